"""Signals that stop training: the first one stops after the current step, the second one stops immediately.

They are Ctrl-C, SIGTERM, SIGHUP (the terminal was closed) and SIGUSR1 (a scheduler preempts the job).
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

from skyformer.errors import InterruptedRunError
from skyformer.processes import STOP_SIGNALS


class StopSignals:
    """A context that remembers a received signal; it works in the main thread only.

    Args:
        advice: what to do next, appended to the error message.
    """

    def __init__(self, advice: str) -> None:
        self.advice = advice
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
            # nohup has SIGHUP ignored, and it stays so.
            self._before = {
                number: handler
                for number, handler in handlers.items()
                if number.name != "SIGHUP" or handler != signal.SIG_IGN
            }
        self.listen()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def listen(self) -> None:
        """Install the handlers, again after Lightning has installed its own, which stop in the middle of a step."""
        for number in self._before:
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise self.error("stopped immediately")
        self.received = signal.Signals(number)

    def error(self, what: str) -> InterruptedRunError:
        """The error that ends the run; if this process received no signal, another process of the run did."""
        number = self.received or signal.SIGTERM
        return InterruptedRunError(f"{what} by {number.name}; {self.advice}", number)
