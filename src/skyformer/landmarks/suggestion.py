"""How many landmarks are enough: a number d for a given error, found without the score matrix. The largest matrix
formed is the kernel matrix of the landmarks that are tried.

The error is that of Theorem 1, |C - C~| / |C| in the spectral norm, for the score matrix C = kappa(Q, K). The theorem
needs d = c d_stat landmarks, with the statistical dimension

    d_stat = tr C-bar (C-bar + lambda I)^-1,        lambda = epsilon |C|,

of the completed matrix C-bar of [Q; K], and leaves the constant c open. The constant in its proof would need more
landmarks than there are rows. So here d_stat is estimated and c is measured: the error is estimated for d_stat / 128
landmarks, then for sqrt(2) times as many, and so on, until it is at most epsilon.

Norms are estimated on m rows and m columns of C. Row i is drawn with probability p_i and divided by sqrt(m p_i), so
that the expected Gram matrix of the sampled rows is that of all rows; columns likewise. Half of p is uniform, half is
proportional to the `probe` weights, which estimate the squared norms of the rows: if a few rows make up most of the
norm, the sample contains them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from skyformer.checks import (
    check_at_least,
    check_masks,
    check_positive,
    check_query_key_value,
    check_scale,
    check_share,
)
from skyformer.errors import InputError, UnsupportedError
from skyformer.landmarks.base import Candidates, CustomSampler, Landmarks, Sampler, get_sampler
from skyformer.landmarks.rows import landmark_rows, shuffle_rows, take_rows
from skyformer.landmarks.samplers import ProbeSampler
from skyformer.ops.kernels import Kernel, get_kernel, scale_of
from skyformer.ops.noise import draw_seed, uniform_noise
from skyformer.ops.products import gram_matrix
from skyformer.ops.solve import GAMMA, regularized_solve

NUM_SAMPLES = 256
"""Number of rows, and of columns, of the score matrix on which the error is estimated."""

NUM_DRAWS = 10
"""Number of draws of the landmarks that must all reach the error. A d that fails in three of ten draws passes ten draws
once in 35 times, but three draws once in three times, and a search over many d would stop there."""

_NUM_BLOCKS = 3
"""Number of samples of the score matrix, which the draws use in turn."""

_FIRST_SHARE = 1 / 128
"""The share of d_stat at which the search starts, far below what any sampler needed in our experiments."""

_FEWEST = 8
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
    """A number d of landmarks with which Skyformer's score matrix C~ is within epsilon of the exact one,

        |C - C~| <= epsilon |C|        (spectral norms).

    The search goes up from d_stat / 128 in steps of sqrt(2) and estimates both norms from a sample (see the top of this
    file), so the answer is right with high probability, not with certainty; `docs/reproduction.md` has measurements.

    Args:
        query: (B, H, L, P). key: (B, H, S, P). For example from a typical batch; all heads of all examples are used.
        epsilon: the relative error to reach, between 0 and 1.
        landmarks, key_mask, query_mask, gamma, scale, kernel: as for `skyformer_attention`.
        share: the share of the heads that must reach epsilon; 1 means all. A few difficult heads may need more
            landmarks than all others together.
        num_samples: m, the number of rows and columns on which norms are estimated. No matrix is larger than
            (L + S) x 64, 2m x 2m, m x d or d x d.
        num_draws: the number of draws of the landmarks that must all reach epsilon.
        generator: source of all random numbers; by default torch's global generator.

    Returns:
        d, at most L + S. With L + S landmarks Skyformer is exact.

    Example:
        >>> import torch, skyformer
        >>> time = torch.linspace(0, 6, 500)
        >>> query = key = torch.stack([time.sin(), time.cos()], -1).expand(1, 1, 500, 2)
        >>> d = skyformer.suggest_landmarks(query, key, epsilon=0.1, generator=torch.Generator().manual_seed(0))
        >>> 8 <= d <= 64
        True
    """
    candidates = _candidates(query, key, key_mask, query_mask, scale, kernel)
    _check_below_one("epsilon", epsilon)
    check_share(share)
    check_positive("gamma", gamma)
    check_at_least("num_samples", num_samples, 1)
    check_at_least("num_draws", num_draws, 1)
    sampler, seed = get_sampler(landmarks), draw_seed(generator)
    blocks = [SampledBlock.of(candidates, num_samples, seed + block) for block in range(min(_NUM_BLOCKS, num_draws))]
    d_stat = _estimate_dimension(candidates, epsilon * blocks[0].norm, 2 * num_samples, seed)
    rows, reached = query.shape[2] + key.shape[2], torch.zeros_like(d_stat, dtype=torch.bool)
    for count in _grid(d_stat, rows):
        passed = ~reached
        for draw in range(num_draws):
            drawn = sampler(candidates, count, torch.Generator().manual_seed(seed + draw))
            passed &= blocks[draw % len(blocks)].error(candidates, drawn, gamma) <= epsilon
            if not passed.any():
                break
        reached |= passed
        if int(reached.sum()) >= math.ceil(share * reached.numel() - 1e-9):
            return count
    return max(rows, 1)


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

    With lambda fixed, d_stat of a random subset of the rows of [Q; K] grows with the size of the subset, more and more
    slowly. Its growth from half of `num_samples` rows to `num_samples` rows is fitted by a power of the size, which is
    extrapolated to all rows; in our experiments the result was at most a few percent too small. If there are at most
    `num_samples` rows, d_stat is exact except for the estimate of |C|.

    Args:
        query: (B, H, L, P). key: (B, H, S, P).
        epsilon: the error of Theorem 1 relative to |C|, below 1.
        key_mask, query_mask, scale, kernel, generator: as in `suggest_landmarks`.
        num_samples: the largest number of rows whose kernel matrix is computed.
    """
    candidates = _candidates(query, key, key_mask, query_mask, scale, kernel)
    _check_below_one("epsilon", epsilon)
    check_at_least("num_samples", num_samples, 2)
    seed = draw_seed(generator)
    ridge = epsilon * SampledBlock.of(candidates, num_samples, seed).norm
    return _estimate_dimension(candidates, ridge, num_samples, seed)


