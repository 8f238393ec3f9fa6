"""Triton kernels for the Gaussian product and its gradients.

`gaussian_gradients` computes all gradients of a product with one thin side, such as those of Skyformer, in one launch.
`gaussian_rows` serves the forward pass, and the gradients of one side only, or of two long sides in two launches. Its
rows x_i with a_i, and its columns y_j with b_j, define

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
def wide_gaussian_rows(
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
    P: tl.constexpr, PV: tl.constexpr, BLOCK_F: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WANT_R: tl.constexpr, WANT_T: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`gaussian_rows` in float32 for head dims that do not fit into registers: dot products are added in parts of
    BLOCK_F features, and each program computes one part of the output's features."""
    program = tl.program_id(0)
    part = program % PARTS
    num_blocks = tl.cdiv(num_rows, BLOCK_M)
    first_row = (program // PARTS % num_blocks) * BLOCK_M
    split = (program // (PARTS * num_blocks)) % num_splits
    head_of_batch = program // (PARTS * num_blocks * num_splits)
    b = (head_of_batch // heads).to(tl.int64)
    h = (head_of_batch % heads).to(tl.int64)
    start_row = first_row.to(tl.int64)

    rows = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_N)
    features = part * BLOCK_F + tl.arange(0, BLOCK_F)
    in_rows = first_row + rows < num_rows
    in_p = features < P
    in_pv = features < PV
    log2_scale = scale * 1.4426950408889634

    X += b * stride_xb + h * stride_xh + start_row * stride_xn
    Y += b * stride_yb + h * stride_yh
    B += b * stride_bb + h * stride_bh
    CENTRE += head_of_batch * P
    HALF_X += head_of_batch.to(tl.int64) * num_rows + start_row
    HALF_Y += head_of_batch.to(tl.int64) * num_columns
    half_x = tl.load(HALF_X + rows, mask=in_rows, other=float("inf"))
    if WANT_T:
        A += b * stride_ab + h * stride_ah + start_row * stride_an
        t = tl.zeros((BLOCK_M, BLOCK_F), tl.float32)
        sums = tl.zeros((BLOCK_M,), tl.float32)
    if WANT_R:
        r = tl.zeros((BLOCK_M, BLOCK_F), tl.float32)

    low = split * columns_per_split
    high = tl.minimum(low + columns_per_split, num_columns)
    if CAUSAL == 1:
        high = tl.minimum(high, first_row + BLOCK_M)
    if CAUSAL == -1:
        low = tl.maximum(low, (first_row // BLOCK_N) * BLOCK_N)
    for start in range(low, high, BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        wide = start.to(tl.int64)
        in_columns = start + columns < num_columns
        half_y = tl.load(HALF_Y + start + columns, mask=in_columns, other=float("inf"))
        products = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for first in range(0, P, BLOCK_F):
            x = _points(X, stride_xn, rows, in_rows, first, P, BLOCK_F, CENTRE, PRECISION)
            y = _points(Y + wide * stride_yn, stride_yn, columns, in_columns, first, P, BLOCK_F, CENTRE, PRECISION)
            products = tl.dot(x, tl.trans(y), products, input_precision=PRECISION)
        c = tl.exp2(tl.minimum(products * log2_scale - half_x[:, None] - half_y[None, :], 0.0))
        if CAUSAL == 1:
            c = tl.where(first_row + rows[:, None] >= start + columns[None, :], c, 0.0)
        if CAUSAL == -1:
            c = tl.where(first_row + rows[:, None] <= start + columns[None, :], c, 0.0)
        if WANT_T:
            products = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for first in range(0, PV, BLOCK_F):
                a = _points(A, stride_an, rows, in_rows, first, PV, BLOCK_F, None, PRECISION)
                bs = _points(B + wide * stride_bn, stride_bn, columns, in_columns, first, PV, BLOCK_F, None, PRECISION)
                products = tl.dot(a, tl.trans(bs), products, input_precision=PRECISION)
            g = c * products
            sums += tl.sum(g, 1)
            y = _points(
                Y + wide * stride_yn, stride_yn, columns, in_columns, part * BLOCK_F, P, BLOCK_F, CENTRE, PRECISION
            )
            t = tl.dot(g, y, t, input_precision=PRECISION)
        if WANT_R:
            bs = _points(
                B + wide * stride_bn, stride_bn, columns, in_columns, part * BLOCK_F, PV, BLOCK_F, None, PRECISION
            )
            r = tl.dot(c, bs, r, input_precision=PRECISION)

    peak = 1.0
    if PEAK_B is not None:
        peak *= tl.load(PEAK_B + head_of_batch)
    if WANT_R:
        R += split * stride_rs + b * stride_rb + h * stride_rh + start_row * stride_rn
        tl.store(R + rows[:, None] * stride_rn + features[None, :], r * peak, mask=in_rows[:, None] & in_pv[None, :])
    if WANT_T:
        if PEAK_A is not None:
            peak *= tl.load(PEAK_A + head_of_batch)
        T += split * stride_ts + b * stride_tb + h * stride_th + start_row * stride_tn
        x = _points(X, stride_xn, rows, in_rows, part * BLOCK_F, P, BLOCK_F, CENTRE, PRECISION)
        t = (t - sums[:, None] * x) * (scale * peak)
        tl.store(T + rows[:, None] * stride_tn + features[None, :], t, mask=in_rows[:, None] & in_p[None, :])


@triton.jit
def _points(
    X, stride, rows, in_rows, first,
    P: tl.constexpr, BLOCK_F: tl.constexpr, CENTRE, PRECISION: tl.constexpr,
):  # fmt: skip
    """Features from `first` on of some rows of X, minus the centre; zero beyond the last feature."""
    features = first + tl.arange(0, BLOCK_F)
    in_p = features < P
    x = tl.load(X + rows[:, None] * stride + features[None, :], mask=in_rows[:, None] & in_p[None, :], other=0.0)
    if CENTRE is not None:
        x = x - tl.load(CENTRE + features, mask=in_p, other=0.0)[None, :]
        if PRECISION == "tf32":
            x = _round_bits(x, 13)
    return x


@triton.jit
def gaussian_gradients(
    X, W, A, B,
    CENTRE, HALF_X, HALF_W, PEAK_A, PEAK_B,
    LONG_R, LONG_T, THIN_R, THIN_T,
    num_rows, num_thin, padded_thin, heads, num_splits, rows_per_split,
    stride_xb, stride_xh, stride_xn,
    stride_wb, stride_wh, stride_wn,
    stride_ab, stride_ah, stride_an,
    stride_bb, stride_bh, stride_bn,
    stride_rb, stride_rh, stride_rn,
    stride_tb, stride_th, stride_tn,
    scale,
    P: tl.constexpr, PV: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_PV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISE_R: tl.constexpr, PRECISION: tl.constexpr, AS_BFLOAT16: tl.constexpr,
):  # fmt: skip
    """The backward pass of one product in one launch: with the long side x_i, a_i and the thin side w_j, b_j, whichever
    is requested of

        long:   r_i = sum_j C_ij b_j        t_i = scale sum_j G_ij (w_j - x_i)
        thin:   r_j = sum_i C_ij a_i        t_j = scale sum_i G_ij (x_i - w_j)

    A program reads the rows of one split of the long side, block by block, each against the whole thin side. It writes
    the long results, and adds the thin ones to memory of its own, THIN_R and THIN_T (splits, B, H, padded_thin, .) in
    float32, whose sum over the splits is the result. So no two programs write to the same place. That memory is padded
    to whole blocks, because masks and strides of its addresses would take the registers of the sums.
    """
    program = tl.program_id(0)
    split = program % num_splits
    head_of_batch = program // num_splits
    b = (head_of_batch // heads).to(tl.int64)
    h = (head_of_batch % heads).to(tl.int64)

    rows = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_N)
    features = tl.arange(0, BLOCK_P)
    values = tl.arange(0, BLOCK_PV)
    in_p = features < P
    in_pv = values < PV
    log2_scale = scale * 1.4426950408889634

    X += b * stride_xb + h * stride_xh
    W += b * stride_wb + h * stride_wh
    A += b * stride_ab + h * stride_ah
    B += b * stride_bb + h * stride_bh
    if HALF_X is not None:
        HALF_X += head_of_batch.to(tl.int64) * num_rows
    HALF_W += head_of_batch.to(tl.int64) * num_thin
    thin_rows = (split.to(tl.int64) * (tl.num_programs(0) // num_splits) + head_of_batch) * padded_thin
    if LONG_R is not None:
        LONG_R += b * stride_rb + h * stride_rh
    if LONG_T is not None:
        LONG_T += b * stride_tb + h * stride_th
    if THIN_R is not None:
        THIN_R += thin_rows * BLOCK_PV
    if THIN_T is not None:
        THIN_T += thin_rows * BLOCK_P
    if CENTRE is not None:
        centre = tl.load(CENTRE + head_of_batch * P + features, mask=in_p, other=0.0)
    peak_a = 1.0
    peak_b = 1.0
    if PEAK_A is not None:
        peak_a = tl.load(PEAK_A + head_of_batch)
    if PEAK_B is not None:
        peak_b = tl.load(PEAK_B + head_of_batch)

    low = split * rows_per_split
    high = tl.minimum(low + rows_per_split, num_rows)
    for first_row in range(low, high, BLOCK_M):
        first_row = tl.multiple_of(first_row, BLOCK_M)
        start_row = first_row.to(tl.int64)
        in_rows = first_row + rows < num_rows
        x = tl.load(
            X + start_row * stride_xn + rows[:, None] * stride_xn + features[None, :],
            mask=in_rows[:, None] & in_p[None, :],
            other=0.0,
        )
        if CENTRE is not None:
            x = tl.where(in_p[None, :], x - centre[None, :], 0.0)
            if PRECISION == "tf32":
                x = _round_bits(x, 13)
        a = tl.load(
            A + start_row * stride_an + rows[:, None] * stride_an + values[None, :],
            mask=in_rows[:, None] & in_pv[None, :],
            other=0.0,
        )
        if HALF_X is not None:
            half_x = tl.load(HALF_X + first_row + rows, mask=in_rows, other=float("inf"))
        else:
            x_wide = x.to(tl.float32)
            half_x = tl.sum(x_wide * x_wide, 1) * (0.5 * log2_scale)
            half_x = tl.where(in_rows, half_x, float("inf"))
        if LONG_T is not None:
            t = tl.zeros((BLOCK_M, BLOCK_P), tl.float32)
            sums = tl.zeros((BLOCK_M,), tl.float32)
        if LONG_R is not None:
            r = tl.zeros((BLOCK_M, BLOCK_PV), tl.float32)

        for start in range(0, num_thin, BLOCK_N):
            start = tl.multiple_of(start, BLOCK_N)
            in_columns = start + columns < num_thin
            w = tl.load(
                W + (start + columns[:, None]) * stride_wn + features[None, :],
                mask=in_columns[:, None] & in_p[None, :],
                other=0.0,
            )
            bs = tl.load(
                B + (start + columns[:, None]) * stride_bn + values[None, :],
                mask=in_columns[:, None] & in_pv[None, :],
                other=0.0,
            )
            half_w = tl.load(HALF_W + start + columns, mask=in_columns, other=float("inf"))
            if CENTRE is not None:
                w = tl.where(in_p[None, :], w - centre[None, :], 0.0)
                if PRECISION == "tf32":
                    w = _round_bits(w, 13)
            exponent = (
                tl.dot(x, tl.trans(w), input_precision=PRECISION) * log2_scale - half_x[:, None] - half_w[None, :]
            )
            c = tl.exp2(tl.minimum(exponent, 0.0))
            if LONG_T is not None or THIN_T is not None:
                g = _narrow(c * tl.dot(a, tl.trans(bs), input_precision=PRECISION), w.dtype, AS_BFLOAT16)
            if LONG_T is not None:
                sums += tl.sum(g.to(tl.float32), 1)
                t = tl.dot(g, w, t, input_precision=PRECISION)
            if THIN_T is not None:
                thin_t = tl.dot(tl.trans(g), x, input_precision=PRECISION)
                thin_t -= tl.sum(g.to(tl.float32), 0)[:, None] * w.to(tl.float32)
                to = THIN_T + start * BLOCK_P + columns[:, None] * BLOCK_P + features[None, :]
                _add(to, thin_t * (scale * peak_a * peak_b), first_row > low)
            if LONG_R is not None or THIN_R is not None:
                rounded = _narrow(c, bs.dtype, AS_BFLOAT16)
                if PRECISE_R:
                    rest = _narrow(c - rounded.to(tl.float32), bs.dtype, AS_BFLOAT16)
            if LONG_R is not None:
                r = tl.dot(rounded, bs, r, input_precision=PRECISION)
                if PRECISE_R:
                    r = tl.dot(rest, bs, r, input_precision=PRECISION)
            if THIN_R is not None:
                thin_r = tl.dot(tl.trans(rounded), a, input_precision=PRECISION)
                if PRECISE_R:
                    thin_r = tl.dot(tl.trans(rest), a, thin_r, input_precision=PRECISION)
                to = THIN_R + start * BLOCK_PV + columns[:, None] * BLOCK_PV + values[None, :]
                _add(to, thin_r * peak_a, first_row > low)

        if LONG_R is not None:
            tl.store(
                LONG_R + start_row * stride_rn + rows[:, None] * stride_rn + values[None, :],
                (r * peak_b).to(LONG_R.dtype.element_ty),
                mask=in_rows[:, None] & in_pv[None, :],
            )
        if LONG_T is not None:
            t = (t - sums[:, None] * x.to(tl.float32)) * (scale * peak_a * peak_b)
            tl.store(
                LONG_T + start_row * stride_tn + rows[:, None] * stride_tn + features[None, :],
                t.to(LONG_T.dtype.element_ty),
                mask=in_rows[:, None] & in_p[None, :],
            )
        # The next block of rows reads thin sums that other threads of this program may have written.
        tl.debug_barrier()


@triton.jit
def _add(TO, x, again):
    """Add x to memory that no other program uses; the first time, what is there does not count."""
    if again:
        x += tl.load(TO)
    tl.store(TO, x)


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
def tuned(kernel: Any) -> Any:
    """A kernel with settings that Triton measures once for each kind of pass."""
    configs = [
        triton.Config({"BLOCK_M": rows, "BLOCK_N": columns}, num_warps=warps, num_stages=stages)
        for rows in (16, 32, 64, 128)
        for columns in (16, 32, 64)
        for warps in (4, 8)
        for stages in (1, 2, 3)
    ]
    flags = {"P", "PV", "WANT_R", "WANT_T", "CAUSAL", "PRECISE_R", "PRECISION"}
    return triton.autotune(configs=configs, key=sorted(flags.intersection(kernel.arg_names)))(kernel)
