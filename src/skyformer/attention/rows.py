"""Rows in several orders at once, by permutations whose backward is a plain gather."""

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


def permute_rows(x: Tensor, order: Order) -> Tensor:
    """x (B, H, n, c), every head in R orders (B, H R, n) of its own: (B, H R, n, c)."""
    out: Tensor = _PermuteRows.apply(x, order.order, order.inverse)
    return out


class _PermuteRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.heads = x.shape[1]
        return _take(x, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        back = _take(grad, inverse)
        rounds = grad.shape[1] // ctx.heads
        return back if rounds == 1 else back.view(-1, ctx.heads, rounds, *grad.shape[2:]).sum(2), None, None


def _take(x: Tensor, rows: Tensor) -> Tensor:
    """Rows (B, H R, n) of x (B, H, n, c): whole rows are copied, where a gather goes element by element."""
    batch, heads, length, width = x.shape
    start = torch.arange(batch * heads, device=x.device).view(batch, heads, 1, 1) * length
    flat = (rows.view(batch, heads, -1, length) + start).flatten()
    return x.reshape(-1, width).index_select(0, flat).view(*rows.shape, width)
