"""Examples in bulk: flat symbols and lengths, as readers, generators and the writer pass them on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Symbols = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths, end to end."""

    values: Symbols
    lengths: Integers

    @classmethod
    def from_rows(cls, rows: Sequence[Symbols | bytes]) -> Ragged:
        arrays = [np.frombuffer(row, np.uint8) if isinstance(row, bytes) else row for row in rows]
        lengths = np.array([len(array) for array in arrays], np.int64)
        return cls(np.concatenate([np.empty(0, np.uint8), *arrays]), lengths)

    @classmethod
    def from_matrix(cls, matrix: Symbols) -> Ragged:
        return cls(matrix.reshape(-1), np.full(len(matrix), matrix.shape[1], np.int64))

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def offsets(self) -> Integers:
        """Where each row starts, and where the last one ends."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths)])

    def rows(self) -> Iterator[Symbols]:
        ends = np.cumsum(self.lengths)
        for start, end in zip((ends - self.lengths).tolist(), ends.tolist(), strict=True):
            yield self.values[start:end]

    def take(self, rows: Integers | npt.NDArray[np.bool_]) -> Ragged:
        everything = list(self.rows())
        return Ragged.from_rows([everything[row] for row in np.arange(len(self))[rows]])


def shrink(pixels: Symbols, side: int) -> Symbols:
    """A square image, row after row, averaged down to a smaller side that divides its own."""
    block = math.isqrt(len(pixels)) // side
    means = pixels.reshape(side, block, side, block).mean(axis=(1, 3))
    return np.rint(means).astype(np.uint8).reshape(-1)


@dataclass(frozen=True)
class Examples:
    """A run of examples; `sources` says where each came from, `second` is the partner in a paired task."""

    tokens: Ragged
    labels: Symbols
    sources: list[str]
    second: Ragged | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Integers | npt.NDArray[np.bool_]) -> Examples:
        chosen = np.arange(len(self))[rows]
        return Examples(
            self.tokens.take(chosen),
            self.labels[chosen],
            [self.sources[row] for row in chosen],
            None if self.second is None else self.second.take(chosen),
        )
