"""The attention mechanisms, one module each, with one interface."""

from skyformer.attention.base import Attention, Inputs, Promise
from skyformer.attention.registry import (
    attention_class,
    attention_options,
    build_attention,
    list_attentions,
    register_attention,
)

__all__ = [
    "Attention",
    "Inputs",
    "Promise",
    "attention_class",
    "attention_options",
    "build_attention",
    "list_attentions",
    "register_attention",
]
