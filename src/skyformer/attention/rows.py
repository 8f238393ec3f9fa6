"""Moving rows of (B, H, n, c) tensors: valid tokens to the front, tokens sorted by bucket, and tokens in blocks.

Moving rows is a copy, and so is its backward: the rows move back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from skyformer.ops.tracing import transforming


@dataclass(frozen=True)
class Move:
    """Row i of the result is row source[..., i] of x, or zeros where that is -1; `target` describes the way back.

    source, target: (B, 1, n) for all heads alike, or (B, H R, n) for R results of each head.
    partial: whether some rows are -1.
    """

    source: Tensor
    target: Tensor
    partial: bool

    @staticmethod
    def sorting(keys: Tensor) -> Move:
        """The move that sorts keys (B, H R, n); equal keys stay in order."""
        order = keys.argsort(dim=-1, stable=True)
        rank = torch.arange(keys.shape[-1], device=keys.device).expand_as(order)
        return Move(order, torch.empty_like(order).scatter(-1, order, rank), partial=False)

    def apply(self, x: Tensor) -> Tensor:
        """x (B, H, n, c) to (B, H R, n, c)."""
        return _move(x, self.source, self.target, self.partial)

    def undo(self, x: Tensor) -> Tensor:
        """Moves every row of x (B, H R, n, c) back; rows that were not moved are zeros."""
        return _move(x, self.target, self.source, self.partial)


@dataclass(frozen=True)
class Ranks:
    """The valid tokens of each example, numbered from 0 by their rank, so that padding and gaps do not matter.

    position (B, n): of the token of each rank, -1 beyond the last. count (B, 1): how many tokens are valid.
    """

    position: Tensor
    count: Tensor
    move: Move

    @staticmethod
    def of(mask: Tensor) -> Ranks:
        """mask: bool (B, n), True = a real token."""
        upto = mask.cumsum(-1)
        count = upto[:, -1:] if mask.shape[1] else upto.sum(-1, keepdim=True)
        here = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
        # With masked tokens placed behind the valid ones, the places are a permutation: no sort is needed.
        place = torch.where(mask, upto - 1, count + here - upto)
        position = torch.empty_like(place).scatter(1, place, here)
        position = torch.where(here < count, position, -1)
        rank = torch.where(mask, place, -1)
        return Ranks(position, count, Move(position[:, None], rank[:, None], partial=True))

    def compact(self, x: Tensor) -> Tensor:
        """The valid rows of x (B, H, n, c) in order, followed by zeros."""
        return self.move.apply(x)

    def spread(self, x: Tensor) -> Tensor:
        """The inverse of `compact`, with zeros at masked tokens."""
        return self.move.undo(x)


def in_blocks(x: Tensor, size: int) -> Tensor:
    """x (B, H, n, c) in T >= 1 blocks of `size` rows, the last filled up with zeros: (B, H, T, size, c)."""
    blocks = (max(1, x.shape[2]) + size - 1) // size
    filled = F.pad(x, (0, 0, 0, blocks * size - x.shape[2]))
    return filled.reshape(*x.shape[:2], blocks, size, x.shape[-1])


def _move(x: Tensor, source: Tensor, target: Tensor, partial: bool) -> Tensor:
    if transforming():
        return _take(x, source, partial)
    out: Tensor = _MoveRows.apply(x, source, target, partial)
    return out


class _MoveRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, target: Tensor, partial: bool) -> Tensor:
        ctx.save_for_backward(source, target)
        ctx.heads, ctx.partial = x.shape[1], partial
        return _take(x, source, partial)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        source, target = ctx.saved_tensors
        back: Tensor = _MoveRows.apply(grad, target, source, ctx.partial)
        rounds = grad.shape[1] // ctx.heads
        return back if rounds == 1 else back.unflatten(1, (ctx.heads, rounds)).sum(2), None, None, None


def _take(x: Tensor, rows: Tensor, partial: bool) -> Tensor:
    """Rows (B, 1 or H R, n) of x (B, H, n, c), zeros where -1: (B, H R, n, c).

    One `index_select` over the whole batch copies whole rows: ten times as fast on a CPU as `gather`, and unlike a
    product with the mask it does not spread NaN from masked rows.
    """
    batch, heads, length, width = x.shape
    rounds = max(1, rows.shape[1] // heads)
    start = torch.arange(batch * heads, device=x.device).mul_(length).view(batch, heads, 1, 1)
    chosen = rows.view(batch, rows.shape[1] // rounds, rounds, length)
    index = chosen + start
    flat = x.reshape(-1, width)
    if partial:
        index = torch.where(chosen < 0, batch * heads * length, index)
        flat = F.pad(flat, (0, 0, 0, 1))
    return flat.index_select(0, index.flatten()).view(batch, heads * rounds, length, width)
