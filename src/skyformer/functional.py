"""The paper's two attentions as functions: exact Kernelized Attention, and Skyformer, its Nystrom approximation.

`kernelized_attention`, `softmax_attention` and `skyformer_attention` check their arguments. Callers whose arguments are
already checked, such as the attention modules, use `attend_kernelized`, `attend_softmax` and `attend_skyformer`.
"""

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
    check_masks,
    check_memory_budget,
    check_positive,
    check_probability,
    check_query_key_value,
    check_scale,
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
    is_builtin,
    without_masked_rows,
)
from skyformer.landmarks.whole import WHOLE, WholeSequence
from skyformer.ops.backends import accurate_product, product_by_backend, triton_computes
from skyformer.ops.distances import accurate_points
from skyformer.ops.flash import softmax_product
from skyformer.ops.kernels import GaussianKernel, Kernel, SoftmaxKernel, get_kernel, half_norms, scale_of
from skyformer.ops.noise import FixedSeed, RandomSource
from skyformer.ops.precision import at_least_float32
from skyformer.ops.products import MEMORY_BUDGET, Plan, gram_matrix
from skyformer.ops.softmax_dropout import softmax_attention_with_dropout
from skyformer.ops.solve import GAMMA, Solver, get_solver, regularized_solve
from skyformer.ops.tracing import may_look_at_values

__all__ = [
    "GAMMA",
    "SkyformerSettings",
    "attend_kernelized",
    "attend_skyformer",
    "attend_softmax",
    "kernelized_attention",
    "skyformer_attention",
    "softmax_attention",
]


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
        dropout_p: the probability of dropping an entry of C.
        generator: source of the dropout; by default torch's global generator. The "softmax" kernel does not use it.
        memory_budget: see `kernel_product`.
        check_finite: first check the inputs for NaN and Inf.

    Returns:
        (B, H, L, Pv).

    Example:
        >>> import torch, skyformer
        >>> query, key, value = torch.randn(3, 1, 4, 100, 32).unbind()
        >>> out = skyformer.kernelized_attention(query, key, value)
        >>> out.shape
        torch.Size([1, 4, 100, 32])
        >>> distances = torch.cdist(query, key) / 32**0.25
        >>> torch.allclose(out, torch.exp(-distances.square() / 2) @ value, atol=1e-4)
        True
    """
    check_query_key_value(query, key, value)
    key_mask = check_mask("key_mask", key_mask, key.shape[0], key.shape[2])
    check_probability("dropout_p", dropout_p)
    check_memory_budget(memory_budget)
    check_scale(scale)
    if check_finite:
        check_finite_inputs(query=query, key=key, value=value)
    plan = Plan(get_kernel(kernel), scale_of(query, scale), is_causal, dropout_p, generator, memory_budget)
    return attend_kernelized(query, key, value, key_mask, plan)


def attend_kernelized(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, plan: Plan) -> Tensor:
    """`kernelized_attention` on checked arguments."""
    if isinstance(plan.kernel, SoftmaxKernel):
        return attend_softmax(query, key, value, key_mask, plan.is_causal, plan.scale, plan.dropout_p)
    return accurate_product(query, key, value, key_mask, plan)


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

    The output of a query without any key to attend to is zero. Only a causal mask together with a key mask takes
    O(L S) memory.

    Args:
        query: (B, H, L, P). key: (B, H, S, P). value: (B, H, S, Pv).
        key_mask: bool (B, S), True = attend.
        is_causal: query i attends to keys j <= i only.
        scale: P ** -0.5 by default.
        dropout_p: the probability of dropping an attention weight.

    Returns:
        (B, H, L, Pv).

    Example:
        >>> import torch, skyformer
        >>> query, key, value = torch.randn(3, 2, 4, 100, 32).unbind()
        >>> key_mask = torch.arange(100) < torch.tensor([[100], [70]])
        >>> out = skyformer.softmax_attention(query, key, value, key_mask=key_mask)
        >>> alone = skyformer.softmax_attention(query[1:], key[1:, :, :70], value[1:, :, :70])
        >>> torch.allclose(out[1:], alone, atol=1e-5)
        True
    """
    check_query_key_value(query, key, value)
    key_mask = check_mask("key_mask", key_mask, key.shape[0], key.shape[2])
    check_probability("dropout_p", dropout_p)
    check_scale(scale)
    return attend_softmax(query, key, value, key_mask, is_causal, scale, dropout_p)


