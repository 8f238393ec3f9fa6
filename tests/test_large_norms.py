"""Large norms: Gaussian attention in float32 stays accurate up to a norm of 1e6, and finite and bounded beyond.

Where norms cannot be looked at, in Triton and in compiled programs, that holds after the mean of the keys is subtracted
up to norms of 100 and 40. In half precision Triton subtracts no mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from skyformer import (
    kernel_product,
    kernelized_attention,
    skyformer_attention,
    tilted_attention,
    use_backend,
)
from skyformer.landmarks import SAMPLERS
from skyformer.ops.distances import accurate_points
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


def drawn_landmarks(sampler: str, solver: str) -> Callable[..., Tensor]:
    def attend(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None = None) -> Tensor:
        options = {"landmarks": sampler, "num_landmarks": 40, "solver": solver, "key_mask": key_mask}
        return skyformer_attention(query, key, value, **options, generator=torch.Generator().manual_seed(1))

    return attend


@pytest.mark.parametrize("sampler", SAMPLERS.names())
@pytest.mark.parametrize("solver", ["cholesky", "schulz"])
def test_every_sampler_and_solver_is_accurate(sampler: str, solver: str) -> None:
    attend = drawn_landmarks(sampler, solver)
    for norm, spread in ((1.7e4, "shift"), (1e6, "directions")):
        inputs = far_points(norm, spread)
        exact = with_gradients(attend, tuple(x.double() for x in inputs), None)
        for actual, expected in zip(with_gradients(attend, inputs, None), exact, strict=True):
            assert relative_error(actual, expected) < 1e-3


def few_cells(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None = None) -> Tensor:
    return tilted_attention(
        query, key, value, num_blocks=4, num_exact=16, num_cells=16, kernel="gaussian", key_mask=key_mask
    )


def product(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None = None) -> Tensor:
    return kernel_product(query, key, value, scale=DIM**-0.5, key_mask=key_mask)


@pytest.mark.parametrize("attend", [few_cells, product])
@pytest.mark.parametrize("norm", NORMS)
def test_other_gaussian_functions_are_accurate(attend: Callable[..., Tensor], norm: float) -> None:
    inputs = far_points(norm, "directions")
    exact = with_gradients(attend, tuple(x.double() for x in inputs), None)
    for actual, expected in zip(with_gradients(attend, inputs, None), exact, strict=True):
        assert relative_error(actual, expected) < 1e-3


@pytest.mark.parametrize("attend", [kernelized_attention, drawn_landmarks("uniform", "cholesky")])
def test_triton(attend: Callable[..., Tensor]) -> None:
    for norm, spread in ((1e6, "shift"), (1e2, "directions")):
        inputs = far_points(norm, spread)
        exact = with_gradients(attend, tuple(x.double() for x in inputs), None)
        with use_backend("triton"):
            found = with_gradients(attend, inputs, None)
        assert all(relative_error(*pair) < 1e-3 for pair in zip(found, exact, strict=True))
    for norm in (1.7e4, 1e6, 1e15):
        with use_backend("triton"):
            assert all(bool(x.isfinite().all()) for x in with_gradients(attend, far_points(norm, "directions"), None))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("attend", [kernelized_attention, drawn_landmarks("uniform", "cholesky")])
def test_half_precision_in_triton(attend: Callable[..., Tensor], dtype: torch.dtype) -> None:
    for spread in ("shift", "directions"):
        inputs = tuple(x.to(dtype) for x in far_points(1e2, spread))
        expected, *exact = with_gradients(attend, tuple(x.double() for x in inputs), None)
        with use_backend("triton"):
            out, *gradients = with_gradients(attend, inputs, None)
        assert relative_error(out, expected) <= 4e-3
        assert all(relative_error(*pair) <= 1e-2 for pair in zip(gradients, exact, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_in_triton_is_bounded_beyond_that_range(dtype: torch.dtype) -> None:
    for spread in ("shift", "directions"):
        inputs = tuple(x.to(dtype) for x in far_points(1e4, spread))
        with use_backend("triton"):
            out, *gradients = with_gradients(kernelized_attention, inputs, None)
        assert float(out.detach().abs().max()) <= 1.01 * LENGTH * float(inputs[2].abs().max())
        assert all(bool(gradient.isfinite().all()) for gradient in gradients)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled() -> None:
    compiled = torch.compile(kernelized_attention, backend="aot_eager")
    for norm, spread in ((1e6, "shift"), (40.0, "directions")):
        inputs = far_points(norm, spread)
        exact = with_gradients(dense, tuple(x.double() for x in inputs), None)
        for actual, expected in zip(with_gradients(compiled, inputs, None), exact, strict=True):
            assert relative_error(actual, expected) < 1e-3
    for norm in (1.7e4, 1e6, 1e15):
        inputs = far_points(norm, "directions")
        out, *gradients = with_gradients(compiled, inputs, None)
        assert float(out.detach().abs().max()) <= 2 * LENGTH * float(inputs[2].abs().max())
        assert all(bool(gradient.isfinite().all()) for gradient in gradients)


@pytest.mark.parametrize("norm", [1e8, 1e15, 1e30])
def test_beyond_that_range_everything_is_finite_and_bounded(norm: float) -> None:
    inputs = far_points(norm, "directions")
    for function in (kernelized_attention, landmarks_at_all_keys, few_cells, product):
        out, *gradients = with_gradients(function, inputs, None)
        # The second order may multiply a cell's weight by e, and the slope may add the range of the values.
        most = 1.01 if function is not few_cells else 3 * math.e
        assert float(out.detach().abs().max()) <= most * LENGTH * float(inputs[2].abs().max())
        assert all(bool(gradient.isfinite().all()) for gradient in gradients)


@pytest.mark.parametrize(("half_norm", "left_alone"), [(499.0, True), (501.0, False)])
def test_norms_decide_even_where_the_largest_entry_does_not(half_norm: float, left_alone: bool) -> None:
    # All of the norm is in one entry, so the bound from the largest entry is P times as large as the norm.
    x = torch.zeros(1, 1, 4, DIM)
    x[..., 1, 3] = -math.sqrt(2 * half_norm)
    points, keys = accurate_points(x, torch.zeros_like(x), None, 1.0)
    assert (points is x) == left_alone
    torch.testing.assert_close(points - keys, x, check_dtype=False)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_points_that_are_not_finite_are_not_taken_for_small_ones(bad: float) -> None:
    x = torch.zeros(1, 1, 4, DIM)
    x[..., 2, 0] = bad
    points, _ = accurate_points(x, torch.zeros_like(x), None, 1.0)
    assert points is not x


@pytest.mark.parametrize("lengths", [(0, 4), (4, 0), (0, 0)])
def test_points_of_empty_sequences(lengths: tuple[int, int]) -> None:
    x, y = (torch.randn(1, 1, length, DIM) for length in lengths)
    points, keys = accurate_points(x, y, None, 1.0)
    assert (points.shape, keys.shape) == (x.shape, y.shape)
