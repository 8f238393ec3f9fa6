"""The parts of a run without its training loop: seeds, model, loss, optimizer, schedule.

Nothing here needs Lightning, so that a process that only takes a few steps starts fast.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR

from skyformer.lra.batching import Batch
from skyformer.lra.tasks import TaskSpec
from skyformer.model import PairClassifier, SequenceClassifier
from skyformer.ops.noise import mixed_seed
from skyformer.training.config import OptimConfig, RunConfig

_LOWEST_BETA1, _HIGHEST_BETA1 = 0.85, 0.95


def step_seed(seed: int, number: int, rank: int = 0) -> int:
    """The seed for everything random in backward pass `number` of a run, in the process `rank`."""
    return mixed_seed("step", seed, number, rank)


def classifier_class(spec: TaskSpec) -> type[SequenceClassifier | PairClassifier]:
    """The model class that a task needs."""
    return PairClassifier if spec.paired else SequenceClassifier


def build_model(config: RunConfig) -> SequenceClassifier | PairClassifier:
    """The model of a run before its first step; it depends on the config and its seed only."""
    torch.manual_seed(mixed_seed("weights", config.seed))
    return classifier_class(config.task.spec)(config.build_model_config())


def logits_of(model: nn.Module, batch: Batch) -> Tensor:
    """Logits (B, C) of a batch of sequences or of pairs."""
    pair = (batch.tokens, batch.second, batch.mask, batch.second_mask)
    logits: Tensor = model(batch.tokens, batch.mask) if batch.second is None else model(*pair)
    return logits


def cross_entropy(logits: Tensor, label: Tensor) -> Tensor:
    """The mean cross entropy, computed at least in float32."""
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), label)


def build_optimizer(parameters: Iterable[nn.Parameter], optim: OptimConfig, *, fused: bool) -> AdamW:
    return AdamW(
        parameters, lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay, fused=fused
    )


def one_cycle(optimizer: torch.optim.Optimizer, optim: OptimConfig, steps: int) -> OneCycleLR:
    """A learning rate that rises linearly in the warm-up and then falls linearly.

    With `optim.cycle_beta1`, AdamW's beta1 is 0.95 where the learning rate is lowest and 0.85 where it is highest.
    """
    # OneCycleLR divides by the number of warm-up steps minus one.
    warmup = optim.warmup_steps if optim.warmup_steps > 1 else 0
    return OneCycleLR(
        optimizer,
        max_lr=optim.lr,
        total_steps=steps,
        pct_start=warmup / steps,
        anneal_strategy="linear",
        cycle_momentum=optim.cycle_beta1,
        base_momentum=_LOWEST_BETA1,
        max_momentum=_HIGHEST_BETA1,
    )


class Trainee:
    """Trains a model as `skyformer train` does, but the caller provides the batch for each step."""

    def __init__(self, config: RunConfig, model: nn.Module | None = None) -> None:
        self.config = config
        self.model = build_model(config) if model is None else model
        self._optimizer = build_optimizer(self.model.parameters(), config.optim, fused=True)
        self._schedule = one_cycle(self._optimizer, config.optim, config.loop.steps)
        self._number = 0

    def step(self, batch: Batch) -> float:
        """Update the weights once; returns the loss before the update."""
        torch.manual_seed(step_seed(self.config.seed, self._number))
        loss = cross_entropy(logits_of(self.model.train(), batch), batch.label)
        loss.backward()
        if self.config.optim.clip_value is not None:
            nn.utils.clip_grad_value_(self.model.parameters(), self.config.optim.clip_value)
        self._optimizer.step()
        self._schedule.step()
        self._optimizer.zero_grad()
        self._number += 1
        return float(loss.detach())