@dataclass(frozen=True)
class SampledBlock:
    """Rows (B, H, m, P) of Q and of K with their weights (B, H, m); C between them, weighted; its norm (B, H)."""

    query: Tensor
    key: Tensor
    query_weight: Tensor
    key_weight: Tensor
    scores: Tensor
    norm: Tensor

    @staticmethod
    def of(candidates: Candidates, num_samples: int, seed: int) -> SampledBlock:
        of_query, of_key = ProbeSampler(_PROBES).weights(candidates, seed)
        query, query_weight = _sample(candidates.query, of_query, candidates.query_mask, num_samples, seed, 10)
        key, key_weight = _sample(candidates.key, of_key, candidates.key_mask, num_samples, seed, 11)
        scores = candidates.kernel.matrix(query, key, candidates.scale)
        scores = scores * query_weight.unsqueeze(-1) * key_weight.unsqueeze(-2)
        return SampledBlock(query, key, query_weight, key_weight, scores, largest_singular_value(scores))

    def error(self, candidates: Candidates, drawn: Tensor | Landmarks, gamma: float) -> Tensor:
        """|C - C~| / |C| on the sample, for landmarks that a sampler drew: (B, H); 0 where C is 0."""
        kernel, scale = candidates.kernel, candidates.scale
        chosen = _as_points(candidates, drawn)
        W, active = chosen.points, chosen.all_active().unsqueeze(-1)
        right = kernel.matrix(W, self.key, scale) * self.key_weight.unsqueeze(-2)
        gram = gram_matrix(W, kernel=kernel, scale=scale).masked_fill(~(active & active.mT), 0)
        middle = regularized_solve(gram, right.masked_fill(~active, 0), gamma)
        left = kernel.matrix(self.query, W, scale) * self.query_weight.unsqueeze(-1)
        rest = largest_singular_value(self.scores - left @ middle)
        return torch.where(self.norm > 0, rest / self.norm, 0.0)


def largest_singular_value(matrix: Tensor) -> Tensor:
    """The largest singular value of each matrix (..., m, k), by block power iteration from a fixed start: (...)."""
    width = min(_POWER_WIDTH, *matrix.shape[-2:])
    start = uniform_noise(0, 0, matrix.shape[-1] * width, matrix.device).to(matrix.dtype) - 0.5
    vectors = start.view(-1, width).expand(*matrix.shape[:-2], -1, -1)
    for _ in range(_POWER_STEPS):
        vectors = torch.linalg.qr(matrix.mT @ (matrix @ vectors)).Q
    return torch.linalg.matrix_norm(matrix @ vectors, 2)


