"""Kernelized Attention: the softmax is replaced by a kernel, and computed exactly."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from skyformer.attention.base import Attention, Inputs
from skyformer.attention.registry import register_attention
from skyformer.checks import check_finite_inputs, check_memory_budget
from skyformer.functional import attend_kernelized
from skyformer.ops.kernels import Kernel, get_kernel, scale_of
from skyformer.ops.products import MEMORY_BUDGET, Plan


@register_attention
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
        check_memory_budget(self.memory_budget)
        self.kernel = get_kernel(self.kernel)

    def attend(self, inputs: Inputs) -> Tensor:
        if self.check_finite:
            check_finite_inputs(query=inputs.query, key=inputs.key, value=inputs.value)
        plan = Plan(
            get_kernel(self.kernel),
            scale_of(inputs.query, self.scale),
            inputs.is_causal,
            self.dropout_p,
            memory_budget=self.memory_budget,
        )
        return attend_kernelized(inputs.query, inputs.key, inputs.value, inputs.key_mask, plan)
