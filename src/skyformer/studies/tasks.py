"""Long Range Arena as the studies train on it: a run's settings, its data and its batches."""

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
from skyformer.training.data import load_data
from skyformer.training.presets import load_preset

MADE_ON_DEMAND = 20_000
"""Examples a split of ListOps that are generated when they are missing; it takes seconds."""


def run_config(
    task: str, preset: str, attention: str, seed: int, limit: int | None = None, **settings: object
) -> RunConfig:
    """A preset's settings for a study: with `limit` examples a split, and `settings` such as `optim_lr=1e-3`."""
    overrides = [f"{name.replace('_', '.', 1)}={value}" for name, value in settings.items()]
    if limit is not None:
        overrides.append(f"task.limit={limit}")
    return load_preset(task, preset, attention=attention, overrides=overrides, seed=seed)


def study_data(config: RunConfig, data_dir: str | Path | None) -> Task:
    """The data of a run. A limited ListOps is made if it is missing; the rest must be prepared."""
    chosen = config.task
    if chosen.name == "listops" and chosen.limit is not None and chosen.limit <= MADE_ON_DEMAND:
        root = None if data_dir is None else Path(data_dir)
        prepare("listops", data_dir=root, seed=chosen.data_seed, limit=chosen.limit, max_length=chosen.max_length)
    return load_data(config, data_dir)


def data_fact(task: Task) -> Fact:
    """Which data it is: the name of the training set's file ends in a hash of what it holds."""
    return task.manifest.splits[Split.TRAIN].file


def data_digest(task: Task) -> str:
    """Which data it is, all splits of it, in eight digits."""
    hashes = "".join(split.sha256 for split in task.manifest.splits.values())
    return hashlib.sha256(hashes.encode()).hexdigest()[:8]


def runs_of_data(runs_dir: str | Path, task: Task) -> Path:
    """The folder of the runs that were trained on this data: with other data the same settings give other figures."""
    return Path(runs_dir) / f"{task.spec.name}-{data_digest(task)}"


def batches_of(task: Task, config: RunConfig) -> Iterator[Batch]:
    """The batches that a run trains on, without end."""
    loop = config.loop
    loader = training_loader(
        task.train,
        loop.batch_size,
        seed=config.seed,
        group_by_length=loop.group_by_length,
        pad_to_max=loop.pad_to_max,
    )
    yield from loader  # type: ignore[misc]
