"""Linformer: learned projections of the keys and the values along the sequence, then softmax attention to d features.

    softmax(Q (E K)^T / sqrt(P)) (F V)          E, F (H, d, max_length): the column of a token is its rank

A sequence of n valid tokens uses the n leading columns. O((L + S) d P) time and O((L + S) P) memory.
Wang et al., "Linformer: Self-Attention with Linear Complexity", 2020.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skyformer.attention.base import Attention, Promise
from skyformer.attention.ranks import Ranks
from skyformer.attention.registry import register
from skyformer.checks import (
    check_at_least,
    check_mask,
    check_positive,
    check_probability,
    check_query_key_value,
)
from skyformer.errors import InputError, ShapeError
from skyformer.ops.precision import at_least_float32, without_autocast


def linformer_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_projection: Tensor,
    value_projection: Tensor | None = None,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """softmax(Q (E K)^T scale) (F V), exact softmax attention to d learned mixtures of the tokens.

    Args:
        query: (B, H, L, P). key: (B, H, S, P). value: (B, H, S, Pv).
        key_projection: E, (H or 1, d, N) for up to N valid keys; with 1 the heads share it.
        value_projection: F, likewise; E serves the values too when it is None.
        key_mask: bool (B, S), True = attend. Masked keys have no column, so those after them do not move.
        scale: P ** -0.5 by default.
        dropout_p: the probability with which an entry of the (L, d) weights is dropped.

    Returns:
        (B, H, L, Pv).
    """
    check_query_key_value(query, key, value)
    check_mask("key_mask", key_mask, key.shape[0], key.shape[2])
    check_probability("dropout_p", dropout_p)
    if scale is not None:
        check_positive("scale", scale)
    value_projection = key_projection if value_projection is None else value_projection
    for name, projection in (("key_projection", key_projection), ("value_projection", value_projection)):
        _check_projection(name, projection, key)
    query32, key32, value32 = (at_least_float32(t) for t in (query, key, value))
    out = _attend(query32, key32, value32, key_projection, value_projection, key_mask, scale, dropout_p)
    return out.to(query.dtype)


@without_autocast
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_projection: Tensor,
    value_projection: Tensor,
    key_mask: Tensor | None,
    scale: float | None,
    dropout_p: float,
) -> Tensor:
    columns = min(key_projection.shape[-1], value_projection.shape[-1])
    _check_length(key.shape[2], key_mask, columns)
    if key_mask is not None:
        ranks = Ranks.of(key_mask)
        key, value = (ranks.compact(x)[:, :, :columns] for x in (key, value))
    features = project(key, key_projection), project(value, value_projection)
    return F.scaled_dot_product_attention(query, *features, scale=scale, dropout_p=dropout_p)


def project(x: Tensor, projection: Tensor) -> Tensor:
    """E x with the leading columns of E (H or 1, d, N) for x (B, H, n, P): (B, H, d, P)."""
    leading = projection[..., : x.shape[2]].to(x.dtype)
    # matmul would copy E once for each example; einsum puts the examples side by side in one product a head.
    return torch.einsum("hdn,bhnp->bhdp", leading, x)


def _check_projection(name: str, projection: Tensor, key: Tensor) -> None:
    if projection.dim() != 3 or projection.shape[0] not in (1, key.shape[1]):
        raise ShapeError(
            f"{name} must have shape ({key.shape[1]}, d, N), or (1, d, N) for all heads; got {tuple(projection.shape)}"
        )


def _check_length(length: int, key_mask: Tensor | None, columns: int) -> None:
    """Only valid keys need a column, but to count them is to look at the data, which tracing cannot do."""
    if length <= columns:
        return
    if key_mask is not None and not key_mask.is_meta and not torch.compiler.is_compiling():
        length = int(key_mask.sum(-1).max()) if key_mask.numel() else 0
    if length > columns:
        raise ShapeError(
            f"key has {length} tokens, but the projections of 'linformer' attention have columns for {columns}; "
            f"build it with max_length={length} or more"
        )


@register
class LinformerAttention(Attention):
    """softmax(Q (E K)^T / sqrt(P)) (F V) with learned E and F.

    Args:
        num_heads: H. head_dim: P. seed: not used, for nothing is random.
        max_length: the most valid keys an example may have: the number of columns of E and F.
        num_features: d. share_heads: one E and one F for all heads. share_key_value: F = E.
        scale: P ** -0.5 by default. dropout: of the (L, d) attention weights.
    """

    name = "linformer"
    cannot: ClassVar[Mapping[Promise, str]] = {
        Promise.CAUSAL: "every feature mixes keys from the whole sequence",
        Promise.ANY_LENGTH: "the projections have a column for each key up to max_length, and no more",
    }

    value_projection: nn.Parameter | None

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        max_length: int | None = None,
        seed: int = 0,
        num_features: int = 128,
        share_heads: bool = False,
        share_key_value: bool = False,
        scale: float | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(num_heads, head_dim, max_length=max_length, seed=seed)
        if max_length is None:
            raise InputError(
                "'linformer' attention needs max_length, the longest sequence it will see, for its projections have "
                "that many columns: give max_length=4096, say, among the attention's options"
            )
        check_at_least("num_features", num_features, 1)
        check_probability("dropout", dropout)
        if scale is not None:
            check_positive("scale", scale)
        self.scale, self.dropout = scale, dropout
        shape = (1 if share_heads else num_heads, num_features, max_length)
        self.key_projection = nn.Parameter(torch.empty(shape))
        self.register_parameter("value_projection", None if share_key_value else nn.Parameter(torch.empty(shape)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal, and scaled so that max_length independent keys give features of the size of one key."""
        for projection in self.parameters():
            nn.init.normal_(projection, std=projection.shape[-1] ** -0.5)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None,
        query_mask: Tensor | None,
        is_causal: bool,
    ) -> Tensor:
        return linformer_attention(
            query,
            key,
            value,
            key_projection=self.key_projection,
            value_projection=self.value_projection,
            key_mask=key_mask,
            scale=self.scale,
            dropout_p=self.dropout if self.training else 0.0,
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, num_features={self.key_projection.shape[1]}, max_length={self.max_length}"
