"""The LightningModule of a run, and its evaluation on every example of a split exactly once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from skyformer.distributed import parallelize, piece_of
from skyformer.errors import InputError, SolveError
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

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss)


@dataclass(frozen=True)
class StepPart:
    """One backward pass of a step: the ids of its examples, its mean loss, and its number of correct predictions."""

    ids: Tensor
    loss: Tensor
    correct: Tensor

    @staticmethod
    def of(batch: Batch, logits: Tensor, loss: Tensor) -> StepPart:
        return StepPart(batch.ids, loss.detach(), (logits.detach().argmax(-1) == batch.label).sum())


class Scores:
    """Sums of loss, correct predictions and examples, over batches and processes.

    In float64, also where Lightning sets another default: bfloat16 cannot count beyond 256.
    """

    def __init__(self) -> None:
        self.sums = torch.zeros(3, dtype=torch.float64)

    def add(self, part: StepPart) -> None:
        examples = len(part.ids)
        self.sums += torch.tensor([float(part.loss) * examples, int(part.correct), examples], dtype=torch.float64)

    def total(self, trainer: pl.Trainer) -> Tensor:
        """The sums over all processes; every process must call this."""
        device = trainer.strategy.root_device
        # Apple's GPUs have no float64.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        own = self.sums.to(device, dtype, copy=True)
        total: Tensor = trainer.strategy.reduce(own, reduce_op="sum")
        return total.cpu().double()

    def take(self, trainer: pl.Trainer) -> Evaluation:
        """The means over all processes; the sums are then reset."""
        loss, correct, examples = self.total(trainer).tolist()
        self.sums.zero_()
        return Evaluation(loss / max(examples, 1), correct / max(examples, 1), int(examples))

    def gather(self, trainer: pl.Trainer) -> dict[str, float]:
        """The sums over all processes; afterwards the first process holds them and the others hold zero."""
        total = self.total(trainer)
        self.sums = total if trainer.is_global_zero else torch.zeros_like(total)
        return dict(zip(("loss", "correct", "examples"), total.tolist(), strict=True))

    def restore(self, sums: dict[str, float]) -> None:
        """Continue from sums that `gather` returned."""
        self.sums = torch.tensor([sums["loss"], sums["correct"], sums["examples"]], dtype=torch.float64)


class ClassifierModule(pl.LightningModule):
    """A classifier in training.

    Every backward pass seeds its random numbers from its own number, so that resuming needs no generator state.

    Attributes:
        window: scores of training since they were last logged.
        scores: scores of the current evaluation.
        parts: the backward passes of the current step.
        unsolved: the last error of an attention that could not solve its linear system.
        group: the processes that share each sequence; None if this process has sequences of its own.
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
        self.unsolved = ""
        self.group: dist.ProcessGroup | None = None

    @property
    def _shared(self) -> int:
        return self.config.hardware.sequence_parallel

    @property
    def counts(self) -> bool:
        """Whether this process counts the examples of its batches; of those that share sequences, the first does."""
        return self.global_rank % self._shared == 0

    def setup(self, stage: str) -> None:
        if self._shared == 1 or self.group is not None:
            return
        size = self.trainer.world_size
        if size % self._shared:
            raise InputError(
                f"the number of processes must be a multiple of hardware.sequence_parallel = {self._shared}; got {size}"
            )
        shape = (size // self._shared, self._shared)
        mesh = init_device_mesh(self.trainer.strategy.root_device.type, shape, mesh_dim_names=("data", "sequence"))
        self.group = mesh["sequence"].get_group()
        # Lightning's DDP averages the gradients over all processes.
        parallelize(self.model, self.group, reduce_gradients=False)

    def forward(self, batch: Batch) -> Tensor:
        """Logits (B, C)."""
        return logits_of(self.model, batch if self.group is None else self._piece(batch))

    def _piece(self, batch: Batch) -> Batch:
        """This process' piece of the sequences of a batch."""
        tokens, mask = piece_of(batch.tokens, self.group), piece_of(batch.mask, self.group)
        if batch.second is None or batch.second_mask is None:
            return replace(batch, tokens=tokens, mask=mask)
        second, second_mask = piece_of(batch.second, self.group), piece_of(batch.second_mask, self.group)
        return replace(batch, tokens=tokens, mask=mask, second=second, second_mask=second_mask)

    def _logits(self, batch: Batch) -> Tensor:
        """Logits, or NaN if an attention could not solve its linear system: the weights have diverged."""
        try:
            logits: Tensor = self(batch)
        except SolveError as unsolved:
            self.unsolved = str(unsolved)
            zero = torch.stack([parameter.sum() for parameter in self.model.parameters()]).sum() * 0
            classes = self.config.task.spec.num_classes
            return zero + torch.full((len(batch.ids), classes), float("nan"), device=self.device)
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        # Processes that share sequences draw the same landmarks; their dropout has streams of its own.
        torch.manual_seed(step_seed(self.config.seed, batch_idx, self.global_rank // self._shared))
        if batch_idx % self.config.loop.accumulate == 0:
            self.parts.clear()
        logits = self._logits(batch)
        loss = cross_entropy(logits, batch.label)
        self.parts.append(StepPart.of(batch, logits, loss))
        if self.counts:
            self.window.add(self.parts[-1])
        return loss

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        logits = self._logits(batch)
        if self.counts and batch_idx < self.batches_to_score:
            self.scores.add(StepPart.of(batch, logits, cross_entropy(logits, batch.label)))

    def on_test_epoch_end(self) -> None:
        self.evaluation = self.scores.take(self.trainer)

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
    module.scores = Scores()
    return data.loader(split, batches)
