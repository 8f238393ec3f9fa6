"""Skyformer: Kernelized Attention and its Nystrom approximation, for sequences too long for softmax attention."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skyformer.attention import build_attention, list_attentions
    from skyformer.attention.budget import suggest_budget
    from skyformer.attention.multihead import MultiheadAttention
    from skyformer.attention.tilted import tilted_attention
    from skyformer.functional import kernelized_attention, skyformer_attention, softmax_attention
    from skyformer.landmarks import suggest_landmarks
    from skyformer.model import ModelConfig, PairClassifier, SequenceClassifier, SkyformerEncoder
    from skyformer.ops.backends import kernel_product, use_backend

__version__ = "0.1.0"

__all__ = [
    "ModelConfig",
    "MultiheadAttention",
    "PairClassifier",
    "SequenceClassifier",
    "SkyformerEncoder",
    "build_attention",
    "kernel_product",
    "kernelized_attention",
    "list_attentions",
    "skyformer_attention",
    "softmax_attention",
    "suggest_budget",
    "suggest_landmarks",
    "tilted_attention",
    "use_backend",
]

_MODELS = ("ModelConfig", "PairClassifier", "SequenceClassifier", "SkyformerEncoder")
_HOMES = {
    "MultiheadAttention": "attention.multihead",
    "build_attention": "attention",
    "kernel_product": "ops.backends",
    "kernelized_attention": "functional",
    "list_attentions": "attention",
    "skyformer_attention": "functional",
    "softmax_attention": "functional",
    "suggest_budget": "attention.budget",
    "suggest_landmarks": "landmarks",
    "tilted_attention": "attention.tilted",
    "use_backend": "ops.backends",
}
_MODULES = ("attention", "checks", "distributed", "errors", "functional", "landmarks", "ops", "registry")


def __getattr__(name: str) -> Any:
    """Everything is imported at first use: the command starts at once, and only the models need the extra `model`."""
    if name in _MODULES:
        return import_module(f"skyformer.{name}")
    if name in _HOMES:
        return getattr(import_module(f"skyformer.{_HOMES[name]}"), name)
    if name not in _MODELS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from skyformer.errors import MissingExtraError

    try:
        return getattr(import_module("skyformer.model"), name)
    except MissingExtraError as missing:
        return _placeholder(name, missing)


def _placeholder(name: str, missing: Exception) -> type:
    """A class in place of a model that cannot be imported, so that `from skyformer import *` and `hasattr` work; using
    it raises the error that names the missing package."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise missing

    return type(name, (), {"__doc__": str(missing), "__init__": refuse, "from_pretrained": staticmethod(refuse)})


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