def attend_softmax(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """`softmax_attention` on checked arguments."""
    if dropout_p > 0 and not is_causal and may_look_at_values(query):
        return softmax_attention_with_dropout(query, key, value, key_mask, scale_of(query, scale), dropout_p)
    return softmax_product(
        query,
        key,
        value,
        attn_mask=None if key_mask is None else _additive_mask(query, key_mask, is_causal),
        is_causal=is_causal and key_mask is None,
        scale=scale_of(query, scale),
        dropout_p=dropout_p,
    )


def _additive_mask(query: Tensor, key_mask: Tensor, is_causal: bool) -> Tensor:
    """0 or -inf, (B, 1, L, S): a view of one row for each example, unless causality makes the rows differ."""
    length, size = query.shape[2], key_mask.shape[1]
    row = torch.zeros_like(key_mask, dtype=query.dtype).masked_fill(~key_mask, -math.inf)[:, None, None, :]
    if not is_causal:
        return row.expand(-1, -1, length, -1)
    later = torch.ones(length, size, dtype=torch.bool, device=query.device).triu(1)
    return row.masked_fill(later, -math.inf)


@dataclass(frozen=True)
class SkyformerSettings:
    """Checked arguments of `skyformer_attention` that do not change from call to call; `checked` builds them."""

    num_landmarks: int
    landmarks: Sampler | CustomSampler | Tensor
    gamma: float
    solver: Solver
    scale: float | None
    kernel: Kernel
    memory_budget: int

    @staticmethod
    def checked(
        *,
        num_landmarks: int = 128,
        landmarks: str | Sampler | CustomSampler | Tensor = "stratified",
        gamma: float = GAMMA,
        solver: str | Solver = "cholesky",
        scale: float | None = None,
        kernel: str | Kernel = "gaussian",
        memory_budget: int = MEMORY_BUDGET,
    ) -> SkyformerSettings:
        """Settings from the arguments of the same names of `skyformer_attention`."""
        check_at_least("num_landmarks", num_landmarks, 1)
        check_positive("gamma", gamma)
        check_scale(scale)
        check_memory_budget(memory_budget)
        sampler = landmarks if isinstance(landmarks, Tensor) else get_sampler(landmarks)
        return SkyformerSettings(
            num_landmarks, sampler, gamma, get_solver(solver), scale, get_kernel(kernel), memory_budget
        )

    def useful_landmarks(self, num_rows: int) -> int:
        """The number of landmarks to draw. A built-in sampler would leave slots beyond the rows of [Q; K] empty, and
        the solve would still take them into account; a custom sampler gets the number that the caller chose."""
        return min(self.num_landmarks, max(1, num_rows)) if is_builtin(self.landmarks) else self.num_landmarks


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
        num_landmarks: d. An example with at most d valid rows in [Q; K] is computed exactly.
        landmarks: the name of a sampler ("stratified", "uniform", "paper", "queries", "probe", "leverage",
            "segment_means"), a `Sampler`, a callable with the same signature, or row numbers (B, d) or (B, H, d), which
            override `num_landmarks`.
        key_mask: bool (B, S), True = attend.
        query_mask: bool (B, L), True where a landmark may be drawn; `key_mask` by default when L == S.
        is_causal: must be False, because every output depends on landmarks from the whole sequence.
        gamma: regularisation of the d x d matrix, above 0.
        solver: "cholesky", "schulz" or a `Solver`.
        scale: kappa acts on sqrt(scale) times its inputs; P ** -0.5 by default.
        kernel: a name or a `Kernel`. "softmax" approximates softmax attention, D^-1 A V with D from A 1.
        generator: source of the landmarks; by default torch's global generator.
        memory_budget: see `kernel_product`.
        check_finite: first check the inputs for NaN and Inf.

    Returns:
        (B, H, L, Pv).

    Example:
        >>> import torch, skyformer
        >>> query, key, value = (0.3 * torch.randn(3, 1, 4, 1000, 32)).unbind()
        >>> out = skyformer.skyformer_attention(query, key, value, num_landmarks=128)
        >>> out.shape
        torch.Size([1, 4, 1000, 32])
        >>> exact = skyformer.kernelized_attention(query, key, value)
        >>> bool((out - exact).norm() / exact.norm() < 0.1)
        True
    """
    check_query_key_value(query, key, value)
    refuse_causal(is_causal)
    key_mask, query_mask = check_masks(query, key, key_mask, query_mask)
    if check_finite:
        check_finite_inputs(query=query, key=key, value=value)
    settings = SkyformerSettings.checked(
        num_landmarks=num_landmarks,
        landmarks=landmarks,
        gamma=gamma,
        solver=solver,
        scale=scale,
        kernel=kernel,
        memory_budget=memory_budget,
    )
    return attend_skyformer(query, key, value, key_mask, query_mask, settings, generator)


def refuse_causal(is_causal: bool) -> None:
    """Raise an error if causal attention is requested of Skyformer."""
    if is_causal:
        raise UnsupportedError(
            "is_causal must be False for skyformer_attention, because every output depends on landmarks from the whole "
            "sequence; got True. The exact kernelized_attention supports is_causal=True"
        )


def attend_skyformer(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    query_mask: Tensor | None,
    settings: SkyformerSettings,
    source: RandomSource = None,
    whole: WholeSequence = WHOLE,
) -> Tensor:
    """`skyformer_attention` on checked arguments. A missing `query_mask` is not replaced by `key_mask` here.

    `whole` knows the sequence, of which the tensors may be only a piece.
    """
    scale = scale_of(query, settings.scale)
    if triton_computes(query, value, settings.kernel):
        points, keys, values = query, key, value
    else:
        points, keys = query, key
        if settings.kernel.radial:
            points, keys = accurate_points(query, key, key_mask, scale, whole)
        # Contiguous here, once: choosing rows and both products would each copy a strided tensor.
        points, keys = (at_least_float32(x).contiguous() for x in (points, keys))
        values = value.to(points.dtype)
    if isinstance(settings.kernel, SoftmaxKernel):
        keys = _move_to_queries(points, keys, query_mask, key_mask, whole)
        own = Candidates(points, keys, query_mask, key_mask, GaussianKernel(), scale, normalised=True)
        candidates = whole.candidates(own)
        short = _ShortExamples.among(candidates, settings, whole)
        weighted = _weigh_by_key_norm(keys, values, key_mask, scale, whole)
        both = _nystrom(candidates, weighted, settings, short, source, whole)
        out = _normalise(both, values, key_mask, whole).to(query.dtype)
        return out if short is None else short.replace_by_softmax(out, query, key, value, scale)
    candidates = whole.candidates(Candidates(points, keys, query_mask, key_mask, settings.kernel, scale))
    short = _ShortExamples.among(candidates, settings, whole)
    return _nystrom(candidates, values, settings, short, source, whole).to(query.dtype)


def _nystrom(
    candidates: Candidates,
    value: Tensor,
    settings: SkyformerSettings,
    short: _ShortExamples | None,
    source: RandomSource,
    whole: WholeSequence,
) -> Tensor:
    """Equations (4) to (6): (I, 0) C-bar S (S^T C-bar S + gamma I)^-1 S^T C-bar (0, I)^T V, with S^T [Q; K] = W."""
    plan = Plan(candidates.kernel, candidates.scale, memory_budget=settings.memory_budget)
    query, key, chosen = _choose(candidates, settings, short, source, whole)
    W, active = chosen.points, chosen.active
    right = whole.sum(product_by_backend(W, key, value, candidates.key_mask, plan, float32_out=True))
    gram = gram_matrix(at_least_float32(W), kernel=plan.kernel, scale=plan.scale)
    if active is not None:
        right = right.masked_fill(~active.unsqueeze(-1), 0)
        gram = gram.masked_fill(~(active.unsqueeze(-1) & active.unsqueeze(-2)), 0)
    middle = regularized_solve(gram, right, settings.gamma, settings.solver)
    if short is not None:
        middle = torch.where(short.examples.unsqueeze(-1), short.values(value), middle)
    return product_by_backend(query, W, middle, None, plan)


def _choose(
    candidates: Candidates,
    settings: SkyformerSettings,
    short: _ShortExamples | None,
    source: RandomSource,
    whole: WholeSequence,
) -> tuple[Tensor, Tensor, Landmarks]:
    """The Q and K to use from here on (see `landmark_rows`), and the landmarks."""
    query, key, sampler = candidates.query, candidates.key, settings.landmarks
    num_rows = candidates.num_rows
    builtin = is_builtin(sampler)
    if isinstance(sampler, Tensor):
        drawn: Tensor | Landmarks = sampler
    elif is_builtin(sampler):
        drawn = whole.draw(sampler, candidates, settings.useful_landmarks(num_rows), source)
    else:
        generator = source.generator() if isinstance(source, FixedSeed) else source
        drawn = sampler(candidates.in_float32(), settings.num_landmarks, generator)
    if isinstance(drawn, Landmarks):
        if not builtin:
            drawn = check_points_and_slots(drawn, candidates.in_float32()).to(query.dtype)
        return query, key, drawn if short is None else short.replace_points(drawn, key)
    if not builtin:
        rows = check_rows(drawn, query.shape[0], query.shape[1], num_rows).to(query.device)
        # A caller may choose masked rows as mere points; a sampler that does has forgotten the masks.
        rows = rows if isinstance(sampler, Tensor) else without_masked_rows(rows, candidates)
    else:
        rows = drawn if drawn.dim() == 3 else drawn.unsqueeze(1)
    if short is not None:
        rows = short.replace_rows(rows)
    query, key, points = whole.landmark_rows(query, key, rows)
    # A built-in sampler fills every slot if there are more valid rows than slots.
    return query, key, Landmarks(points, None if builtin and short is None else rows >= 0)


@dataclass(frozen=True)
class _ShortExamples:
    """Examples (B, 1, 1) with at most as many valid rows as landmarks, and the rows (B, 1, d) of their keys. If every
    key is a landmark, kappa(W, W)^-1 kappa(W, K) V is V itself, so these examples use the values at their landmarks
    and are exact for every gamma."""

    examples: Tensor
    key_rows: Tensor
    num_queries: int
    whole: WholeSequence

    @staticmethod
    def among(candidates: Candidates, settings: SkyformerSettings, whole: WholeSequence) -> _ShortExamples | None:
        """None if no example is that short, or if the caller chose the rows or the sampler."""
        if not is_builtin(settings.landmarks):
            return None
        unmasked = candidates.query_mask is None and candidates.key_mask is None
        if unmasked and candidates.num_rows > settings.num_landmarks:
            return None
        slots, keys = settings.useful_landmarks(candidates.num_rows), candidates.valid_keys()
        examples = candidates.valid_queries() + keys <= slots
        if may_look_at_values(examples) and not bool(examples.any()):
            return None
        slot = torch.arange(slots, device=candidates.device).expand(keys.shape[0], -1)
        key_rows = torch.where(slot < keys, candidates.key_row(slot), -1)
        return _ShortExamples(examples[:, None], key_rows[:, None], candidates.num_queries, whole)

    def replace_rows(self, rows: Tensor) -> Tensor:
        """The drawn rows (B, 1 or H, k), with all keys as the rows of the short examples: (B, 1 or H, d)."""
        filled = F.pad(rows, (0, self.key_rows.shape[-1] - rows.shape[-1]), value=-1)
        return torch.where(self.examples, self.key_rows, filled)

    def replace_points(self, drawn: Landmarks, key: Tensor) -> Landmarks:
        """The same for landmarks that need not be rows."""
        keys = self.values(key)
        return Landmarks(
            torch.where(self.examples.unsqueeze(-1), keys, drawn.points),
            torch.where(self.examples, self.key_rows >= 0, drawn.all_active()),
        )

    def replace_by_softmax(self, out: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """`out` (B, H, L, Pv), with softmax attention for the short examples: exact for any norm, also where the
        Gaussian values that `_normalise` divides by vanish."""
        keys, values = self.values(key), self.values(value)
        exact = attend_softmax(query, keys, values, self.key_rows.squeeze(1) >= 0, scale=scale)
        return torch.where(self.examples.unsqueeze(-1), exact, out)

    def values(self, value: Tensor) -> Tensor:
        """The rows of value (B, H, S, Pv), or of the keys, at the landmarks; zero in empty slots."""
        taken = self.whole.key_rows(value, self.key_rows - self.num_queries)
        return taken.masked_fill((self.key_rows < 0).unsqueeze(-1), 0)


def _move_to_queries(
    query: Tensor, key: Tensor, query_mask: Tensor | None, key_mask: Tensor | None, whole: WholeSequence
) -> Tensor:
    """The keys, shifted so that their mean is the mean of the queries. A common shift c of the keys adds q_i . c to all
    scores of row i, which does not change softmax attention, and the Gaussian kernel then compares nearby points."""
    return key + (whole.mean(query, query_mask) - whole.mean(key, key_mask))


def _weigh_by_key_norm(
    key: Tensor, value: Tensor, key_mask: Tensor | None, scale: float, whole: WholeSequence
) -> Tensor:
    """D_K^(1/2) [V, 1]: with A = D_Q^(1/2) C D_K^(1/2), its Gaussian product is A [V, 1] up to a factor for each row.

    The largest |k_j|^2 / 2 is subtracted in the exponent, because it cancels in D^-1 A V.
    """
    height = half_norms(key, scale)
    visible = height if key_mask is None else height.masked_fill(~key_mask[:, None, :, None], 0)
    peak = visible.detach().amax(2, keepdim=True) if key.shape[2] else key.new_zeros(*key.shape[:2], 1, 1)
    weight = (visible - whole.largest(peak)).exp()
    return torch.cat([value * weight, weight], -1)


def _normalise(both: Tensor, value: Tensor, key_mask: Tensor | None, whole: WholeSequence) -> Tensor:
    """D^-1 A V from A [V, 1]. An exact row sum is positive, but an approximate one may be zero or negative. The exact
    output is an average of the values, so the output is clamped to their range."""
    total = both[..., -1:]
    out = both[..., :-1] / total.clamp(min=torch.finfo(total.dtype).tiny ** 0.5)
    return out.clamp(*value_range(value.detach(), key_mask, whole))


def value_range(value: Tensor, key_mask: Tensor | None, whole: WholeSequence = WHOLE) -> tuple[Tensor, Tensor]:
    """The smallest and the largest value of each feature over the valid keys, zero if there are none: (B, H, 1, Pv)."""
    if value.shape[2] == 0:
        high = value.new_full((*value.shape[:2], 1, value.shape[-1]), -math.inf)
        low = -high
    elif key_mask is None:
        low, high = value.aminmax(dim=2, keepdim=True)
    else:
        hidden = ~key_mask[:, None, :, None]
        low = value.masked_fill(hidden, math.inf).amin(2, keepdim=True)
        high = value.masked_fill(hidden, -math.inf).amax(2, keepdim=True)
    low, high = -whole.largest(-low), whole.largest(high)
    return low.masked_fill(low == math.inf, 0), high.masked_fill(high == -math.inf, 0)
