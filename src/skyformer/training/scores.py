"""Loss and accuracy over many batches and all processes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torchmetrics import Metric


@dataclass(frozen=True)
class Evaluation:
    """Means over `examples` examples."""

    loss: float
    accuracy: float
    examples: int


class Scores(Metric):
    """Sums that a batch adds to and that processes add up."""

    full_state_update = False
    loss: Tensor
    correct: Tensor
    examples: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("loss", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("correct", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("examples", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, loss: Tensor, correct: Tensor, examples: int) -> None:
        """Adds a batch: its mean loss, and how many of its examples were right."""
        self.loss += loss * examples
        self.correct += correct
        self.examples += examples

    def compute(self) -> tuple[float, int, int]:
        """The sums over all processes, each of which has to ask."""
        return float(self.loss), int(self.correct), int(self.examples)

    def take(self) -> Evaluation:
        """What there is, and from the start again."""
        loss, correct, examples = self.compute()
        self.reset()
        return Evaluation(loss / max(examples, 1), correct / max(examples, 1), examples)

    def gather(self) -> dict[str, float]:
        """The sums of all processes, which the first keeps from now on and the others give up."""
        self.sync(should_sync=self._distributed())
        sums = {"loss": float(self.loss), "correct": int(self.correct), "examples": int(self.examples)}
        if self._is_synced:
            self.unsync()
            self.restore(sums if torch.distributed.get_rank() == 0 else dict.fromkeys(sums, 0))
        return sums

    def restore(self, sums: dict[str, float]) -> None:
        """Goes on from sums that `gather` gave."""
        self.reset()
        self.loss += sums["loss"]
        self.correct += int(sums["correct"])
        self.examples += int(sums["examples"])

    @staticmethod
    def _distributed() -> bool:
        return torch.distributed.is_available() and torch.distributed.is_initialized()
