"""The Gaussian product as torch operators that run Triton kernels: launch settings, fake kernels and gradients.

`skyformer::gaussian_product` and `skyformer::gaussian_product_backward` are opaque to `torch.compile`, `torch.export`
and FakeTensor, which use the fake kernels below. Triton itself is imported at the first product.

Matrix products have inputs of the dtype of x and sums in float32. A thin matrix that is float32 while x is in half
precision, such as Skyformer's solved matrix, may exceed the range of float16, so it is divided by its largest entry
before it is rounded, and the result is multiplied by that entry. No kernel uses atomic operations, so results repeat
bit for bit.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from skyformer.errors import UnsupportedError
from skyformer.ops.differentiable import second_gradients
from skyformer.ops.distances import mean_of_valid
from skyformer.ops.kernels import GaussianKernel
from skyformer.ops.precision import at_least_float32
from skyformer.ops.products import BlockedProduct, Plan

LARGEST_HEAD_DIM = {torch.float32: 128, torch.bfloat16: 256, torch.float16: 256}
"""Without tensor cores, float32 products of larger head dims do not fit into registers."""

_ENOUGH_PROGRAMS = 256
"""With fewer programs than this the columns are divided into splits, to keep all multiprocessors busy."""

_LARGEST_BLOCK = 128


@dataclass(frozen=True)
class Config:
    """Launch settings: rows and columns of a block, warps, and stages of the software pipeline."""

    rows: int
    columns: int
    warps: int
    stages: int


HALF_CONFIGS = {
    # (outputs, padded head dim): outputs are "r" (forward), "t" (dx) or "rt" (dy and dv).
    ("r", 16): Config(64, 64, 4, 3),
    ("r", 32): Config(64, 64, 4, 3),
    ("r", 64): Config(64, 64, 4, 3),
    ("r", 128): Config(64, 32, 4, 2),
    ("r", 256): Config(64, 32, 8, 2),
    ("t", 16): Config(64, 64, 4, 2),
    ("t", 32): Config(64, 64, 4, 2),
    ("t", 64): Config(64, 32, 4, 2),
    ("t", 128): Config(64, 32, 4, 2),
    ("t", 256): Config(32, 32, 8, 1),
    ("rt", 16): Config(64, 64, 4, 2),
    ("rt", 32): Config(64, 64, 4, 2),
    ("rt", 64): Config(64, 32, 4, 2),
    ("rt", 128): Config(64, 32, 8, 2),
    ("rt", 256): Config(32, 32, 8, 1),
}

PRECISE_CONFIGS = {
    ("r", 256): Config(32, 32, 8, 1),
    ("rt", 128): Config(32, 32, 4, 2),
}
"""Where the second product of a float32 result in half precision needs smaller blocks."""

FLOAT32_CONFIGS = {
    ("r", 16): Config(64, 32, 4, 2),
    ("r", 32): Config(32, 32, 4, 2),
    ("r", 64): Config(32, 32, 8, 1),
    ("r", 128): Config(16, 32, 8, 1),
    ("t", 16): Config(32, 32, 4, 2),
    ("t", 32): Config(32, 32, 4, 1),
    ("t", 64): Config(32, 32, 8, 1),
    ("t", 128): Config(16, 16, 8, 1),
    ("rt", 16): Config(32, 32, 4, 2),
    ("rt", 32): Config(32, 32, 4, 2),
    ("rt", 64): Config(16, 32, 4, 1),
    ("rt", 128): Config(16, 16, 8, 1),
}


def choose_config(
    outputs: str,
    head_dim: int,
    value_dim: int,
    num_rows: int,
    dtype: torch.dtype,
    precise_r: bool = False,
    is_amd: bool = False,
) -> Config:
    """The settings for a pass that computes `outputs`, with fewer rows per block where there are fewer rows. Warps of
    AMD GPUs have twice as many threads, so four are enough."""
    table = FLOAT32_CONFIGS if dtype == torch.float32 else {**HALF_CONFIGS, **(PRECISE_CONFIGS if precise_r else {})}
    config = table[outputs, padded(max(head_dim, value_dim))]
    warps = 4 if is_amd else config.warps
    return Config(min(config.rows, padded(num_rows)), config.columns, warps, config.stages)


def padded(size: int) -> int:
    """The next power of two, at least 16: the smallest block that matrix instructions accept."""
    return max(16, 1 << (size - 1).bit_length())


def supports(x: Tensor, v: Tensor) -> bool:
    """Whether the kernels accept the dtype and the head dims of this product."""
    return max(x.shape[-1], v.shape[-1]) <= LARGEST_HEAD_DIM.get(x.dtype, 0)


def interpreting() -> bool:
    """Whether Triton runs kernels in its interpreter, which accepts CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


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
    both = _Sides.of(x, y, key_mask, scale, autotune)
    both.compute(_Matrix.of(v, x.dtype), causal=int(is_causal), r=out)
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
    of_out, of_v = _Matrix.of(grad, x.dtype), _Matrix.of(v, x.dtype)
    both = _Sides.of(x, y, key_mask, scale, autotune)
    if need_x:
        both.compute(of_v, of_out, causal=int(is_causal), t=dx)
    if need_y or need_v:
        both.swapped().compute(of_out, of_v, causal=-int(is_causal), r=dv if need_v else None, t=dy if need_y else None)
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


