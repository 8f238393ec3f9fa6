"""Batches: padded to their longest example or to one length for all, each a pure function of seed and step.

`TrainingBatches` computes which examples make up the batch of any step without drawing the steps before it; so a run
that resumes at a step sees exactly the batches that it would have seen. `EvaluationBatches` covers every example once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from skyformer.checks import check_at_least
from skyformer.errors import InputError
from skyformer.lra.dataset import Example, TaskDataset
from skyformer.lra.examples import Integers
from skyformer.lra.tasks import PADDING_ID, round_up
from skyformer.processes import STOP_SIGNALS, end_with_parent

BATCHES_PER_POOL = 50
"""Examples are sorted by length among this many batches: enough to save most of the padding, few enough for batches to
be composed at random."""


@dataclass  # not frozen: Lightning converts a batch field by field
class Batch:
    """Padded examples; `mask` is True where a token is real. Only pairs have `second` and `second_mask`."""

    tokens: Tensor
    mask: Tensor
    label: Tensor
    ids: Tensor
    second: Tensor | None = None
    second_mask: Tensor | None = None

    def __len__(self) -> int:
        return len(self.label)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        """The same batch on another device."""
        return self._with_each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """The same batch in pinned memory, for `DataLoader(pin_memory=True)`."""
        return self._with_each(Tensor.pin_memory)

    def _with_each(self, function: Callable[[Tensor], Tensor]) -> Self:
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: function(tensor) for name, tensor in tensors.items() if tensor is not None})


def collate(examples: Sequence[Example], length: int | None = None) -> Batch:
    """Pad examples to `length`, or to the longest of them, rounded up to a multiple of 64."""
    if not examples:
        raise InputError("a batch needs at least one example; got none")
    tokens, mask = _pad([example.tokens for example in examples], length)
    second = [example.second for example in examples if example.second is not None]
    padded_second = _pad(second, length) if second else (None, None)
    label = torch.tensor([example.label for example in examples])
    ids = torch.tensor([example.id for example in examples])
    return Batch(tokens, mask, label, ids, *padded_second)


def _pad(rows: Sequence[Tensor], length: int | None) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([len(row) for row in rows])
    longest = int(lengths.max())
    if length is not None and longest > length:
        raise InputError(f"examples must have at most {length} tokens to be padded to {length}; got one of {longest}")
    width = round_up(longest) if length is None else length
    tokens = torch.full((len(rows), width), PADDING_ID, dtype=torch.int64)
    for padded, row in zip(tokens, rows, strict=True):
        padded[: len(row)] = row
    return tokens, torch.arange(width) < lengths[:, None]


def _check_batches(batch_size: int, rank: int, world_size: int) -> None:
    check_at_least("batch_size", batch_size, 1)
    if not 0 <= rank < world_size:
        raise InputError(f"rank must be from 0 to world_size - 1; got rank {rank} of {world_size}")


class TrainingBatches(Sampler[list[int]]):
    """The row numbers of each training batch, from `start_step` to `num_steps`, or without end.

    Every epoch visits all examples once, in a new order. With several ranks, the examples of a step are distributed
    among them; in the step with the smallest batch of an epoch up to `world_size - 1` examples are used twice, so that
    all ranks have equally many.

    Args:
        lengths: number of tokens of each example.
        batch_size: examples per batch and rank.
        group_by_length: cut the order of an epoch into pools of 50 batches, sort each pool by length, cut it into
            batches, and shuffle the batches. This saves most of the padding.
    """

    def __init__(
        self,
        lengths: Integers,
        batch_size: int,
        *,
        seed: int = 0,
        group_by_length: bool = True,
        rank: int = 0,
        world_size: int = 1,
        start_step: int = 0,
        num_steps: int | None = None,
    ) -> None:
        _check_batches(batch_size, rank, world_size)
        if not len(lengths):
            raise InputError("lengths must have at least one example to make batches of; got none")
        if start_step < 0 or (num_steps is not None and num_steps < start_step):
            raise InputError(f"expected 0 <= start_step <= num_steps; got {start_step} and {num_steps}")
        self._lengths, self._seed, self._group_by_length = np.asarray(lengths), seed, group_by_length
        self._global_batch_size, self._rank, self._world_size = batch_size * world_size, rank, world_size
        self.start_step, self.num_steps = start_step, num_steps
        self._cached: tuple[int, list[Integers]] | None = None

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self._lengths) // self._global_batch_size)

    def __len__(self) -> int:
        if self.num_steps is None:
            raise TypeError("training batches have no end and so no length; pass num_steps")
        return self.num_steps - self.start_step

    def __iter__(self) -> Iterator[list[int]]:
        step = self.start_step
        while self.num_steps is None or step < self.num_steps:
            yield self.batch(step)
            step += 1

    def batch(self, step: int) -> list[int]:
        """The row numbers of this rank's batch at a step."""
        epoch, place = divmod(step, self.steps_per_epoch)
        of_all_ranks: list[int] = self._epoch(epoch)[place].tolist()
        missing = -len(of_all_ranks) % self._world_size
        even = of_all_ranks + (of_all_ranks * self._world_size)[:missing]
        return even[self._rank :: self._world_size]

    def _epoch(self, epoch: int) -> list[Integers]:
        if self._cached is None or self._cached[0] != epoch:
            self._cached = epoch, self._draw_epoch(np.random.default_rng([self._seed, epoch]))
        return self._cached[1]

    def _draw_epoch(self, rng: np.random.Generator) -> list[Integers]:
        order = rng.permutation(len(self._lengths))
        if not self._group_by_length:
            return _cut(order, self._global_batch_size)
        pools = _cut(order, self._global_batch_size * BATCHES_PER_POOL)
        ordered = [pool[np.argsort(self._lengths[pool], kind="stable")] for pool in pools]
        batches = [batch for pool in ordered for batch in _cut(pool, self._global_batch_size)]
        return [batches[number] for number in rng.permutation(len(batches))]


