"""Skyformer: the Nystrom approximation of Kernelized Attention on landmarks drawn from [Q; K]."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from skyformer.attention.base import Attention, Inputs, Promise
from skyformer.attention.registry import register
from skyformer.checks import check_at_least, check_positive
from skyformer.functional import GAMMA, skyformer_attention
from skyformer.landmarks import CustomSampler, Sampler, get_sampler
from skyformer.ops.kernels import Kernel, get_kernel
from skyformer.ops.products import MEMORY_BUDGET
from skyformer.ops.solve import Solver, get_solver


@register
@dataclass(eq=False, repr=False, kw_only=True)
class SkyformerAttention(Attention):
    """kappa(Q, W) (kappa(W, W) + gamma I)^-1 kappa(W, K) V."""

    name = "skyformer"
    cannot: ClassVar[Mapping[Promise, str]] = {
        Promise.CAUSAL: "every output row depends on landmarks from the whole sequence; the exact form, "
        "attention='kernelized', is causal",
        Promise.DROPOUT: "the weights are never formed; put nn.Dropout after the attention instead",
        Promise.FULLGRAPH: "drawing landmarks breaks the graph; skyformer_attention with explicit rows does not",
    }

    num_landmarks: int = 128
    landmarks: str | Sampler | CustomSampler = "stratified"
    gamma: float = GAMMA
    solver: str | Solver = "cholesky"
    scale: float | None = None
    kernel: str | Kernel = "gaussian"
    memory_budget: int = MEMORY_BUDGET
    check_finite: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("memory_budget", self.memory_budget, 0, most=2**62)
        check_at_least("num_landmarks", self.num_landmarks, 1)
        check_positive("gamma", self.gamma)
        self.landmarks = get_sampler(self.landmarks)
        self.solver, self.kernel = get_solver(self.solver), get_kernel(self.kernel)

    def attend(self, inputs: Inputs) -> Tensor:
        return skyformer_attention(
            inputs.query,
            inputs.key,
            inputs.value,
            num_landmarks=self.num_landmarks,
            landmarks=self.landmarks,
            key_mask=inputs.key_mask,
            query_mask=inputs.query_mask,
            gamma=self.gamma,
            solver=self.solver,
            scale=self.scale,
            kernel=self.kernel,
            generator=self.generator(),
            memory_budget=self.memory_budget,
            check_finite=self.check_finite,
        )
