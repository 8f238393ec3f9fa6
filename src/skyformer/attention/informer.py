"""Informer: ProbSparse attention. The u queries whose attention is furthest from uniform attend to every key; the
others get the mean of the values.

    M(q_i) = max_j q_i . k_j - mean_j q_i . k_j             over s sampled keys, the same for all queries
    out_i  = softmax(q_i K^T / sqrt(P)) V                   for the u largest M(q_i)
           = mean_j v_j                                     for the others

u = s = 128 unless told otherwise; with a factor c they are c ln L and c ln S, as in the paper. The sampled scores are
the product of Q and the sampled keys. O((L s + u S) P) time, O(L (s + P) + S P) memory.
Zhou et al., "Informer: Beyond Efficient Transformer for Long Sequence Time-Series Forecasting", 2021.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from skyformer.attention.base import Attention, Promise
from skyformer.attention.ranks import Ranks
from skyformer.attention.registry import register
from skyformer.checks import check_at_least, check_mask, check_positive, check_query_key_value
from skyformer.functional import softmax_attention
from skyformer.landmarks import take_rows
from skyformer.ops.noise import draw_seed, uniform_noise
from skyformer.ops.precision import at_least_float32, without_autocast


def informer_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    num_features: int = 128,
    num_samples: int | None = None,
    factor: float | None = None,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    scale: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """ProbSparse attention: full attention for the queries that need it, the mean of the values for the others.

    Args:
        query: (B, H, L, P). key: (B, H, S, P). value: (B, H, S, Pv).
        num_features: u, the queries that attend fully. With as many as there are, this is softmax attention.
        num_samples: s, the keys on which queries are measured; `num_features` by default.
        factor: c, which overrides both: u = ceil(c ln L) and s = ceil(c ln S), by the valid tokens of each example.
        key_mask: bool (B, S), True = attend. query_mask: bool (B, L), True where a query is real; `key_mask` by
            default when L == S.
        scale: P ** -0.5 by default.
        generator: where the sampled keys are drawn from; torch's own by default.

    Returns:
        (B, H, L, Pv).
    """
    check_query_key_value(query, key, value)
    quotas = _Quota.of(num_features, factor), _Quota.of(num_features if num_samples is None else num_samples, factor)
    if query_mask is None and query.shape[2] == key.shape[2]:
        query_mask = key_mask
    check_mask("key_mask", key_mask, key.shape[0], key.shape[2])
    check_mask("query_mask", query_mask, query.shape[0], query.shape[2])
    if scale is not None:
        check_positive("scale", scale)
    query32, key32, value32 = (at_least_float32(t) for t in (query, key, value))
    measure = sparsity_measure(query32, key32, key_mask, quotas[1], draw_seed(generator))
    rows, chosen = _largest(measure, query_mask, quotas[0])
    return _attend(query32, key32, value32, rows, chosen, key_mask, scale).to(query.dtype)


@without_autocast
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Tensor,
    chosen: Tensor,
    key_mask: Tensor | None,
    scale: float | None,
) -> Tensor:
    """Full attention for the queries at rows (B, H, u) where chosen (B, 1, u), the mean elsewhere: (B, H, L, Pv)."""
    mean = _mean_of_valid(value, key_mask)
    full = softmax_attention(take_rows(query, rows), key, value, key_mask=key_mask, scale=scale)
    full = torch.where(chosen.unsqueeze(-1), full, mean)
    return mean.expand(-1, -1, query.shape[2], -1).scatter(2, rows.unsqueeze(-1).expand_as(full), full)


@dataclass(frozen=True)
class _Quota:
    """How many of n tokens to take: `number`, or ceil(factor ln n) and at least one; never more than there are."""

    number: int
    factor: float | None

    @staticmethod
    def of(number: int, factor: float | None) -> _Quota:
        check_at_least("num_features and num_samples", number, 1)
        if factor is not None:
            check_positive("factor", factor)
        return _Quota(number, factor)

    def among(self, count: Tensor) -> Tensor:
        """count (B, 1) to (B, 1)."""
        if self.factor is None:
            return count.clamp(max=self.number)
        wanted = (self.factor * count.clamp(min=1).double().log()).ceil().long()
        return torch.minimum(wanted.clamp(min=1), count)

    def slots(self, length: int) -> int:
        """The most that an example of up to `length` tokens can take."""
        wanted = self.number if self.factor is None else math.ceil(self.factor * math.log(max(length, 1)))
        return min(max(wanted, 1), length)


@torch.no_grad()
@without_autocast
def sparsity_measure(query: Tensor, key: Tensor, key_mask: Tensor | None, quota: _Quota, seed: int) -> Tensor:
    """max - mean of the scores of each query (B, H, L, P) with the sampled keys: (B, H, L)."""
    rows, sampled = sample_keys(key, key_mask, quota, seed)
    if rows.shape[1] == 0:
        return query.new_zeros(query.shape[:3])
    keys = take_rows(key, rows[:, None])
    mean_key = _mean_of_valid(keys, sampled)
    return (query @ keys.mT).amax(-1) - (query @ mean_key.mT).squeeze(-1)


def sample_keys(key: Tensor, key_mask: Tensor | None, quota: _Quota, seed: int) -> tuple[Tensor, Tensor]:
    """Rows (B, s) of the keys: the valid ones are cut into equal strata and one is drawn from each, all of them when
    they are few. And which slots hold one (B, s): the others repeat the first, which leaves a maximum as it is."""
    batch, length = key.shape[0], key.shape[2]
    ranks = None if key_mask is None else Ranks.of(key_mask)
    count = torch.full((batch, 1), length, device=key.device) if ranks is None else ranks.count
    strata = quota.among(count)
    slot = torch.arange(quota.slots(length), device=key.device).expand(batch, -1)
    sampled = slot < strata
    slot = torch.where(sampled, slot, 0)
    low, high = (torch.div(edge * count, strata.clamp(min=1), rounding_mode="floor") for edge in (slot, slot + 1))
    noise = uniform_noise(seed, 0, slot.shape[1], key.device)[slot]
    rank = low + ((high - low) * noise).long()
    if ranks is None:
        return rank, sampled
    return ranks.position.gather(1, rank.clamp(max=max(length - 1, 0))).clamp(min=0), sampled


def _largest(measure: Tensor, query_mask: Tensor | None, quota: _Quota) -> tuple[Tensor, Tensor]:
    """The queries of the largest measure (B, H, L): rows (B, H, u), and which slots the example needs (B, 1, u)."""
    batch, _, length = measure.shape
    count = torch.full((batch, 1), length, device=measure.device)
    if query_mask is not None:
        measure = measure.masked_fill(~query_mask[:, None], -torch.inf)
        count = query_mask.sum(-1, keepdim=True)
    slots = quota.slots(length)
    # Among equals the first, so that padding does not decide; topk would not promise it.
    rows = measure.sort(stable=True, descending=True).indices[..., :slots]
    chosen = torch.arange(slots, device=measure.device) < quota.among(count)
    return rows, chosen[:, None]


def _mean_of_valid(value: Tensor, key_mask: Tensor | None) -> Tensor:
    """The mean (B, H, 1, Pv) of the valid rows of value (B, H, S, Pv); zeros when there are none."""
    if key_mask is None:
        return value.sum(2, keepdim=True) / max(value.shape[2], 1)
    weight = key_mask.to(value.dtype) / key_mask.sum(-1, keepdim=True).clamp(min=1)
    return weight[:, None, None] @ value


@register
class InformerAttention(Attention):
    """softmax(q_i K^T / sqrt(P)) V for the u queries furthest from uniform attention, the mean of V for the others.

    Args:
        num_heads: H. head_dim: P. max_length: not used. seed: of the sampled keys in `eval()`.
        num_features: u, the queries that attend fully. num_samples: s, the keys that queries are measured on;
            `num_features` by default.
        factor: c, which overrides both: u = ceil(c ln L), s = ceil(c ln S). The paper has 5.
        scale: P ** -0.5 by default.
    """

    name = "informer"
    cannot: ClassVar[Mapping[Promise, str]] = {
        Promise.CAUSAL: "which queries attend fully is decided over the whole sequence, and the others get the "
        "mean of all values",
        Promise.DROPOUT: "most queries get the mean of the values and have no weights to drop; put nn.Dropout "
        "after the attention instead",
        Promise.FULLGRAPH: "drawing the sampled keys breaks the graph",
    }

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        max_length: int | None = None,
        seed: int = 0,
        num_features: int = 128,
        num_samples: int | None = None,
        factor: float | None = None,
        scale: float | None = None,
    ) -> None:
        super().__init__(num_heads, head_dim, max_length=max_length, seed=seed)
        check_at_least("num_features", num_features, 1)
        if num_samples is not None:
            check_at_least("num_samples", num_samples, 1)
        for name, number in (("factor", factor), ("scale", scale)):
            if number is not None:
                check_positive(name, number)
        self.num_features, self.num_samples, self.factor, self.scale = num_features, num_samples, factor, scale

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None,
        query_mask: Tensor | None,
        is_causal: bool,
    ) -> Tensor:
        return informer_attention(
            query,
            key,
            value,
            num_features=self.num_features,
            num_samples=self.num_samples,
            factor=self.factor,
            key_mask=key_mask,
            query_mask=query_mask,
            scale=self.scale,
            generator=self.generator(),
        )

    def extra_repr(self) -> str:
        size = f"num_features={self.num_features}" if self.factor is None else f"factor={self.factor}"
        return f"{super().extra_repr()}, {size}"
