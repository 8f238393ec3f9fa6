"""The attentions by name: every module of this package registers its mechanism when it is imported, and modules from
outside may register theirs."""

from __future__ import annotations

import inspect
from fnmatch import fnmatchcase
from typing import Any

from skyformer.attention.base import Attention
from skyformer.errors import InputError, UnknownNameError
from skyformer.registry import Class, Registry

_ORDER = ("softmax", "kernelized", "skyformer")


def _checked(cls: type[Attention]) -> type[Attention]:
    """The class itself, if its options can be given by name and its instances can be modules of a model."""
    decorator = "@dataclass(eq=False, repr=False, kw_only=True)"
    if cls.__hash__ is None:
        raise InputError(f"{cls.__name__} must be hashable, as every module; write {decorator}")
    positional = [
        name
        for name, parameter in inspect.signature(cls.__init__).parameters.items()
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and name not in ("self", "num_heads", "head_dim")
    ]
    if positional:
        raise InputError(
            f"the options of {cls.__name__} must be given by name, but {', '.join(positional)} need not be; write "
            f"{decorator}"
        )
    return cls


_ATTENTIONS: Registry[type[Attention]] = Registry(
    "attention", __package__, base=Attention, make=_checked, entry_points="skyformer.attentions"
)


def register_attention(cls: Class) -> Class:
    """Class decorator: makes an `Attention` known by its `name`."""
    return _ATTENTIONS.register(cls)


def list_attentions(pattern: str = "*") -> list[str]:
    """The names of all mechanisms, or of those that match a pattern, in which * stands for any characters: softmax and
    the paper's own first, then in alphabetical order.

    >>> list_attentions()[:4]
    ['softmax', 'kernelized', 'skyformer', 'bigbird']
    >>> list_attentions("*former")
    ['skyformer', 'informer', 'linformer', 'nystromformer', 'performer', 'reformer']
    """
    names = [name for name in _ATTENTIONS.names() if fnmatchcase(name, pattern)]
    return sorted(names, key=lambda name: (_ORDER.index(name) if name in _ORDER else len(_ORDER), name))


def attention_class(name: str) -> type[Attention]:
    """The class of the mechanism called `name`."""
    return _ATTENTIONS.get(name)


def attention_options(name: str) -> dict[str, inspect.Parameter]:
    """The options of a mechanism besides `num_heads` and `head_dim`, with their defaults and annotations."""
    parameters = inspect.signature(attention_class(name).__init__).parameters
    return {key: p for key, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}


def build_attention(name: str, num_heads: int, head_dim: int, **options: Any) -> Attention:
    """The mechanism called `name`, as a module from query, key and value (B, H, n, P) to (B, H, n, P).

    Args:
        name: one of `list_attentions()`.
        num_heads: H.
        head_dim: P.
        options: the options of the mechanism; an unknown one is an error that lists the known ones.

    >>> import torch
    >>> attention = build_attention("skyformer", num_heads=2, head_dim=8, num_landmarks=16)
    >>> query, key, value = torch.randn(3, 1, 2, 100, 8)
    >>> attention(query, key, value).shape
    torch.Size([1, 2, 100, 8])
    """
    known = attention_options(name)
    for option in options:
        if option not in known:
            raise UnknownNameError(f"option for attention {name!r}:", option, known)
    return attention_class(name)(num_heads, head_dim, **options)
