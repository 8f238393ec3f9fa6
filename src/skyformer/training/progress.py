"""Reports the steps of a run, with running means of loss and accuracy, to the progress display."""

from __future__ import annotations

from dataclasses import dataclass

from skyformer.report.progress import Progress

STEPS = "training steps"
_DECAY = 0.98
"""Weight of the running mean after one more step."""


@dataclass
class RunningMean:
    """An exponentially weighted mean over the steps so far."""

    weight: float = 0.0
    total: float = 0.0

    def add(self, value: float) -> None:
        self.weight = _DECAY * self.weight + 1
        self.total = _DECAY * self.total + value

    @property
    def value(self) -> float:
        return self.total / self.weight if self.weight else float("nan")


class RunProgress:
    """Shows one run on a progress display."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._loss, self._accuracy = RunningMean(), RunningMean()
        self._evaluating = ""

    def begin(self, name: str, step: int, steps: int) -> None:
        self.note(f"{name}: from step {step:,} to {steps:,}")
        self._progress.begin(STEPS, total=steps, done=step)

    def advance(self, step: int, loss: float, accuracy: float) -> None:
        self._loss.add(loss)
        self._accuracy.add(accuracy)
        text = f"loss {self._loss.value:.4f}  accuracy {self._accuracy.value:.4f}"
        self._progress.update(STEPS, done=step, text=text)

    def evaluating(self, split: str) -> None:
        self._evaluating = f"evaluating on the {split} set"
        self.still_evaluating()

    def still_evaluating(self) -> None:
        """Called after each batch, so that a long evaluation shows in a log."""
        self._progress.update(STEPS, text=self._evaluating)

    def note(self, message: str) -> None:
        self._progress.note(message)
