"""The LightningModule of a run, and its evaluation on every example of a split exactly once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torchmetrics import Metric

from skyformer.lra.batching import Batch
from skyformer.lra.tasks import Split
from skyformer.model.storage import StoredModel
from skyformer.training.building import build_optimizer, cross_entropy, logits_of, one_cycle, step_seed
from skyformer.training.config import RunConfig
from skyformer.training.data import TaskData


@dataclass(frozen=True)
class Evaluation:
    """Mean loss and accuracy over a number of examples."""

    loss: float
    accuracy: float
    examples: int


class Scores(Metric):
    """Sums of loss, correct predictions and examples, over batches and processes."""

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
        """Add a batch: its mean loss, its number of correct predictions, and its size."""
        self.loss += loss * examples
        self.correct += correct
        self.examples += examples

    def compute(self) -> tuple[float, int, int]:
        """The sums over all processes; every process must call this."""
        return float(self.loss), int(self.correct), int(self.examples)

    def take(self) -> Evaluation:
        """The means so far; the sums are then reset."""
        loss, correct, examples = self.compute()
        self.reset()
        return Evaluation(loss / max(examples, 1), correct / max(examples, 1), examples)

    def gather(self) -> dict[str, float]:
        """The sums over all processes; afterwards the first process holds them and the others hold zero."""
        self.sync(should_sync=torch.distributed.is_available() and torch.distributed.is_initialized())
        sums = {"loss": float(self.loss), "correct": int(self.correct), "examples": int(self.examples)}
        if self._is_synced:
            self.unsync()
            self.restore(sums if torch.distributed.get_rank() == 0 else dict.fromkeys(sums, 0))
        return sums

    def restore(self, sums: dict[str, float]) -> None:
        """Continue from sums that `gather` returned."""
        self.reset()
        self.loss += sums["loss"]
        self.correct += int(sums["correct"])
        self.examples += int(sums["examples"])


@dataclass(frozen=True)
class StepPart:
    """One backward pass of a step: the ids of its examples, its mean loss, and its number of correct predictions."""

    ids: Tensor
    loss: Tensor
    correct: Tensor

    @staticmethod
    def of(batch: Batch, logits: Tensor, loss: Tensor) -> StepPart:
        return StepPart(batch.ids, loss.detach(), (logits.detach().argmax(-1) == batch.label).sum())

    def add_to(self, scores: Scores) -> None:
        scores.update(self.loss, self.correct, len(self.ids))


class ClassifierModule(pl.LightningModule):
    """A classifier in training.

    Every backward pass seeds its random numbers from its own number, so that resuming needs no generator state.

    Attributes:
        window: scores of training since they were last logged.
        scores: scores of the current evaluation.
        parts: the backward passes of the current step.
    """

    def __init__(self, config: RunConfig, model: StoredModel) -> None:
        super().__init__()
        self.config = config
        self.model = model
        self.window = Scores()
        self.scores = Scores()
        self.batches_to_score = 0
        self.evaluation = Evaluation(0.0, 0.0, 0)
        self.parts: list[StepPart] = []

    def forward(self, batch: Batch) -> Tensor:
        """Logits (B, C)."""
        return logits_of(self.model, batch)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        torch.manual_seed(step_seed(self.config.seed, batch_idx, self.global_rank))
        if batch_idx % self.config.loop.accumulate == 0:
            self.parts.clear()
        logits = self(batch)
        loss = cross_entropy(logits, batch.label)
        self.parts.append(StepPart.of(batch, logits, loss))
        self.parts[-1].add_to(self.window)
        return loss

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        logits = self(batch)
        if batch_idx < self.batches_to_score:
            StepPart.of(batch, logits, cross_entropy(logits, batch.label)).add_to(self.scores)

    def on_test_epoch_end(self) -> None:
        # Here the sums are still on the device through which the processes communicate.
        self.evaluation = self.scores.take()

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optim = self.config.optim
        optimizer = build_optimizer(self.parameters(), optim, fused=self._may_fuse())
        schedule = one_cycle(optimizer, optim, self.config.loop.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _may_fuse(self) -> bool:
        """A fused optimizer is faster, but with mixed precision Lightning cannot clip gradients for it."""
        return self.device.type in ("cpu", "cuda") and not self.config.hardware.precision.endswith("-mixed")


def score(
    trainer: pl.Trainer, module: ClassifierModule, data: TaskData, split: Split, batch_size: int | None = None
) -> Evaluation:
    """Evaluate with Lightning's own loop, outside of training."""
    trainer.test(module, dataloaders=_open(trainer, module, data, split, batch_size), verbose=False)
    return module.evaluation


def score_during_fit(
    trainer: pl.Trainer, module: ClassifierModule, data: TaskData, split: Split, before_batch: Callable[[], None]
) -> Evaluation:
    """Evaluate between two training steps; `before_batch` is called before each batch.

    Lightning's own validation would leave it open whether a checkpoint was written before or after the evaluation of
    its step. Here it is always written before.
    """
    loader = _open(trainer, module, data, split, None)
    module.eval()
    try:
        with torch.no_grad():
            for number, batch in enumerate(loader):
                before_batch()
                ready = trainer.strategy.batch_to_device(trainer.precision_plugin.convert_input(batch))
                trainer.strategy.test_step(ready, number)
        module.on_test_epoch_end()
    finally:
        module.train()
    return module.evaluation


def _open(trainer: pl.Trainer, module: ClassifierModule, data: TaskData, split: Split, batch_size: int | None) -> Any:
    batches = data.evaluation(split, batch_size, rank=trainer.global_rank, world_size=trainer.world_size)
    module.batches_to_score = batches.count
    module.scores.reset()
    return data.loader(split, batches)
