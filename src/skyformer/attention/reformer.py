"""Reformer: softmax attention among tokens that fall into the same buckets of a locality-sensitive hash.

Queries and keys are shared: the key of a token is its query, brought to the length sqrt(P). In each of
several rounds, with a random matrix R (P, num_buckets / 2),

    bucket(x) = argmax([x R, -x R])

the valid tokens are sorted by bucket and position and cut into chunks; a token sees its own chunk and the one
before it, or the last one if its own is the first. If causal, it sees the chunk_size latest of the earlier
tokens in its bucket, a choice that no later token can change. It attends to itself only when it sees no other
token. With N_ij the number of rounds in which i sees j,

    out_i = sum_j N_ij exp(s_ij) v_j / sum_j N_ij exp(s_ij),        s_ij = scale sqrt(P) <q_i, q_j> / |q_j|

which is what the rounds give when each is weighed by its log-sum-exp.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from skyformer.attention.base import Attention, Promise
from skyformer.attention.registry import register
from skyformer.attention.rows import Order, permute_rows
from skyformer.checks import (
    check_at_least,
    check_mask,
    check_positive,
    check_probability,
    check_query_key_value,
    check_scale,
)
from skyformer.errors import InputError, ShapeError
from skyformer.ops.noise import draw_seed, drawn_now
from skyformer.ops.precision import at_least_float32, without_autocast

SELF_SCORE = -1e9
"""The score of a token with itself: too low to matter beside any other, yet enough for one that is alone."""

NORM_FLOOR = 1e-6
"""Added to the mean square of a query before dividing by its root, so that a query of zero stays zero."""


def reformer_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    is_causal: bool = False,
    num_hashes: int = 2,
    chunk_size: int = 32,
    num_buckets: int = 64,
    buckets: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """LSH attention in O(n num_hashes (chunk_size + num_buckets) P) time.

    A token sees up to 2 chunk_size tokens in each round; an example of at most chunk_size valid tokens is computed
    in full, unless causal.

    Args:
        query: (B, H, n, P), which serves as key as well. value: (B, H, n, Pv).
        key: (B, H, n, P), accepted as everywhere but not used.
        key_mask: bool (B, n), True = attend. query_mask: bool (B, n), key_mask by default. Chunks are cut
            from the tokens that are valid in either.
        is_causal: a token attends to earlier ones only, and only to those in its bucket.
        num_hashes: rounds. chunk_size: tokens in a chunk. num_buckets: buckets of a round, an even number.
        buckets: int64 (B, H, num_hashes, n), to use instead of hashing with `num_hashes` and `num_buckets`.
        scale: what the inner products are multiplied by; P ** -0.5 by default.
        dropout_p: the probability with which a weight is dropped.
        generator: where the hash is drawn from; torch's own by default.

    Returns:
        (B, H, n, Pv).
    """
    check_query_key_value(query, key, value)
    check_mask("key_mask", key_mask, key.shape[0], key.shape[2])
    check_mask("query_mask", query_mask, query.shape[0], query.shape[2])
    check_at_least("chunk_size", chunk_size, 1)
    check_probability("dropout_p", dropout_p)
    if scale is not None:
        check_positive("scale", scale)
    if query.shape[2] != key.shape[2]:
        ReformerAttention.require(Promise.CROSS_ATTENTION)
    if buckets is None:
        buckets = lsh_buckets(query, num_hashes=num_hashes, num_buckets=num_buckets, generator=generator)
    _check_buckets(buckets, query)
    tokens = key_mask if key_mask is None or query_mask is None else key_mask | query_mask
    plan = _Plan(chunk_size, is_causal, query.shape[-1] ** -0.5 if scale is None else scale, dropout_p)
    out = _attend(at_least_float32(query), at_least_float32(value), buckets, tokens, key_mask, plan)
    return out.to(query.dtype)


@torch.no_grad()
@without_autocast
def lsh_buckets(
    x: Tensor, *, num_hashes: int = 2, num_buckets: int = 64, generator: torch.Generator | None = None
) -> Tensor:
    """The bucket of each row of x (B, H, n, P) in each round: int64 (B, H, num_hashes, n)."""
    check_at_least("num_hashes", num_hashes, 1)
    check_num_buckets(num_buckets)
    half = num_buckets // 2
    source = torch.Generator().manual_seed(draw_seed(generator))
    with drawn_now():
        rotation = torch.randn(x.shape[1], x.shape[3], num_hashes * half, generator=source, device="cpu")
    full = at_least_float32(x)
    rotated = (full @ rotation.to(full)).view(*x.shape[:3], num_hashes, half)
    # The largest of [x R, -x R] is the entry of x R farthest from zero, or its opposite.
    farthest = rotated.abs().argmax(-1, keepdim=True)
    bucket = farthest + half * (rotated.gather(-1, farthest) < 0)
    return bucket.squeeze(-1).transpose(2, 3)


def check_num_buckets(num_buckets: int) -> None:
    check_at_least("num_buckets", num_buckets, 2)
    if num_buckets % 2:
        raise InputError(f"num_buckets must be even, as directions come with their opposites; got {num_buckets}")


def _check_buckets(buckets: Tensor, query: Tensor) -> None:
    batch, heads, length, _ = query.shape
    if buckets.dtype != torch.int64:
        raise InputError(f"buckets must have dtype int64; got {buckets.dtype}")
    if buckets.dim() != 4 or (buckets.shape[:2], buckets.shape[3]) != ((batch, heads), length):
        raise ShapeError(
            f"buckets must have shape ({batch}, {heads}, num_hashes, {length}); got {tuple(buckets.shape)}"
        )


@dataclass(frozen=True)
class _Plan:
    chunk_size: int
    is_causal: bool
    scale: float
    dropout_p: float


@without_autocast
def _attend(
    query: Tensor, value: Tensor, buckets: Tensor, tokens: Tensor | None, key_mask: Tensor | None, plan: _Plan
) -> Tensor:
    """Fills the sequence up to whole chunks, attends in every round and joins the rounds."""
    length, rounds, size = query.shape[2], buckets.shape[2], plan.chunk_size
    missing = max(1, -(-length // size)) * size - length
    if missing and key_mask is None:
        key_mask = torch.ones(query.shape[0], length, dtype=torch.bool, device=query.device)
    tokens = key_mask if tokens is None else tokens
    if key_mask is not None and tokens is not None:
        query, value = (x.masked_fill(~m[:, None, :, None], 0) for x, m in ((query, tokens), (value, key_mask)))
    query, value = (F.pad(x, (0, 0, 0, missing)) for x in (query, value))
    key_mask, tokens = (None if m is None else F.pad(m, (0, missing)) for m in (key_mask, tokens))
    buckets = F.pad(buckets, (0, missing))
    if tokens is not None:
        buckets = buckets.masked_fill(~tokens[:, None, None], torch.iinfo(torch.int64).max)
    buckets, order = _sort(buckets.flatten(1, 2))
    look = _Look.back(buckets, order, tokens, key_mask, plan)
    out, total, peak = _attend_in_rounds(query, value, order, look, plan)
    both = permute_rows(torch.cat([out, total], -1), order.reversed())
    return _join_rounds(both, permute_rows(peak, order.reversed()), rounds)[:, :, :length]


def _attend_in_rounds(
    query: Tensor, value: Tensor, order: Order, look: _Look, plan: _Plan
) -> tuple[Tensor, Tensor, Tensor]:
    """In bucket order: sum_j exp(s_ij - peak_i) v_j (B, H R, n, Pv), the same without v_j, and peak_i."""
    queries, values = (_in_chunks(permute_rows(x, order), plan.chunk_size) for x in (query, value))
    keys = queries * (queries.square().mean(-1, keepdim=True) + NORM_FLOOR).rsqrt().mul(plan.scale)
    scores = look.hide(queries @ look.with_previous(keys).mT)
    peak = scores.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
    weights = scores.sub_(peak).exp_()
    total = weights.sum(-1, keepdim=True)
    out = F.dropout(weights, plan.dropout_p) @ look.with_previous(values)
    return out.flatten(2, 3), total.flatten(2, 3), peak.flatten(2, 3)


@dataclass(frozen=True)
class _Look:
    """What tokens in chunks of C see of their own chunk and the one before.

    last (B,): the number of the last chunk. hidden: bool masks that broadcast to (B, H R, T, C, 2 C).
    """

    last: Tensor
    hidden: tuple[Tensor, ...]

    @staticmethod
    def back(buckets: Tensor, order: Order, tokens: Tensor | None, key_mask: Tensor | None, plan: _Plan) -> _Look:
        """For buckets (B, H R, n) in their order."""
        size, chunks = plan.chunk_size, buckets.shape[2] // plan.chunk_size
        look = _Look(_last_chunk(tokens, size, torch.full(buckets.shape[:1], chunks - 1, device=buckets.device)), ())
        hidden = []
        if tokens is not None or plan.is_causal or chunks == 1:
            hidden.append(look._nothing_before(chunks, size, plan.is_causal))
        if key_mask is not None:
            masked = ~key_mask[:, None].expand_as(order.order).gather(-1, order.order)
            hidden.append(look.with_previous(_in_chunks(masked.unsqueeze(-1), size)).mT)
        if plan.is_causal:
            bucket = _in_chunks(buckets.unsqueeze(-1), size)
            hidden.append(bucket != look.with_previous(bucket).mT)
            hidden.append(~_latest(size, buckets.device))
        return _Look(look.last, tuple(hidden))

    def _nothing_before(self, chunks: int, size: int, is_causal: bool) -> Tensor:
        """The previous half of the first chunk, where that is the chunk itself or must not be seen."""
        first = torch.arange(chunks, device=self.last.device).view(-1, 1, 1) == 0
        previous = torch.arange(2 * size, device=self.last.device) < size
        return first & previous & ((self.last == 0) | is_causal).view(-1, 1, 1, 1, 1)

    def with_previous(self, chunks: Tensor) -> Tensor:
        """Each chunk (B, H R, T, C, c) behind its predecessor, the first behind the last: (B, H R, T, 2 C, c)."""
        index = self.last.view(-1, 1, 1, 1, 1).expand_as(chunks[:, :, :1])
        return torch.cat([torch.cat([chunks.gather(2, index), chunks[:, :, :-1]], 2), chunks], 3)

    def hide(self, scores: Tensor) -> Tensor:
        """Scores (B, H R, T, C, 2 C) with -inf where a token does not look, and next to nothing for itself."""
        size = scores.shape[-2]
        own = torch.eye(size, dtype=torch.bool, device=scores.device)
        scores = scores.masked_fill_(F.pad(own, (size, 0)), SELF_SCORE)
        for mask in self.hidden:
            scores = scores.masked_fill_(mask, -math.inf)
        return scores


def _last_chunk(tokens: Tensor | None, size: int, whole: Tensor) -> Tensor:
    """The number (B,) of the last chunk with a token in it; `whole` when all are tokens."""
    if tokens is None:
        return whole
    return ((tokens.sum(-1) + size - 1) // size - 1).clamp(min=0)


def _latest(size: int, device: torch.device) -> Tensor:
    """Oneself and the `size` places before, in one's chunk and the previous one: bool (C, 2 C)."""
    return torch.ones(size, 2 * size, dtype=torch.bool, device=device).tril(size).triu()


