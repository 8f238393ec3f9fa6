"""What Lightning trains: a classifier, its loss, its optimiser, and nothing random that its step has not seeded."""

from __future__ import annotations

from dataclasses import dataclass

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn

from skyformer.lra.batching import Batch
from skyformer.model.storage import StoredModel
from skyformer.training.building import (
    build_model,
    build_optimizer,
    classifier_class,
    cross_entropy,
    logits_of,
    one_cycle,
)
from skyformer.training.config import RunConfig
from skyformer.training.scores import Evaluation, Scores
from skyformer.training.seeds import step_seed

__all__ = ["ClassifierModule", "StepPart", "build_model", "classifier_class", "one_cycle", "parameter_count"]


@dataclass(frozen=True)
class StepPart:
    """One backward pass of a step: the numbers of its examples, its mean loss, and how many were right."""

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

    `window` gathers the scores of training since they were last logged, `scores` those of the running evaluation,
    `parts` what the running step has computed. Everything random in a step is drawn from a seed of its own: a run that
    resumes needs no state of a random number generator.
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
        # While the sums are still on the device that processes talk through.
        self.evaluation = self.scores.take()

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optim = self.config.optim
        optimizer = build_optimizer(self.parameters(), optim, fused=self._may_fuse())
        schedule = one_cycle(optimizer, optim, self.config.loop.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _may_fuse(self) -> bool:
        """One pass over the weights instead of many; under autocast Lightning could then not clip gradients."""
        return self.device.type in ("cpu", "cuda") and not self.config.hardware.precision.endswith("-mixed")


def parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
