"""Skyformer: Kernelized Attention and its Nystrom approximation, for sequences too long for softmax attention."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from skyformer.attention import build_attention, list_attentions
from skyformer.attention.multihead import MultiheadAttention
from skyformer.functional import kernelized_attention, skyformer_attention, softmax_attention
from skyformer.landmarks import suggest_landmarks
from skyformer.ops.products import kernel_product

if TYPE_CHECKING:
    from skyformer.model import ModelConfig as ModelConfig
    from skyformer.model import PairClassifier as PairClassifier
    from skyformer.model import SequenceClassifier as SequenceClassifier
    from skyformer.model import SkyformerEncoder as SkyformerEncoder

__version__ = "0.1.0"

__all__ = [
    "MultiheadAttention",
    "build_attention",
    "kernel_product",
    "kernelized_attention",
    "list_attentions",
    "skyformer_attention",
    "softmax_attention",
    "suggest_landmarks",
]

_OF_THE_MODEL = ("ModelConfig", "PairClassifier", "SequenceClassifier", "SkyformerEncoder")


def __getattr__(name: str) -> Any:
    """The models, imported when first asked for: they need pydantic, the rest of the package needs torch alone."""
    if name in _OF_THE_MODEL:
        return getattr(import_module("skyformer.model"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_OF_THE_MODEL])
