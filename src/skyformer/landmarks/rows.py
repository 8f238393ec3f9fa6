"""Rows by their rank among the valid rows of an example: drawing them, and gathering them with their gradients."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from skyformer.ops.noise import Seed, uniform_noise
from skyformer.ops.tracing import transforming


def count_valid(mask: Tensor | None, x: Tensor) -> Tensor:
    """How many rows of x (B, H, n, P) are valid in each example: (B, 1)."""
    if mask is None:
        return torch.full((x.shape[0], 1), x.shape[2], device=x.device)
    return mask.sum(-1, keepdim=True)


def valid_ranks(mask: Tensor | None, batch: int, length: int, device: torch.device) -> Tensor:
    """The rank of each row among the valid rows (B, n); at masked rows some number in range, without meaning."""
    if mask is None:
        return torch.arange(length, device=device).expand(batch, -1)
    return (mask.cumsum(-1) - 1).clamp(min=0)


def nth_valid(mask: Tensor | None, rank: Tensor) -> Tensor:
    """The positions of the valid rows of these ranks (B, k)."""
    if mask is None:
        return rank
    position = torch.searchsorted(mask.cumsum(-1), rank + 1)
    return position.clamp(max=max(mask.shape[1] - 1, 0))


def pick_in_stratum(slot: Tensor, strata: Tensor, count: Tensor, noise: Tensor) -> Tensor:
    """One rank in [slot count / strata, (slot + 1) count / strata), both ends rounded down; slot (B, d)."""
    strata = strata.clamp(min=1)
    low = torch.div(slot * count, strata, rounding_mode="floor")
    high = torch.div((slot + 1) * count, strata, rounding_mode="floor")
    rank = low + ((high - low) * noise).long()
    return torch.minimum(rank.clamp(min=0), (count - 1).clamp(min=0))


def shuffle_rows(valid: Tensor, seed: Seed, stream: int) -> Tensor:
    """The rows (B, n) in random order, valid rows first. Padding does not change the order of the valid rows."""
    batch, length = valid.shape
    noise = uniform_noise(seed, stream, length, valid.device)[valid_ranks(valid, batch, length, valid.device)]
    return torch.where(valid, noise, 2.0).argsort(-1)


def draw_by_weight(weight: Tensor, mask: Tensor | None, count: int, seed: Seed, stream: int) -> Tensor:
    """Up to `count` row numbers without replacement (the Gumbel top-k trick), best first; weight (B, H, n)."""
    batch, _, length = weight.shape
    noise = uniform_noise(seed, stream, length, weight.device)
    gumbel = -torch.log(-torch.log(noise.clamp(min=1e-7, max=1 - 1e-7)))
    # The floor keeps rows of vanishing weight ahead of masked rows.
    score = weight.clamp(min=1e-30).log() + gumbel[valid_ranks(mask, batch, length, weight.device)].unsqueeze(1)
    if mask is not None:
        score = score.masked_fill(~mask.unsqueeze(1), -math.inf)
    return score.topk(min(count, length), -1).indices


def pad_slots(rows: Tensor, num_landmarks: int) -> Tensor:
    """Rows (..., k) to (..., d) with empty slots at the end."""
    return F.pad(rows, (0, num_landmarks - rows.shape[-1]), value=-1)


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Rows (B, 1 or H, k) of x (B, H, n, P): (B, H, k, P)."""
    if x.shape[2] == 0:
        # Zeros that depend on x: with pieces of a sequence, every process must take part in the backward pass.
        return x.sum(2, keepdim=True).expand(-1, -1, rows.shape[-1], -1)
    return x[(*_batch_and_head(x), rows)]


def _batch_and_head(x: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers of the examples (B, 1, 1) and of the heads (H, 1), which index x in any memory layout."""
    batch, heads = (torch.arange(size, device=x.device) for size in x.shape[:2])
    return batch[:, None, None], heads[:, None]


def landmark_rows(query: Tensor, key: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Q, K and the rows (B, 1 or H, d) of [Q; K], without building [Q; K].

    Use the returned Q and K, each in one product, instead of the given ones: the gradients of the landmarks are then
    added to their gradients in place, where plain indexing would allocate, clear and add two more tensors of their
    size.
    """
    if transforming():
        return query, key, _take_landmarks(query, key, rows)
    taken: tuple[Tensor, Tensor, Tensor] = _LandmarkRows.apply(query, key, rows)
    return taken


def _take_landmarks(query: Tensor, key: Tensor, rows: Tensor) -> Tensor:
    of_query, of_key = _split_rows(rows, query.shape[2], key.shape[2])
    return torch.where((rows < query.shape[2])[..., None], take_rows(query, of_query), take_rows(key, of_key))


class _LandmarkRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(rows)
        ctx.num_queries = query.shape[2]
        return query.view_as(query), key.view_as(key), _take_landmarks(query, key, rows)

    @staticmethod
    def backward(ctx: Any, dquery: Tensor, dkey: Tensor, dpoints: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        of_query, of_key = _split_rows(rows, dquery.shape[2], dkey.shape[2])
        is_query = (rows < ctx.num_queries)[..., None]
        return (
            _add_rows(dquery, of_query, dpoints.masked_fill(~is_query, 0)),
            _add_rows(dkey, of_key, dpoints.masked_fill(is_query, 0)),
            None,
        )


def _split_rows(rows: Tensor, num_queries: int, num_keys: int) -> tuple[Tensor, Tensor]:
    """Row numbers of Q and of K, each clamped to its range where a row belongs to the other."""
    return rows.clamp(0, max(num_queries - 1, 0)), (rows - num_queries).clamp(0, max(num_keys - 1, 0))


def _add_rows(grad: Tensor, rows: Tensor, addend: Tensor) -> Tensor:
    if grad.shape[2] == 0:
        return grad
    index = (*_batch_and_head(grad), rows)
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return grad.index_put(index, addend, accumulate=True)
    # In place: the product that returned this gradient does not use it again.
    return grad.index_put_(index, addend, accumulate=True)
