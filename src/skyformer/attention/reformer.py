"""Reformer: softmax attention among tokens that fall into the same buckets of a locality-sensitive hash.

Queries and keys are shared: the key of a token is its query, scaled to the norm sqrt(P). In each of several rounds,
with a random matrix R (P, num_buckets / 2),

    bucket(x) = argmax([x R, -x R])

the valid tokens are sorted by bucket and position and cut into chunks; a token sees its own chunk and the one before
it, or the last one if its own is the first. If causal, it sees itself and the chunk_size tokens before it in its
bucket, which do not depend on later tokens. It attends to itself only when it sees no other token. With N_ij the number
of rounds in which i sees j,

    out_i = sum_j N_ij exp(s_ij) v_j / sum_j N_ij exp(s_ij),        s_ij = scale sqrt(P) <q_i, q_j> / |q_j|

which is the mean of the rounds, weighted by their log-sum-exp.
Kitaev et al., "Reformer: The Efficient Transformer", 2020.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from skyformer.attention.base import Attention, Inputs, Promise, computed_in_float32
from skyformer.attention.registry import register_attention
from skyformer.attention.rows import Move, in_blocks
from skyformer.checks import check_at_least, check_probability, check_scale
from skyformer.errors import InputError, ShapeError
from skyformer.ops.kernels import scale_of
from skyformer.ops.noise import RandomSource, normal_noise
from skyformer.ops.precision import at_least_float32, without_autocast

SELF_SCORE = -1e9
"""The score of a token with itself: so low that it matters only when the token sees no other."""

NORM_FLOOR = 1e-6
"""Added to the mean square of a query before the division by its root, so that a query of zeros stays zero."""


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
        query: (B, H, n, P), which is used as key as well. value: (B, H, n, Pv).
        key: (B, H, n, P), checked but not used.
        key_mask: bool (B, n), True = attend. query_mask: bool (B, n), `key_mask` by default. The tokens that are valid
            in either are cut into chunks.
        is_causal: a token attends only to earlier tokens in its bucket.
        num_hashes: rounds. chunk_size: tokens per chunk. num_buckets: buckets per round, an even number.
        buckets: int64 (B, H, num_hashes, n), used instead of hashing; `num_hashes` and `num_buckets` are then ignored.
        scale: factor of the inner products; P ** -0.5 by default.
        dropout_p: the probability with which an attention weight is dropped.
        generator: the source of the hash; torch's global generator by default.

    Returns:
        (B, H, n, Pv).
    """
    inputs = ReformerAttention.checked(Inputs(query, key, value, key_mask, query_mask, is_causal))
    check_at_least("chunk_size", chunk_size, 1)
    check_probability("dropout_p", dropout_p)
    check_scale(scale)
    if buckets is None:
        buckets = lsh_buckets(query, num_hashes=num_hashes, num_buckets=num_buckets, generator=generator)
    _check_buckets(buckets, query)
    return _attend(inputs, buckets, chunk_size, scale, dropout_p)


@torch.no_grad()
@without_autocast
def lsh_buckets(x: Tensor, *, num_hashes: int = 2, num_buckets: int = 64, generator: RandomSource = None) -> Tensor:
    """The bucket of each row of x (B, H, n, P) in each round: int64 (B, H, num_hashes, n)."""
    check_at_least("num_hashes", num_hashes, 1)
    check_num_buckets(num_buckets)
    half = num_buckets // 2
    rotation = normal_noise(generator, (int(x.shape[1]), int(x.shape[3]), num_hashes * half))
    full = at_least_float32(x)
    rotated = (full @ rotation.to(full)).view(*x.shape[:3], num_hashes, half)
    # The largest of [x R, -x R] is the entry of x R that is farthest from zero, or its negative.
    farthest = rotated.abs().argmax(-1, keepdim=True)
    bucket = farthest + half * (rotated.gather(-1, farthest) < 0)
    return bucket.squeeze(-1).transpose(2, 3)


