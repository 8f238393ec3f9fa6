"""Kernels: formulas, slopes, positive semidefiniteness, and use by name."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from skyformer import kernelized_attention, skyformer_attention, softmax_attention
from skyformer.errors import InputError, UnknownNameError
from skyformer.ops.kernels import (
    KERNELS,
    GaussianKernel,
    Kernel,
    LaplacianKernel,
    MaternKernel,
    RationalQuadraticKernel,
    SoftmaxKernel,
    get_kernel,
    half_norms,
)
from skyformer.testing.suite import draw
from tests.helpers import refused

RADIAL: list[tuple[Kernel, Callable[[Tensor], Tensor]]] = [
    (GaussianKernel(), lambda s: torch.exp(-s / 2)),
    (LaplacianKernel(), lambda s: torch.exp(-s.sqrt())),
    (MaternKernel(1.5), lambda s: (1 + (3 * s).sqrt()) * torch.exp(-(3 * s).sqrt())),
    (MaternKernel(2.5), lambda s: (1 + (5 * s).sqrt() + 5 * s / 3) * torch.exp(-(5 * s).sqrt())),
    (RationalQuadraticKernel(1.0), lambda s: 1 / (1 + s / 2)),
    (RationalQuadraticKernel(0.3), lambda s: (1 + s / 0.6) ** -0.3),
]
ALL = [*(kernel for kernel, _ in RADIAL), SoftmaxKernel()]


def squared_distances(x: Tensor, y: Tensor, scale: float) -> Tensor:
    """scale |x_i - y_j|^2, from the differences themselves."""
    return scale * (x[..., :, None, :] - y[..., None, :, :]).square().sum(-1)


@pytest.mark.parametrize(("kernel", "formula"), RADIAL)
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_radial_kernel_is_its_formula(kernel: Kernel, formula: Callable[[Tensor], Tensor], scale: float) -> None:
    x, y = torch.randn(2, 7, 3, dtype=torch.float64), torch.randn(2, 5, 3, dtype=torch.float64)
    torch.testing.assert_close(kernel.matrix(x, y, scale), formula(squared_distances(x, y, scale)))


def test_half_norms_and_their_gradient() -> None:
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    x[0, 0] = 0
    x.requires_grad_()
    half = half_norms(x, 0.3)
    torch.testing.assert_close(half, 0.15 * (x * x).sum(-1, keepdim=True))
    (grad,) = torch.autograd.grad(half.sum(), x)
    torch.testing.assert_close(grad, 0.3 * x)


def test_softmax_kernel_is_the_exponential_of_the_product() -> None:
    x, y = torch.randn(2, 7, 3, dtype=torch.float64), torch.randn(2, 5, 3, dtype=torch.float64)
    torch.testing.assert_close(SoftmaxKernel().matrix(x, y, 0.3), torch.exp(0.3 * torch.einsum("bip,bjp->bij", x, y)))


def test_softmax_kernel_is_the_gaussian_between_diagonals() -> None:
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    roots = [torch.exp(z.square().sum(-1) / 2) for z in (x, y)]
    between = roots[0][:, None] * GaussianKernel().matrix(x, y) * roots[1]
    torch.testing.assert_close(SoftmaxKernel().matrix(x, y), between)


@pytest.mark.parametrize("kernel", [kernel for kernel, _ in RADIAL])
def test_slope_is_minus_twice_the_derivative_in_the_squared_distance(kernel: Kernel) -> None:
    s = torch.tensor([1e-3, 0.1, 1.0, 4.0, 30.0], dtype=torch.float64, requires_grad=True)
    value, slope = kernel.value_and_slope(torch.zeros(5, dtype=torch.float64), s / 2, torch.zeros_like(s))
    (derivative,) = torch.autograd.grad(value.sum(), s)
    torch.testing.assert_close(slope, -2 * derivative)


def test_slope_of_the_softmax_kernel_is_its_derivative_in_the_product() -> None:
    inner = torch.linspace(-3, 3, 7, dtype=torch.float64)
    _, slope = SoftmaxKernel().value_and_slope(inner.clone(), torch.zeros(7), torch.zeros(7))
    torch.testing.assert_close(slope, inner.exp())


@pytest.mark.parametrize("kernel", ALL)
def test_value_agrees_with_value_and_slope(kernel: Kernel) -> None:
    inner, half_x, half_y = torch.randn(4, 5), 3 + torch.rand(4, 1), 3 + torch.rand(1, 5)
    value, slope = kernel.value_and_slope(inner.clone(), half_x, half_y)
    torch.testing.assert_close(kernel.value(inner.clone(), half_x, half_y), value)
    assert (slope is value) == kernel.slope_is_value


@pytest.mark.parametrize("kernel", ALL)
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(1, 14),
    features=st.integers(1, 5),
    std=st.sampled_from([1e-4, 0.3, 1.0, 5.0]),
    repeated=st.booleans(),
)
def test_kernel_matrix_is_positive_semidefinite(
    kernel: Kernel, seed: int, count: int, features: int, std: float, repeated: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = std * torch.randn(count, features, generator=generator, dtype=torch.float64)
    x = torch.cat([x, x]) if repeated else x
    eigenvalues = torch.linalg.eigvalsh(kernel.matrix(x, x, features**-0.5))
    # A distance of zero rounds to about 1e-8 |x|, which changes the kernels that use the distance itself.
    assert eigenvalues.min() >= -1e-7 * eigenvalues.max()


@pytest.mark.parametrize("kernel", ALL)
@pytest.mark.parametrize("std", [0.0, 1.0, 1e3])
def test_matrix_and_gradient_are_finite_where_points_coincide(kernel: Kernel, std: float) -> None:
    x = (std * torch.randn(6, 4)).requires_grad_()
    scale = 1e-8 if std > 1 and not kernel.radial else 0.5
    matrix = kernel.matrix(x, x, scale)
    matrix.sum().backward()
    assert matrix.isfinite().all()
    assert x.grad is not None
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("kernel", [kernel for kernel, _ in RADIAL])
def test_radial_kernels_never_exceed_one_by_rounding(kernel: Kernel) -> None:
    x = 300 * torch.randn(50, 8)
    assert kernel.matrix(x, x).max() <= 1


@pytest.mark.parametrize("name", KERNELS.names())
def test_every_name_works_in_kernelized_attention(name: str) -> None:
    q, k, v = draw(1, 4, 6, 3, 2)
    if name == "softmax":
        expected = torch.softmax(q @ k.mT / math.sqrt(3), -1) @ v
    else:
        expected = KERNELS.get(name).matrix(q, k, 3**-0.5) @ v
    torch.testing.assert_close(kernelized_attention(q, k, v, kernel=name), expected)


@pytest.mark.parametrize("name", KERNELS.names())
def test_every_name_works_in_skyformer_attention(name: str) -> None:
    q, k, v = draw(1, 20, 20, 3, 3)
    rows = torch.arange(40)[None]
    exact = softmax_attention(q, k, v) if name == "softmax" else kernelized_attention(q, k, v, kernel=name)
    approximate = skyformer_attention(q, k, v, kernel=name, landmarks=rows, gamma=1e-9)
    torch.testing.assert_close(approximate, exact, rtol=1e-5, atol=1e-6)


def test_a_kernel_object_brings_its_own_parameters() -> None:
    q, k, v = draw(1, 4, 6, 3, 2)
    smooth = MaternKernel(nu=2.5)
    torch.testing.assert_close(kernelized_attention(q, k, v, kernel=smooth), smooth.matrix(q, k, 3**-0.5) @ v)
    assert get_kernel(smooth) is smooth


@pytest.mark.parametrize("name", ["gausian", None, 3, ["gaussian"]])
def test_unknown_name_lists_the_known_ones(name: object) -> None:
    with refused(UnknownNameError, "kernel", repr(name), *KERNELS.names()):
        get_kernel(name)  # type: ignore[arg-type]


def test_a_near_miss_is_suggested() -> None:
    with refused(UnknownNameError, "Did you mean 'gaussian'?"):
        get_kernel("gausian")


@pytest.mark.parametrize("nu", [0.5, 2.0, float("nan")])
def test_other_smoothness_of_matern_is_refused(nu: float) -> None:
    with refused(InputError, "nu", "1.5 or 2.5", repr(nu)):
        MaternKernel(nu)


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("inf"), float("nan")])
def test_rational_quadratic_needs_a_positive_alpha(alpha: float) -> None:
    with refused(InputError, "alpha", "above 0", repr(alpha)):
        RationalQuadraticKernel(alpha)


def test_value_at_zero_is_the_value_of_a_point_and_itself() -> None:
    for name in ("gaussian", "laplacian", "matern", "rational_quadratic"):
        kernel, x = get_kernel(name), torch.zeros(1, 3, dtype=torch.float64)
        torch.testing.assert_close(kernel.value_at_zero(x), kernel.matrix(x, x)[0])
