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
keys are left out instead of masked, norms are additional features of the products, a random byte decides about a
weight, and all blocks get their bytes from a few tables. Exponents of the Gaussian kernel are in units of log 2,
because torch computes exp2 up to three times as fast as exp.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from skyformer.ops.differentiable import Operation, Three
from skyformer.ops.kernels import EXPONENT_FLOOR, half_norms
from skyformer.ops.noise import RandomWords, Seed, draw_seed, rounded_probability
from skyformer.ops.precision import at_least_float32
from skyformer.ops.products import bounded, subtract_dots

BLOCK_ELEMENTS = 2**19
"""Number of weights in a block: 2 MiB in float32. Smaller blocks slow down the products, larger ones the rest."""
BLOCKS_FOR_TABLES = 8
"""From this number of blocks on, random bytes come from tables, which cost as much as the bytes of four blocks."""

_BYTE = 2**8
_CLOSE = 0.02
"""A random byte decides if rounding p to a multiple of 1/256 changes p and 1 - p by at most this share."""


def softmax_attention_with_dropout(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, scale: float, dropout_p: float
) -> Tensor:
    """query (B, H, L, P), key (B, H, S, P), value (B, H, S, Pv), key_mask bool (B, S) to (B, H, L, Pv), on the CPU.

    p is rounded, see `drop_probability`. An example without valid keys gives zeros.
    """
    operation = _DroppedAttention(False, scale, drop_probability(dropout_p))
    return _attend(query, key, value, key_mask, operation, draw_seed(None))


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
    operation = _DroppedAttention(True, scale, drop_probability(dropout_p))
    return _attend(query, key, value, key_mask, operation, draw_seed(generator))


def drop_probability(p: float) -> float:
    """What is used instead of p: a multiple of 2^-8 if that changes p and 1 - p by at most 2 %, else of 2^-16."""
    coarse = min(round(p * _BYTE), _BYTE - 1) / _BYTE
    return coarse if abs(coarse - p) <= _CLOSE * min(p, 1 - p) else rounded_probability(p)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, operation: _DroppedAttention, seed: int
) -> Tensor:
    x, y, v = (at_least_float32(t).contiguous() for t in (query, key, value))
    return operation(x, y, v, key_mask, seed).to(query.dtype)


@dataclass(frozen=True)
class _DroppedAttention(Operation):
    gaussian: bool
    scale: float
    dropout_p: float

    def forward(self, x: Tensor, y: Tensor, v: Tensor, mask: Tensor | None, seed: Seed | None) -> tuple[Tensor, ...]:
        out = v.new_zeros(*x.shape[:3], v.shape[-1])
        points, keys = _points(x, y, self)
        buffers = _Buffers(x, y, self, seed)
        for head, valid, number in _heads(x, y, mask):
            x_h, y_h, v_h = points[head], keys[head][valid], v[head][valid]
            for rows in _blocks(len(x_h), len(y_h)):
                _, dropped, _ = buffers.weights(x_h[rows], y_h, number + rows.start)
                torch.mm(dropped, v_h, out=out[head][rows])
        return (out.div_(1 - self.dropout_p),)

    def gradients(
        self, grad: Tensor, x: Tensor, y: Tensor, v: Tensor, mask: Tensor | None, seed: Seed | None, *saved: Tensor
    ) -> Three:
        (out,) = saved
        delta = (grad * out).sum(-1, keepdim=True)
        scaled = grad / (1 - self.dropout_p)
        dx, dy, dv = torch.zeros_like(x), torch.zeros_like(y), torch.zeros_like(v)
        points, keys = _points(x, y, self)
        features = y.shape[-1]
        buffers = _Buffers(x, y, self, seed)
        for head, valid, number in _heads(x, y, mask):
            x_h, y_h, k, v_h = points[head], keys[head][valid], y[head][valid], v[head][valid]
            # Transposed, because a sum over the rows of a block is then much faster.
            dy_t, dv_t = k.new_zeros(features, len(k)), v_h.new_zeros(v_h.shape[1], len(v_h))
            for rows in _blocks(len(x_h), len(y_h)):
                do = scaled[head][rows]
                weights, dropped, ds = buffers.weights(x_h[rows], y_h, number + rows.start)
                dv_t.addmm_(do.mT, dropped)
                torch.mm(do, v_h.mT, out=ds).mul_(dropped)
                if not self.gaussian:
                    ds.addcmul_(weights, delta[head][rows], value=-1)
                torch.mm(ds, k, out=dx[head][rows])
                dy_t.addmm_(x_h[rows, :features].mT, ds)
            dy[head][valid], dv[head][valid] = dy_t.mT, dv_t.mT
        dx.mul_(self.scale)
        if self.gaussian:
            dy.mul_(math.log(2))
            subtract_dots(dx, x, grad, out, self.scale)
            subtract_dots(dy, y, v, dv, self.scale)
        return dx, dy, dv

    def row_blocks(self, x: Tensor, y: Tensor) -> Iterator[tuple[slice, None]]:
        """All rows at once: second derivatives take O(L S) memory."""
        yield slice(None), None

    def row_gradients(
        self, block: None, grad: Tensor, x: Tensor, y: Tensor, v: Tensor, mask: Tensor | None, seed: Seed | None
    ) -> Three:
        masks, heads = _Masks(x, y, self.dropout_p, seed), list(_heads(x, y, mask))
        # Drawn here, because a function that torch.func transforms may not write into memory from outside of it.
        kept = [
            masks.of_head(number, torch.empty(x.shape[2], len(y[head][valid]), dtype=x.dtype))
            for head, valid, number in heads
        ]

        def attend(x: Tensor, y: Tensor, v: Tensor) -> Tensor:
            points, keys = _points(x, y, self)
            nothing = v.new_zeros(x.shape[2], v.shape[-1])
            of_heads = dict.fromkeys(product(*map(range, x.shape[:2])), nothing)
            for (head, valid, _), keep in zip(heads, kept, strict=True):
                scores = points[head] @ keys[head][valid].mT
                weights = bounded(scores * math.log(2)).exp() if self.gaussian else scores.softmax(-1)
                of_heads[head] = (weights * keep / (1 - self.dropout_p)) @ v[head][valid]
            return torch.stack(list(of_heads.values())).unflatten(0, x.shape[:2])

        dx, dy, dv = torch.func.vjp(attend, x, y, v)[1](grad)
        return dx, dy, dv


