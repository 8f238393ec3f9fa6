"""The one progress display: bars on a terminal, a line at once and then every 30 seconds in a log, or nothing.

Library functions take a `Progress` and report to it by the name of a task; commands choose which one they hand in:

    with display() as progress:
        progress.begin("training", total=1000)
        progress.update("training", advance=1, text="loss 0.69")
        progress.end("training")
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from skyformer.report.tables import visible

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

SECONDS_BETWEEN_LINES = 30.0
"""Seconds between progress lines without a terminal."""
REFRESHES_PER_SECOND = 2


class Progress(Protocol):
    """Receives the progress of one or more named tasks."""

    def begin(self, task: str, total: int | None = None, done: int = 0) -> None:
        """Start a task of `total` units, of which `done` are done already."""

    def update(self, task: str, *, done: int | None = None, advance: int = 0, text: str | None = None) -> None:
        """Set the number of units that are done, or add to it; `text` says what is happening now.

        A task that has not begun is ignored.
        """

    def end(self, task: str) -> None:
        """Remove a task."""

    def note(self, message: str) -> None:
        """Print a line that stays."""


class Silent:
    """Shows nothing."""

    def begin(self, task: str, total: int | None = None, done: int = 0) -> None: ...

    def update(self, task: str, *, done: int | None = None, advance: int = 0, text: str | None = None) -> None: ...

    def end(self, task: str) -> None: ...

    def note(self, message: str) -> None: ...


@dataclass
class _LineTask:
    total: int | None
    first: int
    done: int
    began: float
    last_line: float


class Lines:
    """Prints a line per task at its first step and then every `seconds` seconds to standard error, for logs."""

    def __init__(self, seconds: float = SECONDS_BETWEEN_LINES) -> None:
        self._seconds = seconds
        self._tasks: dict[str, _LineTask] = {}

    def begin(self, task: str, total: int | None = None, done: int = 0) -> None:
        now = time.monotonic()
        self._tasks[task] = _LineTask(total, done, done, now, float("-inf"))

    def update(self, task: str, *, done: int | None = None, advance: int = 0, text: str | None = None) -> None:
        state = self._tasks.get(task)
        if state is None:
            return
        state.done = (state.done if done is None else done) + advance
        now = time.monotonic()
        if now - state.last_line >= self._seconds:
            state.last_line = now
            self.note("  ".join([f"{task}: {self._count(state)}", *self._pace(state, now), *([text] if text else [])]))

    @staticmethod
    def _count(state: _LineTask) -> str:
        return f"{state.done:,}" if state.total is None else f"{state.done:,} of {state.total:,}"

    @staticmethod
    def _pace(state: _LineTask, now: float) -> list[str]:
        per_second = (state.done - state.first) / max(now - state.began, 1e-9)
        if per_second <= 0 or state.total is None:
            return []
        return [pace(per_second), f"{_rough_duration((state.total - state.done) / per_second)} left"]

    def end(self, task: str) -> None:
        self._tasks.pop(task, None)

    def note(self, message: str) -> None:
        print(visible(message, lines=True), file=sys.stderr, flush=True)


class Bars:
    """A bar per task on a terminal, with count, pace, the time left and what is happening now."""

    def __init__(self, bars: RichProgress) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def begin(self, task: str, total: int | None = None, done: int = 0) -> None:
        self.end(task)
        self._tasks[task] = self._bars.add_task(task, total=total, completed=done, text="")

    def update(self, task: str, *, done: int | None = None, advance: int = 0, text: str | None = None) -> None:
        if task not in self._tasks:
            return
        fields = {} if text is None else {"text": text}
        self._bars.update(self._tasks[task], completed=done, advance=advance or None, **fields)  # type: ignore[arg-type]

    def end(self, task: str) -> None:
        if task in self._tasks:
            self._bars.remove_task(self._tasks.pop(task))

    def note(self, message: str) -> None:
        self._bars.console.print(visible(message, lines=True), markup=False, highlight=False, soft_wrap=True)


@contextmanager
def display(quiet: bool = False) -> Iterator[Progress]:
    """The display that fits: bars if standard error is a terminal, lines if it is a file, nothing if `quiet`."""
    if quiet:
        yield Silent()
    elif not sys.stderr.isatty():
        yield Lines()
    else:
        with _rich_bars() as bars:
            yield Bars(bars)


def _rich_bars() -> RichProgress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress
    from rich.table import Column
    from rich.text import Text

    class Pace(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(pace(task.speed) if task.speed else "")

    return RichProgress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        Pace(),
        TimeRemainingColumn(compact=True),
        # The text takes the rest of the line and is cut there.
        TextColumn("{task.fields[text]}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
        console=Console(stderr=True),
        refresh_per_second=REFRESHES_PER_SECOND,
        transient=True,
        expand=True,
    )


def pace(per_second: float) -> str:
    """Units per second, or seconds per unit if they are slow."""
    return f"{per_second:.1f}/s" if per_second >= 1 else f"{1 / per_second:.1f} s each"


def _rough_duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
