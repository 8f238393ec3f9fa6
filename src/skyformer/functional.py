"""The paper's two attentions as functions: exact Kernelized Attention, and Skyformer, its Nystrom approximation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from skyformer.checks import (
    check_at_least,
    check_finite_inputs,
    check_mask,
    check_positive,
    check_probability,
    check_query_key_value,
)
from skyformer.errors import UnsupportedError
from skyformer.landmarks import (
    Candidates,
    CustomSampler,
    Landmarks,
    Sampler,
    check_points_and_slots,
    check_rows,
    get_sampler,
    is_ours,
    landmark_rows,
    take_rows,
)
from skyformer.ops.fused import fused_gaussian_attention, fused_gaussian_available
from skyformer.ops.kernels import GaussianKernel, Kernel, SoftmaxKernel, get_kernel, half_norms
from skyformer.ops.precision import at_least_float32
from skyformer.ops.products import MEMORY_BUDGET, gram_matrix, kernel_product
from skyformer.ops.solve import Solver, get_solver, regularized_solve

GAMMA = 1e-2
"""Default regularisation of the landmarks' kernel matrix; the paper's experiments use 0.1."""


def kernelized_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    kernel: str | Kernel = "gaussian",
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    memory_budget: int = MEMORY_BUDGET,
    check_finite: bool = False,
) -> Tensor:
    """Kernelized Attention, C V with C = kappa(Q / p^(1/4), K / p^(1/4)): exact, in O(L + S) memory.

    Args:
        query: (B, H, L, P). key: (B, H, S, P). value: (B, H, S, Pv).
        key_mask: bool (B, S), True = attend.
        is_causal: query i attends to keys j <= i only.
        scale: kappa acts on sqrt(scale) times its inputs; P ** -0.5 by default.
        kernel: a name or a `Kernel`. "softmax" gives softmax attention, D^-1 A V.
        dropout_p: the probability with which an entry of C is dropped.
        generator: where dropout draws from. memory_budget: see `kernel_product`.
        check_finite: look for NaN and Inf in the inputs first.

    Returns:
        (B, H, L, Pv).
    """
    check_query_key_value(query, key, value)
    check_mask("key_mask", key_mask, key.shape[0], key.shape[2])
    check_probability("dropout_p", dropout_p)
    check_at_least("memory_budget", memory_budget, 0, most=2**62)
    if check_finite:
        check_finite_inputs(query=query, key=key, value=value)
    scale = _default_scale(query, scale)
    kernel = get_kernel(kernel)
    if isinstance(kernel, SoftmaxKernel):
        return softmax_attention(
            query, key, value, key_mask=key_mask, is_causal=is_causal, scale=scale, dropout_p=dropout_p
        )
    if dropout_p == 0:
        return _product(query, key, value, kernel, scale, key_mask, memory_budget, is_causal)
    return kernel_product(
        query,
        key,
        value,
        kernel=kernel,
        scale=scale,
        key_mask=key_mask,
        is_causal=is_causal,
        dropout_p=dropout_p,
        generator=generator,
        memory_budget=memory_budget,
    )


def _product(
    x: Tensor,
    y: Tensor,
    v: Tensor,
    kernel: Kernel,
    scale: float,
    key_mask: Tensor | None,
    memory_budget: int,
    is_causal: bool = False,
) -> Tensor:
    """kappa(x, y) v by whichever way is the fastest for this kernel and device."""
    if isinstance(kernel, GaussianKernel) and fused_gaussian_available(x, v):
        query, key, value = (at_least_float32(t) for t in (x, y, v))
        return fused_gaussian_attention(query, key, value, key_mask, is_causal, scale).to(x.dtype)
    return kernel_product(
        x, y, v, kernel=kernel, scale=scale, key_mask=key_mask, is_causal=is_causal, memory_budget=memory_budget
    )


def softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """softmax(Q K^T scale) V through `F.scaled_dot_product_attention`, with this package's key mask (B, S).

    A query with no key to attend to gives zeros. Only a causal mask together with a key mask takes O(L S) memory.
    """
    check_query_key_value(query, key, value)
    check_mask("key_mask", key_mask, key.shape[0], key.shape[2])
    check_probability("dropout_p", dropout_p)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=None if key_mask is None else _additive_mask(query, key_mask, is_causal),
        is_causal=is_causal and key_mask is None,
        scale=_default_scale(query, scale),
        dropout_p=dropout_p,
    )


def _additive_mask(query: Tensor, key_mask: Tensor, is_causal: bool) -> Tensor:
    """0 or -inf, (B, 1, L, S): a view of one row an example, unless causality makes the rows differ."""
    length, size = query.shape[2], key_mask.shape[1]
    row = torch.zeros_like(key_mask, dtype=query.dtype).masked_fill(~key_mask, -math.inf)[:, None, None, :]
    if not is_causal:
        return row.expand(-1, -1, length, -1)
    later = torch.ones(length, size, dtype=torch.bool, device=query.device).triu(1)
    return row.masked_fill(later, -math.inf)


def skyformer_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
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
    """Skyformer: C V with C replaced by its Nystrom approximation on landmarks W, rows of [Q; K]. O((L + S) d P) time.

        kappa(Q, W) (kappa(W, W) + gamma I)^-1 kappa(W, K) V

    Args:
        query: (B, H, L, P). key: (B, H, S, P). value: (B, H, S, Pv).
        num_landmarks: d. An example with no more than d valid rows in [Q; K] is computed exactly.
        landmarks: a sampler's name ("stratified", "uniform", "probe", "leverage", "segment_means"), a `Sampler`, any
            callable of its signature, or row numbers (B, d) or (B, H, d), which override `num_landmarks`.
        key_mask: bool (B, S), True = attend.
        query_mask: bool (B, L), True where a landmark may be drawn; `key_mask` by default when L == S.
        is_causal: refused, for every output passes through landmarks from the whole sequence.
        gamma: regularisation of the d x d matrix, above 0.
        solver: "cholesky", "schulz" or a `Solver`.
        scale: kappa acts on sqrt(scale) times its inputs; P ** -0.5 by default.
        kernel: a name or a `Kernel`. "softmax" approximates softmax attention, D^-1 A V with D from A 1.
        generator: where landmarks are drawn from; torch's own by default.
        memory_budget: see `kernel_product`. check_finite: look for NaN and Inf in the inputs first.

    Returns:
        (B, H, L, Pv).
    """
    check_query_key_value(query, key, value)
    if is_causal:
        raise UnsupportedError(
            "is_causal must be False for skyformer_attention, whose every output passes through landmarks from the "
            "whole sequence; got True. The exact kernelized_attention is causal"
        )
    check_at_least("num_landmarks", num_landmarks, 1)
    check_positive("gamma", gamma)
    check_at_least("memory_budget", memory_budget, 0, most=2**62)
    if query_mask is None and query.shape[2] == key.shape[2]:
        query_mask = key_mask
    check_mask("key_mask", key_mask, key.shape[0], key.shape[2])
    check_mask("query_mask", query_mask, query.shape[0], query.shape[2])
    if check_finite:
        check_finite_inputs(query=query, key=key, value=value)
    scale = _default_scale(query, scale)
    kernel, solver = get_kernel(kernel), get_solver(solver)
    num_landmarks = _useful_landmarks(num_landmarks, landmarks, query.shape[2] + key.shape[2])
    of_softmax = isinstance(kernel, SoftmaxKernel)
    # Contiguous here, once: choosing rows and both products would each copy a strided one.
    points, keys = (at_least_float32(x).contiguous() for x in (query, key))
    if of_softmax:
        keys = _move_to_queries(points, keys, query_mask, key_mask)
    candidates = Candidates(
        points, keys, query_mask, key_mask, GaussianKernel() if of_softmax else kernel, scale, normalised=of_softmax
    )
    if of_softmax:
        weighted = _weigh_by_key_norm(candidates.key, at_least_float32(value), key_mask, scale)
        both = _nystrom(candidates, weighted, num_landmarks, landmarks, gamma, solver, generator, memory_budget)
        out = _normalise(both, at_least_float32(value), key_mask).to(query.dtype)
        whole = _Whole.among(candidates, num_landmarks, landmarks)
        return out if whole is None else whole.softmax_instead_of(out, query, key, value, scale)
    out = _nystrom(
        candidates, at_least_float32(value), num_landmarks, landmarks, gamma, solver, generator, memory_budget
    )
    return out.to(query.dtype)


def _useful_landmarks(count: int, landmarks: str | Sampler | CustomSampler | Tensor, num_rows: int) -> int:
    """Landmarks beyond the rows of [Q; K] would stay empty, yet cost their square; other people's samplers are asked
    for what the caller wrote."""
    if isinstance(landmarks, Tensor) or not is_ours(get_sampler(landmarks)):
        return count
    return min(count, max(1, num_rows))


def _nystrom(
    candidates: Candidates,
    value: Tensor,
    num_landmarks: int,
    landmarks: str | Sampler | CustomSampler | Tensor,
    gamma: float,
    solver: Solver,
    generator: torch.Generator | None,
    memory_budget: int,
) -> Tensor:
    """Equations (4) to (6): (I, 0) C-bar S (S^T C-bar S + gamma I)^-1 S^T C-bar (0, I)^T V, with S^T [Q; K] = W."""
    kernel, scale, key_mask = candidates.kernel, candidates.scale, candidates.key_mask
    whole = _Whole.among(candidates, num_landmarks, landmarks)
    query, key, chosen = _choose(landmarks, candidates, num_landmarks, whole, generator)
    W, active = chosen.points, chosen.active
    right = _product(W, key, value, kernel, scale, key_mask, memory_budget)
    gram = gram_matrix(W, kernel=kernel, scale=scale)
    if active is not None:
        right = right.masked_fill(~active.unsqueeze(-1), 0)
        gram = gram.masked_fill(~(active.unsqueeze(-1) & active.unsqueeze(-2)), 0)
    middle = regularized_solve(gram, right, gamma, solver)
    if whole is not None:
        middle = torch.where(whole.examples.unsqueeze(-1), whole.values(value, candidates.num_queries), middle)
    return _product(query, W, middle, kernel, scale, None, memory_budget)


def _choose(
    landmarks: str | Sampler | CustomSampler | Tensor,
    candidates: Candidates,
    num_landmarks: int,
    whole: _Whole | None,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor, Landmarks]:
    """Q and K to go on with (see `landmark_rows`), and the landmarks."""
    query, key = candidates.query, candidates.key
    sampler = landmarks if isinstance(landmarks, Tensor) else get_sampler(landmarks)
    drawn = sampler if isinstance(sampler, Tensor) else sampler(candidates, num_landmarks, generator)
    if isinstance(drawn, Landmarks):
        if not is_ours(sampler):
            drawn = check_points_and_slots(drawn, candidates)
        if whole is not None:
            drawn = whole.instead_of_points(drawn, key, candidates.num_queries)
        return query, key, drawn
    if not is_ours(sampler):
        rows = check_rows(drawn, query.shape[0], query.shape[1], query.shape[2] + key.shape[2])
        query, key, points = landmark_rows(query, key, rows)
        return query, key, Landmarks(points, rows >= 0)
    rows = drawn if drawn.dim() == 3 else drawn.unsqueeze(1)
    if whole is not None:
        rows = whole.instead_of_rows(rows)
    query, key, points = landmark_rows(query, key, rows)
    # With more valid rows than slots a sampler of ours fills every slot.
    return query, key, Landmarks(points, None if whole is None else rows >= 0)


@dataclass(frozen=True)
class _Whole:
    """Examples (B, 1, 1) with no more valid rows than landmarks, and the rows (B, 1, d) of their keys. With every key
    a landmark, kappa(W, W)^-1 kappa(W, K) V is V itself, so these examples take the values at their landmarks and are
    exact whatever gamma is."""

    examples: Tensor
    key_rows: Tensor

    @staticmethod
    def among(
        candidates: Candidates, num_landmarks: int, landmarks: str | Sampler | CustomSampler | Tensor
    ) -> _Whole | None:
        """None when no example is that short, or when the caller chooses the landmarks himself."""
        if isinstance(landmarks, Tensor) or not is_ours(get_sampler(landmarks)):
            return None
        unmasked = candidates.query_mask is None and candidates.key_mask is None
        if unmasked and candidates.num_queries + candidates.key.shape[2] > num_landmarks:
            return None
        keys = candidates.valid_keys()
        examples = candidates.valid_queries() + keys <= num_landmarks
        if not examples.is_meta and not torch.compiler.is_compiling() and not bool(examples.any()):
            return None
        slot = torch.arange(num_landmarks, device=candidates.device).expand(keys.shape[0], -1)
        key_rows = torch.where(slot < keys, candidates.key_row(slot), -1)
        return _Whole(examples[:, None], key_rows[:, None])

    def instead_of_rows(self, rows: Tensor) -> Tensor:
        """The drawn rows (B, 1 or H, k), but all keys for the short examples: (B, 1 or H, d)."""
        filled = F.pad(rows, (0, self.key_rows.shape[-1] - rows.shape[-1]), value=-1)
        return torch.where(self.examples, self.key_rows, filled)

    def instead_of_points(self, drawn: Landmarks, key: Tensor, num_queries: int) -> Landmarks:
        """The same for landmarks that are points."""
        keys = self.values(key, num_queries)
        return Landmarks(
            torch.where(self.examples.unsqueeze(-1), keys, drawn.points),
            torch.where(self.examples, self.key_rows >= 0, drawn.all_active()),
        )

    def softmax_instead_of(self, out: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """`out` (B, H, L, Pv), but softmax attention for the short examples: exact at any norm, where the Gaussian
        values that `_normalise` divides by vanish."""
        keys, values = (self.values(x, query.shape[2]) for x in (key, value))
        present = self.key_rows.squeeze(1) >= 0
        exact = softmax_attention(query, keys, values, key_mask=present, scale=scale)
        return torch.where(self.examples.unsqueeze(-1), exact, out)

    def values(self, value: Tensor, num_queries: int) -> Tensor:
        """The rows of value (B, H, S, Pv), or of the keys, at the landmarks; zero in empty slots."""
        taken = take_rows(value, (self.key_rows - num_queries).clamp(0, max(value.shape[2] - 1, 0)))
        return taken.masked_fill((self.key_rows < 0).unsqueeze(-1), 0)


def _move_to_queries(query: Tensor, key: Tensor, query_mask: Tensor | None, key_mask: Tensor | None) -> Tensor:
    """The keys, moved so that their mean is the queries': a common shift c of the keys adds q_i . c to all scores of
    row i, which softmax attention does not see, but a Gaussian kernel sees points that are near each other."""
    return key + (_mean_of_valid(query, query_mask) - _mean_of_valid(key, key_mask))


def _mean_of_valid(x: Tensor, mask: Tensor | None) -> Tensor:
    """The mean over the valid rows of x (B, H, n, P), zero if there are none: (B, H, 1, P)."""
    if mask is None:
        return x.sum(2, keepdim=True) / max(x.shape[2], 1)
    valid = mask[:, None, :, None]
    return x.masked_fill(~valid, 0).sum(2, keepdim=True) / valid.sum(2, keepdim=True).clamp(min=1)


def _weigh_by_key_norm(key: Tensor, value: Tensor, key_mask: Tensor | None, scale: float) -> Tensor:
    """D_K^(1/2) [V, 1]: with A = D_Q^(1/2) C D_K^(1/2), its Gaussian product is A [V, 1] up to a factor a row.

    The largest |k_j|^2 / 2 is taken out of the exponent, for it cancels in D^-1 A V.
    """
    height = half_norms(key, scale)
    visible = height if key_mask is None else height.masked_fill(~key_mask[:, None, :, None], 0)
    peak = visible.detach().amax(2, keepdim=True) if key.shape[2] else 0.0
    weight = (visible - peak).exp()
    return torch.cat([value * weight, weight], -1)


def _normalise(both: Tensor, value: Tensor, key_mask: Tensor | None) -> Tensor:
    """D^-1 A V from A [V, 1]. An approximate row sum may vanish or turn negative, which an exact one cannot; but an
    exact output is an average of the values, so what leaves their range is brought back to it."""
    total = both[..., -1:]
    out = both[..., :-1] / total.clamp(min=torch.finfo(total.dtype).tiny ** 0.5)
    return out.clamp(*_value_range(value.detach(), key_mask))


def _value_range(value: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The least and the greatest of each feature over the valid keys, zero if there are none: (B, H, 1, Pv)."""
    if value.shape[2] == 0:
        zero = value.new_zeros(*value.shape[:2], 1, value.shape[-1])
        return zero, zero
    if key_mask is None:
        low, high = value.aminmax(dim=2, keepdim=True)
        return low, high
    hidden = ~key_mask[:, None, :, None]
    low = value.masked_fill(hidden, math.inf).amin(2, keepdim=True)
    high = value.masked_fill(hidden, -math.inf).amax(2, keepdim=True)
    return low.nan_to_num(posinf=0.0), high.nan_to_num(neginf=0.0)


def _default_scale(query: Tensor, scale: float | None) -> float:
    if scale is None:
        return float(query.shape[-1] ** -0.5)
    check_positive("scale", scale)
    return float(scale)