class EvaluationBatches(Sampler[list[int]]):
    """The row numbers of each evaluation batch: every example exactly once over all ranks together.

    Batches are distributed among the ranks in turn, so their number may differ by one; none is repeated.
    """

    def __init__(
        self,
        lengths: Integers,
        batch_size: int,
        *,
        group_by_length: bool = True,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        _check_batches(batch_size, rank, world_size)
        order = np.argsort(lengths, kind="stable") if group_by_length else np.arange(len(lengths))
        self._batches = _cut(order, batch_size)[rank::world_size]

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        return (batch.tolist() for batch in self._batches)


def _cut(order: Integers, size: int) -> list[Integers]:
    return [order[start : start + size] for start in range(0, len(order), size)]


def training_loader(
    dataset: TaskDataset,
    batch_size: int,
    *,
    seed: int = 0,
    group_by_length: bool = True,
    rank: int = 0,
    world_size: int = 1,
    start_step: int = 0,
    num_steps: int | None = None,
    **loader: Any,
) -> DataLoader[Example]:
    """A loader of `TrainingBatches`: from `start_step` to `num_steps`, or without end.

    Args:
        dataset: the training set of a task.
        batch_size: examples per batch and rank.
        seed: decides the order of the examples.
        group_by_length: put examples of similar length together; batches are still composed at random.
        rank, world_size: this process, and the number of processes that share each step.
        start_step, num_steps: the first step, and the step to stop before.
        loader: arguments of `loader_of`, such as `pad_to_max` or `num_workers`.
    """
    batches = TrainingBatches(
        dataset.lengths(),
        batch_size,
        seed=seed,
        group_by_length=group_by_length,
        rank=rank,
        world_size=world_size,
        start_step=start_step,
        num_steps=num_steps,
    )
    return loader_of(dataset, batches, **loader)


def evaluation_loader(
    dataset: TaskDataset,
    batch_size: int,
    *,
    group_by_length: bool = True,
    rank: int = 0,
    world_size: int = 1,
    **loader: Any,
) -> DataLoader[Example]:
    """A loader of `EvaluationBatches`: every example of `dataset` exactly once. The arguments are as in training."""
    lengths = dataset.lengths()
    batches = EvaluationBatches(lengths, batch_size, group_by_length=group_by_length, rank=rank, world_size=world_size)
    return loader_of(dataset, batches, **loader)


def loader_of(
    dataset: TaskDataset, batches: Sampler[list[int]], *, pad_to_max: bool = False, **loader: Any
) -> DataLoader[Example]:
    """A loader of the given batches.

    Args:
        pad_to_max: pad every batch to the `max_length` of its task.
        loader: arguments of `torch.utils.data.DataLoader`, such as `num_workers` or `pin_memory`.
    """
    return DataLoader(
        dataset,
        batch_sampler=batches,
        collate_fn=partial(collate, length=dataset.spec.max_length if pad_to_max else None),
        worker_init_fn=_begin_worker,
        **loader,
    )


def _begin_worker(worker: int) -> None:
    """Signals reach all processes, and the parent decides when to stop its workers. torch itself ends the workers of a
    killed parent only if they were forked from it: under a fork server they would stay for ever."""
    end_with_parent(STOP_SIGNALS)
