"""ModelConfig: every setting of a model, typed, and checked against each other before anything is built."""

from __future__ import annotations

import re
from typing import Any, Self

import torch

from skyformer.attention import Attention, Promise, attention_class, attention_options, build_attention, list_attentions
from skyformer.checks import LARGEST_INTEGER
from skyformer.errors import InputError, MissingExtraError, SkyformerError, UnknownNameError

try:
    from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator
    from pydantic_core import ErrorDetails
except ImportError as missing:
    raise MissingExtraError("pydantic", "model") from missing

_OWN_SETTING = {"max_length": "max_length", "seed": "seed", "dropout": "attention_dropout"}
"""Options of the attentions that the model sets itself, and the setting they come from."""


class ModelConfig(BaseModel):
    """What a `SkyformerEncoder`, a `SequenceClassifier` or a `PairClassifier` is built from.

    The defaults are the paper's: 2 layers, 2 heads, 64 features, 128 in the MLPs. A setting that is missing, unknown,
    out of range or at odds with another is an `InputError` that names it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    vocab_size: int = Field(ge=1, le=LARGEST_INTEGER, description="how many different tokens there are")
    max_length: int = Field(
        ge=1, le=LARGEST_INTEGER, description="the longest sequence, in tokens; a longer one is refused"
    )
    num_classes: int = Field(
        default=2, ge=1, le=LARGEST_INTEGER, description="the width of the logits; the encoder has no use for it"
    )
    dim: int = Field(default=64, ge=1, le=LARGEST_INTEGER, description="features of a token")
    hidden_dim: int = Field(
        default=128, ge=1, le=LARGEST_INTEGER, description="features inside the MLPs of the layers and the head"
    )
    num_layers: int = Field(default=2, ge=1, le=LARGEST_INTEGER, description="encoder layers")
    num_heads: int = Field(default=2, ge=1, le=LARGEST_INTEGER, description="attention heads; must divide dim")
    attention: str = Field(default="skyformer", description="a name from `list_attentions()`")
    attention_options: dict[str, JsonValue] = Field(
        default_factory=dict, description="the attention's own options, such as num_landmarks"
    )
    attention_dropout: float = Field(
        default=0.0, ge=0, lt=1, description="dropout of the attention weights, where the mechanism has any"
    )
    dropout: float = Field(default=0.1, ge=0, lt=1, description="dropout before each residual addition")
    seed: int = Field(default=0, ge=0, lt=2**48, description="what random attentions draw from in `eval()`")
    checkpoint_activations: bool = Field(
        default=False, description="keep only the input of each layer, and compute it again for the backward pass"
    )

    def __init__(self, /, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as invalid:
            raise _as_input_error(invalid) from None

    @model_validator(mode="after")
    def _check_contradictions(self) -> Self:
        if self.dim % self.num_heads:
            raise InputError(f"dim must be a multiple of num_heads; got {self.dim} and {self.num_heads}")
        if (self.seed + 1) * self.num_layers > 2**63:
            raise InputError(f"seed * num_layers must be below 2**63; got {self.seed} and {self.num_layers}")
        _check_attention(self.attention, self.attention_options, self.attention_dropout)
        try:
            # The mechanism itself knows which values it takes. On the meta device building it costs nothing.
            with torch.random.fork_rng(devices=[]), torch.device("meta"):
                self.build_attention(layer=0)
        except (SkyformerError, TypeError, OverflowError, RuntimeError) as refused:
            raise InputError(f"attention_options do not suit {self.attention!r} attention: {refused}") from refused
        return self

    def replace(self, /, **changes: Any) -> Self:
        """A copy with some settings changed, checked again."""
        return type(self)(**{**self.model_dump(), **changes})

    def build_attention(self, layer: int) -> Attention:
        """The attention of one layer; in `eval()` each layer draws from a stream of its own."""
        options: dict[str, Any] = {
            **self.attention_options,
            "max_length": self.max_length,
            "seed": self.seed * self.num_layers + layer,
        }
        if self.attention_dropout > 0:
            options["dropout"] = self.attention_dropout
        return build_attention(self.attention, self.num_heads, self.dim // self.num_heads, **options)


def as_config(config: ModelConfig | None, settings: dict[str, Any]) -> ModelConfig:
    """The config given, or the one that `settings` describe."""
    if config is None:
        return ModelConfig(**settings)
    if not isinstance(config, ModelConfig):
        raise InputError(f"config must be a ModelConfig; got {type(config).__name__}. Settings go by keyword")
    if settings:
        raise InputError(
            f"give either a config or its settings, not both: got a config and {', '.join(sorted(settings))}; "
            "config.replace(...) changes settings of a config"
        )
    return config


def _check_attention(name: str, options: dict[str, JsonValue], dropout: float) -> None:
    known = [option for option in attention_options(name) if option not in _OWN_SETTING]
    for option in options:
        if option in _OWN_SETTING:
            raise InputError(
                f"attention_options must not have {option!r}: the model's {_OWN_SETTING[option]} decides it"
            )
        if option not in known:
            raise UnknownNameError(f"option of attention {name!r}", option, known)
    cannot = attention_class(name).cannot
    if dropout > 0 and Promise.DROPOUT in cannot:
        raise InputError(
            f"attention_dropout must be 0 with {name!r} attention, which cannot do {Promise.DROPOUT.value}: "
            f"{cannot[Promise.DROPOUT]}; got {dropout}"
        )


def _as_input_error(invalid: ValidationError) -> InputError:
    """pydantic's list of complaints as one sentence; an error of ours comes out as it went in."""
    details = invalid.errors(include_url=False)
    own = details[0].get("ctx", {}).get("error")
    if isinstance(own, InputError):
        return own
    if details[0]["type"] == "extra_forbidden":
        return _unknown_setting(str(details[0]["loc"][-1]))
    return InputError("; ".join(_sentence(detail) for detail in details))


def _unknown_setting(name: str) -> InputError:
    owners = [attention for attention in list_attentions() if name in attention_options(attention)]
    if owners and name not in _OWN_SETTING:
        return InputError(
            f"{name} is an option of {' and '.join(owners)} attention, not of the model: "
            f'give it as attention_options={{"{name}": ...}}'
        )
    return UnknownNameError("setting of ModelConfig", name, ModelConfig.model_fields)


def _sentence(detail: ErrorDetails) -> str:
    name = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "missing":
        return f"{name} is required"
    complaint = re.sub("^[Ii]nput", name, detail["msg"])
    return f"{complaint}; got {detail['input']!r}"
