"""A config that cannot be built is an error that names the setting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyformer import ModelConfig, SequenceClassifier
from skyformer.errors import InputError, UnknownNameError
from tests.model.small import small_config

REQUIRED: dict[str, Any] = {"vocab_size": 256, "max_length": 64}


def test_defaults_are_the_papers() -> None:
    config = ModelConfig(**REQUIRED)
    assert (config.num_layers, config.dim, config.hidden_dim, config.num_heads) == (2, 64, 128, 2)
    assert config.attention == "skyformer"


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"dim": 63}, "dim must be a multiple of num_heads; got 63 and 2"),
        ({"max_length": 0}, "max_length must be greater than or equal to 1; got 0"),
        ({"vocab_size": -1}, "vocab_size must be"),
        ({"num_layers": 0}, "num_layers must be"),
        ({"dropout": 1.0}, "dropout must be less than 1; got 1.0"),
        ({"dropout": -0.1}, "dropout must be greater than or equal to 0"),
        ({"dropout": float("nan")}, "dropout must be a finite number"),
        ({"dim": "64"}, "dim must be a valid integer; got '64'"),
        ({"num_heads": True}, "num_heads must be a valid integer"),
        ({"attention_dropout": 0.1}, "attention_dropout must be 0 with 'skyformer' attention"),
        ({"attention_dropout": None}, "attention_dropout must be 0 with 'skyformer' attention"),
        ({"mlp_hidden_dropout": 1.0}, "mlp_hidden_dropout must be less than 1; got 1.0"),
        ({"head_activation": "tanh"}, "head_activation must be 'gelu' or 'relu'; got 'tanh'"),
        ({"attention_options": {"num_landmarks": 0}}, "num_landmarks must be an integer of at least 1"),
        ({"attention_options": {"max_length": 8}}, "the model's max_length decides it"),
        ({"attention_options": {"dropout": 0.1}}, "the model's attention_dropout decides it"),
        ({"attention_options": {"kernel": object()}}, "attention_options.kernel"),
        ({"seed": -1}, "seed must be"),
        ({"vocab_size": 2**70}, "vocab_size must be less than or equal to 2147483648; got"),
        ({"num_classes": 2**63}, "num_classes must be less than or equal to 2147483648; got"),
        ({"self": 1}, "unknown setting 'self'"),
        (
            {"attention": "performer", "attention_options": {"num_features": 10**13}},
            "num_features must be an integer of at most 2147483648; got 10000000000000",
        ),
        (
            {"attention": "linformer", "attention_options": {"num_features": 2**61}},
            "num_features must be an integer of at most 2147483648",
        ),
        (
            {"attention": "linformer", "attention_options": {"num_features": 2**31}, "max_length": 2**31},
            "a model must have at most 100,000,000,000 weights",
        ),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InputError) as caught:
        ModelConfig(**{**REQUIRED, **settings})
    assert complaint in str(caught.value)
    assert "validation error" not in str(caught.value)


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match=r"attention 'skyforme'; known: .*softmax.*Did you mean 'skyformer'"):
        ModelConfig(**REQUIRED, attention="skyforme")
    with pytest.raises(UnknownNameError, match=r"option for attention 'skyformer': 'landmark'; known: .*num_landmarks"):
        ModelConfig(**REQUIRED, attention_options={"landmark": 3})
    with pytest.raises(UnknownNameError, match=r"setting 'head'; known: .*num_heads"):
        ModelConfig(**REQUIRED, head=3)


def test_says_where_to_give_an_option_of_an_attention() -> None:
    with pytest.raises(InputError, match=r'attention_options=\{"num_landmarks": \.\.\.\}'):
        ModelConfig(vocab_size=4, max_length=8, num_landmarks=4)


def test_every_missing_setting_is_named() -> None:
    with pytest.raises(InputError, match="vocab_size is required; max_length is required"):
        ModelConfig()


def test_a_config_is_frozen_and_replace_checks_again() -> None:
    config = ModelConfig(**REQUIRED)
    with pytest.raises(ValueError, match="frozen"):
        config.dim = 3  # type: ignore[misc]
    assert config.replace(dim=32).dim == 32
    with pytest.raises(InputError, match="multiple"):
        config.replace(dim=31)


def test_config_or_settings_but_not_both() -> None:
    config = ModelConfig(**REQUIRED)
    with pytest.raises(InputError, match=r"not both: got a config and dim"):
        SequenceClassifier(config, dim=32)
    with pytest.raises(InputError, match="must be a ModelConfig; got int"):
        SequenceClassifier(256)  # type: ignore[arg-type]


def test_attention_dropout_reaches_the_attention() -> None:
    model = SequenceClassifier(small_config("softmax", attention_dropout=0.25))
    assert [layer.attention.attention.dropout for layer in model.encoder.layers] == [0.25, 0.25]


def test_a_config_draws_no_random_numbers() -> None:
    before = torch.get_rng_state()
    small_config()
    assert torch.equal(torch.get_rng_state(), before)


def test_each_layer_has_its_own_seed() -> None:
    seeds = {small_config(seed=seed).build_attention(layer).seed for seed in range(5) for layer in range(2)}
    assert len(seeds) == 10


@given(
    settings=st.fixed_dictionaries(
        {},
        optional={
            "dim": st.integers(-3, 40),
            "num_heads": st.integers(-3, 40) | st.none(),
            "dropout": st.floats() | st.text(),
            "attention": st.sampled_from(["softmax", "kernelized", "skyformer"]) | st.text(),
            "attention_options": st.dictionaries(st.text(), st.integers()) | st.integers(),
            "attention_dropout": st.floats(0, 1),
        },
    )
)
def test_a_config_is_valid_or_an_input_error(settings: dict[str, Any]) -> None:
    try:
        config = ModelConfig(**REQUIRED, **settings)
    except InputError:
        return
    assert ModelConfig(**config.model_dump()) == config
