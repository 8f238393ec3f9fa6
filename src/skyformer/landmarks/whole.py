"""What Skyformer needs to know about a whole sequence: its landmarks, and sums, means and extremes over its rows.

`WholeSequence` is for the usual case that one process holds all rows, where most of it is nothing to do. Where each
process holds a piece, `skyformer.distributed` does the same by exchanging as little as possible.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from skyformer.landmarks.base import Candidates, Landmarks, Sampler
from skyformer.landmarks.rows import landmark_rows, take_rows
from skyformer.ops.distances import Rows
from skyformer.ops.noise import RandomSource


@dataclass(frozen=True)
class WholeSequence(Rows):
    """All rows of Q and K are in this process."""

    def candidates(self, own: Candidates) -> Candidates:
        """The candidates of the whole sequence, from those of the rows in this process."""
        return own

    def draw(
        self, sampler: Sampler, candidates: Candidates, num_landmarks: int, source: RandomSource
    ) -> Tensor | Landmarks:
        """The landmarks of a built-in sampler."""
        return sampler(candidates, num_landmarks, source)

    def landmark_rows(self, query: Tensor, key: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `skyformer.landmarks.rows.landmark_rows`."""
        return landmark_rows(query, key, rows)

    def key_rows(self, x: Tensor, numbers: Tensor) -> Tensor:
        """The rows of the keys with these numbers (B, 1, d) in x (B, H, S, P): (B, H, d, P)."""
        return take_rows(x, numbers.clamp(0, max(x.shape[2] - 1, 0)))

    def sum(self, x: Tensor) -> Tensor:
        """The sum of x over all processes."""
        return x


WHOLE = WholeSequence()
