"""Long Range Arena in the studies: the config of a run, its data and its batches."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from skyformer.lra.batching import Batch, training_loader
from skyformer.lra.dataset import Task
from skyformer.lra.preparation import prepare
from skyformer.lra.tasks import Split
from skyformer.studies.base import Fact
from skyformer.training.config import RunConfig
from skyformer.training.presets import load_preset

GENERATED_ON_DEMAND = 20_000
"""Missing ListOps data is generated up to this number of examples per split; that takes seconds."""


def run_config(
    task: str, preset: str, attention: str, seed: int, limit: int | None = None, **settings: object
) -> RunConfig:
    """The config of a preset with `limit` examples per split, and with changes such as `optim_lr=1e-3`."""
    overrides = [f"{name.replace('_', '.', 1)}={value}" for name, value in settings.items()]
    if limit is not None:
        overrides.append(f"task.limit={limit}")
    return load_preset(task, preset, attention=attention, overrides=overrides, seed=seed)


def study_data(config: RunConfig, data_dir: str | Path | None) -> Task:
    """The data of a run. A limited ListOps is generated if it is missing; other tasks must be prepared."""
    chosen = config.task
    if chosen.name == "listops" and chosen.limit is not None and chosen.limit <= GENERATED_ON_DEMAND:
        root = None if data_dir is None else Path(data_dir)
        prepare("listops", data_dir=root, seed=chosen.data_seed, limit=chosen.limit, max_length=chosen.max_length)
    return chosen.load(data_dir)


def data_fact(task: Task) -> Fact:
    """Identifies the data: the file name of the training set ends in a hash of its content."""
    return task.manifest.splits[Split.TRAIN].file


def data_digest(task: Task) -> str:
    """Eight digits that identify the data of all splits."""
    hashes = "".join(split.sha256 for split in task.manifest.splits.values())
    return hashlib.sha256(hashes.encode()).hexdigest()[:8]


def runs_of_data(runs_dir: str | Path, task: Task) -> Path:
    """The folder for runs trained on this data; the same config gives different results on different data."""
    return Path(runs_dir) / f"{task.spec.name}-{data_digest(task)}"


def batches_of(task: Task, config: RunConfig, split: Split = Split.TRAIN) -> Iterator[Batch]:
    """The training batches of a run, without end, or such batches of another split."""
    loop = config.loop
    loader = training_loader(
        task[split],
        loop.batch_size,
        seed=config.seed,
        group_by_length=loop.group_by_length,
        pad_to_max=loop.pad_to_max,
    )
    yield from loader  # type: ignore[misc]
