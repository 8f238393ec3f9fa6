"""Masks: a mask function that never expands padding masks, and the reading of the masks that models pass on.

transformers builds masks from a function of indices (causal, bidirectional, sliding windows, ...) and a padding mask
(B, S). `plain_mask` returns padding alone as (B, 1, 1, S), which models can slice and repeat like one of (B, 1, L, S).
Any other pattern of indices is attached to a mask (B, S): operations on a mask lose its pattern, and then one of two
dimensions fails, where one of four would silently stand for padding alone. `read_mask` returns padding and pattern.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    prepare_padding_mask,
    sdpa_mask,
)

from skyformer.errors import MaskError, UnsupportedError

_ATTRIBUTE = "_skyformer_pattern"
_INDEXED = "choose the keys of every query by scores of their own"
_EXPECT_WIDE_MASKS = {
    "AXK2Config": _INDEXED,
    "BridgeTowerConfig": "call layers causal that have no mask and attend to everything",
    "DeepseekV32Config": _INDEXED,
    "DogeConfig": "add learned terms to the scores",
    "Gemma4AudioConfig": "compute attention inside chunks of tokens with their own code",
    "GitConfig": "compute the attention of their text part with their own code",
    "GlmMoeDsaConfig": _INDEXED,
    "HYV4Config": _INDEXED,
    "InformerConfig": "compute most of their attention (ProbSparse) with their own code",
    "MistralLarge4TextConfig": _INDEXED,
    "NemotronAsrStreamingEncoderConfig": "add positions to the scores through the mask",
    "NllbMoeConfig": "route tokens to experts by a mask of every pair of tokens",
    "PPDocLayoutV2ReadingOrderConfig": "add the mask to scores that they compute with their own code",
    "Pix2StructTextConfig": "add a position_bias to the scores, which this attention never computes",
}
"""Configs of models that build their mask by `attn_implementation` but then expect one of every pair of tokens, and why
they cannot be used."""


@dataclass(frozen=True)
class Pattern:
    """The keys that a query may attend to, apart from padding: all by default.

    Args:
        causal: only earlier keys. first_query: the position of the first query among the keys.
        local: only keys inside a window.
        other: a description of any pattern that these do not cover.
    """

    causal: bool = False
    first_query: int = 0
    local: bool = False
    other: str | None = None


@dataclass(frozen=True)
class Visible:
    """The keys that are not padding, bool (B, S) or None for all; and the pattern, None if the mask has none."""

    key_mask: Tensor | None
    pattern: Pattern | None


def plain_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    device: torch.device | str = "cpu",
    config: Any = None,
    **others: Any,
) -> Tensor:
    """Bool: (B, 1, 1, S) for padding alone, (B, S) with any other pattern attached.

    If nothing at all is hidden, the mask says so by the pattern that is attached to it, so that its values need not be
    looked at. None would not do: some modules call themselves causal although their model attends to everything.
    """
    if not torch.compiler.is_compiling():
        _refuse_other_masks(config.__class__)
    if attention_mask is not None and attention_mask.dim() != 2:
        shape = tuple(attention_mask.shape)
        raise MaskError(
            f"attention_mask must be (B, S), or (B, 1, L, S) if it is the same for all L; got shape {shape}"
        )
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:
        padding = padding[:, kv_offset : kv_offset + kv_length].expand(batch_size, -1)
    # A model may pass the mask it has made on to a model inside it, which takes it for padding.
    pattern = attached_pattern(attention_mask) or _pattern_of(mask_function, local_size, int(q_offset) - int(kv_offset))
    nothing_hidden = padding is None or _all_true(padding)
    if padding is None:
        padding = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)
    if pattern != Pattern():
        return attach(padding.view_as(padding), pattern)
    wide = padding[:, None, None]
    return attach(wide, pattern) if nothing_hidden else wide


def mask_with_sdpa_windows(*, local_size: int | None = None, **arguments: Any) -> Tensor | None:
    """`plain_mask`, except that layers with a window get the (B, 1, L, S) mask of sdpa."""
    if local_size is None:
        return plain_mask(**arguments)
    mask = sdpa_mask(local_size=local_size, **arguments)
    return None if mask is None else attach(mask, Pattern(local=True))


@cache
def _refuse_other_masks(config_type: Any) -> None:
    """Raises for models that build their mask by `attn_implementation` but then expect one of every pair of tokens."""
    if config_type.__name__ in _EXPECT_WIDE_MASKS:
        raise UnsupportedError(
            f"{config_type.__name__.removesuffix('Config')} models {_EXPECT_WIDE_MASKS[config_type.__name__]}. Use "
            "attn_implementation='sdpa' or 'eager' for this model"
        )


def attach(mask: Tensor, pattern: Pattern) -> Tensor:
    """`mask` with the pattern as an attribute, which operations on the mask do not copy."""
    setattr(mask, _ATTRIBUTE, pattern)
    return mask


def attached_pattern(mask: Tensor | None) -> Pattern | None:
    return getattr(mask, _ATTRIBUTE, None)


def _pattern_of(mask_function: Callable[..., Any], local_size: int | None, first_query: int) -> Pattern:
    if mask_function is bidirectional_mask_function:
        return Pattern()
    if mask_function is causal_mask_function:
        return Pattern(causal=True, first_query=first_query)
    if local_size is not None:
        return Pattern(local=True, other=f"a window of {local_size} tokens")
    return Pattern(other="a pattern of its own, such as a prefix without order or several sequences in one row")


def _all_true(mask: Tensor) -> bool:
    """Whether nothing is masked, if that can be known: a traced graph has no values."""
    return not torch.compiler.is_compiling() and not mask.is_meta and bool(mask.all())


def read_mask(mask: Tensor | None, batch: int, num_keys: int) -> Visible:
    """The key mask and pattern of the mask that a model passes to its attention, (B, S) or (B, 1 or H, 1 or L, S)."""
    if mask is None:
        return Visible(None, None)
    if not isinstance(mask, Tensor) or mask.dim() not in (2, 4):
        given = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise MaskError(f"attention_mask must be a tensor (B, S) or (B, 1, L, S); got {given}")
    if mask.dim() == 4 and attached_pattern(mask) == Pattern():
        return Visible(None, Pattern())
    if mask.dim() == 4:
        # Such a mask describes every pair, so whether the module is causal no longer matters.
        return Visible(_key_mask_of(mask)[:, :num_keys].expand(batch, -1), Pattern())
    key_mask = mask if mask.dtype == torch.bool or mask.is_floating_point() else mask.bool()
    return Visible(key_mask, attached_pattern(mask))


def _key_mask_of(mask: Tensor) -> Tensor:
    """(B, S) from a mask (B, 1 or H, 1 or L, S) that is the same for all queries and heads."""
    row = mask[:, :1, :1]
    # Without looking at the values of a mask that has one row only, which would make an accelerator wait.
    if mask.shape[1:3] != (1, 1) and not bool((mask == row).all()):
        raise UnsupportedError(
            f"attention_mask of shape {tuple(mask.shape)} hides different keys from different queries or heads; this "
            "attention never computes the (L, S) scores, so it supports padding only, the same keys for all. Pass the "
            "padding as attention_mask (B, S), or use attn_implementation='sdpa' or 'eager'"
        )
    row = row[:, 0, 0]
    if row.dtype == torch.bool:
        return row
    visible, hidden = row == 0, row <= _HIDDEN
    if not row.is_floating_point() or not bool((visible | hidden).all()):
        raise MaskError(
            "attention_mask (B, 1, L, S) must be bool, True = attend, or float with 0 = attend and -inf (or at most "
            f"-10000) = ignore; got {row.dtype} with values from {float(row.min()):g} to {float(row.max()):g}"
        )
    return visible


_HIDDEN = -9999.0
"""Scores lowered by this much have no weight left. Older models use -10000."""