def _candidates(
    query: Tensor,
    key: Tensor,
    key_mask: Tensor | None,
    query_mask: Tensor | None,
    scale: float | None,
    kernel: str | Kernel,
) -> Candidates:
    """Checked candidates, in float64, because the errors to compare may be small."""
    check_query_key_value(query, key, key)
    key_mask, query_mask = check_masks(query, key, key_mask, query_mask)
    check_scale(scale)
    chosen = get_kernel(kernel)
    if not chosen.radial:
        raise UnsupportedError(
            f"kernel must be radial, as in Theorem 1; got {chosen.name!r}, which divides each row of scores by its sum"
        )
    return Candidates(query.double(), key.double(), query_mask, key_mask, chosen, scale_of(query, scale))


def _check_below_one(name: str, value: float) -> None:
    check_positive(name, value)
    if value >= 1:
        raise InputError(f"{name} must be below 1, which is the error without any landmarks; got {value!r}")


def _grid(d_stat: Tensor, rows: int) -> Iterator[int]:
    """Numbers of landmarks to try: from a small share of the largest d_stat, in steps of sqrt(2), below `rows`. All are
    even, because half of the landmarks come from each side."""
    if not d_stat.numel():
        return
    count = max(float(_FEWEST), _FIRST_SHARE * float(d_stat.max()))
    while round(count / 2) * 2 < rows:
        yield round(count / 2) * 2
        count *= math.sqrt(2)


def _sample(
    x: Tensor, weight: Tensor, mask: Tensor | None, count: int, seed: int, stream: int
) -> tuple[Tensor, Tensor]:
    """`count` rows of x (B, H, n, P), drawn with replacement, and the factors (B, H, count) to multiply them by."""
    if x.shape[2] == 0:
        return x.new_zeros(*x.shape[:2], count, x.shape[-1]), x.new_zeros(*x.shape[:2], count)
    valid = torch.ones_like(weight) if mask is None else mask[:, None].to(weight.dtype).expand_as(weight)
    probability = (_normalised(weight * valid) + _normalised(valid)) / 2
    noise = uniform_noise(seed, stream, count, x.device).double().expand(*x.shape[:2], -1).contiguous()
    upto = probability.cumsum(-1)
    rows = torch.searchsorted(upto, noise * upto[..., -1:]).clamp(max=x.shape[2] - 1)
    scaled = (count * probability.gather(-1, rows)).rsqrt()
    return take_rows(x, rows), torch.where(scaled.isfinite(), scaled, 0.0)


def _normalised(weight: Tensor) -> Tensor:
    """`weight` divided by its sum over the last axis; zero where the sum is zero."""
    return weight / weight.sum(-1, keepdim=True).clamp(min=torch.finfo(weight.dtype).tiny)


def _as_points(candidates: Candidates, drawn: Tensor | Landmarks) -> Landmarks:
    if isinstance(drawn, Landmarks):
        return drawn
    rows = drawn if drawn.dim() == 3 else drawn.unsqueeze(1)
    return Landmarks(landmark_rows(candidates.query, candidates.key, rows)[2], rows >= 0)


def _estimate_dimension(candidates: Candidates, ridge: Tensor, num_samples: int, seed: int) -> Tensor:
    """d_stat for lambda (B, H), as `statistical_dimension` describes it."""
    valid = candidates.valid_rows()
    order, total = shuffle_rows(valid, seed, 20), valid.sum(-1, keepdim=True)
    few, many = num_samples // 2, num_samples
    whole = _dimension_of_rows(candidates, order[:, :many], total, ridge)
    half = _dimension_of_rows(candidates, order[:, :few], total, ridge)
    power = torch.log(whole / half.clamp(min=1e-12)) / math.log(many / few)
    grown = whole * (total / many) ** power.clamp(0, 1)
    return torch.minimum(torch.where(total > many, grown, whole), total.double())


def _dimension_of_rows(candidates: Candidates, rows: Tensor, num_valid: Tensor, ridge: Tensor) -> Tensor:
    """tr G (G + lambda I)^-1 for the kernel matrix G of the first `num_valid` (B, 1) of `rows` (B, m)."""
    inside = torch.arange(rows.shape[1], device=rows.device) < num_valid
    chosen = take_rows(torch.cat([candidates.query, candidates.key], 2), rows.unsqueeze(1))
    gram = candidates.kernel.matrix(chosen, chosen, candidates.scale)
    gram = gram.masked_fill(~(inside[:, None, :, None] & inside[:, None, None, :]), 0)
    values = torch.linalg.eigvalsh(gram).clamp(min=0)
    return (values / (values + ridge.unsqueeze(-1)).clamp(min=torch.finfo(values.dtype).tiny)).sum(-1)
