"""Masks: padding stays two-dimensional, patterns are recognised, and a mask of four dimensions must be padding."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaModel
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    or_masks,
    sliding_window_bidirectional_mask_function,
)

from skyformer.errors import MaskError, UnsupportedError
from skyformer.hf.masks import Pattern, Visible, attached_pattern, mask_with_sdpa_windows, plain_mask, read_mask
from tests.helpers import refused, scattered_mask
from tests.hf.families import BERT_FAMILY, LENGTH, TEXT, model_of, tokens


def make(mask_function: Any, attention_mask: Tensor | None = None, **more: Any) -> Tensor:
    sizes = {"batch_size": 2, "q_length": 6, "kv_length": 6, **more}
    return plain_mask(mask_function=mask_function, attention_mask=attention_mask, **sizes)


def test_padding_is_never_expanded_and_no_padding_hides_nothing() -> None:
    padding = scattered_mask(2, 6)
    mask = make(bidirectional_mask_function, padding)
    assert mask is not None
    assert torch.equal(mask, padding[:, None, None])
    visible = read_mask(mask, 2, 6)
    assert visible.pattern == Pattern()
    assert torch.equal(visible.key_mask, padding)
    for nothing in (None, torch.ones(2, 6, dtype=torch.bool)):
        mask = make(bidirectional_mask_function, nothing)
        assert mask.shape == (2, 1, 1, 6)
        assert mask.all()
        assert read_mask(mask, 2, 6) == Visible(None, Pattern())
        # A model may change the mask, which then speaks for itself.
        changed = read_mask(mask[..., :4], 2, 4)
        assert changed.pattern == Pattern()
        assert changed.key_mask is not None
        assert changed.key_mask.shape == (2, 4)


@pytest.mark.parametrize("padding", [None, scattered_mask(2, 6)])
def test_a_causal_pattern_is_attached_to_the_mask(padding: Tensor | None) -> None:
    mask = make(causal_mask_function, padding, q_offset=4, q_length=2)
    assert mask is not None
    assert torch.equal(mask, torch.ones(2, 6, dtype=torch.bool) if padding is None else padding)
    assert read_mask(mask, 2, 6).pattern == Pattern(causal=True, first_query=4)
    assert attached_pattern(padding) is None


def test_a_mask_shorter_than_a_static_cache_is_filled_up() -> None:
    mask = make(causal_mask_function, torch.ones(2, 4, dtype=torch.bool))
    assert mask is not None
    assert mask.tolist() == [[True] * 4 + [False] * 2] * 2


def test_a_mask_of_three_dimensions_is_refused() -> None:
    with refused(MaskError, "(B, S)", "(2, 6, 6)"):
        make(bidirectional_mask_function, torch.ones(2, 6, 6, dtype=torch.bool))


def test_windows_are_recognised() -> None:
    window = sliding_window_bidirectional_mask_function(2)
    mask = make(window, local_size=2)
    assert read_mask(mask, 2, 6).pattern == Pattern(local=True, other="a window of 2 tokens")
    kept = mask_with_sdpa_windows(
        batch_size=2, q_length=6, kv_length=6, mask_function=window, local_size=2, allow_is_causal_skip=False
    )
    assert kept is not None
    assert kept.shape == (2, 1, 6, 6)
    assert attached_pattern(kept) == Pattern(local=True)
    full = mask_with_sdpa_windows(batch_size=2, q_length=6, kv_length=6, mask_function=bidirectional_mask_function)
    assert read_mask(full, 2, 6) == Visible(None, Pattern())


def test_other_patterns_are_refused_where_they_are_used() -> None:
    model = LlamaModel(LlamaConfig(**TEXT, num_key_value_heads=2)).eval()
    model.set_attn_implementation("kernelized")
    packed = torch.cat([torch.arange(25), torch.arange(LENGTH - 25)]).expand(2, -1)
    with refused(UnsupportedError, "LlamaAttention", "several sequences in one row", "'sdpa' or 'eager'"):
        model(input_ids=tokens()["input_ids"], position_ids=packed, use_cache=False)


PADDING = scattered_mask(2, 6, seed=3)
ADDITIVE = torch.zeros(2, 1, 1, 6).masked_fill(~PADDING[:, None, None], torch.finfo(torch.float32).min)


@pytest.mark.parametrize(
    "mask",
    [
        PADDING.long(),
        PADDING[:, None, None],
        PADDING[:, None, None].expand(-1, 4, 6, -1),
        ADDITIVE,
        ADDITIVE.expand(-1, 1, 6, -1),
        ADDITIVE.masked_fill(ADDITIVE < 0, -float("inf")),
        ADDITIVE.masked_fill(ADDITIVE < 0, -10000.0),
        torch.cat([ADDITIVE, ADDITIVE], -1),
        PADDING[:1, None, None],
    ],
    ids=["int", "row", "expanded", "additive", "additive rows", "inf", "-10000", "longer than the keys", "one row"],
)
def test_padding_is_found_in_other_forms(mask: Tensor) -> None:
    key_mask = read_mask(mask, 2, 6).key_mask
    assert key_mask is not None
    # One row may serve the batch.
    assert torch.equal(key_mask, PADDING if len(mask) == 2 else PADDING[:1].expand(2, -1))


BIAS = torch.zeros(2, 1, 1, 6)
BIAS[0, 0, 0, 2] = -1.5


@pytest.mark.parametrize(
    ("mask", "error", "words"),
    [
        (torch.ones(2, 1, 6, 6).tril().bool(), UnsupportedError, ("(2, 1, 6, 6)", "different queries", "'sdpa'")),
        (torch.arange(4).view(1, 4, 1, 1).expand(2, 4, 6, 6) > 0, UnsupportedError, ("heads",)),
        (BIAS, MaskError, ("float", "-1.5")),
        (torch.ones(2, 1, 1, 6, dtype=torch.long), MaskError, ("bool", "int64")),
        (torch.ones(2, 6, 6), MaskError, ("(B, S)", "(2, 6, 6)")),
        ("mask", MaskError, ("tensor", "str")),
    ],
)
def test_other_masks_are_refused(mask: Any, error: type[Exception], words: tuple[str, ...]) -> None:
    with refused(error, *words):
        read_mask(mask, 2, 6)


def test_a_model_takes_a_mask_of_four_dimensions() -> None:
    model, inputs = model_of(BERT_FAMILY), tokens()
    model.set_attn_implementation("few")
    plain = model.eval()(**inputs)[0]
    four = inputs["attention_mask"].bool()[:, None, None].expand(-1, 1, LENGTH, -1)
    torch.testing.assert_close(model(inputs["input_ids"], attention_mask=four)[0], plain)


def test_a_module_that_calls_itself_causal_attends_to_everything_if_its_model_says_so() -> None:
    """BridgeTower's layers do; transformers' eager attention looks at the mask only."""
    model, inputs = copy.deepcopy(model_of(BERT_FAMILY)).eval(), {"input_ids": tokens()["input_ids"]}
    model.set_attn_implementation("eager")
    own = model(**inputs)[0]
    for layer in model.encoder.layer:
        layer.attention.self.is_causal = True
    for name in ("exact-softmax", "all-of-softmax"):
        model.set_attn_implementation(name)
        torch.testing.assert_close(model(**inputs)[0], own, rtol=1e-4, atol=1e-4)


def test_a_mask_that_is_passed_on_to_an_inner_model_keeps_its_pattern() -> None:
    """PaliGemma makes the mask of its text model, in which a prefix attends to itself in both directions."""
    prefix = or_masks(causal_mask_function, lambda batch, head, query, key: key < 3)
    outer = make(prefix, scattered_mask(2, 6))
    inner = make(causal_mask_function, outer)
    assert read_mask(inner, 2, 6).pattern == read_mask(outer, 2, 6).pattern
    assert read_mask(inner, 2, 6).pattern != Pattern(causal=True)
    assert read_mask(make(causal_mask_function, make(causal_mask_function)), 2, 6).pattern == Pattern(causal=True)
