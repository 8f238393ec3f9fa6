"""Batches: padding, grouping by length, resuming and completeness."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyformer.errors import InputError
from skyformer.lra import (
    Batch,
    EvaluationBatches,
    Example,
    TaskDataset,
    TrainingBatches,
    collate,
    evaluation_loader,
    load_task,
    prepare,
    training_loader,
)
from skyformer.processes import process_exists

lengths_strategy = st.lists(st.integers(1, 500), min_size=1, max_size=150).map(lambda values: np.array(values))


def example(length: int, second: int | None = None, number: int = 0) -> Example:
    partner = None if second is None else torch.ones(second, dtype=torch.int64)
    return Example(torch.full((length,), 5), 1, number, partner)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=10))
def test_padding(lengths: list[int]) -> None:
    batch = collate([example(length) for length in lengths])
    width = batch.tokens.shape[1]
    assert width % 64 == 0
    assert max(1, max(lengths)) <= width < max(1, max(lengths)) + 64
    assert batch.mask.sum(dim=1).tolist() == lengths
    assert batch.mask.dtype == torch.bool
    assert (batch.tokens[batch.mask] == 5).all()
    assert (batch.tokens[~batch.mask] == 0).all()
    assert (batch.tokens.dtype, batch.label.dtype) == (torch.int64, torch.int64)


def test_padding_of_pairs_and_to_a_length() -> None:
    batch = collate([example(10, 100), example(70, 3)])
    assert batch.tokens.shape == (2, 128)
    assert batch.second is not None
    assert batch.second_mask is not None
    assert batch.second.shape == (2, 128)
    assert batch.second_mask.sum(dim=1).tolist() == [100, 3]
    batch = collate([example(10, 3), example(7, 20)], length=100)
    assert batch.tokens.shape == (2, 100)
    assert batch.second is not None
    assert batch.second.shape == (2, 100)
    assert batch.mask.sum(dim=1).tolist() == [10, 7]
    with pytest.raises(InputError, match=r"at most 9 tokens to be padded .* got one of 10"):
        collate([example(10)], length=9)
    with pytest.raises(InputError, match="at least one"):
        collate([])


def test_all_tensors_of_a_batch_move() -> None:
    moved = collate([example(3, 4)]).to("meta")
    assert {moved.tokens.device.type, moved.ids.device.type} == {"meta"}
    assert moved.second_mask is not None
    assert moved.second_mask.is_meta
    assert collate([example(3)]).to("cpu").second is None


@given(lengths_strategy, st.integers(1, 20), st.booleans(), st.integers(0, 3))
def test_an_epoch_has_every_example_once(lengths: np.ndarray, batch_size: int, grouped: bool, epoch: int) -> None:
    batches = TrainingBatches(lengths, batch_size, group_by_length=grouped)
    steps = range(epoch * batches.steps_per_epoch, (epoch + 1) * batches.steps_per_epoch)
    seen = [index for step in steps for index in batches.batch(step)]
    assert sorted(seen) == list(range(len(lengths)))


@given(lengths_strategy, st.integers(1, 20), st.integers(0, 60), st.integers(0, 5))
def test_any_step_can_be_resumed_from(lengths: np.ndarray, batch_size: int, start: int, seed: int) -> None:
    whole = list(TrainingBatches(lengths, batch_size, seed=seed, num_steps=70))
    resumed = list(TrainingBatches(lengths, batch_size, seed=seed, start_step=start, num_steps=70))
    assert whole[start:] == resumed


@given(lengths_strategy, st.integers(1, 8), st.integers(1, 5), st.booleans())
def test_ranks_share_every_step(lengths: np.ndarray, batch_size: int, world_size: int, grouped: bool) -> None:
    ranks = [
        TrainingBatches(lengths, batch_size, rank=rank, world_size=world_size, group_by_length=grouped)
        for rank in range(world_size)
    ]
    seen: Counter[int] = Counter()
    for step in range(ranks[0].steps_per_epoch):
        batches = [rank.batch(step) for rank in ranks]
        assert len({len(batch) for batch in batches}) == 1
        assert 1 <= len(batches[0]) <= batch_size
        seen.update(index for batch in batches for index in batch)
    assert set(seen) == set(range(len(lengths)))
    assert sum(seen.values()) - len(lengths) < world_size


def test_seeds_and_epochs_differ_without_end() -> None:
    lengths = np.arange(1, 101)
    batches = TrainingBatches(lengths, 10)
    assert batches.batch(0) != TrainingBatches(lengths, 10, seed=1).batch(0)
    assert [batches.batch(step) for step in range(10)] != [batches.batch(step) for step in range(10, 20)]
    with pytest.raises(TypeError, match="no end"):
        len(batches)
    assert len(TrainingBatches(lengths, 10, start_step=2, num_steps=9)) == 7


def padding_share(lengths: np.ndarray, batches: TrainingBatches) -> float:
    widths = [(lengths[batches.batch(step)].max(), len(batches.batch(step))) for step in range(batches.steps_per_epoch)]
    return 1 - lengths.sum() / sum(width * count for width, count in widths)


def test_grouping_saves_padding_and_stays_random() -> None:
    lengths = np.random.default_rng(0).integers(50, 4000, 5000)
    grouped, plain = TrainingBatches(lengths, 32), TrainingBatches(lengths, 32, group_by_length=False)
    assert padding_share(lengths, grouped) < 0.1 < 0.3 < padding_share(lengths, plain)
    means = [lengths[grouped.batch(step)].mean() for step in range(grouped.steps_per_epoch)]
    # Long and short batches alternate at random, and two epochs hardly ever put the same examples together.
    assert abs(np.corrcoef(np.arange(len(means)), means)[0, 1]) < 0.3
    first = {frozenset(grouped.batch(step)) for step in range(grouped.steps_per_epoch)}
    second = {frozenset(grouped.batch(step)) for step in range(grouped.steps_per_epoch, 2 * grouped.steps_per_epoch)}
    assert not first & second


@given(lengths_strategy, st.integers(1, 20), st.integers(1, 5), st.booleans())
def test_evaluation_covers_everything_once(
    lengths: np.ndarray, batch_size: int, world_size: int, grouped: bool
) -> None:
    seen = [
        index
        for rank in range(world_size)
        for batch in EvaluationBatches(lengths, batch_size, rank=rank, world_size=world_size, group_by_length=grouped)
        for index in batch
    ]
    assert sorted(seen) == list(range(len(lengths)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be an integer of at least 1; got 0"),
        ({"batch_size": 2, "rank": 2, "world_size": 2}, "rank 2 of 2"),
        ({"batch_size": 2, "start_step": -1}, "start_step"),
        ({"batch_size": 2, "start_step": 5, "num_steps": 4}, "got 5 and 4"),
        ({"batch_size": 1, "examples": 0}, "at least one example"),
    ],
)
def test_bad_options(options: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        TrainingBatches(np.ones(options.pop("examples", 3)), **options)


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> TaskDataset:
    options = {"data_dir": tmp_path_factory.mktemp("data"), "limit": 60, "max_length": 200}
    prepare("listops", **options)
    return load_task("listops", **options).train


def same(one: Batch, other: Batch) -> bool:
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in ("tokens", "mask", "ids"))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loader_resumes_in_mid_epoch(train: TaskDataset, num_workers: int) -> None:
    whole = list(training_loader(train, 8, seed=3, num_steps=20))
    resumed = list(training_loader(train, 8, seed=3, start_step=11, num_steps=20, num_workers=num_workers))
    assert len(resumed) == 9
    assert all(same(one, other) for one, other in zip(whole[11:], resumed, strict=True))


def test_evaluation_loaders_of_two_ranks(train: TaskDataset) -> None:
    batches = [batch for rank in range(2) for batch in evaluation_loader(train, 7, rank=rank, world_size=2)]
    assert sorted(int(number) for batch in batches for number in batch.ids) == list(range(60))
    for batch in batches:
        for tokens, mask, label, number in zip(batch.tokens, batch.mask, batch.label, batch.ids, strict=True):
            assert torch.equal(tokens[mask], train[int(number)].tokens)
            assert int(label) == train[int(number)].label


def test_loaders_pad_to_the_maximum_of_the_task(train: TaskDataset) -> None:
    for loader in (
        training_loader(train, 8, num_steps=3, pad_to_max=True),
        evaluation_loader(train, 8, pad_to_max=True),
    ):
        assert {batch.tokens.shape[1] for batch in loader} == {200}


@pytest.mark.slow
def test_spawned_workers(train: TaskDataset) -> None:
    loader = evaluation_loader(train, 30, num_workers=1, multiprocessing_context="spawn")
    assert sum(len(batch) for batch in loader) == 60


_KILLED_LOADER = """
import os, signal, sys
from skyformer.lra import evaluation_loader, load_task
train = load_task("listops", sys.argv[1], limit=60, max_length=200).train
batches = iter(evaluation_loader(train, 30, num_workers=1, multiprocessing_context="forkserver"))
next(batches)
print(batches._workers[0].pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork server")
def test_workers_of_a_fork_server_end_with_a_killed_process(train: TaskDataset) -> None:
    command = [sys.executable, "-c", _KILLED_LOADER, str(train._path.parent.parent)]
    worker = int(subprocess.run(command, stdout=subprocess.PIPE, check=False).stdout)
    deadline = time.monotonic() + 60
    while process_exists(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not process_exists(worker)
