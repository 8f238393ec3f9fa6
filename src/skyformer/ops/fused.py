"""Gaussian products through the fused softmax kernel of torch's CPU backend.

With a key bias of -|k_j|^2 / 2 (all norms and products multiplied by `scale`) a fused softmax kernel returns

    a_i = sum_j exp(<q_i, k_j> - |k_j|^2/2 - lse_i) v_j,        lse_i = log sum_j exp(<q_i, k_j> - |k_j|^2/2)

so  o_i = exp(lse_i - |q_i|^2/2) a_i  is the Gaussian product. Its backward pass, called with an output of zero and the
gradient dO_i exp(lse_i - |q_i|^2/2), returns G k, G^T q and C^T dO of `products`; the terms in the row and column sums
are subtracted here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from skyformer.ops.differentiable import Three
from skyformer.ops.flash import flash_attention, flash_attention_backward, flash_attention_works
from skyformer.ops.kernels import GaussianKernel, half_norms
from skyformer.ops.noise import Seed
from skyformer.ops.products import KernelOperation, Plan, subtract_dots

# At import: while a program is being compiled or exported, a call would be traced instead of run.
FUSED_WORKS = flash_attention_works()
"""Whether torch's fused attention for the CPU computes what is needed here."""


def fused_gaussian_available(query: Tensor, value: Tensor) -> bool:
    """Whether the fused kernel can be used: on the CPU, with one head dim for all, and no empty tensor."""
    fits = query.device.type == "cpu" and query.shape[-1] == value.shape[-1]
    return FUSED_WORKS and fits and min(query.numel(), value.numel()) > 0


def fused_gaussian_attention(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, is_causal: bool, scale: float
) -> Tensor:
    """kappa(Q, K) V; query (B, H, L, P), key and value (B, H, S, P), key_mask bool (B, S)."""
    query, key, value = (_features_together(x) for x in (query, key, value))
    return _FusedGaussian(Plan(GaussianKernel(), scale, is_causal))(query, key, value, key_mask)


def _features_together(x: Tensor) -> Tensor:
    """x, copied if its features are not contiguous in memory, which the fused kernel assumes without a check."""
    return x if x.stride(-1) == 1 else x.contiguous()


@dataclass(frozen=True)
class _FusedGaussian(KernelOperation):
    def forward(self, x: Tensor, y: Tensor, v: Tensor, mask: Tensor | None, seed: Seed | None) -> tuple[Tensor, ...]:
        scale = self.plan.scale
        bias = _key_bias(y, mask, scale)
        out, lse = flash_attention(x, y, v, bias.expand(-1, -1, x.shape[2], -1), self.plan.is_causal, scale)
        height = _row_height(x, lse, scale, y.shape[2])
        return out.mul_(height), lse, height, bias

    def gradients(
        self, grad: Tensor, x: Tensor, y: Tensor, v: Tensor, mask: Tensor | None, seed: Seed | None, *saved: Tensor
    ) -> Three:
        scale, (out, lse, height, bias) = self.plan.scale, saved
        bias = bias.expand(-1, -1, x.shape[2], -1)
        scaled = _features_together(grad * height)
        zero = out.new_zeros(out.shape[-1]).expand_as(out)
        dx, dy, dv = flash_attention_backward(scaled, x, y, v, zero, lse, bias, self.plan.is_causal, scale)
        subtract_dots(dx, x, grad, out, scale)
        subtract_dots(dy, y, v, dv, scale)
        return dx, dy, dv


def _key_bias(key: Tensor, key_mask: Tensor | None, scale: float) -> Tensor:
    """-scale |k_j|^2 / 2, and -inf where masked: (B, H, 1, S)."""
    bias = half_norms(key, -scale).mT
    return bias if key_mask is None else bias.masked_fill(~key_mask[:, None, None, :], -math.inf)


def _row_height(query: Tensor, lse: Tensor, scale: float, num_keys: int) -> Tensor:
    """exp(lse_i - scale |q_i|^2 / 2), which without rounding is at most the number of keys."""
    norms = torch.linalg.vector_norm(query, dim=-1, keepdim=True)
    return torch.addcmul(lse.unsqueeze(-1), norms, norms, value=-scale / 2).exp_().clamp_(max=num_keys)
