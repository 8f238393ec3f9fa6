"""The guard of the switch: models that would ignore it, texts that are too long, weights of another attention."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import (
    AutoModel,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    CLIPConfig,
    CLIPModel,
    DebertaV2Config,
    EncoderDecoderModel,
    FNetConfig,
    FNetModel,
    GPT2LMHeadModel,
    GPT2Model,
    GPTJConfig,
    MPNetConfig,
    MPNetModel,
    PreTrainedModel,
    RobertaConfig,
    RobertaModel,
    XLNetConfig,
)

import skyformer.hf
from skyformer import Attention, list_attentions, register_attention
from skyformer.attention.registry import _ATTENTIONS
from skyformer.errors import AttentionWarning, InputError, ShapeError, UnsupportedError
from skyformer.hf import guard
from skyformer.hf.families import KINDS, WORKS, outcomes, record
from tests.helpers import refused
from tests.hf.families import BERT, BERT_FAMILY, IDS, LENGTH, PICTURE, TEXT, model_of, tokens
from tests.outside.outcomes import TRIALS, grouped

OWN: dict[str, Callable[[], Any]] = {
    "DebertaV2Model": lambda: DebertaV2Config(**BERT),
    "MPNetModel": lambda: MPNetConfig(**BERT),
    "GPTJModel": lambda: GPTJConfig(vocab_size=50, n_embd=32, n_layer=1, n_head=4, rotary_dim=4, **IDS),
    "XLNetModel": lambda: XLNetConfig(vocab_size=50, d_model=32, n_layer=1, n_head=4, d_inner=48),
}
WITHOUT_PARAMETERS = [name for name in list_attentions() if name != "linformer"]


# Importing DeBERTa scripts a function.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", OWN)
def test_models_with_their_own_attention_are_refused_on_all_ways_in(name: str, tmp_path: Path) -> None:
    words = ("'skyformer'", f"{name} computes attention with its own code", "another family", "MultiheadAttention")
    with refused(UnsupportedError, *words):
        AutoModel.from_config(OWN[name](), attn_implementation="skyformer")
    model = AutoModel.from_config(OWN[name]())
    before = model.config._attn_implementation
    with refused(UnsupportedError, *words):
        model.set_attn_implementation("skyformer")
    assert model.config._attn_implementation == before
    model.save_pretrained(tmp_path)
    with refused(UnsupportedError, *words):
        AutoModel.from_pretrained(tmp_path, attn_implementation="skyformer")
    model.set_attn_implementation(before)


def test_a_model_that_never_calls_the_attention_is_refused_after_its_first_pass() -> None:
    model = FNetModel(FNetConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1, intermediate_size=48)).eval()
    model.set_attn_implementation("skyformer")
    with refused(UnsupportedError, "FNetModel ran without calling attention 'skyformer'"):
        model(tokens()["input_ids"])
    model.set_attn_implementation("eager")
    assert model(tokens()["input_ids"])[0].isfinite().all()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_a_refused_switch_of_one_part_leaves_all_parts_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    model = CLIPModel(CLIPConfig(text_config=TEXT, vision_config=PICTURE))
    parts = [model.config, model.config.text_config, model.config.vision_config]
    before = [part._attn_implementation for part in parts]
    monkeypatch.setattr(type(model.vision_model), "_can_set_attn_implementation", classmethod(lambda cls: False))
    with refused(UnsupportedError, "CLIPVisionModel", "{'text_config': 'kernelized'}"):
        model.set_attn_implementation("kernelized")
    assert [part._attn_implementation for part in parts] == before
    model.set_attn_implementation({"text_config": "kernelized"})
    assert [part._attn_implementation for part in parts] == [before[0], "kernelized", before[2]]


def test_watched_models_can_be_copied_and_stored() -> None:
    model = BertModel(BertConfig(**BERT)).eval()
    model.set_attn_implementation("few")
    expected = model(**tokens())[0]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(**tokens())[0], expected)
    model.set_attn_implementation("sdpa")
    assert not model._forward_hooks


@pytest.mark.parametrize("by", ["input_ids", "inputs_embeds", "position"])
@pytest.mark.parametrize("kind", [BertModel, RobertaModel, BertForMaskedLM])
def test_a_text_beyond_the_learned_positions_names_extend_positions(kind: type[PreTrainedModel], by: str) -> None:
    config = RobertaConfig(**BERT, pad_token_id=1) if kind is RobertaModel else BertConfig(**BERT)
    model, positions = kind(config).eval(), 78 if kind is RobertaModel else 80
    model.set_attn_implementation("tilted")
    ids = torch.randint(5, 50, (1, positions + 1))
    with refused(ShapeError, f"{positions + 1} tokens", f"positions for {positions}", "skyformer.hf.extend_positions"):
        if by == "position":
            model(ids)
        else:
            model(**{by: ids if by == "input_ids" else torch.randn(*ids.shape, 32)})
    assert model(ids[:, :-1])[0].isfinite().all()
    skyformer.hf.extend_positions(model, positions + 1)
    assert model(ids)[0].isfinite().all()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    BERT_FAMILY.build().save_pretrained(tmp_path)
    return tmp_path


@torch.no_grad()
def test_weights_of_another_attention_are_a_warning_once(checkpoint: Path, tmp_path: Path) -> None:
    model = AutoModel.from_pretrained(checkpoint, attn_implementation="skyformer").eval()
    with pytest.warns(AttentionWarning, match="not trained with attention 'skyformer'.*attn_implementation='tilted'"):
        model(**tokens())
    model(**tokens())
    for name in ("tilted", "skyformer-softmax", "sdpa", "performer"):
        AutoModel.from_pretrained(checkpoint, attn_implementation=name).eval()(**tokens())
    guard._warned.clear()
    model.train()(**tokens())
    model.save_pretrained(tmp_path / "trained")
    AutoModel.from_pretrained(tmp_path / "trained", attn_implementation="skyformer").eval()(**tokens())


@pytest.mark.parametrize("name", WITHOUT_PARAMETERS)
def test_every_attention_without_parameters_runs_by_its_name(name: str) -> None:
    model, inputs = copy.deepcopy(model_of(BERT_FAMILY)).eval(), tokens()
    model.set_attn_implementation(name)
    out = model(**inputs)[0]
    assert torch.equal(out, model(**inputs)[0])
    assert torch.equal(out, copy.deepcopy(model)(**inputs)[0])
    alone = model(inputs["input_ids"][1:, :28])[0]
    torch.testing.assert_close(out[1:, :28], alone, rtol=0, atol=1e-5)
    model.train()(**inputs)[0].square().sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_options_of_an_attention_by_name_and_the_models_scale_reach_it() -> None:
    skyformer.hf.register("exact-informer", attention="informer", num_features=LENGTH)
    model, inputs = model_of(BERT_FAMILY).eval(), tokens()
    model.set_attn_implementation("eager")
    expected = model(**inputs)[0]
    model.set_attn_implementation("exact-informer")
    torch.testing.assert_close(model(**inputs)[0][0], expected[0], rtol=1e-4, atol=1e-4)


def test_an_attention_with_parameters_is_refused_with_the_reason() -> None:
    with refused(InputError, "max_length"):
        BertModel(BertConfig(**BERT)).set_attn_implementation("linformer")


def test_an_attention_of_your_own_needs_no_registration_here() -> None:
    @dataclass(eq=False, repr=False, kw_only=True)
    class First(Attention):
        name = "first-value"

        def attend(self, inputs: Any) -> Tensor:
            value: Tensor = inputs.value
            return value[:, :, :1].expand(-1, -1, inputs.query.shape[2], -1)

    register_attention(First)
    try:
        model = BertModel(BertConfig(**BERT)).eval()
        model.set_attn_implementation("first-value")
        assert model(**tokens())[0].isfinite().all()
    finally:
        del _ATTENTIONS._parts["first-value"]


def test_supports_answers_before_a_model_is_built() -> None:
    assert skyformer.hf.supports(BertModel)
    assert skyformer.hf.supports(BertConfig(**BERT), "performer").reason.startswith("BertModel was tried with")
    own = skyformer.hf.supports(MPNetModel(MPNetConfig(**BERT)))
    assert not own
    assert "computes attention with its own code" in own.reason
    causal = skyformer.hf.supports(GPT2Model)
    assert not causal
    assert "causal" in causal.reason
    assert skyformer.hf.supports(GPT2Model, "kernelized")
    assert "BertModel, the base of BertForMaskedLM, was tried" in skyformer.hf.supports(BertForMaskedLM).reason
    assert not skyformer.hf.supports(GPT2LMHeadModel)
    assert "was not tried" in skyformer.hf.supports(EncoderDecoderModel).reason
    with refused(InputError, "attention must be registered", "'nothing'"):
        skyformer.hf.supports(BertModel, "nothing")
    with refused(InputError, "model must be", "str"):
        skyformer.hf.supports("bert-base-cased")  # type: ignore[arg-type]


def test_every_class_works_or_is_refused_with_a_reason() -> None:
    found = [group[kind] for group in record()["groups"] for kind in KINDS]
    assert [outcome for outcome in found if outcome != WORKS and not outcome.startswith("it ")] == []
    assert record()["equal to eager"]["different"] == []
    assert sum(len(group["classes"]) for group in record()["groups"]) > 370


def test_the_groups_are_those_of_the_record_of_every_class() -> None:
    assert record() == grouped(json.loads(TRIALS.read_text()))


def test_supports_answers_as_the_record_says() -> None:
    for kind in KINDS:
        for name, outcome in outcomes(kind).items():
            # A version of transformers may lack a class, and a class may need a package that is not installed.
            if (cls := getattr(transformers, name, None)) is not None and issubclass(cls, PreTrainedModel):
                assert bool(skyformer.hf.supports(cls, kind)) == (outcome == WORKS), name
