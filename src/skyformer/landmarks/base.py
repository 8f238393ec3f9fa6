"""What a landmark sampler is given, what it returns, and the registry of samplers by name.

A sampler turns queries and keys into row numbers: row i < L is query i, row L + j is key j, and -1 is an empty slot.
The built-in samplers draw one seed and derive every random number from that seed and the rank of a row among the valid
rows of its example, so the landmarks of an example depend neither on the rest of its batch nor on padding.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from skyformer.errors import InputError, ShapeError
from skyformer.landmarks.rows import count_valid, nth_valid
from skyformer.ops.kernels import Kernel
from skyformer.ops.noise import RandomSource
from skyformer.ops.precision import at_least_float32
from skyformer.ops.tracing import may_look_at_values
from skyformer.registry import Class, Registry


@dataclass(frozen=True)
class Candidates:
    """What a sampler may use: query (B, H, L, P), key (B, H, S, P), their masks, the kernel and its scale.
    `normalised` says whether each row of the score matrix is divided by its sum, as in softmax attention."""

    query: Tensor
    key: Tensor
    query_mask: Tensor | None
    key_mask: Tensor | None
    kernel: Kernel
    scale: float
    normalised: bool = False

    @property
    def num_queries(self) -> int:
        return self.query.shape[2]

    @property
    def num_rows(self) -> int:
        """Rows of [Q; K]."""
        return self.num_queries + self.key.shape[2]

    @property
    def device(self) -> torch.device:
        return self.query.device

    def valid_queries(self) -> Tensor:
        """The number of valid queries of each example: (B, 1)."""
        return count_valid(self.query_mask, self.query)

    def valid_keys(self) -> Tensor:
        """The number of valid keys of each example: (B, 1)."""
        return count_valid(self.key_mask, self.key)

    def valid_rows(self) -> Tensor:
        """Which rows of [Q; K] are valid: bool (B, L + S)."""
        return torch.cat([_mask_of(self.query, self.query_mask), _mask_of(self.key, self.key_mask)], -1)

    def in_float32(self) -> Candidates:
        """The same with queries and keys of half precision converted to float32."""
        return replace(self, query=at_least_float32(self.query), key=at_least_float32(self.key))

    def query_row(self, rank: Tensor) -> Tensor:
        """The row numbers of the valid queries of these ranks (B, k)."""
        return nth_valid(self.query_mask, rank)

    def key_row(self, rank: Tensor) -> Tensor:
        """The row numbers of the valid keys of these ranks (B, k)."""
        return self.num_queries + nth_valid(self.key_mask, rank)


def _mask_of(x: Tensor, mask: Tensor | None) -> Tensor:
    return x.new_ones(x.shape[0], x.shape[2], dtype=torch.bool) if mask is None else mask


@dataclass(frozen=True)
class Landmarks:
    """Points (B, H, d, P), and which slots hold one: active (B, 1 or H, d), or None if all do."""

    points: Tensor
    active: Tensor | None = None

    def to(self, dtype: torch.dtype) -> Landmarks:
        """The same with points of this dtype."""
        return Landmarks(self.points.to(dtype), self.active)

    def all_active(self) -> Tensor:
        """`active` as a tensor, also if it is None."""
        if self.active is not None:
            return self.active
        batch, _, count, _ = self.points.shape
        return torch.ones(batch, 1, count, dtype=torch.bool, device=self.points.device)


class Sampler(abc.ABC):
    """A strategy for choosing landmarks. `register_sampler` makes a subclass known by its `name`."""

    name: ClassVar[str]

    @abc.abstractmethod
    def __call__(self, candidates: Candidates, num_landmarks: int, generator: RandomSource) -> Tensor | Landmarks:
        """Rows (B, d) or (B, H, d) of [Q; K], with -1 in an empty slot; or `Landmarks` if they need not be rows."""


CustomSampler = Callable[[Candidates, int, torch.Generator | None], Tensor | Landmarks]

SAMPLERS: Registry[Sampler] = Registry(
    "landmark sampler", base=Sampler, make=lambda cls: cls(), entry_points="skyformer.samplers"
)


def register_sampler(cls: Class) -> Class:
    """Class decorator: makes a `Sampler`, with its default settings, known by its `name`."""
    return SAMPLERS.register(cls)


def list_samplers() -> list[str]:
    """The names of all samplers of landmarks, in alphabetical order."""
    return SAMPLERS.names()


def get_sampler(sampler: str | Sampler | CustomSampler) -> Sampler | CustomSampler:
    """The sampler of this name with its default settings, or the given callable itself."""
    return sampler if callable(sampler) else SAMPLERS.get(sampler)


def check_points_and_slots(drawn: Landmarks, candidates: Candidates) -> Landmarks:
    """Check `Landmarks` that a custom sampler returned."""
    batch, heads, _, features = candidates.query.shape
    points, active = drawn.points, drawn.active
    fits = points.dim() == 4 and (*points.shape[:2], points.shape[3]) == (batch, heads, features)
    if not fits or points.shape[2] == 0:
        raise ShapeError(
            f"points of the landmarks must have shape ({batch}, {heads}, d, {features}) with d >= 1; "
            f"got {tuple(points.shape)}"
        )
    if points.dtype != candidates.query.dtype:
        raise InputError(f"points of the landmarks must be {candidates.query.dtype}; got {points.dtype}")
    slots = points.shape[2]
    if active is not None and (
        active.dtype != torch.bool or active.shape not in ((batch, 1, slots), (batch, heads, slots))
    ):
        raise ShapeError(
            f"active of the landmarks must be bool of shape ({batch}, 1 or {heads}, {slots}); "
            f"got {active.dtype} of shape {tuple(active.shape)}"
        )
    return drawn


def without_masked_rows(rows: Tensor, candidates: Candidates) -> Tensor:
    """Checked rows (B, 1 or H, d) of a custom sampler; masked ones are an error, and where values cannot be looked at,
    empty slots."""
    if candidates.query_mask is None and candidates.key_mask is None:
        return rows
    valid = candidates.valid_rows().unsqueeze(1).expand(-1, rows.shape[1], -1)
    masked = (rows >= 0) & ~valid.gather(-1, rows.clamp(min=0))
    if not may_look_at_values(rows):
        return rows.masked_fill(masked, -1)
    if bool(masked.any()):
        example, head, slot = (int(i) for i in masked.nonzero()[0])
        row, length = int(rows[example, head, slot]), candidates.num_queries
        what = f"query {row}" if row < length else f"key {row - length}"
        raise InputError(
            f"a sampler must choose rows that are not masked, or -1 for an empty slot; got row {row} of example "
            f"{example}, which is the masked {what}. `Candidates.valid_rows()` says which rows it may choose"
        )
    return rows


def check_rows(rows: Tensor, batch: int, heads: int, num_rows: int) -> Tensor:
    """Check row numbers that the caller or a custom sampler chose; returns them as (B, 1 or H, d)."""
    if not isinstance(rows, Tensor):
        raise InputError(f"landmarks must be a tensor of row numbers or `Landmarks`; got {type(rows).__name__}")
    if rows.dtype != torch.int64:
        raise InputError(f"landmarks must be row numbers of dtype int64; got {rows.dtype}")
    fits = rows.dim() in (2, 3) and rows.shape[0] == batch and (rows.dim() == 2 or rows.shape[1] in (1, heads))
    if not fits or rows.shape[-1] == 0:
        raise ShapeError(
            f"landmarks must have shape ({batch}, d) or ({batch}, {heads}, d) with d >= 1; got {tuple(rows.shape)}"
        )
    rows = rows if rows.dim() == 3 else rows.unsqueeze(1)
    if may_look_at_values(rows) and rows.numel() > 0:
        low, high = (int(bound) for bound in rows.aminmax())
        if low < -1 or high >= num_rows:
            raise InputError(
                f"landmarks must be between 0 and {num_rows - 1}, the rows of [Q; K], or -1 for an empty slot; "
                f"got numbers from {low} to {high}"
            )
    return rows
