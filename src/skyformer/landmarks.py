"""Landmarks: which rows of [Q; K], or which points near them, the Nystrom approximation stands on.

A sampler is an object that turns queries and keys into row numbers: row i < L is query i, row L + j is key j, and -1
is a slot left empty. A sampler draws one seed and derives every number from the seed and the rank of a row among the
valid rows of its example, so an example keeps its landmarks whatever it is batched with and however far it is padded.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from skyformer.checks import check_at_least, check_positive
from skyformer.errors import InputError, ShapeError, UnknownNameError
from skyformer.ops.kernels import Kernel
from skyformer.ops.noise import draw_seed, uniform_noise


@dataclass(frozen=True)
class Candidates:
    """What a sampler may look at: query (B, H, L, P), key (B, H, S, P), their masks, the kernel and its scale; and
    whether the rows of the result are normalised, as softmax attention's are."""

    query: Tensor
    key: Tensor
    query_mask: Tensor | None
    key_mask: Tensor | None
    kernel: Kernel
    scale: float
    normalised: bool = False

    @property
    def num_queries(self) -> int:
        return self.query.shape[2]

    @property
    def device(self) -> torch.device:
        return self.query.device

    def valid_queries(self) -> Tensor:
        """(B, 1): how many queries of each example are real."""
        return _count(self.query_mask, self.query)

    def valid_keys(self) -> Tensor:
        return _count(self.key_mask, self.key)

    def query_row(self, rank: Tensor) -> Tensor:
        """The row of the rank-th valid query; rank (B, k)."""
        return _nth_valid(self.query_mask, rank)

    def key_row(self, rank: Tensor) -> Tensor:
        return self.num_queries + _nth_valid(self.key_mask, rank)


@dataclass(frozen=True)
class Landmarks:
    """Points (B, H, d, P), and which slots hold one: active (B, 1 or H, d), None when all do."""

    points: Tensor
    active: Tensor | None = None

    def all_active(self) -> Tensor:
        """`active`, spelt out."""
        if self.active is not None:
            return self.active
        batch, _, count, _ = self.points.shape
        return torch.ones(batch, 1, count, dtype=torch.bool, device=self.points.device)


class Sampler(abc.ABC):
    """A strategy for choosing landmarks."""

    name: ClassVar[str]

    @abc.abstractmethod
    def __call__(
        self, candidates: Candidates, num_landmarks: int, generator: torch.Generator | None
    ) -> Tensor | Landmarks:
        """Rows (B, d) or (B, H, d) of [Q; K], -1 for an empty slot; or `Landmarks` of its own."""


@dataclass(frozen=True)
class UniformSampler(Sampler):
    """The paper's definition: independent, with replacement, over the valid rows of [Q; K]. The heads share their
    rows, or with `per_head` each draws its own."""

    name = "uniform"
    per_head: bool = False

    def __call__(self, candidates: Candidates, num_landmarks: int, generator: torch.Generator | None) -> Tensor:
        draws = candidates.query.shape[1] if self.per_head else 1
        noise = uniform_noise(draw_seed(generator), 0, draws * num_landmarks, candidates.device)
        queries = candidates.valid_queries()
        total = queries + candidates.valid_keys()
        rank = _scale_to(noise, total)
        rows = torch.where(
            rank < queries, candidates.query_row(rank), candidates.key_row((rank - queries).clamp(min=0))
        )
        return rows.unflatten(-1, (draws, num_landmarks)) if self.per_head else rows


