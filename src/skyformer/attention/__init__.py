"""Attention mechanisms, one file each, behind one interface."""

from skyformer.attention.base import Attention, Promise
from skyformer.attention.registry import (
    attention_class,
    attention_options,
    build_attention,
    list_attentions,
    register,
)

__all__ = [
    "Attention",
    "Promise",
    "attention_class",
    "attention_options",
    "build_attention",
    "list_attentions",
    "register",
]
