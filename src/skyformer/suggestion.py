"""How many landmarks are enough: a number d for a given error, found without any matrix of the sequence's size.

The error is that of the score matrix in Theorem 1, |C - C~| / |C| in the spectral norm. Both norms are estimated on a
sample of rows and columns of C: row i is drawn with probability p_i and divided by sqrt(m p_i), columns likewise, with
probabilities half uniform and half in proportion to the `probe` weights, which estimate the squared norms. Such a
sample has the norm of the whole on average, however few the rows are that make it up.

Theorem 1 itself asks for a number in proportion to the statistical dimension of the completed matrix C-bar,
`statistical_dimension`. On trained heads that comes close to the number of rows, while far fewer landmarks give a small
error of C; so the error is measured, for more and more landmarks, rather than bounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from skyformer.checks import check_at_least, check_mask, check_positive, check_query_key_value, check_scale
from skyformer.errors import InputError, UnsupportedError
from skyformer.functional import GAMMA, skyformer_attention
from skyformer.kernels import Kernel, get_kernel
from skyformer.landmarks import (
    Candidates,
    CustomSampler,
    Landmarks,
    ProbeSampler,
    Sampler,
    get_sampler,
    landmark_rows,
    take_rows,
)
from skyformer.noise import draw_seed, uniform_noise

NUM_SAMPLES = 256
"""Rows, and columns, of the score matrix that the error is estimated on."""

NUM_DRAWS = 3
"""Draws of the landmarks that must all reach the error."""

_MARGIN = 1.0
"""The estimate must be below this share of epsilon, for it has a spread of its own."""

_SMALLEST = 8
_STEP = 2**0.5
_PROBES = 64
_POWER_STEPS = 12
_POWER_WIDTH = 8


@torch.no_grad()
def suggest_landmarks(
    query: Tensor,
    key: Tensor,
    epsilon: float,
    *,
    landmarks: str | Sampler | CustomSampler = "stratified",
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    gamma: float = GAMMA,
    scale: float | None = None,
    kernel: str | Kernel = "gaussian",
    share: float = 1.0,
    num_samples: int = NUM_SAMPLES,
    num_draws: int = NUM_DRAWS,
    generator: torch.Generator | None = None,
) -> int:
    """The least d on a grid of ratio sqrt(2) at which Skyformer's score matrix is within `epsilon` of the exact one.

    Args:
        query: (B, H, L, P). key: (B, H, S, P). Of a typical batch, say; every head of every example counts.
        epsilon: the bound on |C - C~| / |C|, spectral norms, between 0 and 1.
        landmarks, key_mask, query_mask, gamma, scale, kernel: as for `skyformer_attention`.
        share: how many of the heads must reach it, as a share of 1. A few heads that resist may ask for as many
            landmarks as all others together.
        num_samples: rows, and columns, that the error is estimated on; the cost is O(num_samples (L + S) P) and
            O(num_draws (num_samples d + d^2) (P + d)) for the largest d tried.
        num_draws: draws of the landmarks that must all reach it.
        generator: where all draws come from; torch's own by default.

    Returns:
        d, at most L + S, where Skyformer is exact.
    """
    check_share(share)
    reached = landmarks_by_head(
        query,
        key,
        epsilon,
        landmarks=landmarks,
        key_mask=key_mask,
        query_mask=query_mask,
        gamma=gamma,
        scale=scale,
        kernel=kernel,
        num_samples=num_samples,
        num_draws=num_draws,
        generator=generator,
        share=share,
    )
    if reached.numel() == 0:
        return 1
    enough = max(0, -(-round(share * reached.numel() * 1e9) // 10**9) - 1)
    return int(reached.flatten().sort().values[enough])


@torch.no_grad()
def landmarks_by_head(
    query: Tensor,
    key: Tensor,
    epsilon: float,
    *,
    landmarks: str | Sampler | CustomSampler = "stratified",
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    gamma: float = GAMMA,
    scale: float | None = None,
    kernel: str | Kernel = "gaussian",
    share: float = 1.0,
    num_samples: int = NUM_SAMPLES,
    num_draws: int = NUM_DRAWS,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The same for each head of each example: int64 (B, H). The search ends when `share` of them have reached epsilon;
    the others get L + S."""
    candidates = _candidates(query, key, key_mask, query_mask, scale, kernel)
    check_epsilon(epsilon)
    check_positive("gamma", gamma)
    check_at_least("num_samples", num_samples, 1)
    check_at_least("num_draws", num_draws, 1)
    check_share(share)
    sampler = get_sampler(landmarks)
    seed = draw_seed(generator)
    blocks = [SampledBlock.of(candidates, num_samples, seed + draw) for draw in range(num_draws)]
    rows = query.shape[2] + key.shape[2]
    found = torch.full(query.shape[:2], rows, dtype=torch.int64, device=query.device)
    for count in _grid(rows):
        open_heads = found == rows
        if open_heads.double().mean() <= 1 - share:
            break
        worst = torch.zeros(found.shape, dtype=torch.float64, device=found.device)
        for draw, block in enumerate(blocks):
            drawn = sampler(candidates, count, torch.Generator().manual_seed(seed + draw))
            worst = torch.maximum(worst, block.error(candidates, drawn, gamma))
        found = torch.where(open_heads & (worst <= _MARGIN * epsilon), count, found)
    return found


