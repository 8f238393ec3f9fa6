"""The data of a run: batches from the step it is at, and an evaluation that counts every example once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from skyformer.lra import EvaluationBatches, Split, Task, load_task
from skyformer.training.data import EvenBatches, TaskData
from tests.training.tiny import tiny_config


@pytest.fixture
def task(data_dir: Path) -> Task:
    return load_task("listops", data_dir, limit=64, max_length=64)


def ids_from(task: Task, step: int, count: int, rank: int = 0, world_size: int = 1, **loop: int) -> list[list[int]]:
    """The examples of the first batches that a trainer at `step` gets."""
    data = TaskData(task, tiny_config(**loop).loop, seed=3)
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    data.trainer = SimpleNamespace(global_step=step, global_rank=rank, world_size=world_size, strategy=strategy)
    batches = iter(data.train_dataloader())
    return [next(batches).ids.tolist() for _ in range(count)]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_training_starts_at_the_trainers_step(task: Task, accumulate: int) -> None:
    whole = ids_from(task, 0, 40, accumulate=accumulate)
    assert ids_from(task, 7, 10, accumulate=accumulate) == whole[7 * accumulate : 7 * accumulate + 10]


def test_processes_share_the_batch_of_one(task: Task) -> None:
    single = ids_from(task, 0, 10, batch_size=8)
    shares = [ids_from(task, 0, 10, rank=rank, world_size=2, batch_size=4) for rank in range(2)]
    assert [sorted(first + second) for first, second in zip(*shares, strict=True)] == [sorted(ids) for ids in single]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("batch_size", [1, 7, 24, 64])
def test_an_evaluation_counts_every_example_once(task: Task, world_size: int, batch_size: int) -> None:
    data = TaskData(task, tiny_config().loop, seed=0)
    shares = [data.evaluation(Split.DEV, batch_size, rank, world_size) for rank in range(world_size)]
    assert len({len(share) for share in shares}) == 1
    scored = [index for share in shares for batch in list(share)[: share.count] for index in batch]
    assert sorted(scored) == list(range(64))
    assert all(len(list(share)) == len(share) for share in shares)


def test_padding_batches_come_last() -> None:
    rows = np.arange(5) + 10
    batches = EvenBatches(EvaluationBatches(np.ones(5), 2, rank=1, world_size=2), rows, most=3)
    assert (batches.count, list(batches)) == (1, [[12, 13], [0], [0]])


def evaluated(task: Task, split: Split, seed: int, **limits: int) -> list[int]:
    data = TaskData(task, tiny_config(**limits).loop, seed)
    return sorted(index for batch in data.evaluation(split, 6) for index in batch)


def test_an_evaluation_may_be_limited(task: Task) -> None:
    limited = evaluated(task, Split.DEV, 0, dev_limit=20)
    assert len(set(limited)) == 20
    # Not just the first ones, but the same whatever the seed.
    assert max(limited) >= 20
    assert evaluated(task, Split.DEV, 5, dev_limit=20) == limited
    assert len(evaluated(task, Split.TEST, 0, dev_limit=20)) == 64
    assert len(set(evaluated(task, Split.TEST, 0, test_limit=7))) == 7


def test_evaluation_batches_have_a_size_of_their_own(task: Task) -> None:
    data = TaskData(task, tiny_config(eval_batch_size=None).loop, seed=0)
    assert len(data.evaluation(Split.DEV)) == 16
    assert len(TaskData(task, tiny_config().loop, seed=0).evaluation(Split.DEV)) == 3
    assert len(data.evaluation(Split.DEV, batch_size=64)) == 1
