"""kappa(x, y) v in blocks, with a backward that recomputes them, so the (L, S) matrix never exists.

With C = kappa(x, y), o = C v, dO the gradient of o and psi the slope of the kernel (see `kernels`):

    dv   = C^T dO
    G    = psi * (dO v^T)                                  elementwise, one block at a time
    dx_i = scale ((G y)_i   - (sum_j G_ij) x_i)
    dy_j = scale ((G^T x)_j - (sum_i G_ij) y_j)

If psi = C (Gaussian), the row sums of G are dO . o and its column sums are v . dv, at no extra cost. For the softmax
kernel the terms in the sums are absent. `docs/derivation.md` has the steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from skyformer.ops.differentiable import Operation, Three, sum_of
from skyformer.ops.distances import shrunk
from skyformer.ops.kernels import EXPONENT_FLOOR, GaussianKernel, Kernel, get_kernel, half_norms
from skyformer.ops.noise import Seed, dropout_seed, keep_mask, rounded_probability, uniform_noise
from skyformer.ops.precision import at_least_float32, without_autocast
from skyformer.ops.tracing import is_variable, transforming

BLOCK_ELEMENTS = 2**19
"""Number of kernel values in one block over the whole batch: 2 MiB in float32, which fits into the cache."""

SHORT_SIDE = 512
"""A side up to this length is not divided into blocks."""

MEMORY_BUDGET = 2**25
"""Bytes of kernel values that one product may store for its backward pass; if they need more, they are recomputed."""


@dataclass(frozen=True)
class Plan:
    """What a kernel product computes apart from its tensors: the arguments of `kernel_product`, checked."""

    kernel: Kernel
    scale: float
    is_causal: bool = False
    dropout_p: float = 0.0
    generator: torch.Generator | None = None
    memory_budget: int = MEMORY_BUDGET


def blocked_product(x: Tensor, y: Tensor, v: Tensor, key_mask: Tensor | None, plan: Plan) -> Tensor:
    """The portable kappa(x, y) v: on every device, for every kernel, with dropout."""
    if key_mask is not None:
        v = v.masked_fill(~key_mask[:, None, :, None], 0)
        if not plan.kernel.radial:
            # exp(<x, y>) may overflow at a masked key, and infinity times the zero above would be NaN.
            y = y.masked_fill(~key_mask[:, None, :, None], 0)
    batch_and_heads, dtype = x.shape[:2], x.dtype
    x, y, v = (at_least_float32(t).flatten(0, 1) for t in (x, y, v))
    seed = None if plan.dropout_p == 0 else dropout_seed(plan.generator)
    needs_gradients = torch.is_grad_enabled() and any(t.requires_grad for t in (x, y, v))
    return BlockedProduct(plan, needs_gradients)(x, y, v, None, seed).unflatten(0, batch_and_heads).to(dtype)


def dense_kernel_product(
    x: Tensor,
    y: Tensor,
    v: Tensor,
    *,
    kernel: str | Kernel = "gaussian",
    scale: float = 1.0,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """The same product with the whole matrix in memory, as a reference for tests and benchmarks."""
    matrix = get_kernel(kernel).matrix(x, y, scale)
    if key_mask is not None:
        matrix = matrix.masked_fill(~key_mask[:, None, None, :], 0)
    if is_causal:
        matrix = matrix.tril()
    return matrix @ v


def gram_matrix(x: Tensor, *, kernel: str | Kernel = "gaussian", scale: float = 1.0) -> Tensor:
    """kappa(x, x) for x (B, H, d, P): (B, H, d, d), with a backward pass of six operations instead of twenty."""
    if transforming():
        return _transformable_gram(x, get_kernel(kernel), scale)
    matrix: Tensor = _Gram.apply(x, get_kernel(kernel), scale)
    return matrix


def _transformable_gram(x: Tensor, kernel: Kernel, scale: float) -> Tensor:
    """The same in operations of torch, without a gradient of its own."""
    x, _ = _gram_points(x, kernel, scale)
    half = _half_norms(x, scale)
    value, _ = _smooth_value_and_slope(kernel, scale * (x @ x.mT), half, half.mT)
    own = torch.eye(x.shape[-2], dtype=torch.bool, device=x.device)
    return torch.where(own, kernel.value_at_zero(x), value) if kernel.radial else value


def _gram_and_slope(x: Tensor, kernel: Kernel, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor | float]:
    """The kernel matrix of x, its slope, the points from which both were computed, and the factor of the gradient."""
    x, shrink = _gram_points(x, kernel, scale)
    half = half_norms(x, scale)
    value, slope = kernel.value_and_slope((x @ x.mT).mul_(scale), half, half.mT)
    if kernel.radial:
        # Rounding may make the distance of a point to itself larger than 0.
        value.diagonal(dim1=-2, dim2=-1).copy_(kernel.value_at_zero(x))
    return value, slope, x, shrink * scale


def _gram_points(x: Tensor, kernel: Kernel, scale: float) -> tuple[Tensor, Tensor | float]:
    """Points of the same distances as x, and the factors by which they were moved closer together."""
    if not kernel.radial:
        return x, 1.0
    # Distances do not depend on the origin, but their rounding does: for near duplicates far from the origin the matrix
    # would be indefinite. The rounding errors of extreme norms would make it indefinite too.
    return shrunk(x - x.mean(-2, keepdim=True), scale)


class _Gram(torch.autograd.Function):
    """dx = scale (H x - (row sums of H) x) with H = G + G^T and G = psi * dM; without the sums if not radial."""

    @staticmethod
    @without_autocast
    def forward(ctx: Any, x: Tensor, kernel: Kernel, scale: float) -> Tensor:
        value, slope, points, ctx.factor = _gram_and_slope(x, kernel, scale)
        ctx.kernel, ctx.scale = kernel, scale
        ctx.save_for_backward(x, points, slope)
        return value

    @staticmethod
    @without_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, points, slope = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _gram_gradient(grad, x, ctx.kernel, ctx.scale), None, None
        g = grad * slope
        both = g + g.mT
        dx = both @ points
        if ctx.kernel.radial:
            dx.addcmul_(points, both.sum(-1, keepdim=True), value=-1)
        return dx.mul_(ctx.factor), None, None


def _gram_gradient(grad: Tensor, x: Tensor, kernel: Kernel, scale: float) -> Tensor:
    """The same in operations that can be differentiated again."""
    x, shrink = _gram_points(x, kernel, scale)
    half = _half_norms(x, scale)
    _, slope = _smooth_value_and_slope(kernel, scale * (x @ x.mT), half, half.mT)
    g = grad * slope
    both = g + g.mT
    return shrink * scale * (both @ x - both.sum(-1, keepdim=True) * x if kernel.radial else both @ x)


@dataclass(frozen=True)
class _Block:
    """Rows `i` of x and rows `j` of y; `number` counts the blocks of one pass."""

    i: slice
    j: slice
    number: int

    @property
    def diagonal(self) -> int:
        return int(self.i.start - self.j.start)


@dataclass(frozen=True)
class KernelOperation(Operation):
    """kappa(x, y) v; here its derivatives beyond the first, in plain torch operations. x, y and v have three dimensions
    and no mask, or four and a mask (B, S)."""

    plan: Plan

    def row_blocks(self, x: Tensor, y: Tensor) -> Iterator[tuple[slice, list[_Block]]]:
        count = math.prod(x.shape[:-2])
        for rows, blocks in groupby(blocks_of(count, x.shape[-2], y.shape[-2], self.plan.is_causal), attrgetter("i")):
            yield rows, list(blocks)

    def row_gradients(
        self, block: Any, grad: Tensor, x: Tensor, y: Tensor, v: Tensor, mask: Tensor | None, seed: Seed | None
    ) -> Three:
        scale, dx, dy, dv = self.plan.scale, [], [], []
        for part in block:
            y_j, v_j = y[..., part.j, :], v[..., part.j, :]
            value, slope = self._values_and_slopes(part, x, y_j, mask, seed)
            g = slope * (grad @ v_j.mT)
            dx.append(g @ y_j - g.sum(-1, keepdim=True) * x if self.plan.kernel.radial else g @ y_j)
            dy.append(g.mT @ x - g.sum(-2).unsqueeze(-1) * y_j if self.plan.kernel.radial else g.mT @ x)
            dv.append(value.mT @ grad)
        of_y, of_v = (torch.cat(each, -2) for each in (dy, dv))
        missing = y.shape[-2] - of_y.shape[-2]
        return scale * sum_of(dx), F.pad(scale * of_y, (0, 0, 0, missing)), F.pad(of_v, (0, 0, 0, missing))

    def row_tangents(self, block: Any, primals: Three, tangents: Three, mask: Tensor | None) -> Tensor:
        """sum_j scale psi_ij t_ij v_j + kappa_ij dv_j with t_ij = <dx_i - dy_j, y_j - x_i>, or if not radial
        <dx_i, y_j> + <x_i, dy_j>."""
        (x, y, v), (dx, dy, dv) = primals, tangents
        out = []
        for part in block:
            y_j, v_j, dy_j, dv_j = (t[..., part.j, :] for t in (y, v, dy, dv))
            value, slope = self._values_and_slopes(part, x, y_j, mask, None)
            change = dx @ y_j.mT + x @ dy_j.mT
            if self.plan.kernel.radial:
                change = change - (dx * x).sum(-1, keepdim=True) - (dy_j * y_j).sum(-1).unsqueeze(-2)
            out.append(self.plan.scale * (slope * change) @ v_j + value @ dv_j)
        return sum_of(out)

    def _values_and_slopes(
        self, part: _Block, x: Tensor, y: Tensor, mask: Tensor | None, seed: Seed | None
    ) -> tuple[Tensor, Tensor]:
        """kappa and psi of one block after the masks and dropout."""
        plan = self.plan
        halves = _half_norms(x, plan.scale), _half_norms(y, plan.scale).mT
        found = _smooth_value_and_slope(plan.kernel, plan.scale * (x @ y.mT), *halves)
        factor = torch.ones_like(found[0].detach())
        if mask is not None:
            factor = factor.masked_fill(~mask[:, None, None, part.j], 0)
        if plan.is_causal:
            factor = factor.tril(part.diagonal)
        if seed is not None:
            factor = _drop(factor.contiguous(), plan.dropout_p, seed + part.number)
        value, slope = (each * factor for each in found)
        return value, slope


def _smooth_value_and_slope(kernel: Kernel, inner: Tensor, half_x: Tensor, half_y: Tensor) -> tuple[Tensor, Tensor]:
    """`Kernel.value_and_slope`, with derivatives where rounding moves the exponent of the Gaussian kernel above 0."""
    if not isinstance(kernel, GaussianKernel):
        return kernel.value_and_slope(inner, half_x, half_y)
    value = bounded(inner - half_x - half_y).exp()
    return value, value


def bounded(exponent: Tensor) -> Tensor:
    """The exponent within its bounds, with the derivatives of one that has no bounds."""
    return exponent + (exponent.clamp(EXPONENT_FLOOR[exponent.dtype], 0) - exponent).detach()


def _half_norms(x: Tensor, scale: float) -> Tensor:
    """`half_norms` with second derivatives at zero, where a norm has none."""
    return x.square().sum(-1, keepdim=True) * (scale / 2)


@dataclass(frozen=True)
class BlockedProduct(KernelOperation):
    """x (N, L, P), y (N, S, P), v (N, S, Pv) to (N, L, Pv). It saves the kernel values if gradients will be needed and
    they fit into the memory budget."""

    needs_gradients: bool

    def forward(self, x: Tensor, y: Tensor, v: Tensor, mask: Tensor | None, seed: Seed | None) -> tuple[Tensor, ...]:
        plan = self.plan
        grid = _Grid(x, y, plan, seed)
        keep = self.needs_gradients and plan.kernel.slope_is_value and grid.bytes <= plan.memory_budget
        out = x.new_zeros(*x.shape[:2], v.shape[-1])
        kept = []
        for block in grid.blocks():
            c = grid.values(block)
            out[:, block.i] += torch.bmm(c, v[:, block.j])
            if keep:
                kept.append(c)
                grid.inner.release()
        return out, *kept

    def gradients(
        self, grad: Tensor, x: Tensor, y: Tensor, v: Tensor, mask: Tensor | None, seed: Seed | None, *saved: Tensor
    ) -> Three:
        plan, (out, *kept) = self.plan, saved
        grid = _Grid(x, y, plan, seed, only_shape=bool(kept))
        dx, dy, dv = torch.zeros_like(x), torch.zeros_like(y), torch.zeros_like(v)
        row_sums, column_sums = x.new_zeros(*x.shape[:2], 1), y.new_zeros(y.shape[0], 1, y.shape[1])
        sum_slopes = plan.kernel.radial and not plan.kernel.slope_is_value
        for block in grid.blocks():
            x_i, y_j, v_j, do_i = x[:, block.i], y[:, block.j], v[:, block.j], grad[:, block.i]
            c, slope = (kept[block.number],) * 2 if kept else grid.values_and_slopes(block)
            dv[:, block.j] += torch.bmm(c.mT, do_i)
            g = grid.gradients.product(do_i, v_j.mT).mul_(slope)
            dx[:, block.i].add_(torch.bmm(g, y_j), alpha=plan.scale)
            dy[:, block.j].add_(torch.bmm(g.mT, x_i), alpha=plan.scale)
            if sum_slopes:
                row_sums[:, block.i] += g.sum(-1, keepdim=True)
                column_sums[:, :, block.j] += g.sum(-2, keepdim=True)
        if sum_slopes:
            dx.addcmul_(x, row_sums, value=-plan.scale)
            dy.addcmul_(y, column_sums.mT, value=-plan.scale)
        elif plan.kernel.radial:
            subtract_dots(dx, x, grad, out, plan.scale)
            subtract_dots(dy, y, v, dv, plan.scale)
        return dx, dy, dv


def blocks_of(count: int, rows: int, columns: int, is_causal: bool) -> Iterator[_Block]:
    """The blocks of `count` matrices (rows, columns), row by row. In an exported program, in which one of the sizes is
    a variable, there is one block, because the number of blocks is not known. torch.compile compiles for the size."""
    fixed = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
    if not fixed and any(is_variable(size) for size in (count, rows, columns)):
        yield _Block(slice(0, None), slice(0, None), 0)
        return
    height, width = block_shape(count, rows, columns)
    number = 0
    for i in range(0, rows, height):
        for j in range(0, columns, width):
            block = _Block(slice(i, min(i + height, rows)), slice(j, min(j + width, columns)), number)
            if is_causal and block.j.start >= block.i.stop:
                continue
            yield block
            number += 1


class _Grid:
    """The kernel matrix of x (N, L, P) and y (N, S, P), one block at a time."""

    def __init__(self, x: Tensor, y: Tensor, plan: Plan, seed: Seed | None, only_shape: bool = False) -> None:
        """`only_shape` leaves out the norms, which are needed for values only."""
        self.x, self.y, self.plan, self.seed = x, y, plan, seed
        if not only_shape:
            self.half_x = half_norms(x, plan.scale)
            self.half_y = half_norms(y, plan.scale).mT
        self.inner, self.gradients = _Scratch(), _Scratch()

    @property
    def bytes(self) -> int:
        return self.x.shape[0] * self.x.shape[1] * self.y.shape[1] * self.x.element_size()

    def blocks(self) -> Iterator[_Block]:
        return blocks_of(self.x.shape[0], self.x.shape[1], self.y.shape[1], self.plan.is_causal)

    def values(self, block: _Block) -> Tensor:
        value = self.plan.kernel.value(self._inner(block), *self._halves(block))
        return self._mask_and_drop(value, block)

    def values_and_slopes(self, block: _Block) -> tuple[Tensor, Tensor]:
        value, slope = self.plan.kernel.value_and_slope(self._inner(block), *self._halves(block))
        if slope is value:
            value = slope = self._mask_and_drop(value, block)
            return value, slope
        return self._mask_and_drop(value, block), self._mask_and_drop(slope, block)

    def _inner(self, block: _Block) -> Tensor:
        return self.inner.product(self.x[:, block.i], self.y[:, block.j].mT).mul_(self.plan.scale)

    def _halves(self, block: _Block) -> tuple[Tensor, Tensor]:
        return self.half_x[:, block.i], self.half_y[:, :, block.j]

    def _mask_and_drop(self, c: Tensor, block: _Block) -> Tensor:
        """The block after the causal mask and dropout."""
        if self.plan.is_causal and (block.j.stop is None or block.j.stop > block.i.start + 1):
            c = c.tril_(block.diagonal)
        if self.seed is not None:
            c = _drop(c, self.plan.dropout_p, self.seed + block.number)
        return c


class _Scratch:
    """A buffer that is used for one block after another: new memory for each would cost more than its arithmetic."""

    def __init__(self) -> None:
        self.buffer: Tensor | None = None

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """a b, in the buffer, which the next call overwrites."""
        if torch.compiler.is_compiling():
            return torch.bmm(a, b)
        size = a.shape[0] * a.shape[1] * b.shape[2]
        if self.buffer is None or self.buffer.numel() < size:
            self.buffer = a.new_empty(size)
        return torch.bmm(a, b, out=self.buffer[:size].view(a.shape[0], a.shape[1], b.shape[2]))

    def release(self) -> None:
        """Use another buffer from now on, so that the last product is not overwritten."""
        self.buffer = None


def block_shape(count: int, rows: int, columns: int) -> tuple[int, int]:
    """Sizes of a block of the (rows, columns) matrix; the shorter side is divided only if it is long."""
    short = max(1, min(rows, columns, SHORT_SIDE))
    long = max(64, BLOCK_ELEMENTS // max(1, count * short))
    return (short, long) if rows <= columns else (long, short)


def subtract_dots(grad: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> None:
    """grad_i -= scale (a_i . b_i) x_i for (..., n, P), in pieces, which avoids another tensor of that size."""
    length = x.shape[-2]
    if is_variable(x.numel()):
        grad.addcmul_(x, (a * b).sum(-1, keepdim=True), value=-scale)
        return
    step = max(1, BLOCK_ELEMENTS * length // max(1, x.numel()))
    for i in range(0, length, step):
        a_i, b_i, x_i = (t[..., i : i + step, :] for t in (a, b, x))
        grad[..., i : i + step, :].addcmul_(x_i, (a_i * b_i).sum(-1, keepdim=True), value=-scale)


def _drop(c: Tensor, p: float, seed: Seed) -> Tensor:
    """c after dropout, in place; the same in both passes, because they use the same seed. A seed that is a tensor comes
    from a program that is being compiled, which cannot contain a generator."""
    if c.is_meta:
        return c
    if isinstance(seed, Tensor):
        return c.mul_((uniform_noise(seed, 0, c.numel(), c.device) >= p).view(c.shape)).div_(1 - p)
    generator = torch.Generator(device=c.device).manual_seed(seed)
    if c.device.type != "cpu":
        return c.mul_(torch.empty_like(c).bernoulli_(1 - p, generator=generator)).div_(1 - p)
    p = rounded_probability(p)
    return c.mul_(keep_mask(c, p, generator)).div_(1 - p)
