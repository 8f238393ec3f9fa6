"""Classes that would ignore the switch or fail inside: every way in gives the same answer, and back is really back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from skyformer.errors import UnsupportedError
from skyformer.hf import supports
from tests.helpers import refused
from tests.hf.families import BERT, BOTH, IDS, PICTURE, SPEECH, T5, Inputs, noise, pixels, tokens, two_texts, wave

# Importing DeBERTa scripts a function.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::skyformer.errors.AttentionWarning"),
]

OWN_CODE = "computes attention with its own code"
GPT = {"vocab_size": 50, **IDS}


def pictures_and_texts() -> Inputs:
    ids = torch.tensor([[101, 7, 8, 1012, 9, 102], [101, 9, 5, 6, 1012, 102]])
    return {**noise("pixel_values", 2, 3, 32, 32)(), "input_ids": ids}


def series() -> Inputs:
    """Ten known values and four to predict, with a lag of one."""
    known, later = torch.randn(2, 11), torch.randn(2, 4)
    return {
        "past_values": known,
        "past_time_features": torch.randn(2, 11, 1),
        "past_observed_mask": torch.ones(2, 11),
        "future_values": later,
        "future_time_features": torch.randn(2, 4, 1),
    }


@dataclass(frozen=True)
class Case:
    """A class, how it is made, its inputs, and why it is refused; "" if it works."""

    model: str
    settings: dict[str, Any]
    reason: str = OWN_CODE
    inputs: Callable[[], Inputs] = tokens
    attention: str = "skyformer"

    def __str__(self) -> str:
        return self.model

    def config(self) -> Any:
        cls = getattr(transformers, self.model)
        return cls.config_class(**copy.deepcopy(self.settings))


CASES = [
    *(
        Case(name, BERT)
        for name in (
            "DebertaModel",
            "DebertaV2Model",
            "MPNetModel",
            "RoFormerModel",
            "RemBertModel",
            "LukeModel",
            "NystromformerModel",
        )
    ),
    Case("LongformerModel", {**BERT, "attention_window": 4, "max_position_embeddings": 90}),
    Case("LayoutLMv3Model", {**BERT, "coordinate_size": 6, "shape_size": 4, "visual_embed": False}),
    Case("ConvBertModel", {**BERT, "embedding_size": 32}),
    Case("BigBirdModel", {**BERT, "attention_type": "original_full"}),
    Case("EsmModel", {**BERT, "pad_token_id": 1, "mask_token_id": 3}, reason=""),
    Case("XLNetModel", {"vocab_size": 50, "d_model": 32, "n_layer": 1, "n_head": 4, "d_inner": 48}),
    Case(
        "FunnelModel", {"vocab_size": 50, "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 48, "block_sizes": [1, 1]}
    ),
    Case("WavLMModel", SPEECH, inputs=wave),
    Case(
        "Swinv2Model",
        {"image_size": 24, "patch_size": 4, "embed_dim": 16, "depths": [1], "num_heads": [2], "window_size": 3},
        inputs=pixels,
    ),
    Case(
        "HieraModel",
        {
            "image_size": [32, 32],
            "patch_size": [7, 7],
            "patch_stride": [4, 4],
            "patch_padding": [3, 3],
            "masked_unit_size": [4, 4],
            "embed_dim": 16,
            "depths": [1, 1, 1],
            "num_heads": [1, 2, 4],
            "query_stride": [2, 2],
            "num_query_pool": 2,
        },
        inputs=noise("pixel_values", 2, 3, 32, 32),
    ),
    Case("GPTJModel", {**GPT, "n_embd": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 4}),
    Case(
        "GPTNeoModel",
        {**GPT, "hidden_size": 32, "num_layers": 1, "num_heads": 4, "attention_types": [[["global"], 1]]},
    ),
    Case("Data2VecVisionModel", PICTURE, inputs=pixels),
    Case(
        "BarkSemanticModel",
        {"input_vocab_size": 50, "output_vocab_size": 50, "hidden_size": 32, "num_layers": 1, "num_heads": 4},
    ),
    Case("Pix2StructTextModel", {**T5, "hidden_size": 32, "initializer_range": 0.02}, reason="position_bias"),
    Case(
        "InformerModel",
        {
            **{name: value for name, value in BOTH.items() if name != "vocab_size"},
            "prediction_length": 4,
            "context_length": 10,
            "lags_sequence": [1],
            "num_time_features": 1,
        },
        reason="ProbSparse",
        inputs=series,
    ),
    Case("BigBirdPegasusModel", {**BOTH, **IDS, "attention_type": "original_full"}, reason="causal", inputs=two_texts),
    Case(
        "BigBirdPegasusModel",
        {**BOTH, **IDS, "attention_type": "original_full"},
        reason="",
        inputs=two_texts,
        attention="kernelized",
    ),
    Case(
        "GroundingDinoModel",
        {
            **{name: value for name, value in BOTH.items() if name != "vocab_size"},
            "num_queries": 5,
            "num_feature_levels": 4,
            "encoder_n_points": 2,
            "decoder_n_points": 2,
            "backbone_config": transformers.SwinConfig(
                image_size=32, embed_dim=8, depths=[1] * 4, num_heads=[1] * 4, out_indices=[2, 3, 4]
            ),
            "text_config": {**BERT, "vocab_size": 1100, "model_type": "bert"},
            "max_text_len": 16,
        },
        inputs=pictures_and_texts,
    ),
]


def outputs(model: PreTrainedModel, inputs: Inputs) -> list[Tensor]:
    torch.manual_seed(0)
    with torch.no_grad():
        found = model.eval()(**copy.deepcopy(inputs)).to_tuple()
    return [x for x in found if isinstance(x, Tensor) and x.is_floating_point()]


def implementations(config: Any) -> dict[str, Any]:
    """The attention of every part, as `set_attn_implementation` takes it."""
    parts = {name: getattr(config, name) for name in config.sub_configs}
    inside = {name: implementations(part) for name, part in parts.items() if part is not None}
    return {"": config._attn_implementation, **inside}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_way_in_gives_the_same_answer_and_back_is_back(case: Case, tmp_path: Path) -> None:
    torch.manual_seed(0)
    cls, inputs = getattr(transformers, case.model), case.inputs()
    model: PreTrainedModel = cls(case.config()).eval()
    model.save_pretrained(tmp_path)
    first, own = implementations(model.config), outputs(model, inputs)
    never_switched = copy.deepcopy(model)
    assert own

    def switched() -> PreTrainedModel:
        model.set_attn_implementation(case.attention)
        return model

    ways: list[Callable[[], PreTrainedModel]] = [
        lambda: cls._from_config(case.config(), attn_implementation=case.attention),
        lambda: cls.from_pretrained(tmp_path, attn_implementation=case.attention),
        switched,
    ]
    for way in ways:
        if not case.reason:
            assert all(x.isfinite().all() for x in outputs(way(), inputs))
            continue
        with refused(UnsupportedError, case.reason, case.model.removesuffix("Model")):
            outputs(way(), inputs)
    assert bool(supports(cls, case.attention)) == (not case.reason)
    if case.reason == OWN_CODE:
        # Refused before anything changed, so there is nothing to switch back.
        assert implementations(model.config) == first
        assert all(torch.equal(x, y) for x, y in zip(own, outputs(model, inputs), strict=True))
    model.set_attn_implementation(first)
    assert all(torch.equal(x, y) for x, y in zip(own, outputs(model, inputs), strict=True))
    # One name for all parts may differ from the first names of the parts, also in a model that was never refused.
    for each in (model, never_switched):
        each.set_attn_implementation(first[""])
    for x, y in zip(outputs(model, inputs), outputs(never_switched, inputs), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
