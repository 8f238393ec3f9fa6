"""Examples in memory, as readers and generators pass them to the writer, and seeded choices among them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from skyformer.lra.tasks import Split

Symbols = npt.NDArray[Any]
"""Of the smallest unsigned type that holds all symbols of the task: bytes and pixels are uint8."""
Integers = npt.NDArray[np.int64]

ROWS_PER_BATCH = 1_000


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths, stored one after another in one array."""

    values: Symbols
    lengths: Integers

    @classmethod
    def from_rows(cls, rows: Sequence[Symbols | bytes]) -> Ragged:
        arrays = [np.frombuffer(row, np.uint8) if isinstance(row, bytes) else row for row in rows]
        lengths = np.array([len(array) for array in arrays], np.int64)
        return cls(np.concatenate(arrays) if arrays else np.empty(0, np.uint8), lengths)

    @classmethod
    def from_matrix(cls, matrix: Symbols) -> Ragged:
        return cls(matrix.reshape(-1), np.full(len(matrix), matrix.shape[1], np.int64))

    @property
    def offsets(self) -> Integers:
        """Where each row starts, and where the last one ends."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths)])

    def rows(self) -> list[Symbols]:
        return np.split(self.values, self.offsets[1:-1]) if len(self.lengths) else []


class Row(NamedTuple):
    """One example of a file; `source` says where it comes from, `second` is the other text of a pair."""

    tokens: Symbols | bytes
    label: int
    source: str
    second: bytes | None = None


@dataclass(frozen=True)
class Examples:
    """Several examples; `sources` says where each comes from, `second` holds the other texts of a paired task."""

    tokens: Ragged
    labels: Symbols
    sources: list[str]
    second: Ragged | None = None

    @classmethod
    def from_rows(cls, rows: Sequence[Row]) -> Examples:
        second = [row.second for row in rows if row.second is not None]
        return cls(
            Ragged.from_rows([row.tokens for row in rows]),
            np.array([row.label for row in rows], np.uint8),
            [row.source for row in rows],
            Ragged.from_rows(second) if second else None,
        )

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def texts(self) -> list[Ragged]:
        """The tokens, and in a paired task the second texts."""
        return [self.tokens] if self.second is None else [self.tokens, self.second]


Batches = Iterator[tuple[Split, Examples]]
"""Some examples at a time, with the split that they belong to."""


def in_batches(split: Split, rows: Iterable[Row], size: int = ROWS_PER_BATCH) -> Batches:
    """The examples of a split, at most `size` at a time."""
    remaining = iter(rows)
    while batch := list(islice(remaining, size)):
        yield split, Examples.from_rows(batch)


def choose(labels: Symbols, count: int, seed: int) -> Integers:
    """`count` random row numbers in ascending order, with each class as frequent as among all rows."""
    if count >= len(labels):
        return np.arange(len(labels))
    rng = np.random.default_rng(seed)
    shuffled = rng.permutation(len(labels))
    # Each row's position within its own class, as a share of the class: the smallest shares are a proportional sample.
    shares = np.empty(len(labels))
    for label in np.unique(labels):
        members = shuffled[labels[shuffled] == label]
        shares[members] = (np.arange(len(members)) + 0.5) / len(members)
    return np.sort(shuffled[np.argsort(shares[shuffled], kind="stable")[:count]])


def hold_out(labels: Symbols, count: int, seed: int) -> tuple[Integers, Integers]:
    """Row numbers to keep, and `count` row numbers to hold out."""
    held_out = choose(labels, count, seed)
    return np.setdiff1d(np.arange(len(labels)), held_out), held_out
