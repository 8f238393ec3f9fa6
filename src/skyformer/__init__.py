"""Skyformer: Kernelized Attention and its Nystrom approximation, for sequences too long for softmax attention."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skyformer.attention import Attention, Promise, build_attention, list_attentions, register_attention
    from skyformer.attention.bigbird import bigbird_attention
    from skyformer.attention.budget import suggest_budget
    from skyformer.attention.informer import informer_attention
    from skyformer.attention.linformer import linformer_attention
    from skyformer.attention.multihead import MultiheadAttention
    from skyformer.attention.nystromformer import nystromformer_attention
    from skyformer.attention.performer import performer_attention
    from skyformer.attention.reformer import reformer_attention
    from skyformer.attention.tilted import tilted_attention
    from skyformer.functional import kernelized_attention, skyformer_attention, softmax_attention
    from skyformer.landmarks import Landmarks, Sampler, list_samplers, register_sampler, suggest_landmarks
    from skyformer.model import ModelConfig, PairClassifier, SequenceClassifier, SkyformerEncoder
    from skyformer.ops.backends import kernel_product, use_backend
    from skyformer.ops.kernels import Kernel, list_kernels, register_kernel

__version__ = "0.2.0"

__all__ = [
    "Attention",
    "Kernel",
    "Landmarks",
    "ModelConfig",
    "MultiheadAttention",
    "PairClassifier",
    "Promise",
    "Sampler",
    "SequenceClassifier",
    "SkyformerEncoder",
    "bigbird_attention",
    "build_attention",
    "informer_attention",
    "kernel_product",
    "kernelized_attention",
    "linformer_attention",
    "list_attentions",
    "list_kernels",
    "list_samplers",
    "nystromformer_attention",
    "performer_attention",
    "reformer_attention",
    "register_attention",
    "register_kernel",
    "register_sampler",
    "skyformer_attention",
    "softmax_attention",
    "suggest_budget",
    "suggest_landmarks",
    "tilted_attention",
    "use_backend",
]

_MODELS = ("ModelConfig", "PairClassifier", "SequenceClassifier", "SkyformerEncoder")
_HOMES = {
    "Attention": "attention",
    "Kernel": "ops.kernels",
    "Landmarks": "landmarks",
    "MultiheadAttention": "attention.multihead",
    "Promise": "attention",
    "Sampler": "landmarks",
    "bigbird_attention": "attention.bigbird",
    "build_attention": "attention",
    "informer_attention": "attention.informer",
    "kernel_product": "ops.backends",
    "kernelized_attention": "functional",
    "linformer_attention": "attention.linformer",
    "list_attentions": "attention",
    "list_kernels": "ops.kernels",
    "list_samplers": "landmarks",
    "nystromformer_attention": "attention.nystromformer",
    "performer_attention": "attention.performer",
    "reformer_attention": "attention.reformer",
    "register_attention": "attention",
    "register_kernel": "ops.kernels",
    "register_sampler": "landmarks",
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
