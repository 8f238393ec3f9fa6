"""What Lightning trains: a classifier, its loss, its optimiser, and nothing random that its step has not seeded."""

from __future__ import annotations

from dataclasses import dataclass

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR

from skyformer.lra.batching import Batch
from skyformer.lra.tasks import TaskSpec, task_spec
from skyformer.model import PairClassifier, SequenceClassifier
from skyformer.model.storage import StoredModel
from skyformer.training.config import OptimConfig, RunConfig
from skyformer.training.scores import Evaluation, Scores
from skyformer.training.seeds import mixed_seed


def classifier_class(spec: TaskSpec) -> type[SequenceClassifier | PairClassifier]:
    """The kind of model that a task needs."""
    return PairClassifier if spec.paired else SequenceClassifier


def build_model(config: RunConfig) -> SequenceClassifier | PairClassifier:
    """The model of a run before its first step: a function of the config and its seed."""
    torch.manual_seed(mixed_seed("weights", config.seed))
    return classifier_class(task_spec(config.task.name))(config.build_model_config())


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
        if batch.second is None:
            return self.model(batch.tokens, batch.mask)
        return self.model(batch.tokens, batch.second, batch.mask, batch.second_mask)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        torch.manual_seed(mixed_seed("step", self.config.seed, batch_idx, self.global_rank))
        if batch_idx % self.config.loop.accumulate == 0:
            self.parts.clear()
        logits = self(batch)
        loss = _cross_entropy(logits, batch.label)
        self.parts.append(StepPart.of(batch, logits, loss))
        self.parts[-1].add_to(self.window)
        return loss

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        logits = self(batch)
        if batch_idx < self.batches_to_score:
            StepPart.of(batch, logits, _cross_entropy(logits, batch.label)).add_to(self.scores)

    def on_test_epoch_end(self) -> None:
        # While the sums are still on the device that processes talk through.
        self.evaluation = self.scores.take()

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optim = self.config.optim
        optimizer = AdamW(
            self.parameters(),
            lr=optim.lr,
            betas=optim.betas,
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            fused=self._may_fuse(),
        )
        schedule = one_cycle(optimizer, optim, self.config.loop.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _may_fuse(self) -> bool:
        """One pass over the weights instead of many; under autocast Lightning could then not clip gradients."""
        return self.device.type in ("cpu", "cuda") and not self.config.hardware.precision.endswith("-mixed")


def one_cycle(optimizer: torch.optim.Optimizer, optim: OptimConfig, steps: int) -> OneCycleLR:
    """Linearly up for the warm-up steps and down for the rest; the betas stay what the config says."""
    # OneCycleLR divides by the warm-up's length less one.
    warmup = optim.warmup_steps if optim.warmup_steps > 1 else 0
    return OneCycleLR(
        optimizer,
        max_lr=optim.lr,
        total_steps=steps,
        pct_start=warmup / steps,
        anneal_strategy="linear",
        cycle_momentum=False,
    )


def _cross_entropy(logits: Tensor, label: Tensor) -> Tensor:
    """In float32 at least."""
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), label)


def parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
