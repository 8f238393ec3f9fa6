"""ModelConfig: every setting of a model, typed, and checked together before anything is built."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, JsonValue, model_validator

from skyformer.attention import Attention, Promise, attention_class, attention_options, build_attention, list_attentions
from skyformer.checks import LARGEST_INTEGER
from skyformer.errors import InputError, SkyformerError, UnknownNameError
from skyformer.settings import Settings

Count = Annotated[int, Field(ge=1, le=LARGEST_INTEGER)]
LARGEST_MODEL = 10**11
"""Weights of the largest model that is built: 400 GB in float32."""
Probability = Annotated[float, Field(ge=0, lt=1)]
Activation = Literal["gelu", "relu"]

_SET_BY_MODEL = {"max_length": "max_length", "seed": "seed", "dropout": "attention_dropout"}
"""Options of the attentions that the model sets itself, and the setting of the model that decides them."""


class ModelConfig(Settings):
    """The settings of a `SkyformerEncoder`, a `SequenceClassifier` or a `PairClassifier`.

    The defaults are those of the paper: 2 layers, 2 heads, 64 features, 128 in the MLPs. A setting that is missing,
    unknown, out of range or in conflict with another is an `InputError` that names it.
    """

    vocab_size: Count = Field(description="number of different tokens")
    max_length: Count = Field(description="the longest sequence allowed, in tokens")
    num_classes: Count = Field(default=2, description="number of logits; the encoder does not use it")
    dim: Count = Field(default=64, description="features per token")
    hidden_dim: Count = Field(default=128, description="features inside the MLPs of the layers and the head")
    num_layers: Annotated[int, Field(ge=1, le=10_000)] = Field(default=2, description="encoder layers")
    num_heads: Count = Field(default=2, description="attention heads; must divide dim")
    attention: str = Field(default="skyformer", description="a name from `list_attentions()`")
    attention_options: dict[str, JsonValue] = Field(
        default_factory=dict, description="options of the attention, such as num_landmarks"
    )
    dropout: Probability = Field(default=0.1, description="dropout at each place below that is set to null")
    embedding_dropout: Probability | None = Field(default=0.0, description="dropout of the embeddings; null = dropout")
    attention_dropout: Probability | None = Field(
        default=0.0, description="dropout of the attention weights, for attentions that support it; null = dropout"
    )
    attention_output_dropout: Probability | None = Field(
        default=None, description="dropout of the attention's output, before the residual addition; null = dropout"
    )
    mlp_hidden_dropout: Probability | None = Field(
        default=0.0, description="dropout inside the MLPs of the layers, after GELU; null = dropout"
    )
    mlp_output_dropout: Probability | None = Field(
        default=None, description="dropout of the MLPs' output, before the residual addition; null = dropout"
    )
    head_activation: Activation = Field(default="gelu", description="activation in the MLP of the head: gelu or relu")
    seed: int = Field(default=0, ge=0, lt=2**48, description="seed of random attentions in `eval()`")
    checkpoint_activations: bool = Field(
        default=False, description="store only the input of each layer, and compute the rest again in the backward pass"
    )

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.dim % self.num_heads:
            raise InputError(f"dim must be a multiple of num_heads; got {self.dim} and {self.num_heads}")
        if self._weights > LARGEST_MODEL:
            raise InputError(
                f"a model must have at most {LARGEST_MODEL:,} weights; vocab_size={self.vocab_size}, "
                f"max_length={self.max_length}, num_classes={self.num_classes}, dim={self.dim}, "
                f"hidden_dim={self.hidden_dim} and num_layers={self.num_layers} make about {self._weights:,}"
            )
        _check_attention(self.attention, self.attention_options, self.dropout_or(self.attention_dropout))
        try:
            # The attention checks its options when it is built, which costs nothing on the meta device.
            with torch.random.fork_rng(devices=[]), torch.device("meta"):
                self.build_attention(layer=0)
        except (SkyformerError, TypeError, OverflowError, RuntimeError) as refused:
            raise InputError(f"attention_options do not fit {self.attention!r} attention: {refused}") from refused
        return self

    @property
    def _weights(self) -> int:
        """About the number of weights, computed before anything is allocated."""
        layer = 4 * self.dim**2 + 2 * self.dim * self.hidden_dim
        tables = (self.vocab_size + self.max_length) * self.dim
        return tables + self.num_layers * layer + self.num_classes * self.hidden_dim

    @classmethod
    def unknown_setting(cls, name: str) -> InputError:
        owners = [attention for attention in list_attentions() if name in attention_options(attention)]
        if owners and name not in _SET_BY_MODEL:
            return InputError(
                f"{name} is an option of {' and '.join(owners)} attention, not of the model: "
                f'give it as attention_options={{"{name}": ...}}'
            )
        return super().unknown_setting(name)

    def dropout_or(self, own: float | None) -> float:
        """The dropout of a place: its own setting, or else `dropout`."""
        return self.dropout if own is None else own

    def build_attention(self, layer: int) -> Attention:
        """The attention of one layer; in `eval()` each layer has a random stream of its own."""
        options: dict[str, Any] = {
            **self.attention_options,
            "max_length": self.max_length,
            "seed": self.seed * self.num_layers + layer,
        }
        dropout = self.dropout_or(self.attention_dropout)
        if dropout > 0:
            options["dropout"] = dropout
        return build_attention(self.attention, self.num_heads, self.dim // self.num_heads, **options)


def as_config(config: ModelConfig | None, settings: dict[str, Any]) -> ModelConfig:
    """The given config, or one with the given settings."""
    if config is None:
        return ModelConfig(**settings)
    if not isinstance(config, ModelConfig):
        raise InputError(f"config must be a ModelConfig; got {type(config).__name__}. Give settings as keywords")
    if settings:
        raise InputError(
            f"give either a config or its settings, not both: got a config and {', '.join(sorted(settings))}; "
            "config.replace(...) changes settings of a config"
        )
    return config


def _check_attention(name: str, options: dict[str, JsonValue], dropout: float) -> None:
    known = [option for option in attention_options(name) if option not in _SET_BY_MODEL]
    for option in options:
        if option in _SET_BY_MODEL:
            raise InputError(
                f"attention_options must not have {option!r}: the model's {_SET_BY_MODEL[option]} decides it"
            )
        if option not in known:
            raise UnknownNameError(f"option for attention {name!r}:", option, known)
    cannot = attention_class(name).cannot
    if dropout > 0 and Promise.DROPOUT in cannot:
        raise InputError(
            f"attention_dropout must be 0 with {name!r} attention, which does not support {Promise.DROPOUT.value}: "
            f"{cannot[Promise.DROPOUT]}; got {dropout}"
        )
