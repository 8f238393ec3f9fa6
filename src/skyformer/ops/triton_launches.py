"""Launches of the Triton kernels: how passes are divided into programs, and where their results are stored."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from skyformer.errors import UnsupportedError
from skyformer.ops.distances import mean_of_valid
from skyformer.ops.triton_configs import (
    LARGEST_BLOCK,
    LARGEST_FLOAT32_BLOCK,
    LARGEST_THIN_SIDE,
    PART,
    Config,
    choose_config,
    launch_options,
    padded,
)

_ENOUGH_PROGRAMS = 256
"""With fewer programs than this a pass is divided into splits, to keep all multiprocessors busy."""

_MANY_PROGRAMS = 1024
"""As many as this make the last round of programs short against all rounds, where splits are long enough."""


def interpreting() -> bool:
    """Whether Triton runs kernels in its interpreter, which accepts CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def measures(autotune: bool) -> bool:
    """Whether Triton measures launch settings; times in the interpreter say nothing."""
    return autotune and not interpreting()


@dataclass(frozen=True)
class Matrix:
    """A matrix (B, H, n, Pv) in the dtype of the products, and the factor (B, H) by which it was divided, or None."""

    values: Tensor
    peak: Tensor | None = None

    @staticmethod
    def of(v: Tensor, dtype: torch.dtype) -> Matrix:
        if v.dtype == dtype:
            return Matrix(_features_together(v))
        peak = v.abs().amax((-2, -1)).clamp(min=torch.finfo(torch.float32).tiny).contiguous()
        return Matrix((v / peak[..., None, None]).to(dtype), peak)


