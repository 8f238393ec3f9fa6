"""Softmax and Kernelized Attention with dropout of their weights on the CPU, where torch would form the whole matrix.

It is computed for one block of rows after another, and the backward pass computes the blocks again. With scores
S = scale Q K^T, the weights P = softmax(S), or for Kernelized Attention P_ij = exp(S_ij - scale |q_i|^2/2 -
scale |k_j|^2/2), the masks M (0 or 1), f = 1 / (1 - p), P' = M * P and the gradient dO of the output O:

    O  = f P' V
    dV = f P'^T dO
    G  = P' * (f dO V^T)
    dS = G - delta P,   delta_i = <dO_i, O_i>,   dQ = scale dS K,   dK = scale dS^T Q                     softmax
    dQ = scale (G K - delta Q),   dK = scale (G^T Q - <v_j, dv_j> k_j)                                    Gaussian

Most of the time is spent in the seven matrix products. Therefore there are few passes over a block besides them: masked
keys are left out instead of masked, norms are additional features of the products, and a random byte decides about a
weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from skyformer.ops.kernels import EXPONENT_FLOOR, half_norms
from skyformer.ops.noise import draw_seed, rounded_probability
from skyformer.ops.precision import at_least_float32, without_autocast
from skyformer.ops.products import subtract_dots

BLOCK_ELEMENTS = 2**18
"""Number of weights in a block: 1 MiB in float32, about the cache of one core."""

_BYTE = 2**8
_CLOSE = 0.02
"""A random byte decides if rounding p to a multiple of 1/256 changes p and 1 - p by at most this share."""


def softmax_attention_with_dropout(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, scale: float, dropout_p: float
) -> Tensor:
    """query (B, H, L, P), key (B, H, S, P), value (B, H, S, Pv), key_mask bool (B, S) to (B, H, L, Pv), on the CPU.

    p is rounded, see `drop_probability`. An example without valid keys gives zeros.
    """
    return _attend(query, key, value, key_mask, _Plan(False, scale, drop_probability(dropout_p), draw_seed(None)))


def gaussian_attention_with_dropout(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    scale: float,
    dropout_p: float,
    generator: torch.Generator | None,
) -> Tensor:
    """The same for Kernelized Attention with the Gaussian kernel."""
    return _attend(query, key, value, key_mask, _Plan(True, scale, drop_probability(dropout_p), draw_seed(generator)))


def drop_probability(p: float) -> float:
    """What is used instead of p: a multiple of 2^-8 if that changes p and 1 - p by at most 2 %, else of 2^-16."""
    coarse = min(round(p * _BYTE), _BYTE - 1) / _BYTE
    return coarse if abs(coarse - p) <= _CLOSE * min(p, 1 - p) else rounded_probability(p)


@dataclass(frozen=True)
class _Plan:
    gaussian: bool
    scale: float
    dropout_p: float
    seed: int


def _attend(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, plan: _Plan) -> Tensor:
    inputs = (at_least_float32(x).contiguous() for x in (query, key, value))
    out: Tensor = _DroppedAttention.apply(*inputs, key_mask, plan)
    return out.to(query.dtype)


class _DroppedAttention(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, plan: _Plan) -> Tensor:
        out = value.new_zeros(*query.shape[:3], value.shape[-1])
        points, keys = _points(query, key, plan)
        buffers = _Buffers(out, key.shape[2])
        for number, head, valid in _heads(key, key_mask):
            x, y, v = points[head], keys[head][valid], value[head][valid]
            for rows in _blocks(len(x), len(y)):
                _, dropped, _ = buffers.weights(x[rows], y, plan, plan.seed + number * len(x) + rows.start)
                torch.mm(dropped, v, out=out[head][rows])
        out.div_(1 - plan.dropout_p)
        ctx.plan = plan
        ctx.save_for_backward(query, key, value, key_mask, out)
        return out

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, key_mask, out = ctx.saved_tensors
        plan: _Plan = ctx.plan
        delta = (grad_out * out).sum(-1, keepdim=True)
        grad = grad_out / (1 - plan.dropout_p)
        dq, dk, dv = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
        points, keys = _points(query, key, plan)
        features = key.shape[-1]
        buffers = _Buffers(out, key.shape[2])
        for number, head, valid in _heads(key, key_mask):
            x, y, k, v = points[head], keys[head][valid], key[head][valid], value[head][valid]
            # Transposed, because a sum over the rows of a block is then much faster.
            dk_t, dv_t = k.new_zeros(features, len(k)), v.new_zeros(v.shape[1], len(v))
            for rows in _blocks(len(x), len(y)):
                do = grad[head][rows]
                weights, dropped, ds = buffers.weights(x[rows], y, plan, plan.seed + number * len(x) + rows.start)
                dv_t.addmm_(do.mT, dropped)
                torch.mm(do, v.mT, out=ds).mul_(dropped)
                if not plan.gaussian:
                    ds.addcmul_(weights, delta[head][rows], value=-1)
                torch.mm(ds, k, out=dq[head][rows])
                dk_t.addmm_(x[rows, :features].mT, ds)
            dk[head][valid], dv[head][valid] = dk_t.mT, dv_t.mT
        dq.mul_(plan.scale)
        if plan.gaussian:
            subtract_dots(dq, query, grad_out, out, plan.scale)
            subtract_dots(dk, key, value, dv, plan.scale)
        return dq, dk, dv, None, None


def _points(query: Tensor, key: Tensor, plan: _Plan) -> tuple[Tensor, Tensor]:
    """x and y whose inner products are the scores, for the Gaussian kernel its exponents."""
    x = query * plan.scale
    if not plan.gaussian:
        return x, key
    half_x, half_y = half_norms(query, plan.scale), half_norms(key, plan.scale)
    return torch.cat([x, -half_x, torch.ones_like(half_x)], -1), torch.cat([key, torch.ones_like(half_y), -half_y], -1)


def _heads(key: Tensor, key_mask: Tensor | None) -> Iterator[tuple[int, tuple[int, int], slice | Tensor]]:
    """A number, example and head, and the valid keys of the example, for all examples that have valid keys."""
    batch, heads, size = key.shape[:3]
    for example in range(batch):
        valid: slice | Tensor = slice(size)
        count = size
        if key_mask is not None:
            rows = key_mask[example].nonzero().squeeze(-1)
            count = len(rows)
            # Without gaps a view is enough.
            valid = slice(count) if count and int(rows[-1]) == count - 1 else rows
        if count:
            yield from ((example * heads + head, (example, head), valid) for head in range(heads))


def _blocks(length: int, keys: int) -> Iterator[slice]:
    """Rows of queries whose weights make up one block."""
    height = max(1, BLOCK_ELEMENTS // keys)
    return (slice(start, min(start + height, length)) for start in range(0, length, height))


class _Buffers:
    """Memory for one block after another: new memory for each would cost as much as its arithmetic."""

    def __init__(self, like: Tensor, keys: int) -> None:
        largest = max(BLOCK_ELEMENTS, keys)
        self._memory = like.new_empty(3, largest)
        self._words = torch.empty(-(-largest // 4), dtype=torch.int64)

    def weights(self, x: Tensor, y: Tensor, plan: _Plan, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """P and P' between x (l, P') and y (S, P'), and a third matrix (l, S) for the caller to use."""
        scores, weights, keep = (each[: len(x) * len(y)].view(len(x), len(y)) for each in self._memory)
        torch.mm(x, y.mT, out=scores)
        if plan.gaussian:
            weights, scores = scores.clamp_(EXPONENT_FLOOR[scores.dtype], 0).exp_(), weights
        else:
            torch.softmax(scores, -1, out=weights)
        return weights, _draw_keep(keep, plan.dropout_p, self._words, seed).mul_(weights), scores


def _draw_keep(out: Tensor, p: float, words: Tensor, seed: int) -> Tensor:
    """Fill `out` with 0, with probability p, and 1; comparing into floating point is faster than into bool. `words`
    is memory for the random bits."""
    of_byte = (p * _BYTE).is_integer()
    entries, kind, levels = (8, torch.int8, _BYTE) if of_byte else (4, torch.int16, _BYTE**2)
    drawn = words[: -(-out.numel() // entries)].random_(-(2**63), None, generator=torch.Generator().manual_seed(seed))
    bits = drawn.view(kind)[: out.numel()].view(out.shape)
    return torch.ge(bits, round(p * levels) - levels // 2, out=out)
