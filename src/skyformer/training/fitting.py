"""Presets for own data: lengths, batches and steps that fit the size of the data and the machine.

A preset has a budget of tokens per core. It decides the number of steps, between a smallest and a largest number of
passes over the data. Texts are cut where 95 % of them end, or at the preset's longest length if that is shorter. The
model and the learning rate are those of the preset `cpu`. The config contains all numbers, so a run does not depend
on the machine that it is resumed on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from skyformer.lra.dataset import Task
from skyformer.lra.tasks import round_up
from skyformer.processes import available_cores

GPU_CORES = 64
"""A GPU counts as this many cores: an assumption, not measured. A budget only decides the number of steps."""
_BATCH = 32
_FEWEST_STEPS_PER_EPOCH = 20
_EVALUATIONS = 10
_FEWEST_DEV_EXAMPLES = 100


@dataclass(frozen=True)
class Budget:
    """Training tokens per core, limits of the passes over the data, and the longest text."""

    tokens: float
    least_epochs: float
    most_epochs: float
    longest: int


OWN_PRESETS = MappingProxyType(
    {
        "quick": Budget(2e6, 0.1, 5, 512),
        "standard": Budget(3e7, 1, 20, 1024),
        "long": Budget(3e8, 3, 60, 4096),
    }
)
"""quick: a first look. standard: the default. long: several times longer, with longer texts."""
DEFAULT_OWN_PRESET = "standard"


def fitting_settings(task: Task, preset: str, cores: int | None = None) -> dict[str, Any]:
    """The settings of an own preset for prepared data on a machine with `cores` (default: this machine)."""
    budget, lengths = OWN_PRESETS[preset], task.train.stored.lengths()
    cores = machine_cores() if cores is None else cores
    longest = min(budget.longest, round_up(math.ceil(float(np.quantile(lengths, 0.95)))), task.spec.max_length)
    texts = 2 if task.spec.paired else 1
    batch = max(1, min(_BATCH, len(lengths) // _FEWEST_STEPS_PER_EPOCH))
    tokens_per_epoch = texts * float(np.minimum(lengths, longest).sum())
    epochs = min(max(cores * budget.tokens / tokens_per_epoch, budget.least_epochs), budget.most_epochs)
    steps = max(2 * _FEWEST_STEPS_PER_EPOCH, math.ceil(epochs * len(lengths) / batch))
    every = max(1, steps // _EVALUATIONS)
    # An evaluation reads at most half as many examples as the training since the last one.
    dev_limit = max(_FEWEST_DEV_EXAMPLES, every * batch // 2)
    return {
        "task": {"max_length": longest},
        "model": {"features": fitting_features(longest)},
        "optim": {"warmup_steps": max(1, steps // 10)},
        "loop": {
            "steps": steps,
            "batch_size": batch,
            "eval_every": every,
            "eval_batch_size": 2 * batch,
            "dev_limit": dev_limit if len(task.dev) > dev_limit else None,
            "checkpoint_every": every,
            "log_every": max(1, steps // 100),
            "keep_after": 0.0,
        },
    }


def fitting_features(longest: int) -> int:
    """The number of features for texts of at most `longest` tokens."""
    return 128 if longest > 512 else 64


def machine_cores() -> int:
    """The cores of this machine, or those that a GPU counts as; a run uses one GPU unless it is asked for more."""
    return GPU_CORES if torch.cuda.is_available() else available_cores()
