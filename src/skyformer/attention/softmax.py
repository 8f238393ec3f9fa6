"""Softmax attention, the baseline: `F.scaled_dot_product_attention` as an `Attention`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from skyformer.attention.base import Attention, Inputs
from skyformer.attention.registry import register_attention
from skyformer.functional import attend_softmax


@register_attention
@dataclass(eq=False, repr=False, kw_only=True)
class SoftmaxAttention(Attention):
    """softmax(Q K^T / sqrt(P)) V."""

    name = "softmax"
    approximates_softmax = True
    exact = True

    scale: float | None = None
    dropout: float = 0.0

    def attend(self, inputs: Inputs) -> Tensor:
        return attend_softmax(
            inputs.query, inputs.key, inputs.value, inputs.key_mask, inputs.is_causal, self.scale, self.dropout_p
        )
