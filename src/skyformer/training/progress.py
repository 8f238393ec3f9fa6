"""How a run shows that it goes on: a bar on a terminal, now and then a line elsewhere, or nothing."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

LINE_SECONDS = 30.0
BAR_REFRESHES_A_SECOND = 2
_MEMORY = 0.98
"""How much of the running means a step leaves in place."""


@dataclass
class RunningMean:
    """A mean over the last steps, the older the less."""

    weight: float = 0.0
    total: float = 0.0

    def add(self, value: float) -> None:
        self.weight = _MEMORY * self.weight + 1
        self.total = _MEMORY * self.total + value

    @property
    def value(self) -> float:
        return self.total / self.weight if self.weight else float("nan")


class Display(Protocol):
    """Told how a run goes on."""

    def begin(self, name: str, step: int, steps: int) -> None: ...

    def advance(self, step: int, loss: float, accuracy: float) -> None: ...

    def evaluating(self, split: str) -> None: ...

    def note(self, message: str) -> None: ...

    def end(self) -> None: ...


class Silent:
    """Nobody looks."""

    def begin(self, name: str, step: int, steps: int) -> None: ...

    def advance(self, step: int, loss: float, accuracy: float) -> None: ...

    def evaluating(self, split: str) -> None: ...

    def note(self, message: str) -> None: ...

    def end(self) -> None: ...


class Lines:
    """A line every so many seconds, for logs."""

    def __init__(self, seconds: float = LINE_SECONDS) -> None:
        self._seconds = seconds
        self._loss, self._accuracy = RunningMean(), RunningMean()

    def begin(self, name: str, step: int, steps: int) -> None:
        self._steps, self._first = steps, step
        self._began = self._last = time.monotonic()
        self.note(f"{name}: from step {step:,} to {steps:,}")

    def advance(self, step: int, loss: float, accuracy: float) -> None:
        self._loss.add(loss)
        self._accuracy.add(accuracy)
        now = time.monotonic()
        if now - self._last < self._seconds:
            return
        self._last = now
        pace = (step - self._first) / (now - self._began)
        self.note(
            f"step {step:,} of {self._steps:,}  loss {self._loss.value:.4f}  accuracy {self._accuracy.value:.4f}  "
            f"{pace:.2f} steps/s  {_duration((self._steps - step) / pace)} left"
        )

    def evaluating(self, split: str) -> None: ...

    def note(self, message: str) -> None:
        print(message, file=sys.stderr, flush=True)

    def end(self) -> None: ...


class Pace(ProgressColumn):
    """Steps a second, or seconds a step when there are few."""

    def render(self, task: Task) -> Text:
        if not task.speed:
            return Text("- steps/s")
        return Text(f"{task.speed:.1f} steps/s" if task.speed >= 1 else f"{1 / task.speed:.1f} s/step")


class Bar:
    """A bar with loss, accuracy, pace and the time left."""

    def __init__(self) -> None:
        self._loss, self._accuracy = RunningMean(), RunningMean()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("accuracy {task.fields[accuracy]}"),
            Pace(),
            TimeRemainingColumn(compact=True),
            console=Console(stderr=True),
            refresh_per_second=BAR_REFRESHES_A_SECOND,
            expand=True,
        )

    def begin(self, name: str, step: int, steps: int) -> None:
        self._bar.console.print(f"{name}: from step {step:,} to {steps:,}", highlight=False)
        self._task = self._bar.add_task("training", total=steps, completed=step, loss="-", accuracy="-")
        self._bar.start()

    def advance(self, step: int, loss: float, accuracy: float) -> None:
        self._loss.add(loss)
        self._accuracy.add(accuracy)
        self._bar.update(
            self._task,
            completed=step,
            description="training",
            loss=f"{self._loss.value:.4f}",
            accuracy=f"{self._accuracy.value:.4f}",
        )

    def evaluating(self, split: str) -> None:
        if self._bar.tasks:
            self._bar.update(self._task, description=f"{split} set")

    def note(self, message: str) -> None:
        self._bar.console.print(message, highlight=False)

    def end(self) -> None:
        self._bar.stop()


def choose_display(wanted: bool) -> Display:
    """A bar for a person at a terminal, lines for a log, nothing when it is not wanted."""
    if not wanted:
        return Silent()
    return Bar() if sys.stderr.isatty() else Lines()


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
