"""Kernelized Attention: the softmax replaced by a kernel, computed exactly."""

from __future__ import annotations

from torch import Tensor

from skyformer.attention.base import Attention
from skyformer.attention.registry import register
from skyformer.checks import check_at_least, check_probability, check_scale
from skyformer.functional import kernelized_attention
from skyformer.ops.kernels import Kernel, get_kernel
from skyformer.ops.products import MEMORY_BUDGET


@register
class KernelizedAttention(Attention):
    """kappa(Q / p^(1/4), K / p^(1/4)) V."""

    name = "kernelized"
    exact = True

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        max_length: int | None = None,
        seed: int = 0,
        scale: float | None = None,
        kernel: str | Kernel = "gaussian",
        dropout: float = 0.0,
        memory_budget: int = MEMORY_BUDGET,
        check_finite: bool = False,
    ) -> None:
        super().__init__(num_heads, head_dim, max_length=max_length, seed=seed)
        check_scale(scale)
        check_at_least("memory_budget", memory_budget, 0, most=2**62)
        check_probability("dropout", dropout)
        self.scale, self.kernel, self.dropout = scale, get_kernel(kernel), dropout
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
        return kernelized_attention(
            query,
            key,
            value,
            key_mask=key_mask,
            is_causal=is_causal,
            scale=self.scale,
            kernel=self.kernel,
            dropout_p=self.dropout if self.training else 0.0,
            memory_budget=self.memory_budget,
            check_finite=self.check_finite,
        )
