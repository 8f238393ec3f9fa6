"""Ridge leverage scores: exact, and by the recursive algorithm of Musco and Musco (2017)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from skyformer.landmarks.base import Candidates
from skyformer.landmarks.rows import draw_by_weight, shuffle_rows, take_rows
from skyformer.ops.kernels import Kernel
from skyformer.ops.noise import Seed


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
    # The first k eigenvalues may be the whole spectrum; a ridge of zero would make every score one half or NaN.
    floor = eigenvalues.sum(-1, keepdim=True) * torch.finfo(torch.float32).eps
    return torch.maximum(tail, floor).clamp(min=torch.finfo(torch.float32).tiny)


def recursive_leverage_rows(
    candidates: Candidates, points: Tensor, valid: Tensor, num_landmarks: int, ridge: float | None, seed: Seed
) -> Tensor:
    """Rows (B, H, d), from nested random subsets: the first d rows, then twice as many, and so on up to all rows."""
    _, heads, length, _ = points.shape
    order = shuffle_rows(valid, seed, 0)
    count = valid.sum(-1, keepdim=True)
    levels = max(0, math.ceil(math.log2(length / num_landmarks)))
    chosen = order[:, None, :num_landmarks].expand(-1, heads, -1)
    inclusion = torch.ones_like(chosen, dtype=points.dtype)
    for level in range(levels - 1, -1, -1):
        # An example shorter than the longest of the batch keeps its d first rows until its own levels begin.
        size = torch.maximum(-(-count // 2**level), count.clamp(max=num_landmarks))
        subset = order[:, : max(-(-length // 2**level), min(length, num_landmarks))]
        inside = torch.arange(subset.shape[1], device=points.device) < size
        scores = _NystromScores.of(candidates, points, chosen, inclusion).scores(subset, inside, num_landmarks, ridge)
        picked = draw_by_weight(scores, inside, num_landmarks, seed, level + 1)
        weights, total = scores.gather(-1, picked), scores.sum(-1, keepdim=True)
        untouched = (size <= num_landmarks)[:, None]
        inclusion = torch.where(untouched, 1.0, (num_landmarks * weights / total.clamp(min=1e-30)).clamp(1e-6, 1))
        chosen = subset[:, None].expand(-1, heads, -1).gather(-1, picked)
    return chosen


_RIDGE_ROUNDS = 12
"""How often the ridge is raised until the scores add up to at most d, as the true scores do. A ridge estimated from a
sample that missed rare rows is far too small: every score would be one, and the draw no better than uniform."""


@dataclass(frozen=True)
class _NystromScores:
    """Leverage scores of rows by the rows S chosen so far, in the eigenbasis of K_S weighted by P^(-1/2), with P the
    probabilities (B, H, d) with which the rows of S were included:

        (kappa_ii - k_i (K_S + lambda P)^-1 k_i^T) / lambda
    """

    kernel: Kernel
    scale: float
    points: Tensor
    landmarks: Tensor
    root: Tensor
    values: Tensor
    vectors: Tensor

    @staticmethod
    def of(candidates: Candidates, points: Tensor, chosen: Tensor, inclusion: Tensor) -> _NystromScores:
        kernel, scale = candidates.kernel, candidates.scale
        # In float64 from the start: in float32 the matrix would be indefinite by more than a small ridge repairs.
        landmarks = take_rows(points, chosen).double()
        root = inclusion.double().rsqrt().unsqueeze(-1)
        values, vectors = torch.linalg.eigh(kernel.matrix(landmarks, landmarks, scale) * root * root.mT)
        return _NystromScores(kernel, scale, points, landmarks, root, values.clamp(min=0), vectors)

    def scores(self, subset: Tensor, inside: Tensor, num_landmarks: int, ridge: float | None) -> Tensor:
        """The scores (B, H, m) of the rows of `subset` (B, m), zero where not `inside` (B, m)."""
        if ridge is None:
            lam = self._estimate_ridge(subset, inside, num_landmarks)
        else:
            lam = torch.full_like(self.values[..., :1], ridge)
        found = torch.cat([self._scores(*self._measure(piece), lam) for piece in subset.split(4096, 1)], -1)
        return found.masked_fill(~inside[:, None], 0).to(self.points.dtype)

    def _estimate_ridge(self, subset: Tensor, inside: Tensor, num_landmarks: int) -> Tensor:
        """lambda (B, H, 1), from the first rows of `subset`: its order is random, so they represent all of them."""
        few = min(subset.shape[1], 4 * num_landmarks)
        present = inside[:, None, :few].double()
        count = inside.sum(-1)[:, None, None] / present.sum(-1, keepdim=True).clamp(min=1)
        lam = _tail_ridge(self.values, num_landmarks)
        measured = self._measure(subset[:, :few])
        for _ in range(_RIDGE_ROUNDS):
            total = count * (self._scores(*measured, lam) * present).sum(-1, keepdim=True)
            lam = lam * (total / num_landmarks).clamp(min=1)
        return lam

    def _measure(self, piece: Tensor) -> tuple[Tensor, Tensor]:
        """The squared coordinates (B, H, d, m) of the rows of `piece` (B, m) in the eigenbasis, and kappa_ii."""
        rows = take_rows(self.points, piece[:, None])
        block = self.kernel.matrix(self.landmarks.to(rows.dtype), rows, self.scale).double()
        squares = (self.vectors.mT @ block.mul_(self.root)).square_()
        return squares, kernel_diagonal(self.kernel, rows, self.scale).double()

    def _scores(self, squares: Tensor, own: Tensor, lam: Tensor) -> Tensor:
        explained = (1 / (self.values + lam)).unsqueeze(-2) @ squares
        return ((own - explained.squeeze(-2)).clamp_(min=0) / lam).clamp_(max=1)


def kernel_diagonal(kernel: Kernel, x: Tensor, scale: float) -> Tensor:
    """kappa(x_i, x_i) for x (..., n, P): (..., n)."""
    return kernel.matrix(x.unsqueeze(-2), x.unsqueeze(-2), scale)[..., 0, 0]
