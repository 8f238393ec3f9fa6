"""Nystromformer: softmax attention through landmarks that are means of segments of the queries and of the keys.

    softmax(Q K~^T) Z softmax(Q~ K^T) V  [+ a convolution of V]          Z -> pinv(A),  A = softmax(Q~ K~^T)

with all scores scaled by 1 / sqrt(P). Q~ and K~ (d, P) are the means of d equal runs of the valid tokens, and Z comes
from a few steps of an iteration of matrix products. O((L + S) d P + d^3) time, O((L + S) P) memory.
Xiong et al., "Nystromformer: A Nystrom-Based Algorithm for Approximating Self-Attention", 2021.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skyformer.attention.base import Attention, Inputs, Promise, computed_in_float32
from skyformer.attention.registry import register_attention
from skyformer.attention.rows import Ranks
from skyformer.checks import check_at_least, check_scale
from skyformer.errors import InputError, ShapeError, UnsupportedError
from skyformer.functional import attend_softmax
from skyformer.landmarks import Landmarks, segment_means
from skyformer.ops.kernels import scale_of

CONVOLUTION_BLOCK = 64
"""The number of tokens that one small product of the convolution computes."""


def nystromformer_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    num_landmarks: int = 128,
    num_iterations: int = 6,
    convolution: Tensor | None = None,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Nystrom approximation of softmax attention on segment means.

    Args:
        query: (B, H, L, P). key: (B, H, S, P). value: (B, H, S, Pv).
        num_landmarks: d. An example of fewer valid tokens has one landmark per token.
        num_iterations: steps towards the pseudo-inverse of the d x d matrix.
        convolution: (H, k) with k odd: the weights, for each head, of a convolution of the values along the valid
            tokens, which is added to the output; needs L == S.
        key_mask: bool (B, S), True = attend. query_mask: bool (B, L), True where a query counts in a segment mean;
            `key_mask` by default when L == S.
        scale: factor of the scores; P ** -0.5 by default.

    Returns:
        (B, H, L, Pv).
    """
    inputs = NystromformerAttention.checked(Inputs(query, key, value, key_mask, query_mask))
    check_at_least("num_landmarks", num_landmarks, 1)
    check_at_least("num_iterations", num_iterations, 1)
    check_scale(scale)
    return _attend(inputs, num_landmarks, num_iterations, convolution, scale)


@computed_in_float32
def _attend(
    inputs: Inputs, num_landmarks: int, num_iterations: int, convolution: Tensor | None, scale: float | None
) -> Tensor:
    """The three softmax kernels, of which the two long ones are never formed."""
    query, key, value, key_mask = inputs.query, inputs.key, inputs.value, inputs.key_mask
    if convolution is not None:
        _check_convolution(convolution, query, key)
    of_query = segment_means(query, inputs.query_mask, num_landmarks)
    of_key = segment_means(key, key_mask, num_landmarks)
    active = None if of_key.active is None else of_key.active[:, 0]
    right = attend_softmax(of_query.points, key, value, key_mask, scale=scale)
    middle = iterative_pinv(_landmark_kernel(of_query, of_key, scale), num_iterations) @ right
    out = attend_softmax(query, of_key.points, middle, active, scale=scale)
    return out if convolution is None else out + convolve_tokens(value, convolution.to(out.dtype), key_mask)


