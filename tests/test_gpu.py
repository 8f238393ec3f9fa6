"""On a GPU, run by `make test-gpu`: products and attentions against float64, repeats, compilation, and no waiting."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import skyformer
from skyformer.ops.products import dense_kernel_product
from skyformer.testing.suite import backward, relative_error
from tests.helpers import scattered_mask

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU: run `make test-gpu` on one")

OUTPUT = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 4e-3}
GRADIENT = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 1e-2}


def draw(length: int, size: int, head_dim: int, value_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """query, key and value on the GPU, stored in the order (B, n, H, P).

    Distances are those of a head dim of 16: with larger ones all kernel values are below the normal range of float16.
    """
    std = (16 / head_dim) ** 0.25
    q, k, v = (
        (std * torch.randn(2, n, 3, p)).to("cuda", dtype).transpose(1, 2)
        for n, p in ((length, head_dim), (size, head_dim), (size, value_dim))
    )
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def in_float64(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.detach().double().requires_grad_() for x in inputs)


def assert_close(out: Tensor, inputs: tuple[Tensor, ...], expected: Tensor, exact: tuple[Tensor, ...]) -> None:
    grad = torch.randn_like(out)
    assert relative_error(out, expected) < OUTPUT[out.dtype]
    for found, wanted in zip(backward(out, inputs, grad), backward(expected, exact, grad.double()), strict=True):
        assert relative_error(found, wanted) < GRADIENT[out.dtype]


@pytest.mark.parametrize("dtype", OUTPUT, ids=str)
@pytest.mark.parametrize("head_dim", [16, 48, 64, 128, 192, 256])
@pytest.mark.parametrize(("causal", "masked"), [(False, False), (True, False), (False, True)])
def test_kernelized(causal: bool, masked: bool, head_dim: int, dtype: torch.dtype) -> None:
    inputs = draw(301, 1013, head_dim, 40, dtype)
    exact, mask = in_float64(inputs), scattered_mask(2, 1013).cuda() if masked else None
    out = skyformer.kernelized_attention(*inputs, key_mask=mask, is_causal=causal)
    expected = dense_kernel_product(*exact, scale=head_dim**-0.5, key_mask=mask, is_causal=causal)
    assert_close(out, inputs, expected, exact)


@pytest.mark.parametrize("dtype", OUTPUT, ids=str)
@pytest.mark.parametrize("num_landmarks", [16, 128, 500])
def test_skyformer(num_landmarks: int, dtype: torch.dtype) -> None:
    inputs = draw(4099, 4099, 64, 64, dtype)
    exact = in_float64(inputs)
    rows = torch.linspace(0, 8197, num_landmarks).long().expand(2, -1).cuda()
    out = skyformer.skyformer_attention(*inputs, landmarks=rows)
    assert_close(out, inputs, skyformer.skyformer_attention(*exact, landmarks=rows), exact)


def test_repeats_bit_for_bit() -> None:
    inputs = draw(4099, 4099, 64, 64, torch.bfloat16)

    def run() -> list[Tensor]:
        torch.manual_seed(0)
        out = skyformer.skyformer_attention(*inputs)
        return [out, *backward(out, inputs)]

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


def test_no_call_waits_for_the_gpu() -> None:
    inputs, mask = draw(2000, 2000, 64, 64, torch.bfloat16), scattered_mask(2, 2000).cuda()
    skyformer.skyformer_attention(*inputs, key_mask=mask).sum().backward()
    try:
        torch.cuda.set_sync_debug_mode("error")
        skyformer.skyformer_attention(*inputs, key_mask=mask).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_compiled_in_one_graph() -> None:
    inputs, mask = draw(600, 600, 64, 64, torch.bfloat16), scattered_mask(2, 600).cuda()
    attention = skyformer.build_attention("skyformer", 3, 64).cuda().eval()
    compiled = torch.compile(attention, fullgraph=True)
    torch.testing.assert_close(compiled(*inputs, key_mask=mask), attention(*inputs, key_mask=mask))