def check_num_buckets(num_buckets: int) -> None:
    check_at_least("num_buckets", num_buckets, 2)
    if num_buckets % 2:
        raise InputError(f"num_buckets must be even, because each direction comes with its opposite; got {num_buckets}")


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


@computed_in_float32
def _attend(inputs: Inputs, buckets: Tensor, chunk_size: int, scale: float | None, dropout_p: float) -> Tensor:
    """Fills the sequence up to whole chunks, attends in every round and joins the rounds."""
    query, value, key_mask, tokens = inputs.query, inputs.value, inputs.key_mask, inputs.token_mask()
    if inputs.is_empty:
        return inputs.zeros()
    plan = _Plan(chunk_size, inputs.is_causal, scale_of(query, scale), dropout_p)
    length, rounds = query.shape[2], buckets.shape[2]
    missing = (max(1, length) + chunk_size - 1) // chunk_size * chunk_size - length
    if missing and key_mask is None:
        key_mask = tokens = torch.ones(query.shape[0], length, dtype=torch.bool, device=query.device)
    if key_mask is not None and tokens is not None:
        query, value = (x.masked_fill(~m[:, None, :, None], 0) for x, m in ((query, tokens), (value, key_mask)))
    query, value = (F.pad(x, (0, 0, 0, missing)) for x in (query, value))
    key_mask, tokens = (None if m is None else F.pad(m, (0, missing)) for m in (key_mask, tokens))
    buckets = F.pad(buckets, (0, missing))
    if tokens is not None:
        buckets = buckets.masked_fill(~tokens[:, None, None], torch.iinfo(torch.int64).max)
    buckets = buckets.flatten(1, 2)
    order = Move.sorting(buckets)
    view = _View.back(buckets.gather(-1, order.source), order, tokens, key_mask, plan)
    out, total, peak = _attend_in_rounds(query, value, order, view, plan)
    return _join_rounds(order.undo(torch.cat([out, total], -1)), order.undo(peak), rounds)[:, :, :length]


def _attend_in_rounds(
    query: Tensor, value: Tensor, order: Move, view: _View, plan: _Plan
) -> tuple[Tensor, Tensor, Tensor]:
    """In bucket order: sum_j exp(s_ij - peak_i) v_j (B, H R, n, Pv), the same without v_j, and peak_i."""
    queries, values = (in_blocks(order.apply(x), plan.chunk_size) for x in (query, value))
    keys = queries * (queries.square().mean(-1, keepdim=True) + NORM_FLOOR).rsqrt().mul(plan.scale)
    scores = view.hide(queries @ view.with_previous(keys).mT)
    peak = scores.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
    weights = scores.sub_(peak).exp_()
    total = weights.sum(-1, keepdim=True)
    out = F.dropout(weights, plan.dropout_p) @ view.with_previous(values)
    return out.flatten(2, 3), total.flatten(2, 3), peak.flatten(2, 3)


