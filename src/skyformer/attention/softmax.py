"""Softmax attention, the baseline: `F.scaled_dot_product_attention` as an `Attention`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from skyformer.attention.base import Attention, Inputs
from skyformer.attention.registry import register
from skyformer.functional import softmax_attention


@register
@dataclass(eq=False, repr=False, kw_only=True)
class SoftmaxAttention(Attention):
    """softmax(Q K^T / sqrt(P)) V."""

    name = "softmax"
    exact = True

    scale: float | None = None
    dropout: float = 0.0

    def attend(self, inputs: Inputs) -> Tensor:
        return softmax_attention(
            inputs.query,
            inputs.key,
            inputs.value,
            key_mask=inputs.key_mask,
            is_causal=inputs.is_causal,
            scale=self.scale,
            dropout_p=self.dropout_p,
        )
