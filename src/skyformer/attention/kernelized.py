"""Kernelized Attention: the softmax is replaced by a kernel, and computed exactly."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from skyformer.attention.base import Attention, Inputs
from skyformer.attention.registry import register
from skyformer.checks import check_at_least
from skyformer.functional import kernelized_attention
from skyformer.ops.kernels import Kernel, get_kernel
from skyformer.ops.products import MEMORY_BUDGET


@register
@dataclass(eq=False, repr=False, kw_only=True)
class KernelizedAttention(Attention):
    """kappa(Q / p^(1/4), K / p^(1/4)) V."""

    name = "kernelized"
    exact = True

    scale: float | None = None
    kernel: str | Kernel = "gaussian"
    dropout: float = 0.0
    memory_budget: int = MEMORY_BUDGET
    check_finite: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("memory_budget", self.memory_budget, 0, most=2**62)
        self.kernel = get_kernel(self.kernel)

    def attend(self, inputs: Inputs) -> Tensor:
        return kernelized_attention(
            inputs.query,
            inputs.key,
            inputs.value,
            key_mask=inputs.key_mask,
            is_causal=inputs.is_causal,
            scale=self.scale,
            kernel=self.kernel,
            dropout_p=self.dropout_p,
            memory_budget=self.memory_budget,
            check_finite=self.check_finite,
        )
