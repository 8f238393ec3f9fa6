"""What a run is made of, without the loop around it: its model, its optimiser, its schedule, its loss. None of it needs
Lightning, so a process that only takes a few steps starts fast."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR

from skyformer.lra.batching import Batch
from skyformer.lra.tasks import TaskSpec, task_spec
from skyformer.model import PairClassifier, SequenceClassifier
from skyformer.training.config import OptimConfig, RunConfig
from skyformer.training.seeds import mixed_seed, step_seed


def classifier_class(spec: TaskSpec) -> type[SequenceClassifier | PairClassifier]:
    """The kind of model that a task needs."""
    return PairClassifier if spec.paired else SequenceClassifier


def build_model(config: RunConfig) -> SequenceClassifier | PairClassifier:
    """The model of a run before its first step: a function of the config and its seed."""
    torch.manual_seed(mixed_seed("weights", config.seed))
    return classifier_class(task_spec(config.task.name))(config.build_model_config())


def logits_of(model: nn.Module, batch: Batch) -> Tensor:
    """Logits (B, C) of a batch of sequences or of pairs."""
    pair = (batch.tokens, batch.second, batch.mask, batch.second_mask)
    logits: Tensor = model(batch.tokens, batch.mask) if batch.second is None else model(*pair)
    return logits


def cross_entropy(logits: Tensor, label: Tensor) -> Tensor:
    """In float32 at least."""
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), label)


def build_optimizer(parameters: Iterable[nn.Parameter], optim: OptimConfig, *, fused: bool) -> AdamW:
    return AdamW(
        parameters, lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay, fused=fused
    )


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


class Trainee:
    """A model in training as `skyformer train` trains it, but with its steps in the hands of the caller."""

    def __init__(self, config: RunConfig, model: nn.Module | None = None) -> None:
        self.config = config
        self.model = build_model(config) if model is None else model
        self._optimizer = build_optimizer(self.model.parameters(), config.optim, fused=True)
        self._schedule = one_cycle(self._optimizer, config.optim, config.loop.steps)
        self._number = 0

    def step(self, batch: Batch) -> float:
        """One update of the weights; the loss before it."""
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
