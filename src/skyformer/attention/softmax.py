"""Softmax attention, the baseline: `F.scaled_dot_product_attention` behind this package's interface."""

from __future__ import annotations

from torch import Tensor

from skyformer.attention.base import Attention
from skyformer.attention.registry import register
from skyformer.checks import check_probability, check_scale
from skyformer.functional import softmax_attention


@register
class SoftmaxAttention(Attention):
    """softmax(Q K^T / sqrt(P)) V."""

    name = "softmax"
    exact = True

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        max_length: int | None = None,
        seed: int = 0,
        scale: float | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(num_heads, head_dim, max_length=max_length, seed=seed)
        check_scale(scale)
        check_probability("dropout", dropout)
        self.scale, self.dropout = scale, dropout

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None,
        query_mask: Tensor | None,
        is_causal: bool,
    ) -> Tensor:
        dropout_p = self.dropout if self.training else 0.0
        return softmax_attention(
            query, key, value, key_mask=key_mask, is_causal=is_causal, scale=self.scale, dropout_p=dropout_p
        )