def _features_together(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


@dataclass(frozen=True)
class Outputs:
    """Where to store r (B, H, n, Pv) and t (B, H, n, P) of one side, as the kernels define them; None if not wanted."""

    r: Tensor | None = None
    t: Tensor | None = None

    @property
    def names(self) -> str:
        return "r" * (self.r is not None) + "t" * (self.t is not None)

    def zero(self) -> None:
        for each in (self.r, self.t):
            if each is not None:
                each.zero_()

    def is_precise(self, dtype: torch.dtype) -> bool:
        """Whether r is wanted in float32 while the products are in half precision."""
        return self.r is not None and self.r.dtype != dtype


@dataclass(frozen=True)
class Sides:
    """The rows x and columns y of one kernel matrix; `x_mask` and `y_mask` (B, n) say which of them are used."""

    x: Tensor
    y: Tensor
    x_mask: Tensor | None
    y_mask: Tensor | None
    centre: Tensor | None
    scale: float
    autotune: bool

    @staticmethod
    def of(x: Tensor, y: Tensor, key_mask: Tensor | None, scale: float, autotune: bool) -> Sides:
        if x.device.type == "cpu" and not interpreting():
            raise UnsupportedError(
                "backend 'triton' needs tensors on a GPU, or TRITON_INTERPRET=1 in the environment, which runs kernels "
                "in Triton's slow interpreter; got CPU tensors"
            )
        centre = mean_of_valid(y, key_mask).squeeze(2).contiguous() if x.dtype == torch.float32 else None
        return Sides(_features_together(x), _features_together(y), None, key_mask, centre, scale, autotune)

    def swapped(self) -> Sides:
        return Sides(self.y, self.x, self.y_mask, self.x_mask, self.centre, self.scale, self.autotune)

    @property
    def as_bfloat16(self) -> bool:
        """Whether the kernels compute in float32 and round it as bfloat16: the interpreter's own products are wrong."""
        return self.x.dtype == torch.bfloat16 and interpreting()

    def is_empty(self, b: Matrix) -> bool:
        return min(self.x.numel(), self.y.numel(), b.values.numel()) == 0

    def config(self, name: str, value_dim: int, precise_r: bool) -> Config | None:
        """The launch settings of a pass, or None if it is not available."""
        length, head_dim = self.x.shape[2:]
        is_amd = torch.version.hip is not None
        return choose_config(name, head_dim, value_dim, length, self.y.shape[2], self.x.dtype, precise_r, is_amd)

    def compute(self, b: Matrix, a: Matrix | None, causal: int, out: Outputs) -> None:
        """Fill `out` for the rows x, by `gaussian_rows`; `a` is needed for t only."""
        if self.is_empty(b):
            out.zero()
            return
        precise_r = out.is_precise(self.x.dtype)
        config = self.config(out.names, b.values.shape[-1], precise_r)
        assert config is not None, "every head dim that is accepted has an entry"
        launch = _RowsLaunch.of(self, config)
        # The kernel writes to `out` itself, or the float32 sums of all splits (splits, B, H, n, width).
        in_place = launch.splits == 1 and not self.as_bfloat16
        sums = Outputs(*(_like(each, launch.splits, in_place) for each in (out.r, out.t)))
        launch.run(self, b, a, causal, precise_r, sums)
        if not in_place:
            _copy_sum(sums.r, out.r)
            _copy_sum(sums.t, out.t)

    def compute_gradients(self, a: Matrix, b: Matrix, long: Outputs, thin: Outputs) -> bool:
        """Fill the outputs of the long side x and of the thin side y in one launch, by `gaussian_gradients`.

        Returns:
            whether this is possible: the other side is thin, and registers are enough for the head dim.
        """
        if self.is_empty(b):
            long.zero()
            thin.zero()
            return True
        precise_r = (thin if long.r is None else long).is_precise(self.x.dtype)
        config = self.config("thin" if long.r is None else "long", b.values.shape[-1], precise_r)
        if config is None or self.y.shape[2] > LARGEST_THIN_SIDE:
            return False
        launch = GradientsLaunch.of(self, config)
        written = Outputs(*(_like(each, 1, not self.as_bfloat16) for each in (long.r, long.t)))
        sums = Outputs(*(None if each is None else launch.thin_sums(each) for each in (thin.r, thin.t)))
        launch.run(self, a, b, precise_r, written, sums)
        if self.as_bfloat16:
            _copy_sum(written.r, long.r)
            _copy_sum(written.t, long.t)
        _copy_sum(sums.r, thin.r)
        _copy_sum(sums.t, thin.t)
        return True


def _like(out: Tensor | None, splits: int, in_place: bool) -> Tensor | None:
    """`out` itself as (1, B, H, n, width), or float32 memory for its sums (splits, B, H, n, width)."""
    if out is None or in_place:
        return None if out is None else out.unsqueeze(0)
    return out.new_empty(splits, *out.shape, dtype=torch.float32)


def _copy_sum(sums: Tensor | None, out: Tensor | None) -> None:
    """out = the sum over splits, in their order; sums may be padded beyond the rows and features of `out`."""
    if sums is not None and out is not None:
        out.copy_(sums[..., : out.shape[2], : out.shape[3]].sum(0))


@dataclass(frozen=True)
class _Operands:
    """What all passes read: x, y, a and b, the centre, and norms in base 2."""

    x: Tensor
    y: Tensor
    a: Tensor | None
    b: Tensor
    pointers: tuple[Tensor | None, ...]
    precision: str

    @staticmethod
    def of(sides: Sides, a: Matrix | None, b: Matrix, norms_of_x: bool) -> _Operands:
        x, y, b_values = (each.float() if sides.as_bfloat16 else each for each in (sides.x, sides.y, b.values))
        a_values = None if a is None else a.values.to(b_values.dtype)
        precision = _precision(x)
        half_y = _half_norms(y, sides.y_mask, sides.centre, sides.scale, precision)
        half_x = None
        if norms_of_x or sides.x_mask is not None:
            half_x = _half_norms(x, sides.x_mask, sides.centre, sides.scale, precision)
        read = (x, y, a_values, b_values, sides.centre, half_x, half_y, None if a is None else a.peak, b.peak)
        return _Operands(x, y, a_values, b_values, read, precision)

    @property
    def strides(self) -> tuple[int, ...]:
        return tuple(s for each in (self.x, self.y, self.a, self.b) for s in _strides(each, 3))


def _strides(x: Tensor | None, number: int) -> tuple[int, ...]:
    return (0,) * number if x is None else x.stride()[:number]


@dataclass(frozen=True)
class _RowsLaunch:
    """One launch of `gaussian_rows`, or in parts of the features of `wide_gaussian_rows`, with its columns divided into
    splits."""

    config: Config
    splits: int
    columns_per_split: int

    @staticmethod
    def of(sides: Sides, config: Config) -> _RowsLaunch:
        batch, heads, num_rows, _ = sides.x.shape
        num_columns = sides.y.shape[2]
        programs = batch * heads * -(-num_rows // config.rows)
        splits = min(-(-_ENOUGH_PROGRAMS // programs), -(-num_columns // (2 * LARGEST_BLOCK)))
        # A multiple of all block sizes, so that a split begins where a block begins.
        columns = -(-num_columns // (splits * LARGEST_BLOCK)) * LARGEST_BLOCK
        return _RowsLaunch(config, -(-num_columns // columns), columns)

    def run(self, sides: Sides, b: Matrix, a: Matrix | None, causal: int, precise_r: bool, out: Outputs) -> None:
        """Write the sums of every split to r[split] and t[split]."""
        from skyformer.ops import triton_kernels

        batch, heads, num_rows, head_dim = sides.x.shape
        value_dim = b.values.shape[-1]
        wide = sides.x.dtype == torch.float32 and max(head_dim, value_dim) > LARGEST_FLOAT32_BLOCK
        read = _Operands.of(sides, a, b, norms_of_x=wide)
        width = max(head_dim if out.t is not None else 0, value_dim if out.r is not None else 0)
        parts = -(-width // PART) if wide else 1
        constants: dict[str, Any] = {"BLOCK_F": PART, "PARTS": parts}
        if not wide:
            constants = {"BLOCK_P": padded(head_dim), "BLOCK_PV": padded(value_dim)}
            constants |= {"PRECISE_R": precise_r, "AS_BFLOAT16": sides.as_bfloat16}
        launch(
            triton_kernels.wide_gaussian_rows if wide else triton_kernels.gaussian_rows,
            lambda meta: (parts * batch * heads * self.splits * -(-num_rows // meta["BLOCK_M"]),),
            (
                *read.pointers, out.r, out.t,
                num_rows, sides.y.shape[2], heads, self.splits, self.columns_per_split,
                *read.strides, *_strides(out.r, 4), *_strides(out.t, 4),
                sides.scale,
            ),
            constants
            | {"P": head_dim, "PV": value_dim, "CAUSAL": causal, "PRECISION": read.precision}
            | {"WANT_R": out.r is not None, "WANT_T": out.t is not None},
            self.config,
            sides.autotune,
        )  # fmt: skip


@dataclass(frozen=True)
class GradientsLaunch:
    """One launch of `gaussian_gradients`, with the long side divided into splits."""

    config: Config
    splits: int
    rows_per_split: int

    @staticmethod
    def of(sides: Sides, config: Config) -> GradientsLaunch:
        batch, heads, num_rows, _ = sides.x.shape
        # Every split stores and later reads the sums of the thin side, so it should be long, unless programs are few.
        enough = min(-(-_ENOUGH_PROGRAMS // (batch * heads)), -(-num_rows // LARGEST_BLOCK))
        many = min(-(-_MANY_PROGRAMS // (batch * heads)), -(-num_rows // (4 * LARGEST_BLOCK)))
        rows = -(-num_rows // (max(enough, many) * LARGEST_BLOCK)) * LARGEST_BLOCK
        return GradientsLaunch(config, -(-num_rows // rows), rows)

    def thin_sums(self, out: Tensor) -> Tensor:
        """Memory for the sums of all splits, padded to whole blocks: (splits, B, H, padded d, padded width)."""
        batch, heads, size, width = out.shape
        shape = (self.splits, batch, heads, _whole_blocks(size), padded(width))
        return out.new_empty(shape, dtype=torch.float32)

    def run(self, sides: Sides, a: Matrix, b: Matrix, precise_r: bool, long: Outputs, thin: Outputs) -> None:
        """Write to long.r[0] and long.t[0], and the sums of every split to thin.r[split] and thin.t[split]."""
        from skyformer.ops import triton_kernels

        batch, heads, num_rows, head_dim = sides.x.shape
        num_thin, value_dim = b.values.shape[2:]
        read = _Operands.of(sides, a, b, norms_of_x=False)
        long_r, long_t = (None if each is None else each[0] for each in (long.r, long.t))
        launch(
            triton_kernels.gaussian_gradients,
            lambda meta: (batch * heads * self.splits,),
            (
                *read.pointers, long_r, long_t, thin.r, thin.t,
                num_rows, num_thin, _whole_blocks(num_thin), heads, self.splits, self.rows_per_split,
                *read.strides, *_strides(long_r, 3), *_strides(long_t, 3),
                sides.scale,
            ),
            {"P": head_dim, "PV": value_dim, "BLOCK_P": padded(head_dim), "BLOCK_PV": padded(value_dim)}
            | {"PRECISE_R": precise_r, "PRECISION": read.precision, "AS_BFLOAT16": sides.as_bfloat16},
            self.config,
            sides.autotune,
        )  # fmt: skip


def _whole_blocks(size: int) -> int:
    return -(-size // LARGEST_BLOCK) * LARGEST_BLOCK


def launch(
    kernel: Any,
    grid: Callable[[dict[str, Any]], tuple[int]],
    args: tuple[Any, ...],
    constants: dict[str, Any],
    config: Config,
    autotune: bool,
) -> None:
    """Start a kernel with the settings of the table, or with those that Triton measures to be the fastest."""
    from skyformer.ops import triton_kernels

    if measures(autotune):
        triton_kernels.tuned(kernel)[grid](*args, **constants)
    else:
        kernel[grid](*args, **constants, **launch_options(config))


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