@dataclass(frozen=True)
class StratifiedSampler(Sampler):
    """Half the landmarks from Q and half from K; the valid rows are cut into equal strata and one is picked in each.
    No row repeats, and the variance is lower than with independent picks. The heads share their rows, or with
    `per_head` each draws its own."""

    name = "stratified"
    from_queries: ClassVar[float] = 0.5
    per_head: bool = False

    def __call__(self, candidates: Candidates, num_landmarks: int, generator: torch.Generator | None) -> Tensor:
        draws = candidates.query.shape[1] if self.per_head else 1
        noise = uniform_noise(draw_seed(generator), 0, draws * num_landmarks, candidates.device)
        queries, keys = candidates.valid_queries(), candidates.valid_keys()
        share = query_share(queries, keys, num_landmarks, self.from_queries)
        slot = torch.arange(num_landmarks, device=candidates.device).repeat(draws).expand(queries.shape[0], -1)
        from_query = slot < share
        query_rank = _pick_in_stratum(slot, share, queries, noise)
        key_rank = _pick_in_stratum(slot - share, num_landmarks - share, keys, noise)
        rows = torch.where(from_query, candidates.query_row(query_rank), candidates.key_row(key_rank))
        return rows.unflatten(-1, (draws, num_landmarks)) if self.per_head else rows


@dataclass(frozen=True)
class QuerySampler(StratifiedSampler):
    """All landmarks from Q, as long as there are enough, one in each stratum: the output is exact, but for gamma, at
    the queries that are landmarks. The one to take for the softmax kernel, whose keys differ widely in weight."""

    name = "queries"
    from_queries = 1.0


@dataclass(frozen=True)
class ProbeSampler(Sampler):
    """Importance sampling: a query weighs sum_j kappa(q_i, k_j)^2 over a few random keys, a key likewise over random
    queries; half the landmarks come from each side, drawn by weight without replacement. O(num_probes n P).

    For softmax attention, whose rows are normalised, every query counts the same, and a key weighs the sum of its
    squared attention weights over the random queries."""

    name = "probe"
    num_probes: int = 32

    def __post_init__(self) -> None:
        check_at_least("num_probes", self.num_probes, 1)

    @torch.no_grad()
    def __call__(self, candidates: Candidates, num_landmarks: int, generator: torch.Generator | None) -> Tensor:
        seed = draw_seed(generator)
        query_weight, key_weight = self.weights(candidates, seed)
        best_queries = _draw_by_weight(query_weight, candidates.query_mask, num_landmarks, seed, 2)
        best_keys = _draw_by_weight(key_weight, candidates.key_mask, num_landmarks, seed, 3)
        share = query_share(candidates.valid_queries(), candidates.valid_keys(), num_landmarks)[:, None]
        slot = torch.arange(num_landmarks, device=candidates.device).expand(*candidates.query.shape[:2], -1)
        query_rows = _pad_slots(best_queries, num_landmarks)
        key_rows = _pad_slots(best_keys + candidates.num_queries, num_landmarks)
        return torch.where(slot < share, query_rows, key_rows.gather(-1, (slot - share).clamp(min=0)))

    def weights(self, candidates: Candidates, seed: int) -> tuple[Tensor, Tensor]:
        """Of the queries (B, H, L) and of the keys (B, H, S)."""
        query, key = candidates.query, candidates.key
        if candidates.normalised:
            return torch.ones_like(query[..., 0]), self._attended(candidates, seed)
        return (
            self._weight(candidates, query, key, candidates.key_mask, seed, 0),
            self._weight(candidates, key, query, candidates.query_mask, seed, 1),
        )

    def _weight(
        self, candidates: Candidates, x: Tensor, others: Tensor, mask: Tensor | None, seed: int, stream: int
    ) -> Tensor:
        """sum_j kappa(x_i, y_j)^2 over random valid rows y_j of `others`: (B, H, n)."""
        probes = self._probes(others, mask, seed, stream)
        return candidates.kernel.matrix(x, probes, candidates.scale).square_().sum(-1)

    def _attended(self, candidates: Candidates, seed: int) -> Tensor:
        """sum_i softmax(q_i K^T)_j^2 over random valid queries: (B, H, S)."""
        probes = self._probes(candidates.query, candidates.query_mask, seed, 1)
        scores = candidates.scale * (probes @ candidates.key.mT)
        if candidates.key_mask is not None:
            scores = scores.masked_fill(~candidates.key_mask[:, None, None], torch.finfo(scores.dtype).min)
        return scores.softmax(-1).square_().sum(-2)

    def _probes(self, others: Tensor, mask: Tensor | None, seed: int, stream: int) -> Tensor:
        """`num_probes` random valid rows of `others`."""
        noise = uniform_noise(seed, stream, self.num_probes, others.device)
        rank = _scale_to(noise, _count(mask, others))
        return take_rows(others, _nth_valid(mask, rank)[:, None])