@torch.no_grad()
def statistical_dimension(
    query: Tensor,
    key: Tensor,
    epsilon: float,
    *,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    scale: float | None = None,
    kernel: str | Kernel = "gaussian",
    num_samples: int = 2 * NUM_SAMPLES,
    generator: torch.Generator | None = None,
) -> Tensor:
    """An estimate of Theorem 1's d_stat = tr C-bar (C-bar + lambda I)^-1 with lambda = epsilon |C|: float64 (B, H).

    With lambda fixed, d_stat of a random subset of the rows of [Q; K] grows with its size, more and more slowly. Its
    growth from half of `num_samples` rows to all of them is taken as a power of the size, and continued to all rows:
    too large if anything. Exact, but for |C|, when there are no more rows than `num_samples`.
    """
    candidates = _candidates(query, key, key_mask, query_mask, scale, kernel)
    check_epsilon(epsilon)
    check_at_least("num_samples", num_samples, 2)
    seed = draw_seed(generator)
    ridge = epsilon * SampledBlock.of(candidates, num_samples, seed).norm
    points = torch.cat([candidates.query, candidates.key], 2)
    ranks, total = _shuffled(candidates, seed, num_samples)
    whole = _dimension_of(candidates, points, ranks, total.clamp(max=num_samples), ridge)
    half_size = total.clamp(max=num_samples // 2)
    half = _dimension_of(candidates, points, ranks, half_size, ridge)
    taken = total.clamp(max=num_samples).double()
    power = (whole / half.clamp(min=1e-12)).log() / (taken / half_size.clamp(min=1)).log().clamp(min=1e-12)
    grown = whole * (total / taken.clamp(min=1)) ** power.clamp(0, 1)
    return torch.minimum(torch.where(total > taken, grown, whole), total.double())


@dataclass(frozen=True)
class SampledBlock:
    """Rows (B, H, m, P) of Q and of K with their weights (B, H, m), and the norm (B, H) of C on them."""

    query: Tensor
    key: Tensor
    query_weight: Tensor
    key_weight: Tensor
    scores: Tensor
    norm: Tensor

    @staticmethod
    def of(candidates: Candidates, num_samples: int, seed: int) -> SampledBlock:
        weights = ProbeSampler(_PROBES).weights(candidates, seed)
        sides = (
            (candidates.query, weights[0], candidates.query_mask),
            (candidates.key, weights[1], candidates.key_mask),
        )
        (query, query_weight), (key, key_weight) = (
            _sample(x, weight, mask, num_samples, seed, 10 + stream) for stream, (x, weight, mask) in enumerate(sides)
        )
        scores = candidates.kernel.matrix(query, key, candidates.scale)
        scores = scores * query_weight.unsqueeze(-1) * key_weight.unsqueeze(-2)
        return SampledBlock(query, key, query_weight, key_weight, scores, largest_singular_value(scores))

    def error(self, candidates: Candidates, drawn: Tensor | Landmarks, gamma: float) -> Tensor:
        """|C - C~| / |C| on the sample, for landmarks that a sampler drew: (B, H); 0 where C is."""
        chosen = _as_points(candidates, drawn)
        identity = torch.diag_embed(self.key_weight)
        approximation = skyformer_attention(
            self.query,
            self.key,
            identity,
            landmarks=lambda *_: chosen,
            gamma=gamma,
            scale=candidates.scale,
            kernel=candidates.kernel,
        )
        rest = largest_singular_value(self.scores - approximation * self.query_weight.unsqueeze(-1))
        return torch.where(self.norm > 0, rest / self.norm, 0.0)


def _candidates(
    query: Tensor,
    key: Tensor,
    key_mask: Tensor | None,
    query_mask: Tensor | None,
    scale: float | None,
    kernel: str | Kernel,
) -> Candidates:
    """Checked, and in float64: the errors to be told apart may be small."""
    check_query_key_value(query, key, key)
    if query_mask is None and query.shape[2] == key.shape[2]:
        query_mask = key_mask
    check_mask("key_mask", key_mask, key.shape[0], key.shape[2])
    check_mask("query_mask", query_mask, query.shape[0], query.shape[2])
    check_scale(scale)
    chosen = get_kernel(kernel)
    if not chosen.radial:
        raise UnsupportedError(
            f"kernel must be radial, as Theorem 1 has it; got {chosen.name!r}, whose score matrix is normalised by rows"
        )
    used = query.shape[-1] ** -0.5 if scale is None else scale
    return Candidates(query.double(), key.double(), query_mask, key_mask, chosen, used)


def check_epsilon(epsilon: float) -> None:
    check_positive("epsilon", epsilon)
    if epsilon >= 1:
        raise InputError(f"epsilon must be below 1, for no landmark at all has the error 1; got {epsilon!r}")


def check_share(share: float) -> None:
    check_positive("share", share)
    if share > 1:
        raise InputError(f"share must be at most 1, all heads; got {share!r}")


def _grid(rows: int) -> Iterator[int]:
    """8, 12, 16, 22, 32, ... below `rows`: even numbers, for half the landmarks come from each side."""
    count = float(_SMALLEST)
    while round(count / 2) * 2 < rows:
        yield round(count / 2) * 2
        count *= _STEP


def _sample(
    x: Tensor, weight: Tensor, mask: Tensor | None, count: int, seed: int, stream: int
) -> tuple[Tensor, Tensor]:
    """`count` rows of x (B, H, n, P), drawn with replacement, and what each is multiplied by: (B, H, count)."""
    if x.shape[2] == 0:
        return x.new_zeros(*x.shape[:2], count, x.shape[-1]), x.new_zeros(*x.shape[:2], count)
    valid = torch.ones_like(weight) if mask is None else mask[:, None].to(weight.dtype).expand_as(weight)
    probability = (_to_one(weight * valid) + _to_one(valid)) / 2
    noise = uniform_noise(seed, stream, count, x.device).double().expand(*x.shape[:2], -1).contiguous()
    upto = probability.cumsum(-1)
    rows = torch.searchsorted(upto, noise * upto[..., -1:]).clamp(max=x.shape[2] - 1)
    scaled = (count * probability.gather(-1, rows)).rsqrt()
    return take_rows(x, rows), torch.where(scaled.isfinite(), scaled, 0.0)


def _to_one(weight: Tensor) -> Tensor:
    """Divided by its sum over the last axis; zero if that is."""
    return weight / weight.sum(-1, keepdim=True).clamp(min=torch.finfo(weight.dtype).tiny)


def _as_points(candidates: Candidates, drawn: Tensor | Landmarks) -> Landmarks:
    if isinstance(drawn, Landmarks):
        return drawn
    rows = drawn if drawn.dim() == 3 else drawn.unsqueeze(1)
    return Landmarks(landmark_rows(candidates.query, candidates.key, rows)[2], rows >= 0)


def largest_singular_value(matrix: Tensor) -> Tensor:
    """Of each matrix (..., m, k), by a block power iteration from a fixed start: (...)."""
    width = min(_POWER_WIDTH, *matrix.shape[-2:])
    start = uniform_noise(0, 0, matrix.shape[-1] * width, matrix.device).to(matrix.dtype) - 0.5
    vectors = start.view(-1, width).expand(*matrix.shape[:-2], -1, -1)
    for _ in range(_POWER_STEPS):
        vectors = torch.linalg.qr(matrix.mT @ (matrix @ vectors)).Q
    return torch.linalg.matrix_norm(matrix @ vectors, 2)


def _shuffled(candidates: Candidates, seed: int, count: int) -> tuple[Tensor, Tensor]:
    """The first `count` valid rows of [Q; K] in random order (B, count), and how many are valid (B, 1)."""
    queries, keys = candidates.query.shape[2], candidates.key.shape[2]
    noise = uniform_noise(seed, 20, queries + keys, candidates.device).expand(candidates.query.shape[0], -1)
    masks = ((candidates.query_mask, queries), (candidates.key_mask, keys))
    hidden = torch.cat(
        [torch.zeros_like(noise[:, :size], dtype=torch.bool) if mask is None else ~mask for mask, size in masks], -1
    )
    order = noise.masked_fill(hidden, 2.0).argsort(-1)
    return order[:, :count], (~hidden).sum(-1, keepdim=True)


def _dimension_of(candidates: Candidates, points: Tensor, rows: Tensor, size: Tensor, ridge: Tensor) -> Tensor:
    """tr G (G + lambda I)^-1 for the kernel matrix G of the first `size` (B, 1) of `rows` (B, m): (B, H)."""
    inside = torch.arange(rows.shape[1], device=rows.device) < size
    chosen = take_rows(points, rows.unsqueeze(1))
    gram = candidates.kernel.matrix(chosen, chosen, candidates.scale)
    gram = gram.masked_fill(~(inside[:, None, :, None] & inside[:, None, None, :]), 0)
    values = torch.linalg.eigvalsh(gram).clamp(min=0)
    return (values / (values + ridge.unsqueeze(-1)).clamp(min=torch.finfo(values.dtype).tiny)).sum(-1)