@dataclass(frozen=True)
class _View:
    """What a token sees of its own chunk of C tokens and of the one before.

    last (B,): the number of the last chunk. hidden: bool masks that broadcast to (B, H R, T, C, 2 C).
    """

    last: Tensor
    hidden: tuple[Tensor, ...]

    @staticmethod
    def back(buckets: Tensor, order: Move, tokens: Tensor | None, key_mask: Tensor | None, plan: _Plan) -> _View:
        """For sorted buckets (B, H R, n)."""
        size, chunks = plan.chunk_size, buckets.shape[2] // plan.chunk_size
        view = _View(_last_chunk(tokens, size, torch.full(buckets.shape[:1], chunks - 1, device=buckets.device)), ())
        hidden = []
        if tokens is not None or plan.is_causal or chunks == 1:
            hidden.append(view._first_sees_none_before(chunks, size, plan.is_causal))
        if key_mask is not None:
            masked = ~key_mask[:, None].expand_as(order.source).gather(-1, order.source)
            hidden.append(view.with_previous(in_blocks(masked.unsqueeze(-1), size)).mT)
        if plan.is_causal:
            bucket = in_blocks(buckets.unsqueeze(-1), size)
            hidden.append(bucket != view.with_previous(bucket).mT)
            hidden.append(~_latest(size, buckets.device))
        return _View(view.last, tuple(hidden))

    def _first_sees_none_before(self, chunks: int, size: int, is_causal: bool) -> Tensor:
        """Hides what is in front of the first chunk, if that is the chunk itself, or later tokens and not allowed."""
        first = torch.arange(chunks, device=self.last.device).view(-1, 1, 1) == 0
        previous = torch.arange(2 * size, device=self.last.device) < size
        return first & previous & ((self.last == 0) | is_causal).view(-1, 1, 1, 1, 1)

    def with_previous(self, chunks: Tensor) -> Tensor:
        """Each chunk of (B, H R, T, C, c) after the one before it, the first after the last: (B, H R, T, 2 C, c)."""
        index = self.last.view(-1, 1, 1, 1, 1).expand_as(chunks[:, :, :1])
        return torch.cat([torch.cat([chunks.gather(2, index), chunks[:, :, :-1]], 2), chunks], 3)

    def hide(self, scores: Tensor) -> Tensor:
        """Scores (B, H R, T, C, 2 C) with -inf for hidden tokens, and SELF_SCORE for the token itself."""
        size = scores.shape[-2]
        own = torch.eye(size, dtype=torch.bool, device=scores.device)
        scores = scores.masked_fill_(F.pad(own, (size, 0)), SELF_SCORE)
        for mask in self.hidden:
            scores = scores.masked_fill_(mask, -math.inf)
        return scores


def _last_chunk(tokens: Tensor | None, size: int, whole: Tensor) -> Tensor:
    """The number (B,) of the last chunk that has a valid token; `whole` if all tokens are valid."""
    if tokens is None:
        return whole
    return ((tokens.sum(-1) + size - 1) // size - 1).clamp(min=0)


def _latest(size: int, device: torch.device) -> Tensor:
    """True at a token itself and the `size` places before it, in its chunk and the previous one: bool (C, 2 C)."""
    return torch.ones(size, 2 * size, dtype=torch.bool, device=device).tril(size).triu()


def _join_rounds(both: Tensor, peak: Tensor, rounds: int) -> Tensor:
    """Numerators and denominators (B, H R, n, Pv + 1) of the rounds, each over exp(peak), to outputs (B, H, n, Pv)."""
    both, peak = (x.view(x.shape[0], -1, rounds, *x.shape[2:]) for x in (both, peak))
    joint = (both * (peak - peak.amax(2, keepdim=True)).exp()).sum(2)
    total = joint[..., -1:]
    return joint[..., :-1] / total.masked_fill(total == 0, 1)


@register_attention
@dataclass(eq=False, repr=False, kw_only=True)
class ReformerAttention(Attention):
    """LSH attention with shared queries and keys: `key` is checked but not used, and gets no gradient."""

    name = "reformer"
    cannot: ClassVar[Mapping[Promise, str]] = {
        Promise.CROSS_ATTENTION: "queries are used as keys, so both must be of one sequence",
    }

    num_hashes: int = 2
    chunk_size: int = 32
    num_buckets: int = 64
    scale: float | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("num_hashes", self.num_hashes, 1)
        check_at_least("chunk_size", self.chunk_size, 1)
        check_num_buckets(self.num_buckets)

    def attend(self, inputs: Inputs) -> Tensor:
        buckets = lsh_buckets(
            inputs.query, num_hashes=self.num_hashes, num_buckets=self.num_buckets, generator=self.random_source()
        )
        return _attend(inputs, buckets, self.chunk_size, self.scale, self.dropout_p)
