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

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from skyformer.ops.distances import shrinking
from skyformer.ops.kernels import Kernel, get_kernel, half_norms
from skyformer.ops.noise import Seed, draw_seed, draw_seed_unseen, keep_mask, rounded_probability, uniform_noise
from skyformer.ops.precision import at_least_float32, without_autocast

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
    seed: Seed = 0
    if plan.dropout_p > 0:
        seed = draw_seed_unseen(plan.generator) if torch.compiler.is_compiling() else draw_seed(plan.generator)
    out: Tensor = _KernelProduct.apply(*(at_least_float32(t).flatten(0, 1) for t in (x, y, v)), plan, seed)
    return out.unflatten(0, x.shape[:2]).to(x.dtype)


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
    matrix: Tensor = _Gram.apply(x, get_kernel(kernel), scale)
    return matrix


class _Gram(torch.autograd.Function):
    """dx = scale (H x - (row sums of H) x) with H = G + G^T and G = psi * dM; without the sums if not radial."""

    @staticmethod
    @without_autocast
    def forward(ctx: Any, x: Tensor, kernel: Kernel, scale: float) -> Tensor:
        if kernel.radial:
            # Distances do not depend on the origin, but their rounding does: for near duplicates far from the origin
            # the matrix would be indefinite.
            x = x - x.mean(-2, keepdim=True)
            # The rounding errors of extreme norms would make it indefinite too.
            shrink = shrinking(x, scale)
            x = x * shrink
        half = half_norms(x, scale)
        value, slope = kernel.value_and_slope((x @ x.mT).mul_(scale), half, half.mT)
        if kernel.radial:
            # Rounding may make the distance of a point to itself larger than 0.
            zero = x.new_zeros(1, 1)
            value.diagonal(dim1=-2, dim2=-1).copy_(kernel.value(zero, zero.clone(), zero.clone())[0])
        ctx.radial, ctx.factor = kernel.radial, shrink * scale if kernel.radial else scale
        ctx.save_for_backward(x, slope)
        return value

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, slope = ctx.saved_tensors
        g = grad * slope
        both = g + g.mT
        dx = both @ x
        if ctx.radial:
            dx.addcmul_(x, both.sum(-1, keepdim=True), value=-1)
        return dx.mul_(ctx.factor), None, None


@dataclass(frozen=True)
class _Block:
    """Rows `i` of x and rows `j` of y; `number` counts the blocks of one pass."""

    i: slice
    j: slice
    number: int

    @property
    def diagonal(self) -> int:
        return int(self.i.start - self.j.start)


class _KernelProduct(torch.autograd.Function):
    """x (N, L, P), y (N, S, P), v (N, S, Pv) to (N, L, Pv)."""

    @staticmethod
    @without_autocast
    def forward(ctx: Any, x: Tensor, y: Tensor, v: Tensor, plan: Plan, dropout_seed: Seed) -> Tensor:
        grid = _Grid(x, y, plan, dropout_seed)
        keep = any(ctx.needs_input_grad) and plan.kernel.slope_is_value and grid.bytes <= plan.memory_budget
        out = x.new_zeros(*x.shape[:2], v.shape[-1])
        kept = []
        for block in grid.blocks():
            c = grid.values(block)
            out[:, block.i] += torch.bmm(c, v[:, block.j])
            if keep:
                kept.append(c)
                grid.inner.release()
        ctx.plan, ctx.dropout_seed = plan, dropout_seed
        ctx.save_for_backward(x, y, v, out, *kept)
        return out

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        x, y, v, out, *kept = ctx.saved_tensors
        plan: Plan = ctx.plan
        grid = _Grid(x, y, plan, ctx.dropout_seed, only_shape=bool(kept))
        dx, dy, dv = torch.zeros_like(x), torch.zeros_like(y), torch.zeros_like(v)
        row_sums, column_sums = x.new_zeros(*x.shape[:2], 1), y.new_zeros(y.shape[0], 1, y.shape[1])
        sum_slopes = plan.kernel.radial and not plan.kernel.slope_is_value
        for block in grid.blocks():
            x_i, y_j, v_j, do_i = x[:, block.i], y[:, block.j], v[:, block.j], grad_out[:, block.i]
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
            subtract_dots(dx, x, grad_out, out, plan.scale)
            subtract_dots(dy, y, v, dv, plan.scale)
        return dx, dy, dv, None, None


class _Grid:
    """The kernel matrix of x (N, L, P) and y (N, S, P), one block at a time."""

    def __init__(self, x: Tensor, y: Tensor, plan: Plan, dropout_seed: Seed, only_shape: bool = False) -> None:
        """`only_shape` leaves out the norms, which are needed for values only."""
        self.x, self.y, self.plan, self.dropout_seed = x, y, plan, dropout_seed
        if not only_shape:
            self.half_x = half_norms(x, plan.scale)
            self.half_y = half_norms(y, plan.scale).mT
        self.inner, self.gradients = _Scratch(), _Scratch()

    @property
    def bytes(self) -> int:
        return self.x.shape[0] * self.x.shape[1] * self.y.shape[1] * self.x.element_size()

    def blocks(self) -> Iterator[_Block]:
        count, rows, columns = self.x.shape[0], self.x.shape[1], self.y.shape[1]
        height, width = block_shape(count, rows, columns)
        number = 0
        for i in range(0, rows, height):
            for j in range(0, columns, width):
                block = _Block(slice(i, min(i + height, rows)), slice(j, min(j + width, columns)), number)
                if self.plan.is_causal and block.j.start >= block.i.stop:
                    continue
                yield block
                number += 1

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
        if self.plan.is_causal and block.j.stop > block.i.start + 1:
            c = c.tril_(block.diagonal)
        if self.plan.dropout_p > 0:
            c = _drop(c, self.plan.dropout_p, self.dropout_seed + block.number)
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
