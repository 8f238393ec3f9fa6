"""Evaluation over every example of a split exactly once, within a training run or outside of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch

from skyformer.lra.tasks import Split
from skyformer.training.data import TaskData
from skyformer.training.module import ClassifierModule
from skyformer.training.scores import Evaluation


def score(
    trainer: pl.Trainer, module: ClassifierModule, data: TaskData, split: Split, batch_size: int | None = None
) -> Evaluation:
    """By Lightning's own evaluation loop, when nothing else runs."""
    trainer.test(module, dataloaders=_open(trainer, module, data, split, batch_size), verbose=False)
    return module.evaluation


def score_within_fit(
    trainer: pl.Trainer, module: ClassifierModule, data: TaskData, split: Split, between: Callable[[], None]
) -> Evaluation:
    """In the midst of training, with `between` called before each batch.

    Lightning's loop inside a fit would leave a checkpoint unsure whether the evaluation of its step was done; here it
    belongs to the step.
    """
    loader = _open(trainer, module, data, split, None)
    module.eval()
    try:
        with torch.no_grad():
            for number, batch in enumerate(loader):
                between()
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