@dataclass(frozen=True)
class _Matrix:
    """A matrix (B, H, n, Pv) in the dtype of the products, and the factor (B, H) by which it was divided, or None."""

    values: Tensor
    peak: Tensor | None = None

    @staticmethod
    def of(v: Tensor, dtype: torch.dtype) -> _Matrix:
        if v.dtype == dtype:
            return _Matrix(_features_together(v))
        peak = v.abs().amax((-2, -1)).clamp(min=torch.finfo(torch.float32).tiny).contiguous()
        return _Matrix((v / peak[..., None, None]).to(dtype), peak)


def _features_together(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


@dataclass(frozen=True)
class _Sides:
    """The rows x and columns y of one kernel matrix; `x_mask` and `y_mask` (B, n) say which of them are used."""

    x: Tensor
    y: Tensor
    x_mask: Tensor | None
    y_mask: Tensor | None
    centre: Tensor | None
    scale: float
    autotune: bool

    @staticmethod
    def of(x: Tensor, y: Tensor, key_mask: Tensor | None, scale: float, autotune: bool) -> _Sides:
        if x.device.type == "cpu" and not interpreting():
            raise UnsupportedError(
                "backend 'triton' needs tensors on a GPU, or TRITON_INTERPRET=1 in the environment, which runs kernels "
                "in Triton's slow interpreter; got CPU tensors"
            )
        centre = mean_of_valid(y, key_mask).squeeze(2).contiguous() if x.dtype == torch.float32 else None
        return _Sides(_features_together(x), _features_together(y), None, key_mask, centre, scale, autotune)

    def swapped(self) -> _Sides:
        return _Sides(self.y, self.x, self.y_mask, self.x_mask, self.centre, self.scale, self.autotune)

    def compute(
        self, b: _Matrix, a: _Matrix | None = None, *, causal: int, r: Tensor | None = None, t: Tensor | None = None
    ) -> None:
        """Fill r and t, as `gaussian_rows` defines them, where they are given."""
        if min(self.x.numel(), self.y.numel(), b.values.numel()) == 0:
            for each in (r, t):
                if each is not None:
                    each.zero_()
            return
        launch = _Launch.of(self, b, r, t)
        sums = [None if each is None else launch.memory(each) for each in (r, t)]
        launch.run(self, b, a, causal, *sums)
        for each, of_splits in zip((r, t), sums, strict=True):
            if each is not None and of_splits is not None and each.data_ptr() != of_splits.data_ptr():
                each.copy_(of_splits.sum(0))


@dataclass(frozen=True)
class _Launch:
    """The settings of one launch of `gaussian_rows`, and how many splits its columns are divided into."""

    config: Config
    splits: int
    columns_per_split: int
    precise_r: bool
    as_bfloat16: bool

    @staticmethod
    def of(sides: _Sides, b: _Matrix, r: Tensor | None, t: Tensor | None) -> _Launch:
        batch, heads, num_rows, head_dim = sides.x.shape
        num_columns = sides.y.shape[2]
        outputs = "r" * (r is not None) + "t" * (t is not None)
        is_amd = torch.version.hip is not None
        precise_r = r is not None and r.dtype != sides.x.dtype
        config = choose_config(outputs, head_dim, b.values.shape[-1], num_rows, sides.x.dtype, precise_r, is_amd)
        programs = batch * heads * -(-num_rows // config.rows)
        splits = min(-(-_ENOUGH_PROGRAMS // programs), -(-num_columns // (2 * _LARGEST_BLOCK)))
        # A multiple of all block sizes, so that a split begins where a block begins.
        columns = -(-num_columns // (splits * _LARGEST_BLOCK)) * _LARGEST_BLOCK
        as_bfloat16 = sides.x.dtype == torch.bfloat16 and interpreting()
        return _Launch(config, -(-num_columns // columns), columns, precise_r, as_bfloat16)

    def memory(self, out: Tensor) -> Tensor:
        """Where the kernel writes: `out` itself, or the float32 sums of all splits (splits, B, H, n, width)."""
        if self.splits == 1 and not self.as_bfloat16:
            return out.unsqueeze(0)
        return out.new_empty(self.splits, *out.shape, dtype=torch.float32)

    def run(
        self, sides: _Sides, b: _Matrix, a: _Matrix | None, causal: int, r: Tensor | None, t: Tensor | None
    ) -> None:
        """Write the sums of every split to r[split] and t[split]."""
        from skyformer.ops import triton_kernels

        x, y, b_values = (each.float() if self.as_bfloat16 else each for each in (sides.x, sides.y, b.values))
        a_values = None if a is None else a.values.to(b_values.dtype)
        batch, heads, num_rows, head_dim = x.shape
        value_dim, precision = b_values.shape[-1], _precision(x)
        half_y = _half_norms(y, sides.y_mask, sides.centre, sides.scale, precision)
        half_x = None if sides.x_mask is None else _half_norms(x, sides.x_mask, sides.centre, sides.scale, precision)

        def grid(meta: dict[str, Any]) -> tuple[int]:
            return (batch * heads * self.splits * -(-num_rows // meta["BLOCK_M"]),)

        measure = sides.autotune and not interpreting()
        kernel = triton_kernels.tuned_gaussian_rows() if measure else triton_kernels.gaussian_rows
        chosen = {} if measure else launch_options(self.config)
        kernel[grid](
            x, y, a_values, b_values,
            sides.centre, half_x, half_y, None if a is None else a.peak, b.peak,
            r, t,
            num_rows, y.shape[2], heads, self.splits, self.columns_per_split,
            *x.stride()[:3], *y.stride()[:3],
            *((0, 0, 0) if a_values is None else a_values.stride()[:3]), *b_values.stride()[:3],
            *((0, 0, 0, 0) if r is None else r.stride()[:4]), *((0, 0, 0, 0) if t is None else t.stride()[:4]),
            sides.scale,
            P=head_dim, PV=value_dim, BLOCK_P=padded(head_dim), BLOCK_PV=padded(value_dim),
            WANT_R=r is not None, WANT_T=t is not None, CAUSAL=causal, PRECISE_R=self.precise_r,
            PRECISION=precision, AS_BFLOAT16=self.as_bfloat16,
            **chosen,
        )  # fmt: skip


def launch_options(config: Config) -> dict[str, int]:
    """The keyword arguments of a launch."""
    return {
        "BLOCK_M": config.rows,
        "BLOCK_N": config.columns,
        "num_warps": config.warps,
        "num_stages": config.stages,
    }


def _precision(x: Tensor) -> str:
    """How float32 products are computed: exactly, unless `torch.set_float32_matmul_precision` allows tf32."""
    allowed = torch.get_float32_matmul_precision() != "highest" and torch.version.hip is None
    return "tf32" if allowed and x.dtype == torch.float32 else "ieee"


def _half_norms(x: Tensor, mask: Tensor | None, centre: Tensor | None, scale: float, precision: str) -> Tensor:
    """`scale` |x_i - centre|^2 / 2 in base 2, infinite where masked: (B, H, n)."""
    from skyformer.ops import triton_kernels

    batch, heads, length, head_dim = x.shape
    out = x.new_empty(batch, heads, length, dtype=torch.float32)
    bits = None if mask is None else mask.view(torch.uint8)
    block = max(16, 4096 // padded(head_dim))
    triton_kernels.half_norms[(batch * heads * -(-length // block),)](
        x, bits, centre, out,
        length, heads,
        *x.stride()[:3], *((0, 0) if bits is None else bits.stride()),
        scale,
        P=head_dim, BLOCK_P=padded(head_dim), BLOCK_M=block, PRECISION=precision,
        num_warps=4,
    )  # fmt: skip
    return out
