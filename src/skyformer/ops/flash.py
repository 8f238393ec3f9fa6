"""torch's fused attention: its public function, and the private one for the CPU.

A private function may change or disappear with any version of torch. Where a test finds that it no longer computes what
`fused` needs, the blocked product of `products` is used instead.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from skyformer.ops.tracing import needs_plain_operations


def softmax_product(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """`F.scaled_dot_product_attention`; in forward mode and under `torch.vmap` by its formula, in O(L S) memory."""
    if needs_plain_operations():
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(query, key, value, **options)
    return F.scaled_dot_product_attention(query, key, value, **options)


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """softmax(scale Q K^T + bias) V on the CPU, and the log-sum-exp of each row of scores (B, H, L)."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=bias, scale=scale
    )
    return out, lse


def flash_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value in `flash_attention`."""
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, query, key, value, out, lse, 0.0, is_causal, attn_mask=bias, scale=scale
    )
    return dq, dk, dv


def flash_attention_works() -> bool:
    """Whether the two functions above return the expected numbers in a tiny call, with and without a causal mask."""
    try:
        pairs = [*_found_and_expected(is_causal=False), *_found_and_expected(is_causal=True)]
        return all(torch.allclose(found, expected, atol=1e-5) for found, expected in pairs)
    except Exception:  # A changed function may raise any error.
        return False


def _found_and_expected(is_causal: bool) -> list[tuple[Tensor, Tensor]]:
    """Outputs and gradients for two queries and three keys, of which the first is masked."""
    query, key, value, grad = (
        torch.tensor(rows, dtype=torch.float32, device="cpu")[None, None]
        for rows in (
            [[0.5, -1.0], [2.0, 0.25]],
            [[3.0, 1.0], [-0.5, 0.75], [1.0, 1.5]],
            [[1.0, -2.0], [0.5, 3.0], [-1.5, 0.25]],
            [[1.0, 2.0], [-3.0, 0.5]],
        )
    )
    bias = torch.tensor([-math.inf, 0.5, -0.25], dtype=torch.float32, device="cpu").expand(1, 1, 2, 3)
    scale = 0.7
    weights = (scale * query @ key.mT + bias).exp()
    if is_causal:
        # Not by `tril`, which starts torch's threads: an import must not, because processes may be forked after it.
        weights = weights * torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]], dtype=torch.float32, device="cpu")
    out, lse = flash_attention(query, key, value, bias, is_causal, scale)
    height = lse.exp().unsqueeze(-1)
    dq, dk, dv = flash_attention_backward(
        grad * height, query, key, value, torch.zeros_like(out), lse, bias, is_causal, scale
    )
    g = weights * (grad @ value.mT)
    return [
        (out * height, weights @ value),
        (dq, scale * g @ key),
        (dk, scale * g.mT @ query),
        (dv, weights.mT @ grad),
    ]