def _sort(buckets: Tensor) -> tuple[Tensor, Order]:
    """Buckets (B, H R, n) in order, and the order: by bucket, then by position."""
    order = Order.sorting(buckets)
    return buckets.gather(-1, order.order), order


def _join_rounds(both: Tensor, peak: Tensor, rounds: int) -> Tensor:
    """Numerators and denominators (B, H R, n, Pv + 1) of all rounds, over exp(peak) each: (B, H, n, Pv)."""
    both, peak = (x.view(x.shape[0], -1, rounds, *x.shape[2:]) for x in (both, peak))
    joint = (both * (peak - peak.amax(2, keepdim=True)).exp()).sum(2)
    total = joint[..., -1:]
    return joint[..., :-1] / total.masked_fill(total == 0, 1)


def _in_chunks(x: Tensor, size: int) -> Tensor:
    """(B, H R, n, c) to (B, H R, T, C, c)."""
    return x.reshape(*x.shape[:2], -1, size, x.shape[-1])


@register
class ReformerAttention(Attention):
    """LSH attention with shared queries and keys: `key` is accepted and ignored, and gets no gradient."""

    name = "reformer"
    cannot: ClassVar[Mapping[Promise, str]] = {
        Promise.CROSS_ATTENTION: "queries serve as keys, so both must come from one sequence",
        Promise.FULLGRAPH: "drawing the hash breaks the graph; reformer_attention with given buckets doesn't",
    }

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        max_length: int | None = None,
        seed: int = 0,
        num_hashes: int = 2,
        chunk_size: int = 32,
        num_buckets: int = 64,
        scale: float | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(num_heads, head_dim, max_length=max_length, seed=seed)
        check_scale(scale)
        check_at_least("num_hashes", num_hashes, 1)
        check_at_least("chunk_size", chunk_size, 1)
        check_num_buckets(num_buckets)
        check_probability("dropout", dropout)
        self.num_hashes, self.chunk_size, self.num_buckets = num_hashes, chunk_size, num_buckets
        self.scale, self.dropout = scale, dropout

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None,
        query_mask: Tensor | None,
        is_causal: bool,
    ) -> Tensor:
        return reformer_attention(
            query,
            key,
            value,
            key_mask=key_mask,
            query_mask=query_mask,
            is_causal=is_causal,
            num_hashes=self.num_hashes,
            chunk_size=self.chunk_size,
            num_buckets=self.num_buckets,
            scale=self.scale,
            dropout_p=self.dropout if self.training else 0.0,
            generator=self.generator(),
        )
