"""The built-in samplers."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import ClassVar, TypeGuard

import torch
from torch import Tensor

from skyformer.checks import check_at_least, check_positive
from skyformer.landmarks.base import SAMPLERS, Candidates, Landmarks, Sampler
from skyformer.landmarks.leverage import exact_leverage_scores, recursive_leverage_rows
from skyformer.landmarks.rows import (
    count_valid,
    draw_by_weight,
    nth_valid,
    pad_slots,
    pick_in_stratum,
    take_rows,
    valid_ranks,
)
from skyformer.ops.noise import RandomSource, Seed, draw_seed_unseen, uniform_noise
from skyformer.ops.tracing import is_variable, may_look_at_values


@dataclass(frozen=True)
class _IndependentOfValues(Sampler):
    """A sampler that looks at the number of rows only. All heads share their rows; with `per_head` each head draws
    its own rows."""

    per_head: bool = False

    def __call__(self, candidates: Candidates, num_landmarks: int, generator: RandomSource) -> Tensor:
        draws = candidates.query.shape[1] if self.per_head else 1
        noise = uniform_noise(draw_seed_unseen(generator), 0, draws * num_landmarks, candidates.device)
        rows = self._rows(candidates, num_landmarks, noise)
        return rows.unflatten(-1, (draws, num_landmarks)) if self.per_head else rows

    @abc.abstractmethod
    def _rows(self, candidates: Candidates, num_landmarks: int, noise: Tensor) -> Tensor:
        """Rows (B, k) for k uniform random numbers, of which every `num_landmarks` make one draw."""


@dataclass(frozen=True)
class UniformSampler(_IndependentOfValues):
    """The definition in the paper's text: independent draws, with replacement, from the valid rows of [Q; K]. All heads
    share their rows; with `per_head` each head draws its own."""

    name = "uniform"

    def _rows(self, candidates: Candidates, num_landmarks: int, noise: Tensor) -> Tensor:
        queries = candidates.valid_queries()
        rank = _scale_to(noise, queries + candidates.valid_keys())
        key_rank = (rank - queries).clamp(min=0)
        return torch.where(rank < queries, candidates.query_row(rank), candidates.key_row(key_rank))


@dataclass(frozen=True)
class PaperSampler(_IndependentOfValues):
    """As the paper's authors draw in their code: half of the landmarks from the valid rows of Q and half from those of
    K, independently and with replacement. All heads share their rows; with `per_head` each head draws its own."""

    name = "paper"

    def _rows(self, candidates: Candidates, num_landmarks: int, noise: Tensor) -> Tensor:
        queries, keys = candidates.valid_queries(), candidates.valid_keys()
        half = torch.full_like(queries, num_landmarks // 2)
        # All from one side if the other has no valid rows.
        share = half.masked_fill(keys == 0, num_landmarks).masked_fill(queries == 0, 0)
        slot = (torch.arange(len(noise), device=noise.device) % num_landmarks).expand(queries.shape[0], -1)
        query_row = candidates.query_row(_scale_to(noise, queries))
        return torch.where(slot < share, query_row, candidates.key_row(_scale_to(noise, keys)))


@dataclass(frozen=True)
class StratifiedSampler(_IndependentOfValues):
    """Half of the landmarks from Q and half from K: the valid rows are divided into equal strata, and one row is drawn
    in each. No row repeats, and the variance is lower than with independent draws. All heads share their rows; with
    `per_head` each head draws its own."""

    name = "stratified"
    from_queries: ClassVar[float] = 0.5

    def _rows(self, candidates: Candidates, num_landmarks: int, noise: Tensor) -> Tensor:
        queries, keys = candidates.valid_queries(), candidates.valid_keys()
        share = query_share(queries, keys, num_landmarks, self.from_queries)
        slot = (torch.arange(len(noise), device=noise.device) % num_landmarks).expand(queries.shape[0], -1)
        query_rank = pick_in_stratum(slot, share, queries, noise)
        key_rank = pick_in_stratum(slot - share, num_landmarks - share, keys, noise)
        return torch.where(slot < share, candidates.query_row(query_rank), candidates.key_row(key_rank))


@dataclass(frozen=True)
class QuerySampler(StratifiedSampler):
    """All landmarks from Q, as long as there are enough queries, one in each stratum. The output at the queries that
    are landmarks is then exact, except for gamma. The best choice for the softmax kernel, whose keys differ widely in
    weight."""

    name = "queries"
    from_queries = 1.0


@dataclass(frozen=True)
class ProbeSampler(Sampler):
    """Importance sampling: the weight of a query is sum_j kappa(q_i, k_j)^2 over a few random keys, the weight of a key
    is the same sum over random queries. Half of the landmarks come from each side, drawn by weight without
    replacement. Takes O(num_probes n P) time.

    In softmax attention, whose rows are normalised, all queries have the same weight, and the weight of a key is the
    sum of its squared attention weights over the random queries."""

    name = "probe"
    num_probes: int = 32

    def __post_init__(self) -> None:
        check_at_least("num_probes", self.num_probes, 1)

    @torch.no_grad()
    def __call__(self, candidates: Candidates, num_landmarks: int, generator: RandomSource) -> Tensor:
        seed, candidates = draw_seed_unseen(generator), candidates.in_float32()
        query_weight, key_weight = self.weights(candidates, seed)
        best_queries = draw_by_weight(query_weight, candidates.query_mask, num_landmarks, seed, 2)
        best_keys = draw_by_weight(key_weight, candidates.key_mask, num_landmarks, seed, 3)
        share = query_share(candidates.valid_queries(), candidates.valid_keys(), num_landmarks)[:, None]
        slot = torch.arange(num_landmarks, device=candidates.device).expand(*candidates.query.shape[:2], -1)
        query_rows = pad_slots(best_queries, num_landmarks)
        key_rows = pad_slots(best_keys + candidates.num_queries, num_landmarks)
        return torch.where(slot < share, query_rows, key_rows.gather(-1, (slot - share).clamp(min=0)))

    def weights(self, candidates: Candidates, seed: Seed) -> tuple[Tensor, Tensor]:
        """The weights of the queries (B, H, L) and of the keys (B, H, S)."""
        query, key = candidates.query, candidates.key
        if candidates.normalised:
            return torch.ones_like(query[..., 0]), self._attention_weight(candidates, seed)
        return (
            self._kernel_weight(candidates, query, key, candidates.key_mask, seed, 0),
            self._kernel_weight(candidates, key, query, candidates.query_mask, seed, 1),
        )

    def _kernel_weight(
        self, candidates: Candidates, x: Tensor, others: Tensor, mask: Tensor | None, seed: Seed, stream: int
    ) -> Tensor:
        """sum_j kappa(x_i, y_j)^2 over random valid rows y_j of `others`: (B, H, n)."""
        probes = self._probes(others, mask, seed, stream)
        return candidates.kernel.matrix(x, probes, candidates.scale).square_().sum(-1)

    def _attention_weight(self, candidates: Candidates, seed: Seed) -> Tensor:
        """sum_i softmax(q_i K^T)_j^2 over random valid queries: (B, H, S)."""
        probes = self._probes(candidates.query, candidates.query_mask, seed, 1)
        scores = candidates.scale * (probes @ candidates.key.mT)
        if candidates.key_mask is not None:
            scores = scores.masked_fill(~candidates.key_mask[:, None, None], torch.finfo(scores.dtype).min)
        return scores.softmax(-1).square_().sum(-2)

    def _probes(self, others: Tensor, mask: Tensor | None, seed: Seed, stream: int) -> Tensor:
        """`num_probes` random valid rows of `others`."""
        noise = uniform_noise(seed, stream, self.num_probes, others.device)
        rank = _scale_to(noise, count_valid(mask, others))
        return take_rows(others, nth_valid(mask, rank)[:, None])


@dataclass(frozen=True)
class LeverageSampler(Sampler):
    """Ridge leverage scores of C-bar (Theorem 1), l_i = [C-bar (C-bar + lambda I)^-1]_ii, drawn without replacement.

    Exact while [Q; K] has at most `exact_limit` rows, else recursive (Musco and Musco, 2017): each level scores twice
    as many rows as the previous one, with the landmarks chosen there. `ridge` is lambda; by default the mean of the
    eigenvalues beyond the d/2 largest, times their number over d/2, as in their fixed-size algorithm."""

    name = "leverage"
    ridge: float | None = None
    exact_limit: int = 512

    def __post_init__(self) -> None:
        if self.ridge is not None:
            check_positive("ridge", self.ridge)
        check_at_least("exact_limit", self.exact_limit, 1)

    @torch.no_grad()
    def __call__(self, candidates: Candidates, num_landmarks: int, generator: RandomSource) -> Tensor:
        seed, candidates = draw_seed_unseen(generator), candidates.in_float32()
        points = torch.cat([candidates.query, candidates.key], 2)
        valid = candidates.valid_rows()
        if points.shape[2] <= self.exact_limit:
            return self._exact_rows(candidates, points, valid, num_landmarks, seed)
        rows = recursive_leverage_rows(candidates, points, valid, num_landmarks, self.ridge, seed)
        if candidates.query_mask is None and candidates.key_mask is None:
            return rows
        short = valid.sum(-1) <= self.exact_limit
        if may_look_at_values(short) and not bool(short.any()):
            return rows
        # Whether an example is short depends on its own valid rows, never on the batch.
        leading = nth_valid(valid, torch.arange(self.exact_limit, device=points.device).expand(valid.shape[0], -1))
        inside = torch.arange(self.exact_limit, device=points.device) < valid.sum(-1, keepdim=True)
        ranks = self._exact_rows(candidates, take_rows(points, leading[:, None]), inside, num_landmarks, seed)
        exact = leading[:, None].expand(-1, points.shape[1], -1).gather(-1, ranks)
        return torch.where(short[:, None, None], pad_slots(exact, num_landmarks), pad_slots(rows, num_landmarks))

    def _exact_rows(
        self, candidates: Candidates, points: Tensor, valid: Tensor, num_landmarks: int, seed: Seed
    ) -> Tensor:
        gram = candidates.kernel.matrix(points, points, candidates.scale)
        scores = exact_leverage_scores(gram, valid, num_landmarks, self.ridge)
        return draw_by_weight(scores, valid, num_landmarks, seed, 0)


@dataclass(frozen=True)
class SegmentMeansSampler(Sampler):
    """The means of d/2 segments of the valid queries and of d/2 segments of the valid keys, as in Nystromformer: points
    that need not be rows."""

    name = "segment_means"

    def __call__(self, candidates: Candidates, num_landmarks: int, generator: RandomSource) -> Landmarks:
        dtype, candidates = candidates.query.dtype, candidates.in_float32()
        of_queries = segment_means(candidates.query, candidates.query_mask, num_landmarks // 2)
        of_keys = segment_means(candidates.key, candidates.key_mask, num_landmarks - num_landmarks // 2)
        return Landmarks(
            torch.cat([of_queries.points, of_keys.points], 2),
            torch.cat([of_queries.all_active(), of_keys.all_active()], -1),
        ).to(dtype)


_BUILTIN = (
    UniformSampler,
    PaperSampler,
    StratifiedSampler,
    QuerySampler,
    ProbeSampler,
    LeverageSampler,
    SegmentMeansSampler,
)

for _sampler in _BUILTIN:
    SAMPLERS.register(_sampler)


def is_builtin(sampler: object) -> TypeGuard[Sampler]:
    """Whether the rows of this sampler need no check and fill every slot if there are enough valid rows."""
    return type(sampler) in _BUILTIN


def query_share(queries: Tensor, keys: Tensor, num_landmarks: int, share: float = 0.5) -> Tensor:
    """How many landmarks come from the queries (B, 1): `share` of them, unless one side has too few rows."""
    wanted = int(share * num_landmarks)
    at_least = num_landmarks - keys
    return torch.minimum(torch.maximum(torch.full_like(queries, wanted), at_least), queries)


def segment_means(x: Tensor, mask: Tensor | None, num_segments: int) -> Landmarks:
    """Means of `num_segments` segments of the valid rows of x (B, H, n, P), whose lengths differ by at most one.

    With fewer valid rows than segments, each row is a segment and the remaining slots are empty.
    """
    batch, heads, length, features = x.shape
    if num_segments == 0 or length == 0:
        empty = torch.zeros(batch, 1, num_segments, dtype=torch.bool, device=x.device)
        return Landmarks(x.new_zeros(batch, heads, num_segments, features), empty)
    if mask is None and not is_variable(length) and length % num_segments == 0:
        return Landmarks(x.unflatten(2, (num_segments, -1)).mean(3))
    rank = valid_ranks(mask, batch, length, x.device)
    sums, sizes = segment_sums(x, mask, rank, count_valid(mask, x), num_segments)
    return Landmarks(sums / sizes.clamp(min=1)[:, None, :, None], (sizes > 0)[:, None])


def segment_sums(
    x: Tensor, mask: Tensor | None, rank: Tensor, count: Tensor, num_segments: int
) -> tuple[Tensor, Tensor]:
    """The sums (B, H, m, P) and the sizes (B, m) of m segments of the valid rows of x (B, H, n, P), each row with its
    rank (B, n) among `count` (B, 1) valid rows, of which x may be only a part."""
    batch, heads, _, features = x.shape
    used = count.clamp(max=num_segments)
    segment = torch.div(rank * used, count.clamp(min=1), rounding_mode="floor").clamp(0, num_segments - 1)
    member = torch.ones_like(rank, dtype=x.dtype) if mask is None else mask.to(x.dtype)
    index = segment[:, None, :, None].expand_as(x)
    sums = x.new_zeros(batch, heads, num_segments, features).scatter_add(2, index, x * member[:, None, :, None])
    sizes = x.new_zeros(batch, num_segments).scatter_add(1, segment, member)
    return sums, sizes


def _scale_to(noise: Tensor, count: Tensor) -> Tensor:
    """Uniform numbers (k,) to ranks below count (B, 1): (B, k)."""
    rank = (noise * count).long()
    return torch.minimum(rank, (count - 1).clamp(min=0))