@dataclass(frozen=True)
class LeverageSampler(Sampler):
    """Ridge leverage scores of C-bar (Theorem 1), l_i = [C-bar (C-bar + lambda I)^-1]_ii, drawn without replacement.

    Exact while [Q; K] has at most `exact_limit` rows, else recursive (Musco and Musco, 2017): each level scores twice
    as many rows as the one before with the landmarks chosen there. `ridge` is lambda; by default the mean of the
    eigenvalues beyond the d/2 largest, times their number over d/2, as in their fixed-size algorithm."""

    name = "leverage"
    ridge: float | None = None
    exact_limit: int = 512

    def __post_init__(self) -> None:
        if self.ridge is not None:
            check_positive("ridge", self.ridge)
        check_at_least("exact_limit", self.exact_limit, 1)

    @torch.no_grad()
    def __call__(self, candidates: Candidates, num_landmarks: int, generator: torch.Generator | None) -> Tensor:
        seed = draw_seed(generator)
        points = torch.cat([candidates.query, candidates.key], 2)
        valid = joint_mask(candidates)
        length = points.shape[2]
        if length <= self.exact_limit:
            return self._exact_rows(candidates, points, valid, num_landmarks, seed)
        rows = _recursive_leverage_rows(candidates, points, valid, num_landmarks, self.ridge, seed)
        short = valid.sum(-1) <= self.exact_limit
        if not short.is_meta and not bool(short.any()):
            return rows
        # How an example is treated depends on its own length, not on the batch's.
        leading = _nth_valid(valid, torch.arange(self.exact_limit, device=points.device).expand(valid.shape[0], -1))
        inside = torch.arange(self.exact_limit, device=points.device) < valid.sum(-1, keepdim=True)
        ranks = self._exact_rows(candidates, take_rows(points, leading[:, None]), inside, num_landmarks, seed)
        exact = leading[:, None].expand(-1, points.shape[1], -1).gather(-1, ranks)
        exact, rows = _pad_slots(exact, num_landmarks), _pad_slots(rows, num_landmarks)
        return torch.where(short[:, None, None], exact, rows)

    def _exact_rows(
        self, candidates: Candidates, points: Tensor, valid: Tensor, num_landmarks: int, seed: int
    ) -> Tensor:
        gram = candidates.kernel.matrix(points, points, candidates.scale)
        scores = exact_leverage_scores(gram, valid, num_landmarks, self.ridge)
        return _draw_by_weight(scores, valid, num_landmarks, seed, 0)


