"""Points for which float32 gives accurate distances: |x - y|^2 is computed as |x|^2 - 2 <x, y> + |y|^2, whose rounding
error grows with the norms."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from skyformer.ops.kernels import half_norms
from skyformer.ops.precision import at_least_float32
from skyformer.ops.tracing import may_look_at_values

LARGEST_HALF_NORM = 500.0
"""Up to scale |x|^2 / 2 = 500, rounding changes a kernel value in float32 by less than about 1e-4 of itself."""


def mean_of_valid(x: Tensor, mask: Tensor | None) -> Tensor:
    """The mean of the valid rows of x (B, H, n, P), zero if there are none: (B, H, 1, P)."""
    if mask is None:
        return x.sum(2, keepdim=True) / max(x.shape[2], 1)
    valid = mask[:, None, :, None]
    return x.masked_fill(~valid, 0).sum(2, keepdim=True) / valid.sum(2, keepdim=True).clamp(min=1)


class Rows:
    """Means and extremes over the rows of a sequence, all of which are in this process."""

    def mean(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """The mean of the valid rows of x (B, H, n, P): (B, H, 1, P)."""
        return mean_of_valid(x, mask)

    def largest(self, x: Tensor) -> Tensor:
        """The largest value of each entry of x over all processes; it has no gradient."""
        return x.detach()

    def largest_number(self, x: float) -> float:
        """The largest of the numbers of all processes."""
        return x


def accurate_points(
    x: Tensor, y: Tensor, key_mask: Tensor | None, scale: float, rows: Rows = Rows()
) -> tuple[Tensor, Tensor]:
    """x and y, moved and in a dtype such that their distances are accurate.

    Distances do not change if the mean of y is subtracted from both. Where norms are still too large after that, the
    result is in float64. Small norms are left alone. Looking at norms would make an accelerator wait and cannot be
    traced, so there the mean is always subtracted. Points that are too far away for the dtype are moved closer to
    it: their kernel values are not accurate, but results and gradients are finite.
    """
    x, y = at_least_float32(x), at_least_float32(y)
    dtype = x.dtype
    if may_look_at_values(x):
        if _have_small_norms(x, y, scale, rows):
            return x, y
        x, y = x.double(), y.double()
    mean = rows.mean(y.detach(), key_mask)
    x, y = x - mean, y - mean
    if may_look_at_values(x) and _have_small_norms(x, y, scale, rows):
        return x.to(dtype), y.to(dtype)
    return shrunk(x, scale)[0], shrunk(y, scale)[0]


def _have_small_norms(x: Tensor, y: Tensor, scale: float, rows: Rows) -> bool:
    heights = [_height_bound(points.detach(), scale) for points in (x, y) if points.numel()]
    return rows.largest_number(max(heights, default=0.0)) <= LARGEST_HALF_NORM


def _height_bound(x: Tensor, scale: float) -> float:
    """A number that is above `LARGEST_HALF_NORM` only if a half norm of x (not empty) is. It follows from the largest
    entry, which is found faster than all norms; only where that does not decide, they are computed."""
    entry = _largest_entry(x)
    bound = scale * x.shape[-1] / 2 * entry * entry
    if bound <= LARGEST_HALF_NORM:
        return bound
    # Never NaN, which a comparison over processes would lose.
    return float(half_norms(x, scale).amax().nan_to_num(nan=math.inf, posinf=math.inf))


def _largest_entry(x: Tensor) -> float:
    """The largest absolute value in x, which is not empty; infinity if one is NaN."""
    low, high = x.aminmax()
    largest = max(-float(low), float(high))
    return math.inf if math.isnan(largest) else largest


def shrunk(x: Tensor, scale: float) -> tuple[Tensor, Tensor | float]:
    """x (..., n, P), its rows multiplied by factors up to one, and these factors (..., n, 1), or 1.0 if all are one.

    After that, rounding changes no kernel value by more than a few thousandths of itself. Only extreme norms need
    factors below one. The gradient of the factors is left out.
    """
    most = math.sqrt(2e-3 / (torch.finfo(x.dtype).eps * scale))
    points = x.detach()
    if may_look_at_values(x) and x.numel() and math.sqrt(x.shape[-1]) * _largest_entry(points) <= most:
        return x, 1.0
    factors = most / torch.linalg.vector_norm(points, dim=-1, keepdim=True).clamp(min=most)
    return x * factors, factors
