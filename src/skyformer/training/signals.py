"""Ctrl-C and SIGTERM in training: the first asks for a clean end after the running step, the second ends at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

from skyformer.errors import InterruptedRunError

CAUGHT = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Listens as long as it is entered; only a process's main thread can."""

    def __init__(self, advice: str) -> None:
        self.advice = advice
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.getsignal(number) for number in CAUGHT}
        self.listen()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def listen(self) -> None:
        """Again after Lightning has set a handler of its own, which would end a run in the midst of a step."""
        for number in self._before:
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise self.error("stopped at once")
        self.received = signal.Signals(number)

    def error(self, what: str, received: signal.Signals | None = None) -> InterruptedRunError:
        """What ends the run; `received` is the signal of another process, if it was not this one's."""
        number = self.received or received or signal.SIGTERM
        return InterruptedRunError(f"{what} by {number.name}; {self.advice}", number)
