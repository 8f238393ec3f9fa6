"""Skyformer: Kernelized Attention and its Nystrom approximation, for sequences too long for softmax attention."""

from skyformer.attention import build_attention, list_attentions
from skyformer.functional import kernelized_attention, skyformer_attention, softmax_attention
from skyformer.multihead import MultiheadAttention
from skyformer.products import kernel_product

__version__ = "0.1.0"

__all__ = [
    "MultiheadAttention",
    "build_attention",
    "kernel_product",
    "kernelized_attention",
    "list_attentions",
    "skyformer_attention",
    "softmax_attention",
]
