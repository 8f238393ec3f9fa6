"""The Gaussian product as torch operators that run Triton kernels, with fake kernels and gradients.

`skyformer::gaussian_product` and `skyformer::gaussian_product_backward` are opaque to `torch.compile`, `torch.export`
and FakeTensor, which use the fake kernels below. Triton itself is imported at the first product.

Matrix products have inputs of the dtype of x and sums in float32. A thin matrix that is float32 while x is in half
precision, such as Skyformer's solved matrix, may exceed the range of float16, so it is divided by its largest entry
before it is rounded, and the result is multiplied by that entry. No kernel uses atomic operations, so results repeat
bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from skyformer.ops.differentiable import second_gradients
from skyformer.ops.kernels import GaussianKernel
from skyformer.ops.precision import at_least_float32
from skyformer.ops.products import BlockedProduct, Plan
from skyformer.ops.triton_configs import DTYPES, LARGEST_HEAD_DIM
from skyformer.ops.triton_launches import Matrix, Outputs, Sides


def supports(x: Tensor, v: Tensor) -> bool:
    """Whether the kernels accept the dtype and the head dims of this product."""
    return x.dtype in DTYPES and max(x.shape[-1], v.shape[-1]) <= LARGEST_HEAD_DIM


def triton_product(
    x: Tensor,
    y: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    is_causal: bool,
    scale: float,
    float32_out: bool = False,
    autotune: bool = False,
) -> Tensor:
    """kappa(x, y) v for the Gaussian kernel, in the dtype of x or in float32; all strides are accepted.

    x (B, H, L, P) and y (B, H, S, P) of one dtype, v (B, H, S, Pv) of the same dtype or float32, key_mask bool (B, S).
    """
    out: Tensor = _gaussian_product(x, y, v, key_mask, is_causal, scale, float32_out, autotune)
    return out


@torch.library.custom_op("skyformer::gaussian_product", mutates_args=())
def _gaussian_product(
    x: Tensor,
    y: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    is_causal: bool,
    scale: float,
    float32_out: bool,
    autotune: bool,
) -> Tensor:
    out = _empty_rows(x, v.shape[-1], torch.float32 if float32_out else x.dtype)
    both = Sides.of(x, y, key_mask, scale, autotune)
    both.compute(Matrix.of(v, x.dtype), None, int(is_causal), Outputs(r=out))
    return out


@_gaussian_product.register_fake
def _(
    x: Tensor,
    y: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    is_causal: bool,
    scale: float,
    float32_out: bool,
    autotune: bool,
) -> Tensor:
    return _empty_rows(x, v.shape[-1], torch.float32 if float32_out else x.dtype)


@torch.library.custom_op("skyformer::gaussian_product_backward", mutates_args=())
def _gaussian_product_backward(
    grad: Tensor,
    x: Tensor,
    y: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    is_causal: bool,
    scale: float,
    autotune: bool,
    need_x: bool,
    need_y: bool,
    need_v: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dy, dv = _empty_gradients(x, y, v, need_x, need_y, need_v)
    of_out, of_v = Matrix.of(grad, x.dtype), Matrix.of(v, x.dtype)
    both = Sides.of(x, y, key_mask, scale, autotune)
    wanted_y, wanted_v = dy if need_y else None, dv if need_v else None
    if need_x and (need_y or need_v) and not is_causal:
        if x.shape[2] >= y.shape[2]:
            done = both.compute_gradients(of_out, of_v, Outputs(t=dx), Outputs(wanted_v, wanted_y))
        else:
            done = both.swapped().compute_gradients(of_v, of_out, Outputs(wanted_v, wanted_y), Outputs(t=dx))
        if done:
            return dx, dy, dv
    if need_x:
        both.compute(of_v, of_out, int(is_causal), Outputs(t=dx))
    if need_y or need_v:
        both.swapped().compute(of_out, of_v, -int(is_causal), Outputs(wanted_v, wanted_y))
    return dx, dy, dv


@_gaussian_product_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    y: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    is_causal: bool,
    scale: float,
    autotune: bool,
    need_x: bool,
    need_y: bool,
    need_v: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_gradients(x, y, v, need_x, need_y, need_v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, y, v, key_mask, ctx.is_causal, ctx.scale, _, ctx.autotune = inputs
    ctx.save_for_backward(x, y, v, key_mask)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, y, v, key_mask = ctx.saved_tensors
    need = ctx.needs_input_grad[:3]
    found = _gaussian_product_backward(grad, x, y, v, key_mask, ctx.is_causal, ctx.scale, ctx.autotune, *need)
    return (*(each if wanted else None for each, wanted in zip(found, need, strict=True)), *(None,) * 5)


_gaussian_product.register_autograd(_backward, setup_context=_save)


def _save_twice(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    grad, x, y, v, key_mask, is_causal, scale, _, *ctx.needed = inputs
    ctx.plan = Plan(GaussianKernel(), scale, is_causal)
    ctx.save_for_backward(grad, x, y, v, key_mask)


def _backward_twice(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of the gradients, by the portable product in float32."""
    *primals, key_mask = ctx.saved_tensors
    given = [
        at_least_float32(c) if c is not None and needed else torch.zeros_like(x, dtype=torch.float32)
        for c, needed, x in zip(cotangents, ctx.needed, primals[1:], strict=True)
    ]
    wide = [at_least_float32(x) for x in primals]
    found = second_gradients(BlockedProduct(ctx.plan, needs_gradients=False), wide, given, key_mask, None)
    return *(each.to(x.dtype) for each, x in zip(found, primals, strict=True)), *(None,) * 7


_gaussian_product_backward.register_autograd(_backward_twice, setup_context=_save_twice)


def _empty_gradients(
    x: Tensor, y: Tensor, v: Tensor, need_x: bool, need_y: bool, need_v: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for the gradients; empty tensors for those that are not needed, because an operator cannot return None."""
    dx, dy, dv = (
        _empty_rows(t, t.shape[-1], t.dtype) if need else t.new_empty(0)
        for t, need in ((x, need_x), (y, need_y), (v, need_v))
    )
    return dx, dy, dv


def _empty_rows(x: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Memory for (B, H, n, width), stored in the order (B, n, H, width) if x is."""
    batch, heads, length, _ = x.shape
    if x.stride(1) < x.stride(2):
        return x.new_empty(batch, length, heads, width, dtype=dtype).transpose(1, 2)
    return x.new_empty(batch, heads, length, width, dtype=dtype)
