"""The registry: every module in this folder is imported, and each class it registers joins under its name."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from skyformer.attention.base import Attention
from skyformer.errors import InputError, UnknownNameError

_REGISTRY: dict[str, type[Attention]] = {}
_ORDER = ("softmax", "kernelized", "skyformer")

AnyAttention = TypeVar("AnyAttention", bound=type[Attention])


def register(cls: AnyAttention) -> AnyAttention:
    """Class decorator: makes a mechanism known by its `name`."""
    if cls.name in _REGISTRY:
        raise InputError(f"the name {cls.name!r} belongs to {_REGISTRY[cls.name].__qualname__}; register under another")
    _REGISTRY[cls.name] = cls
    return cls


def list_attentions() -> list[str]:
    """The names of all mechanisms: the paper's own first, then in alphabetical order."""
    return sorted(_known(), key=lambda name: (_ORDER.index(name) if name in _ORDER else len(_ORDER), name))


def attention_class(name: str) -> type[Attention]:
    """The class behind a name."""
    known = _known()
    if not isinstance(name, str) or name not in known:
        raise UnknownNameError("attention", name, known)
    return known[name]


def attention_options(name: str) -> dict[str, inspect.Parameter]:
    """The options of a mechanism beyond heads and head dim, with their defaults and annotations."""
    parameters = inspect.signature(attention_class(name).__init__).parameters
    return {key: p for key, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}


def build_attention(name: str, num_heads: int, head_dim: int, **options: Any) -> Attention:
    """A mechanism by name; an option it does not have is an error that lists those it has."""
    known = attention_options(name)
    for option in options:
        if option not in known:
            raise UnknownNameError(f"option for attention {name!r}:", option, known)
    return attention_class(name)(num_heads, head_dim, **options)


def _known() -> dict[str, type[Attention]]:
    _import_mechanisms()
    return _REGISTRY


@cache
def _import_mechanisms() -> None:
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        importlib.import_module(f"skyformer.attention.{module.name}")
