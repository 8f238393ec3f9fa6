"""Rows in another order: permutations whose backward is a plain gather, and the valid tokens put first.

Mechanisms that look at where a token stands (blocks, chunks) do so in the sequence of an example's valid
tokens, so that neither padding nor holes in a mask move anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class Order:
    """A permutation (..., n): row i of the result is row order[..., i] of the source."""

    order: Tensor
    inverse: Tensor

    @staticmethod
    def sorting(keys: Tensor) -> Order:
        """The order that sorts keys (..., n), equal ones by position."""
        order = keys.argsort(dim=-1, stable=True)
        rank = torch.arange(keys.shape[-1], device=keys.device).expand_as(order)
        return Order(order, torch.empty_like(order).scatter_(-1, order, rank))

    def reversed(self) -> Order:
        return Order(self.inverse, self.order)


def valid_first(valid: Tensor) -> Order:
    """The valid rows (B, n) of each example in front, in their order, then the others."""
    return Order.sorting(~valid)


def permute_rows(x: Tensor, order: Order) -> Tensor:
    """x (B, H, n, c) in the order (B, n) of each example; or, with an order (B, H R, n), every head in R
    orders of its own: (B, H R, n, c)."""
    out: Tensor = _PermuteRows.apply(x, order.order, order.inverse)  # type: ignore[no-untyped-call]
    return out


class _PermuteRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.shape = x.shape
        return _take(x, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        batch, heads, length, width = ctx.shape
        back = _take(grad, inverse)
        rounds = grad.shape[1] // heads
        return back if rounds == 1 else back.view(batch, heads, rounds, length, width).sum(2), None, None


def _take(x: Tensor, rows: Tensor) -> Tensor:
    """Rows (B, n) or (B, H R, n) of x (B, H, n, c). A gather would copy element by element."""
    batch, heads, length, width = x.shape
    rows = rows.unsqueeze(1).expand(-1, heads, -1) if rows.dim() == 2 else rows
    start = torch.arange(batch * heads, device=x.device).view(batch, heads, 1, 1) * length
    flat = (rows.reshape(batch, heads, -1, length) + start).flatten()
    return x.reshape(-1, width).index_select(0, flat).view(batch, -1, length, width)
