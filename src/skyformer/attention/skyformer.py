"""Skyformer: the Nystrom approximation of Kernelized Attention on landmarks drawn from [Q; K]."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from skyformer.attention.base import Attention, Inputs, Promise
from skyformer.attention.registry import register_attention
from skyformer.checks import check_finite_inputs
from skyformer.functional import GAMMA, SkyformerSettings, attend_skyformer
from skyformer.landmarks import CustomSampler, Sampler
from skyformer.ops.kernels import Kernel
from skyformer.ops.products import MEMORY_BUDGET
from skyformer.ops.solve import Solver


@register_attention
@dataclass(eq=False, repr=False, kw_only=True)
class SkyformerAttention(Attention):
    """kappa(Q, W) (kappa(W, W) + gamma I)^-1 kappa(W, K) V."""

    name = "skyformer"
    cannot: ClassVar[Mapping[Promise, str]] = {
        Promise.CAUSAL: "every output row depends on landmarks from the whole sequence; the exact form, "
        "attention='kernelized', is causal",
        Promise.DROPOUT: "the weights are never formed; put nn.Dropout after the attention instead",
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
        self.settings = SkyformerSettings.checked(
            num_landmarks=self.num_landmarks,
            landmarks=self.landmarks,
            gamma=self.gamma,
            solver=self.solver,
            scale=self.scale,
            kernel=self.kernel,
            memory_budget=self.memory_budget,
        )

    def attend(self, inputs: Inputs) -> Tensor:
        query, key, value = inputs.query, inputs.key, inputs.value
        if self.check_finite:
            check_finite_inputs(query=query, key=key, value=value)
        return attend_skyformer(
            query, key, value, inputs.key_mask, inputs.query_mask, self.settings, self.random_source()
        )
