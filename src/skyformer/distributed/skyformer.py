"""Skyformer over the pieces of a sequence: what travels does not grow with its length.

Rank r holds Q_r, K_r and V_r. Per head, with d landmarks:

    W  = the landmark rows, each from the rank that owns it               d x P    travels
    u  = (kappa(W, W) + gamma I)^-1 sum_r kappa(W, K_r) V_r               d x Pv   travels, before the solve
    O_r = kappa(Q_r, W) u                                                 nothing travels

and in the backward pass the gradients of the same two. Which rows are landmarks depends on the seed and on the number
of valid rows only, so ranks agree on them by exchanging these numbers, and one process would draw the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from skyformer.checks import as_bool, check_finite_inputs, check_masks, check_query_key_value
from skyformer.distributed.agreement import RANDOM_STATE, Statement, agree, random_state
from skyformer.distributed.collectives import Group, Ranks
from skyformer.errors import ShapeError, UnsupportedError
from skyformer.functional import GAMMA, SkyformerSettings, attend_skyformer, refuse_causal
from skyformer.landmarks import (
    Candidates,
    CustomSampler,
    Landmarks,
    PaperSampler,
    QuerySampler,
    Sampler,
    SegmentMeansSampler,
    StratifiedSampler,
    UniformSampler,
    landmark_rows,
    take_rows,
)
from skyformer.landmarks.rows import count_valid, nth_valid, valid_ranks
from skyformer.landmarks.samplers import segment_sums
from skyformer.landmarks.whole import WholeSequence
from skyformer.ops.kernels import Kernel
from skyformer.ops.noise import RandomSource
from skyformer.ops.precision import at_least_float32
from skyformer.ops.products import MEMORY_BUDGET
from skyformer.ops.solve import Solver

_BY_NUMBER_OF_ROWS = (StratifiedSampler, UniformSampler, PaperSampler, QuerySampler)
"""Samplers that look at the number of valid rows only."""


def skyformer_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: Group = None,
    num_landmarks: int = 128,
    landmarks: str | Sampler | CustomSampler | Tensor = "stratified",
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    is_causal: bool = False,
    gamma: float = GAMMA,
    solver: str | Solver = "cholesky",
    scale: float | None = None,
    kernel: str | Kernel = "gaussian",
    generator: torch.Generator | None = None,
    memory_budget: int = MEMORY_BUDGET,
    check_finite: bool = False,
) -> Tensor:
    """`skyformer.skyformer_attention` of a sequence of which each rank holds a contiguous piece, in rank order.

    The output and all gradients are those of one process with the whole sequence and the same seed. Every rank must
    call it, and its backward pass, with the same options; pieces may differ in length, and be empty.

    Args:
        query: this rank's queries (B, H, L_r, P). key: (B, H, S_r, P). value: (B, H, S_r, Pv).
        group: the ranks that share the sequence: a ProcessGroup, one dimension of a DeviceMesh, or None for all.
        landmarks: the name of a sampler ("stratified", "uniform", "paper", "queries", "segment_means"), a `Sampler` of
            these kinds, or row numbers (B, d) or (B, H, d) of the whole [Q; K], the same on all ranks.
        key_mask: bool (B, S_r). query_mask: bool (B, L_r); `key_mask` by default when all ranks have L_r == S_r.
        generator: source of the landmarks; it must be in the same state on all ranks, as torch's global one must be.

    The other arguments are those of `skyformer.skyformer_attention`.

    Returns:
        This rank's piece of the output: (B, H, L_r, Pv).
    """

    def checked() -> SkyformerSettings:
        check_query_key_value(query, key, value)
        refuse_causal(is_causal)
        check_masks(query, key, key_mask, query_mask)
        if check_finite:
            check_finite_inputs(query=query, key=key, value=value)
        return SkyformerSettings.checked(
            num_landmarks=num_landmarks,
            landmarks=landmarks,
            gamma=gamma,
            solver=solver,
            scale=scale,
            kernel=kernel,
            memory_budget=memory_budget,
        )

    masks = as_bool(key_mask), as_bool(query_mask)
    return attend_pieces(Ranks.of(group), query, key, value, *masks, checked, generator)


def attend_pieces(
    ranks: Ranks,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    query_mask: Tensor | None,
    checked: Callable[[], SkyformerSettings],
    source: RandomSource = None,
) -> Tensor:
    """`skyformer_attention`; `checked` returns the settings, and may raise an error that all ranks then raise."""
    settings: SkyformerSettings | None = None

    def state() -> Statement:
        nonlocal settings
        settings = checked()
        check_sampler(settings.landmarks)
        options = {name: getattr(settings, name) for name in settings.__dataclass_fields__}
        drawn = isinstance(settings.landmarks, _BY_NUMBER_OF_ROWS)
        given = {"key_mask is given": key_mask is not None, "query_mask is given": query_mask is not None}
        return Statement(
            {
                **common_facts(query, key, value),
                **options,
                **given,
                RANDOM_STATE: random_state(source) if drawn else "",
            },
            (query.shape[2], key.shape[2]),
        )

    num_queries, num_keys = agree(ranks, "skyformer_attention", state, query.device)
    assert settings is not None
    if query_mask is None and key_mask is not None:
        query_mask = _default_query_mask(num_queries, num_keys, key_mask)
    pieces = Pieces(ranks, num_queries, num_keys, _count_valid(ranks, query, key, query_mask, key_mask))
    return attend_skyformer(query, key, value, key_mask, query_mask, settings, source, pieces)


def common_facts(query: Tensor, key: Tensor, value: Tensor) -> dict[str, object]:
    """What must be the same on all ranks for every attention."""
    grads = tuple(x.requires_grad and torch.is_grad_enabled() for x in (query, key, value))
    return {
        "the batch size": query.shape[0],
        "the number of heads": query.shape[1],
        "the head dim": query.shape[-1],
        "the value dim": value.shape[-1],
        "the dtype": query.dtype,
        "the device": query.device.type,
        "whether query, key and value need gradients": grads,
    }


def check_sampler(sampler: Sampler | CustomSampler | Tensor) -> None:
    """Refuse samplers that look at the values of all rows."""
    if isinstance(sampler, Tensor | SegmentMeansSampler) or type(sampler) in _BY_NUMBER_OF_ROWS:
        return
    name = getattr(sampler, "name", None) or getattr(sampler, "__name__", type(sampler).__name__)
    known = ", ".join(each.name for each in (*_BY_NUMBER_OF_ROWS, SegmentMeansSampler))
    raise UnsupportedError(
        f"landmarks={name!r} is not supported for a sequence in pieces: it looks at the values of all rows, which no "
        f"rank holds, and collecting them would make the traffic grow with the length. Use {known}, or row numbers"
    )


def _default_query_mask(num_queries: tuple[int, ...], num_keys: tuple[int, ...], key_mask: Tensor) -> Tensor | None:
    """`key_mask` if queries and keys are the same tokens, as in one process."""
    if num_queries == num_keys:
        return key_mask
    if sum(num_queries) == sum(num_keys):
        raise ShapeError(
            "query_mask must be given if queries and keys are equally many but divided differently among the ranks; "
            f"got pieces of {num_queries} queries and {num_keys} keys"
        )
    return None


def _count_valid(
    ranks: Ranks, query: Tensor, key: Tensor, query_mask: Tensor | None, key_mask: Tensor | None
) -> Tensor | None:
    """How many queries and keys are valid on each rank: (R, B, 2), or None without masks."""
    if query_mask is None and key_mask is None:
        return None
    own = torch.cat([count_valid(query_mask, query), count_valid(key_mask, key)], -1)
    return torch.stack(ranks.gather(own, "exchange of the numbers of valid rows"))


@dataclass(frozen=True)
class Pieces(WholeSequence):
    """A sequence whose rows are divided among ranks.

    num_queries, num_keys: the lengths of the pieces of all ranks.
    valid: how many queries and keys of each are valid (R, B, 2); None if there are no masks.
    """

    ranks: Ranks
    num_queries: tuple[int, ...]
    num_keys: tuple[int, ...]
    valid: Tensor | None

    @property
    def first_query(self) -> int:
        """The number of this rank's first query in the whole sequence."""
        return sum(self.num_queries[: self.ranks.rank])

    @property
    def first_key(self) -> int:
        return sum(self.num_keys[: self.ranks.rank])

    def candidates(self, own: Candidates) -> Candidates:
        return PieceCandidates(**vars(own), pieces=self)

    def draw(
        self, sampler: Sampler, candidates: Candidates, num_landmarks: int, source: RandomSource
    ) -> Tensor | Landmarks:
        if isinstance(sampler, SegmentMeansSampler):
            return self._segment_means(candidates, num_landmarks)
        return sampler(candidates, num_landmarks, source)

    def landmark_rows(self, query: Tensor, key: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`rows` are numbers in the whole [Q; K]; each rank contributes those that it owns."""
        own = self.own_rows(rows)
        query, key, points = landmark_rows(query, key, own)
        return query, key, self._each_from_its_owner(points, own >= 0)

    def own_rows(self, rows: Tensor) -> Tensor:
        """Rows of the whole [Q; K] as rows of this rank's [Q; K]; -1 for those of other ranks."""
        total, mine = sum(self.num_queries), self.num_queries[self.ranks.rank]
        query_row, key_row = rows - self.first_query, rows - total - self.first_key
        of_query = (query_row >= 0) & (query_row < mine) & (rows < total)
        of_key = (key_row >= 0) & (key_row < self.num_keys[self.ranks.rank])
        return torch.where(of_query, query_row, torch.where(of_key, mine + key_row, -1))

    def key_rows(self, x: Tensor, numbers: Tensor) -> Tensor:
        row = numbers - self.first_key
        own = (numbers >= 0) & (row >= 0) & (row < x.shape[2])
        return self._each_from_its_owner(take_rows(x, row.clamp(0, max(x.shape[2] - 1, 0))), own)

    def _each_from_its_owner(self, x: Tensor, own: Tensor) -> Tensor:
        """x (B, H, d, P) with every row from the rank for which `own` (B, 1 or H, d) is True there."""
        mine = at_least_float32(x).masked_fill(~own.unsqueeze(-1), 0)
        return self.ranks.sum(mine, "exchange of landmarks").to(x.dtype)

    def mean(self, x: Tensor, mask: Tensor | None) -> Tensor:
        valid = x if mask is None else x.masked_fill(~mask[:, None, :, None], 0)
        count = count_valid(mask, x).to(x.dtype)[:, None, :, None].expand(-1, x.shape[1], -1, -1)
        both = self.sum(torch.cat([valid.sum(2, keepdim=True), count], -1))
        return both[..., :-1] / both[..., -1:].clamp(min=1)

    def sum(self, x: Tensor) -> Tensor:
        return self.ranks.sum(x)

    def largest(self, x: Tensor) -> Tensor:
        return self.ranks.largest(x)

    def largest_number(self, x: float) -> float:
        return float(self.ranks.largest(torch.tensor(x, dtype=torch.float64, device="cpu")))

    def span(self, side: int, mask: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor]:
        """For the queries (side 0) or keys (side 1) of each example (B, 1): how many valid rows are on lower ranks, and
        on all ranks."""
        if self.valid is None:
            lengths = (self.num_queries, self.num_keys)[side]
            before, total = sum(lengths[: self.ranks.rank]), sum(lengths)
            full = torch.full((x.shape[0], 1), total, device=x.device)
            return torch.full_like(full, before), full
        counts = self.valid[..., side, None]
        return counts[: self.ranks.rank].sum(0), counts.sum(0)

    def _segment_means(self, candidates: Candidates, num_landmarks: int) -> Landmarks:
        """As `segment_means`: each rank adds up its rows, and the sums are added."""
        found, active = [], []
        parts = ((candidates.query, candidates.query_mask), (candidates.key, candidates.key_mask))
        for side, ((x, mask), segments) in enumerate(
            zip(parts, (num_landmarks // 2, num_landmarks - num_landmarks // 2), strict=True)
        ):
            before, total = self.span(side, mask, x)
            rank = before + valid_ranks(mask, x.shape[0], x.shape[2], x.device)
            sums, sizes = segment_sums(at_least_float32(x), mask, rank, total, segments)
            both = self.sum(torch.cat([sums, sizes[:, None, :, None].expand(-1, x.shape[1], -1, 1)], -1))
            found.append((both[..., :-1] / both[..., -1:].clamp(min=1)).to(x.dtype))
            active.append(both[:, :1, :, -1] > 0)
        return Landmarks(torch.cat(found, 2), torch.cat(active, -1))


@dataclass(frozen=True)
class PieceCandidates(Candidates):
    """The candidates of a sequence in pieces: tensors and masks are this rank's, numbers and rows of the whole."""

    pieces: Pieces = field(kw_only=True)

    @property
    def num_queries(self) -> int:
        return sum(self.pieces.num_queries)

    @property
    def num_rows(self) -> int:
        return self.num_queries + sum(self.pieces.num_keys)

    def valid_queries(self) -> Tensor:
        return self.pieces.span(0, self.query_mask, self.query)[1]

    def valid_keys(self) -> Tensor:
        return self.pieces.span(1, self.key_mask, self.key)[1]

    def query_row(self, rank: Tensor) -> Tensor:
        return self._row(0, rank, self.query, self.query_mask, self.pieces.first_query)

    def key_row(self, rank: Tensor) -> Tensor:
        return self.num_queries + self._row(1, rank, self.key, self.key_mask, self.pieces.first_key)

    def _row(self, side: int, rank: Tensor, x: Tensor, mask: Tensor | None, first: int) -> Tensor:
        """The positions of the valid rows of these ranks (B, k); without a mask they are the ranks themselves, else
        only the owner knows."""
        if mask is None:
            return rank
        assert self.pieces.valid is not None
        before, _ = self.pieces.span(side, mask, x)
        here = rank - before
        own = (here >= 0) & (here < self.pieces.valid[self.pieces.ranks.rank, :, side, None])
        position = torch.where(own, first + nth_valid(mask, here.clamp(min=0)), 0)
        return self.pieces.ranks.sum(position, "exchange of row numbers")
