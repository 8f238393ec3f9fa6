"""SkyformerConfig: what it stores, what it refuses, and when."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from skyformer import ModelConfig
from skyformer.errors import InputError, UnknownNameError
from skyformer.hf import SkyformerConfig, SkyformerModel
from tests.helpers import refused
from tests.hf.own_models import small_config


def test_the_defaults_are_those_of_the_papers_model() -> None:
    config = SkyformerConfig(vocab_size=256)
    assert config.model_settings() == ModelConfig(vocab_size=256, max_length=4096)
    assert config.attention_options == {}


def test_every_setting_reaches_the_attention() -> None:
    config = small_config("linformer", attention_dropout=0.25, seed=5, num_hidden_layers=3)
    attention = config.model_settings().build_attention(2)
    assert (attention.num_heads, attention.head_dim, attention.max_length, attention.seed) == (2, 8, 48, 17)
    assert (attention.key_projection.shape, attention.dropout) == ((2, 8, 48), 0.25)


def test_a_saved_config_is_loaded_unchanged(tmp_path: Path) -> None:
    config = small_config("performer", seed=3, num_labels=2, id2label={0: "bad", 1: "good"}, type_vocab_size=2)
    config.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert (stored["attention"], stored["attention_options"]) == ("performer", {"num_features": 8})
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is SkyformerConfig
    assert loaded.to_diff_dict() == config.to_diff_dict()


def test_two_configs_do_not_share_options() -> None:
    given = {"num_landmarks": 8}
    first, second = (SkyformerConfig(attention_options=given) for _ in range(2))
    first.attention_options["num_landmarks"] = 16
    assert second.attention_options == given == {"num_landmarks": 8}


def test_settings_of_the_library_are_stored() -> None:
    config = SkyformerConfig(vocab_size=50, eos_token_id=3, my_own_note="text", num_labels=5)
    assert (config.eos_token_id, config.my_own_note, config.num_labels) == (3, "text", 5)


WRONG: list[tuple[dict[str, Any], list[str]]] = [
    ({"vocab_size": 0}, ["vocab_size", "at least 1", "0"]),
    ({"hidden_size": "64"}, ["hidden_size", "integer", "'64'"]),
    ({"hidden_size": 15}, ["hidden_size", "multiple of num_attention_heads", "15 and 2"]),
    ({"num_hidden_layers": 0}, ["num_hidden_layers", "at least 1"]),
    ({"num_attention_heads": True}, ["num_attention_heads", "True"]),
    ({"intermediate_size": 2.5}, ["intermediate_size", "2.5"]),
    ({"max_position_embeddings": -1}, ["max_position_embeddings", "-1"]),
    ({"num_labels": 0}, ["num_labels", "at least 1"]),
    ({"num_labels": None}, ["num_labels", "integer", "None"]),
    ({"type_vocab_size": -1}, ["type_vocab_size", "at least 0"]),
    ({"seed": -1}, ["seed", "at least 0"]),
    ({"pad_token_id": 30522}, ["pad_token_id", "at most 30521"]),
    ({"hidden_dropout_prob": 1.0}, ["hidden_dropout_prob", "[0, 1)", "1.0"]),
    ({"attention": "linformer", "attention_dropout": -0.1}, ["attention_dropout", "[0, 1)"]),
    ({"attention_dropout": 0.1}, ["attention_dropout must be 0", "'skyformer'"]),
    ({"initializer_range": 0.0}, ["initializer_range", "above 0"]),
    ({"layer_norm_eps": float("nan")}, ["layer_norm_eps", "finite"]),
    ({"attention": 3}, ["attention", "string", "3"]),
    ({"attention_options": ["num_landmarks"]}, ["attention_options", "a dict", "['num_landmarks']"]),
    ({"attention_options": {"max_length": 9}}, ["attention_options", "max_position_embeddings decides"]),
    ({"attention_options": {"seed": 9}}, ["attention_options", "the model's seed decides"]),
    ({"attention_options": {"num_landmarks": 0}}, ["attention_options", "num_landmarks", "at least 1"]),
    ({"num_heads": 4}, ["num_heads is called num_attention_heads"]),
    ({"max_length": 4}, ["max_length is called max_position_embeddings"]),
    ({"num_landmarks": 4}, ["num_landmarks", "attention_options={'num_landmarks': ...}"]),
]


@pytest.mark.parametrize(("settings", "words"), WRONG, ids=[str(settings) for settings, _ in WRONG])
def test_wrong_settings_are_named(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        SkyformerConfig(**settings)
    for word in words:
        assert word in str(caught.value)


def test_misspelt_names_get_a_suggestion() -> None:
    with refused(UnknownNameError, "unknown attention 'skyfromer'", "Did you mean 'skyformer'?"):
        SkyformerConfig(attention="skyfromer")
    with refused(UnknownNameError, "num_landmark", "Did you mean 'num_landmarks'?"):
        SkyformerConfig(attention_options={"num_landmark": 4})
    with refused(UnknownNameError, "setting of SkyformerConfig 'hiden_size'", "Did you mean 'hidden_size'?"):
        SkyformerConfig(hiden_size=4)


def test_later_changes_are_checked_when_the_config_is_used(tmp_path: Path) -> None:
    config = small_config()
    config.num_attention_heads = 5
    with refused(InputError, "hidden_size", "num_attention_heads"):
        SkyformerModel(config)
    with refused(InputError, "hidden_size", "num_attention_heads"):
        config.save_pretrained(tmp_path)
    assert not (tmp_path / "config.json").exists()


@pytest.mark.parametrize("implementation", [None, "sdpa", "eager", "kernelized"])
def test_output_attentions_does_not_change_the_attention(implementation: str | None, tmp_path: Path) -> None:
    config = small_config(attn_implementation=implementation)
    config.output_attentions = True
    assert config._attn_implementation == implementation
    config = small_config(output_attentions=True, attn_implementation=implementation)
    model = SkyformerModel(config)
    assert model.config._attn_implementation == (implementation or "config")
    model.save_pretrained(tmp_path)
    assert SkyformerModel.from_pretrained(tmp_path).config.output_attentions