def _points(query: Tensor, key: Tensor, plan: _DroppedAttention) -> tuple[Tensor, Tensor]:
    """x and y whose inner products are the scores, for the Gaussian kernel its exponents in units of log 2."""
    if not plan.gaussian:
        return query * plan.scale, key
    scale = plan.scale / math.log(2)
    x, half_x, half_y = query * scale, half_norms(query, scale), half_norms(key, scale)
    return torch.cat([x, -half_x, torch.ones_like(half_x)], -1), torch.cat([key, torch.ones_like(half_y), -half_y], -1)


def _heads(
    query: Tensor, key: Tensor, key_mask: Tensor | None
) -> Iterator[tuple[tuple[int, int], slice | Tensor, int]]:
    """Example and head, the valid keys of the example and the number of the first query, counted through all heads, for
    all examples that have valid keys."""
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
            for head in range(heads):
                yield (example, head), valid, (example * heads + head) * query.shape[2]


def _blocks(length: int, keys: int) -> Iterator[slice]:
    """Rows of queries whose weights make up one block."""
    height = max(1, BLOCK_ELEMENTS // keys)
    return (slice(start, min(start + height, length)) for start in range(0, length, height))


def _largest_block(query: Tensor, key: Tensor) -> int:
    queries, keys = query.shape[2], key.shape[2]
    return min(max(BLOCK_ELEMENTS, keys), queries * keys)


class _Buffers:
    """Memory for one block after another: new memory for each would cost as much as its arithmetic."""

    def __init__(self, query: Tensor, key: Tensor, plan: _DroppedAttention, seed: Seed | None) -> None:
        self._memory = query.new_empty(3, _largest_block(query, key))
        self._masks = _Masks(query, key, plan.dropout_p, seed)
        self._gaussian = plan.gaussian

    def weights(self, x: Tensor, y: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
        """P and P' between x (l, P') and y (S, P'), and a third matrix (l, S) for the caller to use."""
        scores, weights, keep = (each[: len(x) * len(y)].view(len(x), len(y)) for each in self._memory)
        torch.mm(x, y.mT, out=scores)
        if self._gaussian:
            floor = EXPONENT_FLOOR[scores.dtype] / math.log(2)
            weights, scores = scores.clamp_(floor, 0).exp2_(), weights
        else:
            torch.softmax(scores, -1, out=weights)
        return weights, self._masks.write(block, keep).mul_(weights), scores


class _Masks:
    """Which weights are kept: 0, with probability p, or 1. A block is known by its first query."""

    def __init__(self, query: Tensor, key: Tensor, p: float, seed: Seed | None) -> None:
        assert isinstance(seed, int)
        of_byte = (p * _BYTE).is_integer()
        self._entries, self._kind, levels = (8, torch.int8, _BYTE) if of_byte else (4, torch.int16, _BYTE**2)
        self._threshold = round(p * levels) - levels // 2
        batch, heads, queries = query.shape[:3]
        self._words = torch.empty(-(-_largest_block(query, key) // self._entries), dtype=torch.int64)
        # Estimated without the number of keys, so that padding does not change the masks.
        many = batch * heads * queries**2 >= BLOCKS_FOR_TABLES * BLOCK_ELEMENTS
        self._random = RandomWords(seed, len(self._words), many)

    def write(self, block: int, out: Tensor) -> Tensor:
        """Fill out (l, S); comparing into floating point is faster than into bool."""
        words = self._random.write(block, self._words[: -(-out.numel() // self._entries)])
        return torch.ge(words.view(self._kind)[: out.numel()].view(out.shape), self._threshold, out=out)

    def of_head(self, first: int, out: Tensor) -> Tensor:
        """Fill out (L, S) with the masks of all blocks of a head, whose first query has this number."""
        for rows in _blocks(*out.shape):
            self.write(first + rows.start, out[rows])
        return out
