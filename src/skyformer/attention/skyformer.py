"""Skyformer: the Nystrom approximation of Kernelized Attention on landmarks drawn from [Q; K]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from skyformer.attention.base import Attention, Promise
from skyformer.attention.registry import register
from skyformer.checks import check_at_least, check_positive, check_scale
from skyformer.functional import GAMMA, skyformer_attention
from skyformer.landmarks import CustomSampler, Sampler, get_sampler
from skyformer.ops.kernels import Kernel, get_kernel
from skyformer.ops.products import MEMORY_BUDGET
from skyformer.ops.solve import Solver, get_solver


@register
class SkyformerAttention(Attention):
    """kappa(Q, W) (kappa(W, W) + gamma I)^-1 kappa(W, K) V."""

    name = "skyformer"
    cannot: ClassVar[Mapping[Promise, str]] = {
        Promise.CAUSAL: "every output row passes through landmarks from the whole sequence; the exact form, "
        "attention='kernelized', is causal",
        Promise.DROPOUT: "the weights are never formed; put nn.Dropout after the attention instead",
        Promise.FULLGRAPH: "drawing landmarks breaks the graph; skyformer_attention with explicit rows does not",
    }

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        max_length: int | None = None,
        seed: int = 0,
        num_landmarks: int = 128,
        landmarks: str | Sampler | CustomSampler = "stratified",
        gamma: float = GAMMA,
        solver: str | Solver = "cholesky",
        scale: float | None = None,
        kernel: str | Kernel = "gaussian",
        memory_budget: int = MEMORY_BUDGET,
        check_finite: bool = False,
    ) -> None:
        super().__init__(num_heads, head_dim, max_length=max_length, seed=seed)
        check_scale(scale)
        check_at_least("memory_budget", memory_budget, 0, most=2**62)
        check_at_least("num_landmarks", num_landmarks, 1)
        check_positive("gamma", gamma)
        self.num_landmarks, self.landmarks, self.gamma = num_landmarks, get_sampler(landmarks), gamma
        self.solver, self.kernel, self.scale = get_solver(solver), get_kernel(kernel), scale
        self.memory_budget, self.check_finite = memory_budget, check_finite

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None,
        query_mask: Tensor | None,
        is_causal: bool,
    ) -> Tensor:
        return skyformer_attention(
            query,
            key,
            value,
            num_landmarks=self.num_landmarks,
            landmarks=self.landmarks,
            key_mask=key_mask,
            query_mask=query_mask,
            gamma=self.gamma,
            solver=self.solver,
            scale=self.scale,
            kernel=self.kernel,
            generator=self.generator(),
            memory_budget=self.memory_budget,
            check_finite=self.check_finite,
        )
