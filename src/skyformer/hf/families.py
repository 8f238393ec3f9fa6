"""`supports`: whether an attention works in a model of transformers, from the record of having tried its class."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from transformers import MODEL_MAPPING, PreTrainedConfig, PreTrainedModel

from skyformer.errors import InputError
from skyformer.hf.functions import ExactAttention, RegisteredAttention, ours
from skyformer.hf.guard import own_attention, register_by_name

RECORD = Path(__file__).with_name("families.json")
"""What happened when the classes of transformers were tried, written by tests/outside/outcomes.py."""

WORKS = "works"
KINDS = ("skyformer", "kernelized")
"""The attentions that are tried: approximations, and exact ones, which can be causal."""


@dataclass(frozen=True)
class Support:
    """Whether a model works with an attention (its truth value), and the reason."""

    works: bool
    reason: str

    def __bool__(self) -> bool:
        return self.works


@cache
def record() -> dict[str, Any]:
    """The versions that were tried, and what happened with each class."""
    content: dict[str, Any] = json.loads(RECORD.read_text())
    return content


def supports(
    model: PreTrainedModel | type[PreTrainedModel] | PreTrainedConfig, attention: str = "skyformer"
) -> Support:
    """Whether `attn_implementation=attention` works for a model, its class, or the base model of a config.

    A class that was tried is answered from the record of the trial, with small random weights and default settings, and
    a class with a head from its base model. Settings of a config that change its attention, such as windows or
    `is_decoder`, are seen only in a forward pass.
    """
    register_by_name(attention)
    registered = ours(attention)
    if registered is None:
        raise InputError(f"attention must be registered with skyformer.hf.register; got {attention!r}")
    cls = _class_of(model)
    reason = own_attention(cls)
    if reason is not None:
        return Support(False, reason)
    known = outcomes(_kind(registered))
    tried = next((each for each in (cls, _base_of(cls)) if each is not None and each.__name__ in known), None)
    if tried is None:
        return Support(True, f"{cls.__name__} uses the attention interface, but was not tried")
    name = cls.__name__ if tried is cls else f"{tried.__name__}, the base of {cls.__name__},"
    reason = f"{name} was tried with transformers {record()['transformers']}"
    found = known[tried.__name__]
    return Support(True, reason) if found == WORKS else Support(False, f"{reason}: {found}")


@cache
def outcomes(attention: str) -> dict[str, str]:
    """ "works" or the reason of its refusal for every class that was tried with "skyformer" or "kernelized"."""
    return {name: group[attention] for group in record()["groups"] for name in group["classes"]}


def _class_of(model: Any) -> type[PreTrainedModel]:
    if isinstance(model, PreTrainedModel):
        return type(model)
    if isinstance(model, type) and issubclass(model, PreTrainedModel):
        return model
    if isinstance(model, PreTrainedConfig) and type(model) in MODEL_MAPPING:
        return _base(type(model))
    raise InputError(f"model must be a model of transformers, its class, or its config; got {type(model).__name__}")


def _base_of(cls: type[PreTrainedModel]) -> type[PreTrainedModel] | None:
    """The model without a head that has the same config."""
    config: Any = cls.config_class
    return _base(config) if config in MODEL_MAPPING else None


def _base(config: Any) -> type[PreTrainedModel]:
    found: Any = MODEL_MAPPING[config]
    return found[0] if isinstance(found, tuple) else found


def _kind(attention: RegisteredAttention) -> str:
    """The attention of the record that has the same limits: exact ones can be causal."""
    return "kernelized" if isinstance(attention, ExactAttention) else "skyformer"
