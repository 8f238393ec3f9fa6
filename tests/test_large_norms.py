"""Large norms: Gaussian attention in float32 stays accurate up to a norm of 1e6, and finite and bounded beyond."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from skyformer import kernelized_attention, skyformer_attention
from skyformer.testing.suite import relative_error
from tests.helpers import scattered_mask

NORMS = [1e2, 1.7e3, 5.6e3, 1.7e4, 8e4, 1e6]
LENGTH, DIM = 60, 32


def dense(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None = None) -> Tensor:
    """Kernelized Attention from the differences themselves."""
    squared = (query.unsqueeze(-2) - key.unsqueeze(-3)).square().sum(-1) * query.shape[-1] ** -0.5
    weights = torch.exp(-squared / 2)
    if key_mask is not None:
        weights = weights.masked_fill(~key_mask[:, None, None], 0)
    return weights @ value


def landmarks_at_all_keys(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None = None) -> Tensor:
    rows = LENGTH + torch.arange(LENGTH).expand(query.shape[0], -1)
    return skyformer_attention(query, key, value, landmarks=rows, gamma=1e-3, key_mask=key_mask)


def far_points(norm: float, spread: str) -> tuple[Tensor, Tensor, Tensor]:
    """Queries near keys, whose norm is large because of a common shift, or because they lie in all directions."""
    directions = torch.randn(2, 2, 1 if spread == "shift" else LENGTH, DIM)
    base = norm * directions / directions.norm(dim=-1, keepdim=True)
    query, key = (base + 0.5 * torch.randn(2, 2, LENGTH, DIM) for _ in range(2))
    return query, key, torch.randn(2, 2, LENGTH, DIM)


def with_gradients(function: Callable[..., Tensor], inputs: tuple[Tensor, ...], mask: Tensor | None) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves, key_mask=mask)
    return [out, *torch.autograd.grad(out.square().sum(), leaves)]


@pytest.mark.parametrize("spread", ["shift", "directions"])
@pytest.mark.parametrize("norm", NORMS)
def test_output_and_gradients_are_accurate(norm: float, spread: str) -> None:
    inputs = far_points(norm, spread)
    mask = scattered_mask(2, LENGTH, keep=0.8)
    exact = with_gradients(dense, tuple(x.double() for x in inputs), mask)
    for actual, expected in zip(with_gradients(kernelized_attention, inputs, mask), exact, strict=True):
        assert relative_error(actual, expected) < 1e-3


@pytest.mark.parametrize("norm", NORMS)
def test_skyformer_is_accurate(norm: float) -> None:
    inputs = far_points(norm, "directions")
    exact = with_gradients(landmarks_at_all_keys, tuple(x.double() for x in inputs), None)
    for actual, expected in zip(with_gradients(landmarks_at_all_keys, inputs, None), exact, strict=True):
        assert relative_error(actual, expected) < 1e-3


@pytest.mark.parametrize("norm", [1e8, 1e15, 1e30])
def test_beyond_that_range_everything_is_finite_and_bounded(norm: float) -> None:
    inputs = far_points(norm, "directions")
    for function in (kernelized_attention, landmarks_at_all_keys):
        out, *gradients = with_gradients(function, inputs, None)
        assert float(out.detach().abs().max()) <= 1.01 * LENGTH * float(inputs[2].abs().max())
        assert all(bool(gradient.isfinite().all()) for gradient in gradients)
