"""Skyformer: Kernelized Attention and its Nystrom approximation, for sequences too long for softmax attention."""

from skyformer.functional import kernelized_attention, skyformer_attention, softmax_attention
from skyformer.products import kernel_product

__version__ = "0.1.0"

__all__ = [
    "kernel_product",
    "kernelized_attention",
    "skyformer_attention",
    "softmax_attention",
]
