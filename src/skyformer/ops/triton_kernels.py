"""Triton kernels for the Gaussian product and its gradients.

One kernel, `gaussian_rows`, serves the forward pass and both halves of the backward pass. Its rows x_i with a_i, and
its columns y_j with b_j, define

    C_ij = exp(-scale |x_i - y_j|^2 / 2)        G_ij = C_ij (a_i . b_j)

and it computes whichever is requested of

    r_i = sum_j C_ij b_j                        t_i = scale sum_j G_ij (y_j - x_i)

With o = C v and dO the gradient of o, rows x, columns y, a = dO and b = v give o = r and dx = t; rows y, columns x,
a = v and b = dO give dv = r and dy = t. The sums of G that multiply x_i are those of the rounded G that multiplies y_j,
so rounding changes the weights of the differences y_j - x_i slightly, but never the differences.

The exponent is computed as (x.y) scale - half_x - half_y in base 2. Masked and missing columns have half_y = inf, so
their C is exactly 0. In float32 a common centre is first subtracted from both sides, which does not change distances
but keeps the subtraction accurate for points far from the origin. In half precision no centre is subtracted: products
of the inputs are exact in float32, but the differences from the centre would have to be rounded.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import functools
from typing import Any

import triton
import triton.language as tl


@triton.jit
def gaussian_rows(
    X, Y, A, B,
    CENTRE, HALF_X, HALF_Y, PEAK_A, PEAK_B,
    R, T,
    num_rows, num_columns, heads, num_splits, columns_per_split,
    stride_xb, stride_xh, stride_xn,
    stride_yb, stride_yh, stride_yn,
    stride_ab, stride_ah, stride_an,
    stride_bb, stride_bh, stride_bn,
    stride_rs, stride_rb, stride_rh, stride_rn,
    stride_ts, stride_tb, stride_th, stride_tn,
    scale,
    P: tl.constexpr, PV: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_PV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WANT_R: tl.constexpr, WANT_T: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISE_R: tl.constexpr,
    PRECISION: tl.constexpr, AS_BFLOAT16: tl.constexpr,
):  # fmt: skip
    """One block of rows against the columns of one split. CAUSAL: 1 keeps columns j <= i, -1 keeps j >= i.

    PRECISE_R adds what rounding C left out, in a second product. Results that go into the landmarks' solve need it,
    because the solve multiplies their errors by up to 1 / gamma.
    AS_BFLOAT16 rounds float32 as bfloat16 would be, for the interpreter, whose own bfloat16 products are wrong.
    """
    program = tl.program_id(0)
    num_blocks = tl.cdiv(num_rows, BLOCK_M)
    first_row = (program % num_blocks) * BLOCK_M
    split = (program // num_blocks) % num_splits
    head_of_batch = program // (num_blocks * num_splits)
    b = (head_of_batch // heads).to(tl.int64)
    h = (head_of_batch % heads).to(tl.int64)
    start_row = first_row.to(tl.int64)

    rows = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_N)
    features = tl.arange(0, BLOCK_P)
    values = tl.arange(0, BLOCK_PV)
    in_rows = first_row + rows < num_rows
    in_p = features < P
    in_pv = values < PV
    log2_scale = scale * 1.4426950408889634

    X += b * stride_xb + h * stride_xh + start_row * stride_xn
    x = tl.load(X + rows[:, None] * stride_xn + features[None, :], mask=in_rows[:, None] & in_p[None, :], other=0.0)
    if CENTRE is not None:
        centre = tl.load(CENTRE + head_of_batch * P + features, mask=in_p, other=0.0)
        x = tl.where(in_p[None, :], x - centre[None, :], 0.0)
        if PRECISION == "tf32":
            x = _round_bits(x, 13)
    if HALF_X is not None:
        HALF_X += head_of_batch.to(tl.int64) * num_rows + start_row
        half_x = tl.load(HALF_X + rows, mask=in_rows, other=float("inf"))
    else:
        x_wide = x.to(tl.float32)
        half_x = tl.sum(x_wide * x_wide, 1) * (0.5 * log2_scale)
    if WANT_T:
        A += b * stride_ab + h * stride_ah + start_row * stride_an
        a = tl.load(A + rows[:, None] * stride_an + values[None, :], mask=in_rows[:, None] & in_pv[None, :], other=0.0)
        t = tl.zeros((BLOCK_M, BLOCK_P), tl.float32)
        sums = tl.zeros((BLOCK_M,), tl.float32)
    if WANT_R:
        r = tl.zeros((BLOCK_M, BLOCK_PV), tl.float32)

    low = split * columns_per_split
    high = tl.minimum(low + columns_per_split, num_columns)
    if CAUSAL == 1:
        high = tl.minimum(high, first_row + BLOCK_M)
    if CAUSAL == -1:
        low = tl.maximum(low, (first_row // BLOCK_N) * BLOCK_N)
    Y += b * stride_yb + h * stride_yh
    B += b * stride_bb + h * stride_bh
    HALF_Y += head_of_batch.to(tl.int64) * num_columns
    for start in range(low, high, BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        wide = start.to(tl.int64)
        in_columns = start + columns < num_columns
        y = tl.load(
            Y + wide * stride_yn + columns[:, None] * stride_yn + features[None, :],
            mask=in_columns[:, None] & in_p[None, :],
            other=0.0,
        )
        bs = tl.load(
            B + wide * stride_bn + columns[:, None] * stride_bn + values[None, :],
            mask=in_columns[:, None] & in_pv[None, :],
            other=0.0,
        )
        half_y = tl.load(HALF_Y + start + columns, mask=in_columns, other=float("inf"))
        if CENTRE is not None:
            y = tl.where(in_p[None, :], y - centre[None, :], 0.0)
            if PRECISION == "tf32":
                y = _round_bits(y, 13)
        exponent = tl.dot(x, tl.trans(y), input_precision=PRECISION) * log2_scale - half_x[:, None] - half_y[None, :]
        c = tl.exp2(tl.minimum(exponent, 0.0))
        if CAUSAL == 1:
            c = tl.where(first_row + rows[:, None] >= start + columns[None, :], c, 0.0)
        if CAUSAL == -1:
            c = tl.where(first_row + rows[:, None] <= start + columns[None, :], c, 0.0)
        if WANT_T:
            g = _narrow(c * tl.dot(a, tl.trans(bs), input_precision=PRECISION), y.dtype, AS_BFLOAT16)
            sums += tl.sum(g.to(tl.float32), 1)
            t = tl.dot(g, y, t, input_precision=PRECISION)
        if WANT_R:
            rounded = _narrow(c, bs.dtype, AS_BFLOAT16)
            r = tl.dot(rounded, bs, r, input_precision=PRECISION)
            if PRECISE_R:
                rest = _narrow(c - rounded.to(tl.float32), bs.dtype, AS_BFLOAT16)
                r = tl.dot(rest, bs, r, input_precision=PRECISION)

    peak = 1.0
    if PEAK_B is not None:
        peak *= tl.load(PEAK_B + head_of_batch)
    if WANT_R:
        R += split * stride_rs + b * stride_rb + h * stride_rh + start_row * stride_rn
        tl.store(
            R + rows[:, None] * stride_rn + values[None, :],
            (r * peak).to(R.dtype.element_ty),
            mask=in_rows[:, None] & in_pv[None, :],
        )
    if WANT_T:
        if PEAK_A is not None:
            peak *= tl.load(PEAK_A + head_of_batch)
        T += split * stride_ts + b * stride_tb + h * stride_th + start_row * stride_tn
        t = (t - sums[:, None] * x.to(tl.float32)) * (scale * peak)
        tl.store(
            T + rows[:, None] * stride_tn + features[None, :],
            t.to(T.dtype.element_ty),
            mask=in_rows[:, None] & in_p[None, :],
        )


@triton.jit
def half_norms(
    X, MASK, CENTRE, OUT,
    num_rows, heads,
    stride_xb, stride_xh, stride_xn, stride_mb, stride_mn,
    scale,
    P: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_M: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """scale |x_i - centre|^2 / 2 in base 2, inf where masked, in the order of (B, H, n)."""
    program = tl.program_id(0)
    num_blocks = tl.cdiv(num_rows, BLOCK_M)
    rows = (program % num_blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    head_of_batch = program // num_blocks
    b = (head_of_batch // heads).to(tl.int64)
    h = (head_of_batch % heads).to(tl.int64)
    features = tl.arange(0, BLOCK_P)
    in_rows = rows < num_rows
    in_p = features < P
    X += b * stride_xb + h * stride_xh
    x = tl.load(X + rows[:, None] * stride_xn + features[None, :], mask=in_rows[:, None] & in_p[None, :], other=0.0)
    x = x.to(tl.float32)
    if CENTRE is not None:
        centre = tl.load(CENTRE + head_of_batch * P + features, mask=in_p, other=0.0)
        x = tl.where(in_p[None, :], x - centre[None, :], 0.0)
        if PRECISION == "tf32":
            x = _round_bits(x, 13)
    half = tl.sum(x * x, 1) * (0.5 * scale * 1.4426950408889634)
    if MASK is not None:
        keep = tl.load(MASK + b * stride_mb + rows * stride_mn, mask=in_rows, other=0)
        half = tl.where(keep != 0, half, float("inf"))
    tl.store(OUT + head_of_batch.to(tl.int64) * num_rows + rows, half, mask=in_rows)


@triton.jit
def _narrow(x, DTYPE: tl.constexpr, AS_BFLOAT16: tl.constexpr):
    return _round_bits(x, 16) if AS_BFLOAT16 else x.to(DTYPE)


@triton.jit
def _round_bits(x, DROPPED: tl.constexpr):
    """float32 without the last bits of the fraction, rounded to nearest even: 13 gives tf32, 16 gives bfloat16."""
    bits = x.to(tl.int32, bitcast=True)
    bits += (1 << (DROPPED - 1)) - 1 + ((bits >> DROPPED) & 1)
    return (bits & -(1 << DROPPED)).to(tl.float32, bitcast=True)


@functools.cache
def tuned_gaussian_rows() -> Any:
    """`gaussian_rows` with settings that Triton measures once for each kind of pass."""
    configs = [
        triton.Config({"BLOCK_M": rows, "BLOCK_N": columns}, num_warps=warps, num_stages=stages)
        for rows in (32, 64, 128)
        for columns in (32, 64)
        for warps in (4, 8)
        for stages in (1, 2, 3)
    ]
    key = ["P", "PV", "WANT_R", "WANT_T", "CAUSAL", "PRECISE_R", "PRECISION"]
    return triton.autotune(configs=configs, key=key)(gaussian_rows)