def _landmark_kernel(of_query: Landmarks, of_key: Landmarks, scale: float | None) -> Tensor:
    """A = softmax(Q~ K~^T scale) (B, H, d, d), with zero rows and columns for empty slots."""
    scores = of_query.points @ of_key.points.mT * scale_of(of_query.points, scale)
    if of_query.active is None and of_key.active is None:
        return scores.softmax(-1)
    pair = of_query.all_active().unsqueeze(-1) & of_key.all_active().unsqueeze(-2)
    # The smallest float instead of -inf: a row with only empty slots would otherwise be NaN.
    return scores.masked_fill(~pair, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(~pair, 0)


def iterative_pinv(A: Tensor, num_iterations: int) -> Tensor:
    """The approximate pseudo-inverse (..., k, m) of A (..., m, k): `num_iterations` steps of

        Z <- Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4,        Z_0 = A^T / (|A|_1 |A|_inf)

    Each matrix is scaled by its own norms; zero rows and columns of A stay zero in Z. A Z is computed again in every
    step: updating it instead is cheaper, but loses all accuracy in float32 if A is nearly singular.
    """
    size = A.abs()
    norms = size.sum(-2).amax(-1) * size.sum(-1).amax(-1)
    Z = A.mT / norms.clamp(min=torch.finfo(A.dtype).tiny)[..., None, None]
    identity = torch.eye(A.shape[-2], dtype=A.dtype, device=A.device)
    for _ in range(num_iterations):
        AZ = A @ Z
        Z = Z @ (3.25 * identity - AZ @ (3.75 * identity - AZ @ (1.75 * identity - AZ / 4)))
    return Z


def convolve_tokens(x: Tensor, weights: Tensor, mask: Tensor | None) -> Tensor:
    """x (B, H, n, P) convolved along its valid tokens with weights (H, k) and zero padding; zeros at masked tokens."""
    if mask is None:
        return _convolve(x, weights)
    ranks = Ranks.of(mask)
    return ranks.spread(_convolve(ranks.compact(x), weights))


def _convolve(x: Tensor, weights: Tensor) -> Tensor:
    """The same without a mask. The result of a block of tokens is a banded matrix, the same for all blocks, times the
    tokens around the block: on a CPU four times as fast as a depthwise `conv2d`."""
    (length, width), taps = x.shape[2:], weights.shape[1]
    block = max(CONVOLUTION_BLOCK, taps)
    padded = F.pad(x, (0, 0, taps // 2, taps // 2 + -length % block))
    around = padded.unfold(2, block + taps - 1, block)
    tap = torch.arange(block + taps - 1, device=x.device)[:, None] - torch.arange(block, device=x.device)
    # Entries off the band get the zero that is appended to the weights.
    band = F.pad(weights, (0, 1))[:, torch.where((tap >= 0) & (tap < taps), tap, taps)]
    out = torch.einsum("bhcpi,hij->bhcjp", around, band)
    return out.reshape(*x.shape[:2], -1, width)[:, :, :length]


def _check_convolution(convolution: Tensor, query: Tensor, key: Tensor) -> None:
    heads = query.shape[1]
    if convolution.dim() != 2 or convolution.shape[0] != heads or convolution.shape[1] % 2 == 0:
        raise ShapeError(f"convolution must have shape ({heads}, k) with k odd; got {tuple(convolution.shape)}")
    if query.shape[2] != key.shape[2]:
        raise UnsupportedError(
            "'nystromformer' attention adds the convolution of the values to the outputs at the same positions, so it "
            f"needs as many queries as values; got {query.shape[2]} queries and {key.shape[2]} values. "
            "For cross-attention, leave out the convolution"
        )


@register_attention
@dataclass(eq=False, repr=False, kw_only=True)
class NystromformerAttention(Attention):
    """softmax(Q K~^T) pinv(softmax(Q~ K~^T)) softmax(Q~ K^T) V, with an optional convolution of V.

    The options are those of `nystromformer_attention`, with `conv_kernel_size`, an odd number k, for a learned
    convolution (H, k) instead of a given one.
    """

    name = "nystromformer"
    approximates_softmax = True
    cannot: ClassVar[Mapping[Promise, str]] = {
        Promise.CAUSAL: "every output row depends on landmarks that are means over the whole sequence",
        Promise.DROPOUT: "the weights are never formed; put nn.Dropout after the attention instead",
    }

    num_landmarks: int = 128
    num_iterations: int = 6
    conv_kernel_size: int | None = None
    scale: float | None = None
    convolution: nn.Parameter | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("num_landmarks", self.num_landmarks, 1)
        check_at_least("num_iterations", self.num_iterations, 1)
        weights = None if self.conv_kernel_size is None else torch.empty(self.num_heads, _odd(self.conv_kernel_size))
        self.register_parameter("convolution", None if weights is None else nn.Parameter(weights))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As torch initialises convolutions: uniform within 1 / sqrt(k)."""
        if self.convolution is not None:
            bound = self.convolution.shape[1] ** -0.5
            nn.init.uniform_(self.convolution, -bound, bound)

    def attend(self, inputs: Inputs) -> Tensor:
        return _attend(inputs, self.num_landmarks, self.num_iterations, self.convolution, self.scale)


def _odd(conv_kernel_size: int) -> int:
    check_at_least("conv_kernel_size", conv_kernel_size, 1)
    if conv_kernel_size % 2 == 0:
        raise InputError(f"conv_kernel_size must be odd, so that it has a middle; got {conv_kernel_size}")
    return conv_kernel_size
