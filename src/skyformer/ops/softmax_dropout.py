"""Softmax attention with dropout of its weights on the CPU, where torch would form the whole (L, S) matrix.

It is computed for one block of rows after another, and the backward pass computes the blocks again. With the weights
P = softmax(scale Q K^T), the masks M (0 or 1), f = 1 / (1 - p), P' = M * P and the gradient dO of the output O:

    O  = f P' V
    dV = f P'^T dO
    dS = P' * (f dO V^T) - delta P,        delta_i = <dO_i, O_i>        the gradient of the scores before scaling
    dQ = scale dS K,   dK = scale dS^T Q
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from skyformer.ops.noise import draw_seed, keep_mask, rounded_probability
from skyformer.ops.precision import at_least_float32, without_autocast
from skyformer.ops.products import BLOCK_ELEMENTS


def softmax_attention_with_dropout(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, scale: float, dropout_p: float
) -> Tensor:
    """query (B, H, L, P), key (B, H, S, P), value (B, H, S, Pv), key_mask bool (B, S) to (B, H, L, Pv), on the CPU.

    p is rounded to a multiple of 2^-16. An example without valid keys gives zeros.
    """
    inputs = (at_least_float32(x).contiguous() for x in (query, key, value))
    out: Tensor = _DroppedSoftmax.apply(*inputs, key_mask, scale, rounded_probability(dropout_p), draw_seed(None))
    return out.to(query.dtype)


class _DroppedSoftmax(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None,
        scale: float,
        dropout_p: float,
        seed: int,
    ) -> Tensor:
        out = value.new_zeros(*query.shape[:3], value.shape[-1])
        for head, rows, block_seed in _blocks(query, key, key_mask, seed):
            weights = _weights(query[head][rows], key[head], _mask_of(key_mask, head), scale)
            dropped = weights.mul_(_keep(weights, dropout_p, block_seed))
            torch.mm(dropped, value[head], out=out[head][rows])
        out.div_(1 - dropout_p)
        ctx.scale, ctx.dropout_p, ctx.seed = scale, dropout_p, seed
        ctx.save_for_backward(query, key, value, key_mask, out)
        return out

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, key_mask, out = ctx.saved_tensors
        delta = (grad_out * out).sum(-1, keepdim=True)
        grad = grad_out / (1 - ctx.dropout_p)
        dq, dk, dv = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
        for head, rows, block_seed in _blocks(query, key, key_mask, ctx.seed):
            q, k, do = query[head][rows], key[head], grad[head][rows]
            weights = _weights(q, k, _mask_of(key_mask, head), ctx.scale)
            dropped = weights * _keep(weights, ctx.dropout_p, block_seed)
            dv[head].addmm_(dropped.mT, do)
            ds = torch.mm(do, value[head].mT).mul_(dropped).addcmul_(weights, delta[head][rows], value=-1)
            torch.mm(ds, k, out=dq[head][rows])
            dk[head].addmm_(ds.mT, q)
        return dq.mul_(ctx.scale), dk.mul_(ctx.scale), dv, None, None, None, None


def _blocks(
    query: Tensor, key: Tensor, key_mask: Tensor | None, seed: int
) -> Iterator[tuple[tuple[int, int], slice, int]]:
    """Example and head, rows of the queries, and a seed, for all blocks of examples that have valid keys."""
    batch, heads, length = query.shape[:3]
    height = max(1, BLOCK_ELEMENTS // max(1, key.shape[2]))
    empty = [key.shape[2] == 0] * batch if key_mask is None else (~key_mask.any(-1)).tolist()
    number = 0
    for example in range(batch):
        for head in range(heads):
            for start in range(0, length, height):
                number += 1
                if not empty[example]:
                    yield (example, head), slice(start, min(start + height, length)), seed + number


def _mask_of(key_mask: Tensor | None, head: tuple[int, int]) -> Tensor | None:
    return None if key_mask is None else key_mask[head[0]]


def _weights(query: Tensor, key: Tensor, valid: Tensor | None, scale: float) -> Tensor:
    """softmax(scale Q K^T) of query (l, P) and key (S, P), with a weight of zero where `valid` (S,) is False."""
    scores = torch.mm(query, key.mT).mul_(scale)
    if valid is not None:
        scores.masked_fill_(~valid, -math.inf)
    return scores.softmax(-1)


def _keep(weights: Tensor, dropout_p: float, seed: int) -> Tensor:
    return keep_mask(weights, dropout_p, torch.Generator().manual_seed(seed))
