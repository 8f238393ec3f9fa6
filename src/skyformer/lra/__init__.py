"""Long Range Arena: five tasks, generated or read here, ready for a PyTorch `DataLoader`.

>>> from tempfile import TemporaryDirectory
>>> from skyformer.lra import load_task, prepare, training_loader
>>> with TemporaryDirectory() as folder:
...     _ = prepare("listops", data_dir=folder, limit=20, max_length=64)
...     task = load_task("listops", data_dir=folder, limit=20, max_length=64)
...     for batch in training_loader(task.train, batch_size=4, num_steps=2):
...         print(tuple(batch.tokens.shape), batch.mask.dtype, tuple(batch.label.shape))
(4, 64) torch.bool (4,)
(4, 64) torch.bool (4,)

Names are imported when they are first used, so that `import skyformer.lra` is quick and needs no optional package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from skyformer.errors import missing_extra

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


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        modules = (import_module(f"{__name__}.{module}") for module in ("tasks", "dataset", "batching", "preparation"))
        return next(getattr(module, name) for module in modules if hasattr(module, name))
    except ModuleNotFoundError as error:
        missing = missing_extra(error)
        if missing is None:
            raise
        raise missing from error
