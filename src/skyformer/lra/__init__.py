"""Long Range Arena: five tasks, generated or read here, ready for a PyTorch `DataLoader`.

    from skyformer.lra import load_task, prepare, training_loader

    prepare("listops", limit=1000)
    task = load_task("listops", limit=1000)
    for batch in training_loader(task.train, batch_size=32, num_steps=100):
        batch.tokens, batch.mask, batch.label

Names are loaded when they are first used, so that importing this package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from skyformer.errors import MissingExtraError

if TYPE_CHECKING:
    from skyformer.lra.batching import (
        Batch,
        EvaluationBatches,
        TrainingBatches,
        collate,
        evaluation_loader,
        training_loader,
    )
    from skyformer.lra.dataset import Example, Task, TaskDataset, load_task
    from skyformer.lra.preparation import Prepared, prepare
    from skyformer.lra.tasks import TASKS, Split, TaskSpec, task_spec

__all__ = [
    "TASKS",
    "Batch",
    "EvaluationBatches",
    "Example",
    "Prepared",
    "Split",
    "Task",
    "TaskDataset",
    "TaskSpec",
    "TrainingBatches",
    "collate",
    "evaluation_loader",
    "load_task",
    "prepare",
    "task_spec",
    "training_loader",
]

_HOME = {
    "batching": (
        "Batch",
        "EvaluationBatches",
        "TrainingBatches",
        "collate",
        "evaluation_loader",
        "training_loader",
    ),
    "dataset": ("Example", "Task", "TaskDataset", "load_task"),
    "preparation": ("Prepared", "prepare"),
    "tasks": ("TASKS", "Split", "TaskSpec", "task_spec"),
}


def __getattr__(name: str) -> object:
    for module, names in _HOME.items():
        if name in names:
            try:
                return getattr(import_module(f"skyformer.lra.{module}"), name)
            except ModuleNotFoundError as error:
                raise MissingExtraError(str(error.name), "lra") from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
