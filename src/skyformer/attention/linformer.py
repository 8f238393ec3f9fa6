"""Linformer: learned projections of the keys and the values along the sequence, then softmax attention to d features.

    softmax(Q (E K)^T / sqrt(P)) (F V)          E, F (H, d, max_length): the column of a token is its rank

A sequence of n valid tokens uses the n leading columns. O((L + S) d P) time and O((L + S) P) memory.
Wang et al., "Linformer: Self-Attention with Linear Complexity", 2020.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from skyformer.attention.base import Attention, Inputs, Promise, computed_in_float32
from skyformer.attention.registry import register_attention
from skyformer.attention.rows import Ranks
from skyformer.checks import check_at_least, check_probability, check_scale
from skyformer.errors import InputError, ShapeError
from skyformer.ops.flash import softmax_product
from skyformer.ops.tracing import is_variable


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
        value_projection: F, of the same shape; None uses E for the values too.
        key_mask: bool (B, S), True = attend. The column of a valid key is its rank among the valid keys.
        scale: factor of the scores; P ** -0.5 by default.
        dropout_p: the probability with which an entry of the (L, d) weights is dropped.

    Returns:
        (B, H, L, Pv).
    """
    inputs = LinformerAttention.checked(Inputs(query, key, value, key_mask))
    check_scale(scale)
    check_probability("dropout_p", dropout_p)
    return _attend(inputs, key_projection, value_projection, scale, dropout_p)


@computed_in_float32
def _attend(
    inputs: Inputs,
    key_projection: Tensor,
    value_projection: Tensor | None,
    scale: float | None,
    dropout_p: float,
) -> Tensor:
    key, value, key_mask = inputs.key, inputs.value, inputs.key_mask
    value_projection = key_projection if value_projection is None else value_projection
    for name, projection in (("key_projection", key_projection), ("value_projection", value_projection)):
        _check_projection(name, projection, key)
    columns = min(key_projection.shape[-1], value_projection.shape[-1])
    _check_length(key.shape[2], key_mask, columns)
    if key_mask is not None:
        ranks = Ranks.of(key_mask)
        key, value = (ranks.compact(x)[:, :, :columns] for x in (key, value))
    features = project(key, key_projection), project(value, value_projection)
    return softmax_product(inputs.query, *features, scale=scale, dropout_p=dropout_p)


def project(x: Tensor, projection: Tensor) -> Tensor:
    """E x with the leading columns of E (H or 1, d, N) for x (B, H, n, P): (B, H, d, P)."""
    length = x.shape[2]
    if is_variable(length):
        # A program with a slice would be for length < N only, because for N the slice is the whole.
        projection = projection.index_select(-1, torch.arange(length, device=x.device))
    leading = projection[..., :length].to(x.dtype)
    # matmul would copy E for each example; einsum makes one product per head of all examples.
    return torch.einsum("hdn,bhnp->bhdp", leading, x)


def _check_projection(name: str, projection: Tensor, key: Tensor) -> None:
    if projection.dim() != 3 or projection.shape[0] not in (1, key.shape[1]):
        raise ShapeError(
            f"{name} must have shape ({key.shape[1]}, d, N), or (1, d, N) for all heads; got {tuple(projection.shape)}"
        )


def _check_length(length: int, key_mask: Tensor | None, columns: int) -> None:
    """Only valid keys need a column; they can be counted where the data are known, but not while tracing."""
    if length <= columns:
        return
    if key_mask is not None and not key_mask.is_meta and not torch.compiler.is_compiling():
        length = int(key_mask.sum(-1).max()) if key_mask.numel() else 0
    if length > columns:
        raise ShapeError(
            f"key has {length} tokens, but the projections of 'linformer' attention have columns for {columns}; "
            f"build it with max_length={length} or more"
        )


@register_attention
@dataclass(eq=False, repr=False, kw_only=True)
class LinformerAttention(Attention):
    """softmax(Q (E K)^T / sqrt(P)) (F V) with learned E and F, (H or 1, num_features, max_length).

    Args:
        max_length: the largest number of valid keys of an example; required.
        share_heads: one E and one F for all heads. share_key_value: F = E.
    """

    name = "linformer"
    cannot: ClassVar[Mapping[Promise, str]] = {
        Promise.CAUSAL: "every feature mixes keys from the whole sequence",
        Promise.ANY_LENGTH: "the projections have one column per key, up to max_length keys",
    }

    num_features: int = 128
    share_heads: bool = False
    share_key_value: bool = False
    scale: float | None = None
    dropout: float = 0.0
    value_projection: nn.Parameter | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_length is None:
            raise InputError(
                "'linformer' attention needs max_length, the length of the longest sequence, because its projections "
                "have that many columns; add for example max_length=4096 to the options of the attention"
            )
        check_at_least("num_features", self.num_features, 1)
        shape = (1 if self.share_heads else self.num_heads, self.num_features, self.max_length)
        self.key_projection = nn.Parameter(torch.empty(shape))
        self.register_parameter("value_projection", None if self.share_key_value else nn.Parameter(torch.empty(shape)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal, and scaled so that max_length independent keys give features of the size of one key."""
        for projection in self.parameters():
            nn.init.normal_(projection, std=projection.shape[-1] ** -0.5)

    def attend(self, inputs: Inputs) -> Tensor:
        return _attend(inputs, self.key_projection, self.value_projection, self.scale, self.dropout_p)