@dataclass(frozen=True)
class SegmentMeansSampler(Sampler):
    """The means of d/2 segments of the valid queries and d/2 of the valid keys, as Nystromformer has them: points that
    need not be rows."""

    name = "segment_means"

    def __call__(self, candidates: Candidates, num_landmarks: int, generator: torch.Generator | None) -> Landmarks:
        of_queries = segment_means(candidates.query, candidates.query_mask, num_landmarks // 2)
        of_keys = segment_means(candidates.key, candidates.key_mask, num_landmarks - num_landmarks // 2)
        return Landmarks(
            torch.cat([of_queries.points, of_keys.points], 2),
            torch.cat([of_queries.all_active(), of_keys.all_active()], -1),
        )


SAMPLERS: dict[str, Sampler] = {
    sampler.name: sampler
    for sampler in (
        UniformSampler(),
        StratifiedSampler(),
        QuerySampler(),
        ProbeSampler(),
        LeverageSampler(),
        SegmentMeansSampler(),
    )
}

_OURS = tuple(type(sampler) for sampler in SAMPLERS.values())

CustomSampler = Callable[[Candidates, int, torch.Generator | None], Tensor | Landmarks]


def get_sampler(sampler: str | Sampler | CustomSampler) -> Sampler | CustomSampler:
    """A sampler by name with its default settings, or the callable itself."""
    if callable(sampler):
        return sampler
    if not isinstance(sampler, str) or sampler not in SAMPLERS:
        raise UnknownNameError("landmark sampler", sampler, SAMPLERS)
    return SAMPLERS[sampler]


def is_ours(sampler: object) -> bool:
    """Whether the rows it returns need no check, and fill every slot wherever there are enough valid ones."""
    return type(sampler) in _OURS


def check_points_and_slots(drawn: Landmarks, candidates: Candidates) -> Landmarks:
    """Landmarks that a callable made itself, or an error that says what is wrong with them."""
    batch, heads, _, features = candidates.query.shape
    points, active = drawn.points, drawn.active
    fits = points.dim() == 4 and (*points.shape[:2], points.shape[3]) == (batch, heads, features)
    if not fits or points.shape[2] == 0:
        raise ShapeError(
            f"points of the landmarks must have shape ({batch}, {heads}, d, {features}) with d >= 1; "
            f"got {tuple(points.shape)}"
        )
    if points.dtype != candidates.query.dtype:
        raise InputError(f"points of the landmarks must be {candidates.query.dtype}; got {points.dtype}")
    slots = points.shape[2]
    if active is not None and (
        active.dtype != torch.bool or active.shape not in ((batch, 1, slots), (batch, heads, slots))
    ):
        raise ShapeError(
            f"active of the landmarks must be bool of shape ({batch}, 1 or {heads}, {slots}); "
            f"got {active.dtype} of shape {tuple(active.shape)}"
        )
    return drawn


def check_rows(rows: Tensor, batch: int, heads: int, num_rows: int) -> Tensor:
    """Row numbers as (B, 1 or H, d), or an error that says what is wrong with them."""
    if not isinstance(rows, Tensor):
        raise InputError(f"landmarks must come as a tensor of row numbers or as `Landmarks`; got {type(rows).__name__}")
    if rows.dtype != torch.int64:
        raise InputError(f"landmarks must be row numbers of dtype int64; got {rows.dtype}")
    fits = rows.dim() in (2, 3) and rows.shape[0] == batch and (rows.dim() == 2 or rows.shape[1] in (1, heads))
    if not fits or rows.shape[-1] == 0:
        raise ShapeError(
            f"landmarks must have shape ({batch}, d) or ({batch}, {heads}, d) with d >= 1; got {tuple(rows.shape)}"
        )
    rows = rows if rows.dim() == 3 else rows.unsqueeze(1)
    if not rows.is_meta and not torch.compiler.is_compiling() and rows.numel() > 0:
        low, high = (int(bound) for bound in rows.aminmax())
        if low < -1 or high >= num_rows:
            raise InputError(
                f"landmarks must lie between 0 and {num_rows - 1}, the rows of [Q; K] (-1: an empty slot); "
                f"got numbers from {low} to {high}"
            )
    return rows


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Rows (B, 1 or H, k) of x (B, H, n, P): (B, H, k, P)."""
    if x.shape[2] == 0:
        return x.new_zeros(*x.shape[:2], rows.shape[-1], x.shape[-1])
    batch, head = _batch_and_head(x)
    return x[batch, head, rows]


def _batch_and_head(x: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers of the examples (B, 1, 1) and heads (H, 1) of x, to index it with whatever its layout."""
    batch, heads = (torch.arange(size, device=x.device) for size in x.shape[:2])
    return batch[:, None, None], heads[:, None]


def landmark_rows(query: Tensor, key: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Q, K and the rows (B, 1 or H, d) of [Q; K], without building [Q; K].

    The Q and K that come back are the ones to go on with, each in one product: their gradients then take up
    the landmarks' in place, where plain indexing would allocate, clear and add two more tensors of their size.
    """
    taken: tuple[Tensor, Tensor, Tensor] = _LandmarkRows.apply(query, key, rows)
    return taken


class _LandmarkRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(rows)
        ctx.num_queries = query.shape[2]
        of_query, of_key = _split_rows(rows, query.shape[2], key.shape[2])
        points = torch.where((rows < query.shape[2])[..., None], take_rows(query, of_query), take_rows(key, of_key))
        return query.view_as(query), key.view_as(key), points

    @staticmethod
    @once_differentiable
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
    """Row numbers of Q and of K, in range where they belong to the other."""
    return rows.clamp(0, max(num_queries - 1, 0)), (rows - num_queries).clamp(0, max(num_keys - 1, 0))


def _add_rows(grad: Tensor, rows: Tensor, addend: Tensor) -> Tensor:
    if grad.shape[2] == 0:
        return grad
    index = (*_batch_and_head(grad), rows)
    if torch.compiler.is_compiling():
        return grad.index_put(index, addend, accumulate=True)
    # In place: the gradient comes fresh from the product, and nobody else holds it.
    return grad.index_put_(index, addend, accumulate=True)


def query_share(queries: Tensor, keys: Tensor, num_landmarks: int, share: float = 0.5) -> Tensor:
    """How many landmarks fall to the queries: half, or `share`, unless one side has too few rows to fill its part."""
    wanted = int(share * num_landmarks)
    at_least = num_landmarks - keys
    return torch.minimum(torch.maximum(torch.full_like(queries, wanted), at_least), queries)


def segment_means(x: Tensor, mask: Tensor | None, num_segments: int) -> Landmarks:
    """Means of `num_segments` equal runs of the valid rows of x (B, H, n, P), whose lengths differ by at most one.

    With fewer valid rows than segments, each row is a segment and the slots left over are empty.
    """
    batch, heads, length, features = x.shape
    if num_segments == 0 or length == 0:
        empty = torch.zeros(batch, 1, num_segments, dtype=torch.bool, device=x.device)
        return Landmarks(x.new_zeros(batch, heads, num_segments, features), empty)
    if mask is None and length % num_segments == 0:
        return Landmarks(x.unflatten(2, (num_segments, -1)).mean(3))
    count = _count(mask, x)
    used = count.clamp(max=num_segments)
    rank = _ranks(mask, batch, length, x.device)
    segment = torch.div(rank * used, count.clamp(min=1), rounding_mode="floor").clamp(0, num_segments - 1)
    member = torch.ones_like(rank, dtype=x.dtype) if mask is None else mask.to(x.dtype)
    index = segment[:, None, :, None].expand_as(x)
    sums = x.new_zeros(batch, heads, num_segments, features).scatter_add(2, index, x * member[:, None, :, None])
    sizes = x.new_zeros(batch, num_segments).scatter_add(1, segment, member)
    return Landmarks(sums / sizes.clamp(min=1)[:, None, :, None], (sizes > 0)[:, None])


def exact_leverage_scores(gram: Tensor, valid: Tensor, num_landmarks: int, ridge: float | None) -> Tensor:
    """diag(K (K + lambda I)^-1) for K (B, H, n, n) restricted to the valid rows (B, n): (B, H, n)."""
    pair = valid[:, None, :, None] & valid[:, None, None, :]
    values, vectors = torch.linalg.eigh(gram.masked_fill(~pair, 0).double())
    values = values.clamp(min=0)
    ridges = _tail_ridge(values, num_landmarks) if ridge is None else torch.full_like(values[..., :1], ridge)
    scores = vectors.square() @ (values / (values + ridges)).unsqueeze(-1)
    return scores.squeeze(-1).to(gram.dtype)


def _tail_ridge(eigenvalues: Tensor, num_landmarks: int) -> Tensor:
    """(1/k) sum of all but the k = d/2 largest of the ascending eigenvalues (..., n): (..., 1)."""
    k = max(1, num_landmarks // 2)
    tail = eigenvalues[..., :-k].sum(-1, keepdim=True) / k
    # All of the spectrum may lie in the first k; a ridge of zero would make every score one half or NaN.
    floor = eigenvalues.sum(-1, keepdim=True) * torch.finfo(torch.float32).eps
    return torch.maximum(tail, floor).clamp(min=torch.finfo(torch.float32).tiny)


def _recursive_leverage_rows(
    candidates: Candidates, points: Tensor, valid: Tensor, num_landmarks: int, ridge: float | None, seed: int
) -> Tensor:
    """Rows (B, H, d), from nested random subsets: the first d, then twice as many, ... , then all rows."""
    batch, heads, length, _ = points.shape
    noise = uniform_noise(seed, 0, length, points.device)[_ranks(valid, batch, length, points.device)]
    order = torch.where(valid, noise, 2.0).argsort(-1)
    count = valid.sum(-1, keepdim=True)
    levels = max(0, math.ceil(math.log2(length / num_landmarks)))
    chosen = order[:, None, :num_landmarks].expand(-1, heads, -1)
    inclusion = torch.ones_like(chosen, dtype=points.dtype)
    for level in range(levels - 1, -1, -1):
        # An example shorter than the batch's longest stays at its d first rows until its own levels begin.
        size = torch.maximum(-(-count // 2**level), count.clamp(max=num_landmarks))
        subset = order[:, : max(-(-length // 2**level), min(length, num_landmarks))]
        inside = torch.arange(subset.shape[1], device=points.device) < size
        scores = _nystrom_leverage(candidates, points, chosen, inclusion, subset, inside, num_landmarks, ridge)
        picked = _draw_by_weight(scores, inside, num_landmarks, seed, level + 1)
        weights, total = scores.gather(-1, picked), scores.sum(-1, keepdim=True)
        untouched = (size <= num_landmarks)[:, None]
        inclusion = torch.where(untouched, 1.0, (num_landmarks * weights / total.clamp(min=1e-30)).clamp(1e-6, 1))
        chosen = subset[:, None].expand(-1, heads, -1).gather(-1, picked)
    return chosen


def _nystrom_leverage(
    candidates: Candidates,
    points: Tensor,
    chosen: Tensor,
    inclusion: Tensor,
    subset: Tensor,
    inside: Tensor,
    num_landmarks: int,
    ridge: float | None,
) -> Tensor:
    """(kappa_ii - k_i (K_S + lambda P)^-1 k_i^T) / lambda for the rows of `subset` (B, m), zero where not `inside`
    (B, m), with P the probabilities (B, H, d) with which the chosen rows S were included: (B, H, m)."""
    kernel, scale = candidates.kernel, candidates.scale
    # In float64 from the start: float32 would leave the matrix indefinite by more than a small ridge mends.
    landmarks = take_rows(points, chosen).double()
    root = inclusion.double().rsqrt().unsqueeze(-1)
    values, vectors = torch.linalg.eigh(kernel.matrix(landmarks, landmarks, scale) * root * root.mT)
    values = values.clamp(min=0)

    def measure(piece: Tensor) -> tuple[Tensor, Tensor]:
        rows = take_rows(points, piece[:, None])
        block = kernel.matrix(landmarks.to(points.dtype), rows, scale).double()
        return (vectors.mT @ block.mul_(root)).square_(), kernel_diagonal(kernel, rows, scale).double()

    def scores(squares: Tensor, own: Tensor, lam: Tensor) -> Tensor:
        explained = (1 / (values + lam)).unsqueeze(-2) @ squares
        return ((own - explained.squeeze(-2)).clamp_(min=0) / lam).clamp_(max=1)

    if ridge is None:
        # `subset` is in random order, so that its first rows stand for all.
        few = min(subset.shape[1], 4 * num_landmarks)
        present = inside[:, None, :few].double()
        count = inside.sum(-1)[:, None, None] / present.sum(-1, keepdim=True).clamp(min=1)
        lam = _tail_ridge(values, num_landmarks)
        measured = measure(subset[:, :few])
        for _ in range(_RIDGE_ROUNDS):
            total = count * (scores(*measured, lam) * present).sum(-1, keepdim=True)
            lam = lam * (total / num_landmarks).clamp(min=1)
    else:
        lam = torch.full_like(values[..., :1], ridge)
    found = torch.cat([scores(*measure(piece), lam) for piece in subset.split(4096, 1)], -1)
    return found.masked_fill(~inside[:, None], 0).to(points.dtype)


_RIDGE_ROUNDS = 12
"""How often the ridge is raised until the scores add up to no more than d, as true ones do. One estimated from a sample
that missed what is rare is far too small: every score would be one, and the draw no better than uniform."""


def kernel_diagonal(kernel: Kernel, x: Tensor, scale: float) -> Tensor:
    """kappa(x_i, x_i) for x (..., n, P): (..., n)."""
    return kernel.matrix(x.unsqueeze(-2), x.unsqueeze(-2), scale)[..., 0, 0]


def _draw_by_weight(weight: Tensor, mask: Tensor | None, count: int, seed: int, stream: int) -> Tensor:
    """Up to `count` row numbers without replacement (the Gumbel top-k trick), best first; weight (B, H, n)."""
    batch, _, length = weight.shape
    noise = uniform_noise(seed, stream, length, weight.device)
    gumbel = -torch.log(-torch.log(noise.clamp(min=1e-7, max=1 - 1e-7)))
    # The floor keeps rows of vanishing weight ahead of masked ones.
    score = weight.clamp(min=1e-30).log() + gumbel[_ranks(mask, batch, length, weight.device)].unsqueeze(1)
    if mask is not None:
        score = score.masked_fill(~mask.unsqueeze(1), -math.inf)
    return score.topk(min(count, length), -1).indices


def _pad_slots(rows: Tensor, num_landmarks: int) -> Tensor:
    """Rows (..., k) to (..., d) with empty slots at the end."""
    return torch.nn.functional.pad(rows, (0, num_landmarks - rows.shape[-1]), value=-1)


def _pick_in_stratum(slot: Tensor, strata: Tensor, count: Tensor, noise: Tensor) -> Tensor:
    """One rank in [slot count / strata, (slot + 1) count / strata), both ends rounded down; slot (B, d)."""
    strata = strata.clamp(min=1)
    low = torch.div(slot * count, strata, rounding_mode="floor")
    high = torch.div((slot + 1) * count, strata, rounding_mode="floor")
    rank = low + ((high - low) * noise).long()
    return torch.minimum(rank.clamp(min=0), (count - 1).clamp(min=0))


def _scale_to(noise: Tensor, count: Tensor) -> Tensor:
    """Uniform numbers (k,) to ranks below count (B, 1): (B, k)."""
    rank = (noise * count).long()
    return torch.minimum(rank, (count - 1).clamp(min=0))


def _count(mask: Tensor | None, x: Tensor) -> Tensor:
    if mask is None:
        return torch.full((x.shape[0], 1), x.shape[2], device=x.device)
    return mask.sum(-1, keepdim=True)


def _ranks(mask: Tensor | None, batch: int, length: int, device: torch.device) -> Tensor:
    """The rank of each row among the valid ones (B, n); of no meaning at the others, but in range."""
    if mask is None:
        return torch.arange(length, device=device).expand(batch, -1)
    return (mask.cumsum(-1) - 1).clamp(min=0)


def _nth_valid(mask: Tensor | None, rank: Tensor) -> Tensor:
    if mask is None:
        return rank
    position = torch.searchsorted(mask.cumsum(-1), rank + 1)
    return position.clamp(max=max(mask.shape[1] - 1, 0))


def joint_mask(candidates: Candidates) -> Tensor:
    """Valid rows of [Q; K]: (B, L + S)."""
    sides = ((candidates.query_mask, candidates.query), (candidates.key_mask, candidates.key))
    return torch.cat(
        [torch.ones(x.shape[0], x.shape[2], dtype=torch.bool, device=x.device) if m is None else m for m, x in sides],
        -1,
    )
