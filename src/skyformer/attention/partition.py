"""Parts of equal size: contiguous blocks of the valid rows of an example, and cells of a tree of median splits.

With n valid rows, part i of `parts` holds the ranks from ceil(i n / parts) to ceil((i + 1) n / parts) - 1. Ranks count
valid rows only, so neither padding nor the rest of the batch changes which rows are together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat

import torch
from torch import Tensor

SAMPLES = 32
"""Rows per node of the tree that its splitting direction is computed from; all rows of the node are then split."""
POWER_STEPS = 2


@dataclass(frozen=True)
class Parts:
    """The rows of each part, padded to the same number of slots.

    Args:
        rows: (B, 1 or H, parts, slots), row numbers; an empty slot holds an arbitrary row.
        filled: bool (B, 1, parts, slots), False in empty slots; None if no slot is empty.
        in_order: whether the rows are 0, 1, 2, ... so that parts are views.
    """

    rows: Tensor
    filled: Tensor | None
    in_order: bool = False

    def split(self, count: int) -> Iterator[Parts]:
        """The parts of at most `count` examples at a time."""
        for rows, filled in split_examples(count, self.rows, self.filled):
            assert rows is not None
            yield Parts(rows, filled, self.in_order)

    def take(self, x: Tensor) -> Tensor:
        """The rows of x (B, H, n, P) by part: (B, H, parts, slots, P)."""
        taken = x if self.in_order else take_rows(x, self.rows.flatten(2))
        return taken.unflatten(2, self.rows.shape[2:])

    def mean(self, taken: Tensor) -> Tensor:
        """The mean of each part of taken (B, H, parts, slots, P), zero for an empty part: (B, H, parts, P)."""
        if self.filled is None:
            return taken.mean(3)
        filled = self.filled.unsqueeze(-1)
        return taken.masked_fill(~filled, 0).sum(3) / filled.sum(3).clamp(min=1)

    def put_back(self, taken: Tensor, length: int) -> Tensor:
        """The inverse of `take`: (B, H, parts, slots, P) to (B, H, length, P). Rows in no part get arbitrary values."""
        flat = taken.flatten(2, 3)
        if self.in_order:
            return flat
        rows = self.rows if self.filled is None else self.rows.masked_fill(~self.filled, length)
        rows = rows.flatten(2)
        slot = torch.arange(rows.shape[-1], device=rows.device).expand_as(rows)
        where = slot.new_zeros(*rows.shape[:2], length + 1).scatter(-1, rows, slot)
        return take_rows(flat, where[..., :length])


def split_examples(count: int, *tensors: Tensor | None) -> Iterator[tuple[Tensor | None, ...]]:
    """Tensors (B, ...) in parts of at most `count` examples; None stays None."""
    return zip(*(repeat(None) if x is None else x.split(count) for x in tensors), strict=False)


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Rows (B, 1 or H, k) of x (B, H, n, P): (B, H, k, P). One `index_select`, whose backward is one `index_add`."""
    batch, heads, length, width = x.shape
    first = length * torch.arange(batch * heads, device=x.device).view(batch, heads, 1)
    return x.reshape(-1, width).index_select(0, (rows + first).flatten()).view(batch, heads, rows.shape[-1], width)


