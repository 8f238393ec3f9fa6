"""Informer: ProbSparse attention. The u queries whose attention is furthest from uniform attend to every key; the
others get the mean of the values.

    M(q_i) = max_j q_i . k_j - mean_j q_i . k_j             over s sampled keys, the same for all queries
    out_i  = softmax(q_i K^T / sqrt(P)) V                   for the u largest M(q_i)
           = mean_j v_j                                     for the others

By default u = s = 128; with a factor c they are c ln L and c ln S, as in the paper. The sampled scores are the product
of Q and the sampled keys. O((L s + u S) P) time, O(L (s + P) + S P) memory.
Zhou et al., "Informer: Beyond Efficient Transformer for Long Sequence Time-Series Forecasting", 2021.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from skyformer.attention.base import Attention, Inputs, Promise, computed_in_float32
from skyformer.attention.registry import register_attention
from skyformer.checks import check_at_least, check_positive, check_scale
from skyformer.functional import attend_softmax
from skyformer.landmarks.rows import count_valid, nth_valid, pick_in_stratum, take_rows
from skyformer.ops.distances import mean_of_valid
from skyformer.ops.noise import Seed, draw_seed_unseen, uniform_noise


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
    """ProbSparse attention: full attention for u of the queries, the mean of the values for the others.

    Args:
        query: (B, H, L, P). key: (B, H, S, P). value: (B, H, S, Pv).
        num_features: u, the number of queries that attend fully. With u >= L, this is softmax attention.
        num_samples: s, the number of keys on which queries are measured; `num_features` by default.
        factor: c, which overrides both: u = ceil(c ln L) and s = ceil(c ln S), with the valid tokens of each example.
        key_mask: bool (B, S), True = attend. query_mask: bool (B, L), True where a query is real; `key_mask` by
            default when L == S.
        scale: factor of the scores; P ** -0.5 by default.
        generator: the source of the sampled keys; torch's global generator by default.

    Returns:
        (B, H, L, Pv).
    """
    inputs = InformerAttention.checked(Inputs(query, key, value, key_mask, query_mask))
    check_scale(scale)
    return _attend(inputs, *_quotas(num_features, num_samples, factor), scale, draw_seed_unseen(generator))


@computed_in_float32
def _attend(inputs: Inputs, queries: _Quota, samples: _Quota, scale: float | None, seed: Seed) -> Tensor:
    query, key, value, key_mask = inputs.query, inputs.key, inputs.value, inputs.key_mask
    measure = sparsity_measure(query, key, key_mask, samples, seed)
    rows, chosen = _largest(measure, inputs.query_mask, queries)
    mean = mean_of_valid(value, key_mask)
    full = attend_softmax(take_rows(query, rows), key, value, key_mask, scale=scale)
    full = torch.where(chosen.unsqueeze(-1), full, mean)
    return mean.expand(-1, -1, query.shape[2], -1).scatter(2, rows.unsqueeze(-1).expand_as(full), full)


@dataclass(frozen=True)
class _Quota:
    """How many of n tokens to take: `number`, or ceil(factor ln n) and at least one; never more than there are."""

    number: int
    factor: float | None

    def among(self, count: Tensor) -> Tensor:
        """count (B, 1) to (B, 1)."""
        if self.factor is None:
            return count.clamp(max=self.number)
        wanted = (self.factor * count.clamp(min=1).double().log()).ceil().long()
        return torch.minimum(wanted.clamp(min=1), count)

    def slots(self, length: int) -> int:
        """The largest number that an example of up to `length` tokens can take."""
        wanted = self.number if self.factor is None else math.ceil(self.factor * math.log(max(length, 1)))
        return min(max(wanted, 1), length)


def _quotas(num_features: int, num_samples: int | None, factor: float | None) -> tuple[_Quota, _Quota]:
    """The quotas of the queries that attend fully and of the sampled keys."""
    check_at_least("num_features", num_features, 1)
    num_samples = num_features if num_samples is None else num_samples
    check_at_least("num_samples", num_samples, 1)
    if factor is not None:
        check_positive("factor", factor)
    return _Quota(num_features, factor), _Quota(num_samples, factor)


@torch.no_grad()
def sparsity_measure(query: Tensor, key: Tensor, key_mask: Tensor | None, quota: _Quota, seed: Seed) -> Tensor:
    """max - mean of the scores of each query (B, H, L, P) with the sampled keys: (B, H, L)."""
    rows, sampled = sample_keys(key, key_mask, quota, seed)
    if rows.shape[1] == 0:
        return query.new_zeros(query.shape[:3])
    keys = take_rows(key, rows[:, None])
    mean_key = mean_of_valid(keys, sampled)
    return (query @ keys.mT).amax(-1) - (query @ mean_key.mT).squeeze(-1)


def sample_keys(key: Tensor, key_mask: Tensor | None, quota: _Quota, seed: Seed) -> tuple[Tensor, Tensor]:
    """Rows (B, s) of the keys, and which slots are used (B, s).

    The valid keys are cut into s equal strata and one is drawn from each; with fewer than s valid keys, all are taken,
    and the unused slots repeat the first one, which does not change a maximum.
    """
    count = count_valid(key_mask, key)
    strata = quota.among(count)
    slot = torch.arange(quota.slots(key.shape[2]), device=key.device).expand(key.shape[0], -1)
    sampled = slot < strata
    slot = torch.where(sampled, slot, 0)
    noise = uniform_noise(seed, 0, slot.shape[1], key.device)[slot]
    return nth_valid(key_mask, pick_in_stratum(slot, strata, count, noise)), sampled


def _largest(measure: Tensor, query_mask: Tensor | None, quota: _Quota) -> tuple[Tensor, Tensor]:
    """The queries of the largest measure (B, H, L): rows (B, H, u), and which slots are used (B, 1, u)."""
    count = count_valid(query_mask, measure)
    if query_mask is not None:
        measure = measure.masked_fill(~query_mask[:, None], -torch.inf)
    slots = quota.slots(measure.shape[2])
    # The first among equals, so that padding does not matter; topk does not guarantee that.
    rows = measure.sort(stable=True, descending=True).indices[..., :slots]
    chosen = torch.arange(slots, device=measure.device) < quota.among(count)
    return rows, chosen[:, None]


@register_attention
@dataclass(eq=False, repr=False, kw_only=True)
class InformerAttention(Attention):
    """softmax(q_i K^T / sqrt(P)) V for the u queries furthest from uniform attention, the mean of V for the others.

    The options are those of `informer_attention`; the paper uses factor=5. `seed` decides the sampled keys in `eval()`.
    """

    name = "informer"
    approximates_softmax = True
    cannot: ClassVar[Mapping[Promise, str]] = {
        Promise.CAUSAL: "which queries attend fully depends on the whole sequence, and the others get the mean of all "
        "values",
        Promise.DROPOUT: "most queries get the mean of the values and have no weights to drop; put nn.Dropout "
        "after the attention instead",
    }

    num_features: int = 128
    num_samples: int | None = None
    factor: float | None = None
    scale: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _quotas(self.num_features, self.num_samples, self.factor)

    def attend(self, inputs: Inputs) -> Tensor:
        quotas = _quotas(self.num_features, self.num_samples, self.factor)
        return _attend(inputs, *quotas, self.scale, draw_seed_unseen(self.random_source()))
