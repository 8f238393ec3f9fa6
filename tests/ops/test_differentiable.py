"""Derivatives beyond the first, forward mode and vmap of the products, the solve and the kernel matrix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import skyformer
from skyformer.errors import UnsupportedError
from skyformer.ops import products
from skyformer.ops.kernels import KERNELS
from skyformer.ops.products import dense_kernel_product, gram_matrix
from skyformer.ops.softmax_dropout import gaussian_attention_with_dropout, softmax_attention_with_dropout
from skyformer.ops.solve import SchulzSolver, regularized_solve
from tests.helpers import scattered_mask


def draw(length: int = 5, size: int = 7, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((length, 3), (size, 3), (size, 2))
    q, k, v = (torch.randn(2, 2, n, p, dtype=dtype).requires_grad_() for n, p in shapes)
    return q, k, v


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "block_shape", lambda count, rows, columns: (3, 2))


def hessian_part(attention: Any, query: Tensor) -> Tensor:
    """What the second derivative adds to the gradient of <g, q> for the gradient g of |out|^2."""
    (g,) = torch.autograd.grad(attention(query).square().sum(), query, create_graph=True)
    (both,) = torch.autograd.grad((g * query).sum(), query)
    return both - g


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fused", "portable"])
def test_no_term_of_a_second_derivative_is_lost(dtype: torch.dtype) -> None:
    query, key = (torch.randn(1, 2, n, 8, dtype=dtype) for n in (20, 30))
    query.requires_grad_()
    found = hessian_part(lambda q: skyformer.kernelized_attention(q, key, key), query)
    expected = hessian_part(lambda q: dense_kernel_product(q, key, key, scale=8**-0.5), query)
    assert expected.norm() > 1
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"key_mask": scattered_mask(2, 7)}], ids=str)
@pytest.mark.parametrize("kernel", KERNELS.names())
@pytest.mark.usefixtures("small_blocks")
def test_second_derivatives_of_the_product(kernel: str, options: dict[str, Any]) -> None:
    assert torch.autograd.gradgradcheck(
        lambda x, y, v: skyformer.kernel_product(x, y, v, kernel=kernel, scale=0.5, **options), draw(), fast_mode=True
    )


def test_second_derivatives_where_points_coincide_and_at_zero() -> None:
    x = torch.randn(1, 1, 4, 3, dtype=torch.float64)
    x[0, 0, 0] = 0
    inputs = tuple(t.clone().requires_grad_() for t in (x, x, x))

    def by_distances(x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        distances = (x.unsqueeze(3) - y.unsqueeze(2)).square().sum(-1)
        return (-distances / 2).exp() @ v

    found, expected = (
        torch.autograd.functional.hessian(lambda *t, product=product: product(*t).square().sum(), inputs)
        for product in (skyformer.kernel_product, by_distances)
    )
    for row, expected_row in zip(found, expected, strict=True):
        for a, e in zip(row, expected_row, strict=True):
            torch.testing.assert_close(a, e)


def test_third_derivatives() -> None:
    def third(product: Any) -> Tensor:
        torch.manual_seed(0)
        x, y, v = draw(3, 4)
        value = product(x, y, v).square().sum()
        for _ in range(3):
            (g,) = torch.autograd.grad(value, x, create_graph=True)
            value = (g * torch.linspace(-1, 1, g.numel(), dtype=g.dtype).view_as(g)).sum()
        return g

    torch.testing.assert_close(third(skyformer.kernel_product), third(dense_kernel_product))


@pytest.mark.parametrize("attend", [softmax_attention_with_dropout, gaussian_attention_with_dropout])
@pytest.mark.parametrize("p", [0.25, 0.1])
def test_second_derivatives_with_dropout(attend: Any, p: float) -> None:
    more = () if attend is softmax_attention_with_dropout else (None,)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(3)
        return attend(q, k, v, scattered_mask(2, 7), 0.5, p, *more)

    assert torch.autograd.gradgradcheck(run, draw(), fast_mode=True)


@pytest.mark.usefixtures("small_blocks")
def test_second_derivatives_of_the_portable_product_with_dropout() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        return skyformer.kernel_product(q, k, v, kernel="matern", dropout_p=0.3, generator=generator)

    assert torch.autograd.gradgradcheck(run, draw(), fast_mode=True)


@pytest.mark.parametrize("kernel", KERNELS.names())
def test_second_derivatives_of_the_kernel_matrix(kernel: str) -> None:
    x = torch.randn(2, 1, 5, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: gram_matrix(x, kernel=kernel, scale=0.5), (x,), fast_mode=True)


@pytest.mark.parametrize("solver", ["cholesky", SchulzSolver(20)], ids=["cholesky", "schulz"])
def test_second_derivatives_and_tangents_of_the_solve(solver: Any) -> None:
    x = torch.randn(2, 1, 5, 3, dtype=torch.float64, requires_grad=True)
    rhs = torch.randn(2, 1, 5, 2, dtype=torch.float64, requires_grad=True)

    def solve(x: Tensor, rhs: Tensor) -> Tensor:
        return regularized_solve(gram_matrix(x), rhs, 0.1, solver)

    assert torch.autograd.gradgradcheck(solve, (x, rhs), fast_mode=True)
    assert torch.autograd.gradcheck(solve, (x, rhs), fast_mode=True, check_forward_ad=True, check_batched_grad=True)


@pytest.mark.parametrize("kernel", KERNELS.names())
@pytest.mark.usefixtures("small_blocks")
def test_forward_mode_of_the_product(kernel: str) -> None:
    def product(x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        return skyformer.kernel_product(x, y, v, kernel=kernel, scale=0.5, key_mask=scattered_mask(2, 7))

    assert torch.autograd.gradcheck(product, draw(), fast_mode=True, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(product, draw(), fast_mode=True, check_fwd_over_rev=True)


def test_vmap_over_some_of_the_inputs() -> None:
    x, y, v = (t.detach() for t in draw())
    many = torch.randn(3, *v.shape, dtype=v.dtype)
    found = torch.vmap(skyformer.kernel_product, in_dims=(None, None, 0))(x, y, many)
    torch.testing.assert_close(found, torch.stack([skyformer.kernel_product(x, y, each) for each in many]))
    moved = torch.vmap(skyformer.kernel_product, in_dims=(None, None, 2), out_dims=1)(x, y, many.movedim(0, 2))
    torch.testing.assert_close(moved.movedim(1, 0), found)


@pytest.mark.parametrize("kernel", ["gaussian", "matern"])
def test_randomness_of_dropout_under_vmap(kernel: str) -> None:
    x, y, v = (t.detach()[None].expand(3, *t.shape) for t in draw(40, 50))

    def dropped(x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        return skyformer.kernel_product(x, y, v, kernel=kernel, dropout_p=0.5)

    same = torch.vmap(dropped, randomness="same")(x, y, v)
    different = torch.vmap(dropped, randomness="different")(x, y, v)
    assert torch.equal(same[0], same[1])
    assert not torch.allclose(different[0], different[1])
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(dropped)(x, y, v)
    with pytest.raises(UnsupportedError, match="dropout"):
        torch.func.jvp(dropped, (x[0], y[0], v[0]), (x[0], y[0], v[0]))


def test_explicit_rows_on_another_device_move_to_the_inputs() -> None:
    q, k, v = (t.to("meta") for t in draw())
    rows = torch.tensor([[0, 3, 8], [1, 2, 9]])
    assert skyformer.skyformer_attention(q, k, v, landmarks=rows).is_meta


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fused", "portable"])
def test_outputs_and_gradients_are_the_same_where_fewer_autograd_functions_are_used(dtype: torch.dtype) -> None:
    inputs = tuple(x.to(dtype)[..., :2].detach().requires_grad_() for x in draw())
    out = skyformer.kernelized_attention(*inputs)
    with torch.no_grad():
        torch.testing.assert_close(skyformer.kernelized_attention(*inputs), out.detach(), rtol=0, atol=0)
    once = torch.autograd.grad(out.square().sum(), inputs, retain_graph=True)
    again = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
    for plain, differentiable in zip(once, again, strict=True):
        assert differentiable.requires_grad
        torch.testing.assert_close(plain, differentiable.detach(), rtol=0, atol=0)