def valid_first(mask: Tensor | None, batch: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Row numbers (B, n) with the valid rows in front, in their order; and how many are valid, (B, 1)."""
    if mask is None:
        rows = torch.arange(length, device=device).expand(batch, length)
        return rows, torch.full((batch, 1), length, device=device)
    count = mask.sum(-1, keepdim=True)
    place = torch.where(mask, mask.cumsum(-1), count + (~mask).cumsum(-1)) - 1
    return torch.empty_like(place).scatter(-1, place, torch.arange(length, device=device).expand_as(place)), count


def part_starts(count: Tensor, parts: int) -> Tensor:
    """ceil(i count / parts) for i = 0 ... parts: (B, 1) to (B, parts + 1)."""
    return -(-count * torch.arange(parts + 1, device=count.device) // parts)


def contiguous_parts(mask: Tensor | None, batch: int, length: int, parts: int, device: torch.device) -> Parts:
    """Cut the valid rows of each example into `parts` runs of neighbours."""
    order, count = valid_first(mask, batch, length, device)
    slots = -(-length // parts)
    starts = part_starts(count, parts)
    rank = starts[:, :-1, None] + torch.arange(slots, device=device)
    filled = None if mask is None and length % parts == 0 else (rank < starts[:, 1:, None])[:, None]
    rows = order.gather(1, rank.clamp(max=length - 1).flatten(1)).view_as(rank)
    return Parts(rows[:, None], filled, in_order=filled is None)


@torch.no_grad()
def tree_parts(points: Tensor, mask: Tensor | None, parts: int) -> Parts:
    """Cut the valid rows of points (B, H, n, P) into `parts` cells of near points; `parts` is a power of two.

    Every node is split at the median of its principal direction. The two halves of a node are parts of equal size
    again, so the sizes at each level are those of `part_starts`.
    """
    batch, heads, length, _ = points.shape
    order, count = valid_first(mask, batch, length, points.device)
    rows = order[:, None, None].expand(batch, heads, 1, length)
    nodes = 1
    while nodes < parts:
        starts = part_starts(count, 2 * nodes)
        size = (starts[:, 2::2] - starts[:, :-1:2])[:, None]
        rows = _split(points, rows, size, (starts[:, 1::2] - starts[:, :-1:2])[:, None])
        nodes *= 2
    starts = part_starts(count, parts)
    size = (starts[:, 1:] - starts[:, :-1])[:, None, :, None]
    uniform = mask is None and length % parts == 0
    return Parts(rows, None if uniform else torch.arange(rows.shape[-1], device=points.device) < size)


def _split(points: Tensor, rows: Tensor, size: Tensor, first: Tensor) -> Tensor:
    """Rows (B, H, nodes, slots) of nodes with `size` (B, 1, nodes) rows each, to their halves, of which the left ones
    get the `first` rows along the principal direction: (B, H, 2 nodes, half the slots)."""
    slots = rows.shape[-1]
    slot = torch.arange(slots, device=rows.device)
    y = take_rows(points, rows.flatten(2)).unflatten(2, rows.shape[2:])
    # A product with one column per node is slow as a matrix product.
    along = (y * principal_direction(points, rows, size)).sum(-1)
    along = along.masked_fill(slot >= size.unsqueeze(-1), torch.inf)
    rows = rows.gather(-1, along.argsort(-1))
    half = torch.arange(-(-slots // 2), device=rows.device)
    left = half.expand(*size.shape, -1)
    right = (first.unsqueeze(-1) + half).clamp(max=slots - 1)
    both = torch.stack([left, right], -2).expand(*rows.shape[:3], 2, -1)
    return rows.unsqueeze(-2).expand(*both.shape[:-1], slots).gather(-1, both).flatten(2, 3)


def principal_direction(points: Tensor, rows: Tensor, size: Tensor) -> Tensor:
    """The direction of largest variance of the first `size` (B, 1, nodes) rows (B, H, nodes, slots) of each node, by
    power steps from the farthest of `SAMPLES` evenly spaced ones: (B, H, nodes, 1, P)."""
    spaced = torch.arange(SAMPLES, device=rows.device) * size.unsqueeze(-1) // SAMPLES
    sampled = rows.gather(-1, spaced.expand(*rows.shape[:3], -1))
    x = take_rows(points, sampled.flatten(2)).unflatten(2, sampled.shape[2:])
    x = x - x.mean(3, keepdim=True)
    farthest = x.square().sum(-1, keepdim=True).argmax(3, keepdim=True)
    u = x.gather(3, farthest.expand(*rows.shape[:3], 1, x.shape[-1]))
    for _ in range(POWER_STEPS):
        u = ((x * u).sum(-1, keepdim=True) * x).sum(3, keepdim=True)
        # Its length does not matter, as long as it neither overflows nor vanishes.
        u = u / u.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(u.dtype).tiny)
    return u
