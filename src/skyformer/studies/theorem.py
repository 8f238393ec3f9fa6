"""Theorem 1 with the paper's names, computed from whole matrices and therefore only for short sequences.

C = kappa(Q, K) is the score matrix (n x n), C-bar the kernel matrix of all N = 2n rows of [Q; K], and
lambda = epsilon |C|. If d landmarks are drawn uniformly and

    d >= 28/3 s / beta log(2 N / delta)

then, with probability 1 - delta,

    C~-bar <= C-bar <= C~-bar + lambda I          (the Loewner order)

and therefore |C - C~| <= epsilon |C|. (The theorem leaves its constant open. 28/3 is that of the lemma in its proof,
whose H is the proof's Psi, so that s = |Psi|_F^2 / |Psi|^2.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from skyformer.ops.kernels import GaussianKernel

_JITTER = 1e-10
"""Used instead of the paper's pseudo-inverse: a ridge only makes C~ smaller, so C~ <= C-bar stays true."""


@dataclass(frozen=True)
class Completion:
    """C-bar of each head: (H, N, N) for Q and K (H, n, P)."""

    query: Tensor
    key: Tensor

    @cached_property
    def matrix(self) -> Tensor:
        points = torch.cat([self.query, self.key], 1)
        return GaussianKernel().matrix(points, points, points.shape[-1] ** -0.5)

    def scores(self, matrix: Tensor) -> Tensor:
        """The block between queries and keys: C of C-bar, C~ of C~-bar."""
        n = self.query.shape[1]
        return matrix[:, :n, n:]

    @cached_property
    def score_norm(self) -> Tensor:
        """|C|: (H,)."""
        return spectral_norm(self.scores(self.matrix))

    @cached_property
    def _spectrum(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues (H, N), and the squared entries of the eigenvectors (H, N, N)."""
        pairs = [torch.linalg.eigh(of_head) for of_head in self.matrix]
        values = torch.stack([values for values, _ in pairs]).clamp(min=0)
        return values, torch.stack([vectors.square_() for _, vectors in pairs])

    @property
    def norm(self) -> Tensor:
        """|C-bar|: (H,)."""
        return self._spectrum[0][:, -1]

    def ridge(self, epsilon: float) -> Tensor:
        """lambda = epsilon |C|: (H,)."""
        return epsilon * self.score_norm

    def leverage_scores(self, epsilon: float) -> Tensor:
        """l_i = [C-bar (C-bar + lambda I)^-1]_ii: (H, N)."""
        values, squares = self._spectrum
        return (squares @ (values / (values + self.ridge(epsilon)[:, None])).unsqueeze(-1)).squeeze(-1)

    def stable_rank(self, epsilon: float) -> Tensor:
        """s = |Psi|_F^2 / |Psi|^2 = d_stat (1 + lambda / |C-bar|): (H,)."""
        return statistical_dimension(self.leverage_scores(epsilon)) * (1 + self.ridge(epsilon) / self.norm)

    def landmarks_of_theorem_1(self, epsilon: float, delta: float) -> Tensor:
        """The smallest d for which the theorem holds: (H,)."""
        scores = self.leverage_scores(epsilon)
        return 28 / 3 * self.stable_rank(epsilon) / beta(scores) * math.log(2 * scores.shape[-1] / delta)


def statistical_dimension(leverage_scores: Tensor) -> Tensor:
    """d_stat = tr C-bar (C-bar + lambda I)^-1 = sum_i l_i: (H,)."""
    return leverage_scores.sum(-1)


def beta(leverage_scores: Tensor) -> Tensor:
    """The largest beta <= d_stat / (N l_i) for all i; 1 if all rows are equally important: (H,)."""
    return statistical_dimension(leverage_scores) / (leverage_scores.shape[-1] * leverage_scores.amax(-1))


def nystrom(matrix: Tensor, rows: Tensor) -> Tensor:
    """C~-bar = C-bar S (S^T C-bar S)^-1 S^T C-bar for C-bar (H, N, N) and rows (1, d) or (1, H, d)."""
    # Rows shared by all heads may repeat; repeated rows would only make the matrix singular.
    rows = rows[0].unique()[None] if rows.dim() == 2 else rows[0]
    rows = rows.expand(matrix.shape[0], -1)
    columns = matrix.gather(2, rows[:, None].expand(-1, matrix.shape[1], -1))
    middle = columns.gather(1, rows[:, :, None].expand(-1, -1, rows.shape[1]))
    middle = middle + _JITTER * torch.eye(rows.shape[1], dtype=matrix.dtype)
    half = torch.linalg.solve_triangular(torch.linalg.cholesky(middle), columns.mT, upper=False)
    return half.mT @ half


def loewner_gaps(matrix: Tensor, approximation: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and the largest eigenvalue of C-bar - C~-bar: (H,) each. C~-bar <= C-bar if the first is at least 0,
    and C-bar <= C~-bar + lambda I if the second is at most lambda."""
    eigenvalues = torch.linalg.eigvalsh(matrix - approximation)
    return eigenvalues[:, 0], eigenvalues[:, -1]


def spectral_norm(x: Tensor) -> Tensor:
    """The largest singular value of each matrix (..., n, p); NaN if an entry is not finite."""
    gram = x.double().mT @ x.double()
    broken = ~gram.isfinite().all(-1).all(-1)
    values = torch.linalg.eigvalsh(gram.masked_fill(broken[..., None, None], 0))[..., -1]
    return values.clamp(min=0).sqrt().masked_fill(broken, torch.nan)
