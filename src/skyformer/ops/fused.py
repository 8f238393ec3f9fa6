"""Gaussian products through the fused softmax kernel of torch's CPU backend.

With a key bias of -|k_j|^2 / 2 (all norms and products multiplied by `scale`) a fused softmax kernel returns

    a_i = sum_j exp(<q_i, k_j> - |k_j|^2/2 - lse_i) v_j,        lse_i = log sum_j exp(<q_i, k_j> - |k_j|^2/2)

so  o_i = exp(lse_i - |q_i|^2/2) a_i  is the Gaussian product. Its backward, handed a zero output and the gradient
dO_i exp(lse_i - |q_i|^2/2), yields G k, G^T q and C^T dO of `products`; the terms in the row and column sums are ours.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from skyformer.ops.precision import without_autocast
from skyformer.ops.products import lean_half_norms, subtract_dots


def fused_gaussian_available(query: Tensor, value: Tensor) -> bool:
    """Whether the fused kernel takes these: on the CPU (or to trace shapes), one head dim, nothing empty."""
    return query.device.type == "cpu" and query.shape[-1] == value.shape[-1] and min(query.numel(), value.numel()) > 0


def fused_gaussian_attention(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, is_causal: bool, scale: float
) -> Tensor:
    """kappa(Q, K) V; query (B, H, L, P), key and value (B, H, S, P), key_mask bool (B, S)."""
    packed = (_features_together(x) for x in (query, key, value))
    out: Tensor = _FusedGaussian.apply(*packed, key_mask, is_causal, scale)
    return out


def _features_together(x: Tensor) -> Tensor:
    """x, copied if its features are not neighbours in memory: the fused kernel does not look at that stride."""
    return x if x.stride(-1) == 1 else x.contiguous()


class _FusedGaussian(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None,
        is_causal: bool,
        scale: float,
    ) -> Tensor:
        bias = _key_bias(key, key_mask, scale).expand(-1, -1, query.shape[2], -1)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, attn_mask=bias, scale=scale
        )
        height = _row_height(query, lse, scale, key.shape[2])
        out = out.mul_(height)
        ctx.is_causal, ctx.scale = is_causal, scale
        ctx.save_for_backward(query, key, value, out, lse, height, key_mask)
        return out

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, height, key_mask = ctx.saved_tensors
        bias = _key_bias(key, key_mask, ctx.scale).expand(-1, -1, query.shape[2], -1)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _features_together(grad_out * height),
            query,
            key,
            value,
            out.new_zeros(out.shape[-1]).expand_as(out),
            lse,
            0.0,
            ctx.is_causal,
            attn_mask=bias,
            scale=ctx.scale,
        )
        subtract_dots(dq, query, grad_out, out, ctx.scale)
        subtract_dots(dk, key, value, dv, ctx.scale)
        return dq, dk, dv, None, None, None


def _key_bias(key: Tensor, key_mask: Tensor | None, scale: float) -> Tensor:
    """-scale |k_j|^2 / 2, and -inf where masked: (B, H, 1, S)."""
    bias = lean_half_norms(key, scale).neg_().mT
    return bias if key_mask is None else bias.masked_fill(~key_mask[:, None, None, :], -math.inf)


def _row_height(query: Tensor, lse: Tensor, scale: float, num_keys: int) -> Tensor:
    """exp(lse_i - scale |q_i|^2 / 2), which cannot exceed the number of keys but for rounding."""
    return (lse.unsqueeze(-1) - lean_half_norms(query, scale)).clamp_(max=math.log(num_keys)).exp_()
