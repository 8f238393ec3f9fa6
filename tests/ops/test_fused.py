"""Exact Gaussian attention through torch's fused kernel, against the dense product."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from skyformer import kernel_product, kernelized_attention, skyformer_attention, use_backend
from skyformer.ops import fused as fused_module
from skyformer.ops.flash import flash_attention_works
from skyformer.ops.fused import fused_gaussian_attention, fused_gaussian_available
from skyformer.ops.products import dense_kernel_product
from skyformer.testing.suite import LargestStorage, backward, draw, relative_error
from tests.helpers import assert_same_with_gradients, scattered_mask

SHAPES = [(1, 1, 4), (1, 40, 8), (40, 1, 8), (33, 70, 1), (70, 33, 7), (300, 300, 5), (513, 40, 33)]


def fused(mask: Tensor | None = None, causal: bool = False, scale: float = 0.3) -> Callable[..., Tensor]:
    return lambda q, k, v: fused_gaussian_attention(q, k, v, mask, causal, scale)


def dense(mask: Tensor | None = None, causal: bool = False, scale: float = 0.3) -> Callable[..., Tensor]:
    return lambda q, k, v: dense_kernel_product(q, k, v, scale=scale, key_mask=mask, is_causal=causal)


def blocked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with use_backend("torch"):
        return kernel_product(q, k, v, scale=0.3)


@pytest.mark.parametrize(("length", "size", "head_dim"), SHAPES)
@pytest.mark.parametrize(("causal", "masked"), [(False, False), (False, True), (True, True)])
def test_agrees_with_the_dense_product(length: int, size: int, head_dim: int, causal: bool, masked: bool) -> None:
    # Scattered masks hide the first key of some examples, so some causal queries have no key.
    mask = scattered_mask(2, size) if masked else None
    inputs = draw(2, length, size, head_dim, head_dim)
    assert_same_with_gradients(fused(mask, causal), dense(mask, causal), inputs, rtol=1e-10, atol=1e-12)


def test_agrees_with_the_blocked_product() -> None:
    assert_same_with_gradients(fused(), blocked, draw(2, 130, 90, 8, 8), rtol=1e-11, atol=1e-12)


def test_gradients_agree_with_finite_differences() -> None:
    mask = torch.tensor([[True, False, True, True, True]])
    assert torch.autograd.gradcheck(fused(mask, causal=True), draw(1, 4, 5, 3, 3))


@pytest.mark.parametrize("std", [0.1, 1.0, 2.0, 4.0])
def test_float32_is_as_good_as_the_dense_product_in_float32(std: float) -> None:
    exact_inputs = draw(1, 200, 200, 16, 16, std=std)
    inputs = tuple(x.detach().float().requires_grad_() for x in exact_inputs)
    grad = torch.randn(1, 2, 200, 16)
    exact = dense()(*exact_inputs)
    truth = (exact, *backward(exact, exact_inputs, grad.double()))

    def errors(function: Callable[..., Tensor]) -> list[float]:
        out = function(*inputs)
        return [relative_error(a, e) for a, e in zip((out, *backward(out, inputs, grad)), truth, strict=True)]

    for ours, plain in zip(errors(fused()), errors(dense()), strict=True):
        assert ours <= 3 * plain + 1e-6


@pytest.mark.parametrize("std", [1e2, 1e3])
@pytest.mark.parametrize("masked", [False, True])
def test_large_norms_stay_finite_and_bounded(std: float, masked: bool) -> None:
    q, k, v = draw(2, 50, 50, 8, 8, torch.float32)
    inputs = tuple((x.detach() * s).requires_grad_() for x, s in ((q, std), (k, std), (v, 1.0)))
    out = fused(scattered_mask(2, 50) if masked else None)(*inputs)
    assert out.isfinite().all()
    assert out.abs().max() <= 50 * float(v.detach().abs().max()) * 1.01
    assert all(g.isfinite().all() for g in backward(out, inputs))


def test_a_query_far_from_every_key_gives_zero() -> None:
    q, k, v = draw(1, 6, 6, 4, 4, torch.float32)
    inputs = (q.detach() + 1e3).requires_grad_(), k, v
    out = fused()(*inputs)
    assert (out == 0).all()
    assert all(g.isfinite().all() for g in backward(out, inputs))


def test_fully_masked_example_gives_zeros_and_no_gradient() -> None:
    mask = torch.tensor([[True] * 7, [False] * 7])
    inputs = draw(2, 5, 7, 4, 4)
    out = fused(mask)(*inputs)
    assert (out[1] == 0).all()
    for grad in backward(out, inputs):
        assert (grad[1] == 0).all()
        assert (grad[0] != 0).any()


@pytest.mark.parametrize("which", [0, 1, 2])
def test_strided_features(which: int) -> None:
    inputs = list(draw(2, 20, 30, 8, 8))
    inputs[which] = inputs[which].detach().mT.contiguous().mT.requires_grad_()
    assert inputs[which].stride(-1) != 1
    assert_same_with_gradients(fused(), dense(), tuple(inputs), rtol=1e-10, atol=1e-12)


def test_expanded_inputs() -> None:
    q, k, v = (torch.randn(1, 1, 12, 1, dtype=torch.float64).expand(2, 3, 12, 8) for _ in range(3))
    torch.testing.assert_close(fused()(q, k, v), dense()(q, k, v))


def test_strided_gradients() -> None:
    inputs = draw(2, 20, 30, 8, 8)
    grad = torch.randn(2, 2, 8, 20, dtype=torch.float64).mT
    for a, e in zip(
        torch.autograd.grad(fused()(*inputs), inputs, grad),
        torch.autograd.grad(dense()(*inputs), inputs, grad),
        strict=True,
    ):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("masked", [False, True])
def test_memory_is_linear_in_length(masked: bool) -> None:
    length = 2048
    inputs = tuple(torch.randn(1, 1, length, 8, requires_grad=True) for _ in range(3))
    mask = torch.ones(1, length, dtype=torch.bool) if masked else None
    with LargestStorage() as largest:
        fused(mask)(*inputs).sum().backward()
    assert largest.bytes <= 2 * length * 8 * 4


def test_available_only_for_equal_head_dims_and_no_empty_tensor_on_the_cpu() -> None:
    q, _, v = draw(1, 4, 4, 3, 3)
    assert fused_gaussian_available(q, v)
    assert not fused_gaussian_available(q, v[..., :2])
    assert not fused_gaussian_available(q[:, :, :0], v)
    assert not fused_gaussian_available(q, v[:, :, :0])
    assert not fused_gaussian_available(q.to("meta"), v.to("meta"))


ATTENTIONS = {
    "kernelized": lambda q, k, v, mask: kernelized_attention(q, k, v, key_mask=mask, is_causal=True),
    "skyformer": lambda q, k, v, mask: skyformer_attention(
        q, k, v, key_mask=mask, num_landmarks=12, generator=torch.Generator().manual_seed(0)
    ),
}
FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"


def removed(*_: object, **__: object) -> Any:
    raise AttributeError("this version of torch does not have the function")


def changed(*args: Any, **kwargs: Any) -> Any:
    """The forward function with the log-sum-exp to base 2."""
    out, lse = ORIGINAL(*args, **kwargs)
    return out, lse / math.log(2)


ORIGINAL = getattr(torch.ops.aten, FORWARD)


def test_the_private_functions_of_this_version_of_torch_work() -> None:
    assert flash_attention_works()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to count threads")
def test_importing_the_package_starts_no_threads() -> None:
    count = "next(line for line in open('/proc/self/status') if line.startswith('Threads'))"
    code = f"import torch; before = {count}; import skyformer; assert {count} == before, {count}"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize(
    ("function", "replacement"),
    [(FORWARD, removed), (BACKWARD, removed), (FORWARD, changed)],
    ids=["no forward", "no backward", "wrong forward"],
)
def test_results_stay_the_same_without_a_private_function(
    name: str, function: str, replacement: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = scattered_mask(2, 40)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ATTENTIONS[name](q, k, v, mask)

    def attend_without(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(torch.ops.aten, function, replacement)
            patch.setattr(fused_module, "FUSED_WORKS", flash_attention_works())
            assert not fused_gaussian_available(q, v)
            return attend(q, k, v)

    assert_same_with_gradients(attend, attend_without, draw(2, 40, 40, 8, 8), rtol=1e-9, atol=1e-10)
