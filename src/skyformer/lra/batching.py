"""Batches: padded to their longest example or to one length for all, and a pure function of seed and step.

`TrainingBatches` says which examples make up the batch of any step, without having drawn the steps before;
so a run that resumes at a step sees exactly the batches it would have seen. `EvaluationBatches` covers
every example once.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from skyformer.errors import InputError
from skyformer.lra.dataset import Example, TaskDataset
from skyformer.lra.examples import Integers
from skyformer.lra.tasks import PADDING_ID, round_up

# Examples are sorted by length among this many batches at a time: enough to save most of the padding, few
# enough for the make-up of a batch to stay random.
BATCHES_A_POOL = 50


@dataclass  # not frozen: Lightning converts a batch field by field
class Batch:
    """Padded examples; `mask` is True where a token is real, and only pairs have a `second` with its mask."""

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
        present = ((field.name, getattr(self, field.name)) for field in fields(self))
        moved = {name: tensor.to(device, non_blocking=non_blocking) for name, tensor in present if tensor is not None}
        return replace(self, **moved)

    def pin_memory(self) -> Self:
        """The same batch in pinned memory, for `DataLoader(pin_memory=True)`."""
        present = ((field.name, getattr(self, field.name)) for field in fields(self))
        return replace(self, **{name: tensor.pin_memory() for name, tensor in present if tensor is not None})


def collate(examples: Sequence[Example], length: int | None = None) -> Batch:
    """Pad examples to `length`, or to the longest of them, rounded up to a multiple of 64."""
    if not examples:
        raise InputError("a batch needs at least one example, got none")
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
        raise InputError(f"examples must be at most {length} tokens long to be padded to it; got one of {longest}")
    width = round_up(longest) if length is None else length
    tokens = torch.full((len(rows), width), PADDING_ID, dtype=torch.int64)
    for padded, row in zip(tokens, rows, strict=True):
        padded[: len(row)] = row
    return tokens, torch.arange(width) < lengths[:, None]


def _check_ranks(batch_size: int, rank: int, world_size: int) -> None:
    if batch_size < 1:
        raise InputError(f"batch_size must be at least 1, got {batch_size}")
    if not 0 <= rank < world_size:
        raise InputError(f"rank must be from 0 to world_size - 1, got rank {rank} of {world_size}")


class TrainingBatches(Sampler[list[int]]):
    """A batch sampler without end (or up to `num_steps`), from `start_step` on.

    Every epoch goes once through all examples in a new order. With several ranks a step's examples are
    dealt out among them; in an epoch's last step up to `world_size - 1` examples are dealt twice, so that
    all ranks have equally many. With `group_by_length` an epoch's order is cut into pools, each sorted by
    length and cut into batches, and then the batches are shuffled.
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
        _check_ranks(batch_size, rank, world_size)
        if not len(lengths):
            raise InputError("there are no examples to make batches of")
        if start_step < 0 or (num_steps is not None and num_steps < start_step):
            raise InputError(f"expected 0 <= start_step <= num_steps, got {start_step} and {num_steps}")
        self._lengths, self._seed, self._group_by_length = np.asarray(lengths), seed, group_by_length
        self._global_batch_size, self._rank, self._world_size = batch_size * world_size, rank, world_size
        self.start_step, self.num_steps = start_step, num_steps
        self._cached: tuple[int, list[Integers]] | None = None

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self._lengths) // self._global_batch_size)

    def __len__(self) -> int:
        if self.num_steps is None:
            raise TypeError("these batches have no end; give num_steps")
        return self.num_steps - self.start_step

    def __iter__(self) -> Iterator[list[int]]:
        step = self.start_step
        while self.num_steps is None or step < self.num_steps:
            yield self.batch(step)
            step += 1

    def batch(self, step: int) -> list[int]:
        """This rank's examples at a step."""
        epoch, place = divmod(step, self.steps_per_epoch)
        everyone: list[int] = self._epoch(epoch)[place].tolist()
        missing = -len(everyone) % self._world_size
        dealt = everyone + (everyone * self._world_size)[:missing]
        return dealt[self._rank :: self._world_size]

    def _epoch(self, epoch: int) -> list[Integers]:
        if self._cached is None or self._cached[0] != epoch:
            self._cached = epoch, self._draw_epoch(np.random.default_rng([self._seed, epoch]))
        return self._cached[1]

    def _draw_epoch(self, rng: np.random.Generator) -> list[Integers]:
        order = rng.permutation(len(self._lengths))
        if not self._group_by_length:
            return _cut(order, self._global_batch_size)
        pools = _cut(order, self._global_batch_size * BATCHES_A_POOL)
        ordered = [pool[np.argsort(self._lengths[pool], kind="stable")] for pool in pools]
        batches = [batch for pool in ordered for batch in _cut(pool, self._global_batch_size)]
        return [batches[number] for number in rng.permutation(len(batches))]


class EvaluationBatches(Sampler[list[int]]):
    """A batch sampler that covers every example exactly once, over all ranks together.

    Ranks take turns at batches, so they may differ by one batch; nothing is repeated to make them even.
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
        _check_ranks(batch_size, rank, world_size)
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
    pad_to_max: bool = False,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> DataLoader[Example]:
    """Batches of `dataset` from `start_step` on, without end unless `num_steps` is given.

    `pad_to_max` pads every batch to the `max_length` of its task.
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
    return loader_of(dataset, batches, pad_to_max=pad_to_max, num_workers=num_workers, pin_memory=pin_memory)


def evaluation_loader(
    dataset: TaskDataset,
    batch_size: int,
    *,
    group_by_length: bool = True,
    rank: int = 0,
    world_size: int = 1,
    pad_to_max: bool = False,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> DataLoader[Example]:
    """Batches that cover every example of `dataset` exactly once."""
    batches = EvaluationBatches(
        dataset.lengths(), batch_size, group_by_length=group_by_length, rank=rank, world_size=world_size
    )
    return loader_of(dataset, batches, pad_to_max=pad_to_max, num_workers=num_workers, pin_memory=pin_memory)


def loader_of(
    dataset: TaskDataset,
    batches: Sampler[list[int]],
    *,
    pad_to_max: bool = False,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> DataLoader[Example]:
    """The batches that a sampler names."""
    return DataLoader(
        dataset,
        batch_sampler=batches,
        collate_fn=partial(collate, length=dataset.spec.max_length if pad_to_max else None),
        num_workers=num_workers,
        pin_memory=pin_memory,
        worker_init_fn=_leave_signals_to_parent,
    )


def _leave_signals_to_parent(worker: int) -> None:
    """Ctrl-C and a scheduler's SIGTERM reach the whole group: the parent decides when its workers end, and they end
    with it in any case."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
