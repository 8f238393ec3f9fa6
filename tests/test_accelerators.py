"""On an accelerator no call waits for values.

Passes are traced on the meta device, where looking at a value or copying it to the host is an error, and which takes
the same path as a GPU. (Fake tensors on a GPU would do as well, but torch without CUDA can neither index them nor run
their backward pass.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from skyformer import kernelized_attention, skyformer_attention, use_backend
from skyformer.attention import build_attention
from skyformer.landmarks import SAMPLERS
from skyformer.ops import backends


@pytest.fixture(autouse=True)
def _triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(backends, "_TRITON_INSTALLED", True)
    with use_backend("triton"):
        yield


def draw(length: int = 300, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """query, key and value, stored in the order (B, n, H, P)."""
    q, k, v = (torch.randn(2, length, 2, 16, device="meta", dtype=dtype).transpose(1, 2) for _ in range(3))
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def mask(length: int = 300) -> Tensor:
    return torch.ones(2, length, dtype=torch.bool, device="meta")


def check(out: Tensor, inputs: tuple[Tensor, ...]) -> None:
    value = inputs[2]
    assert (out.device, out.shape, out.dtype) == (value.device, value.shape, value.dtype)
    if value.requires_grad:
        grads = torch.autograd.grad(out.float().sum(), inputs)
        assert all(g.shape == x.shape and g.dtype == x.dtype for g, x in zip(grads, inputs, strict=True))


def test_a_look_at_a_value_is_an_error() -> None:
    for look in (lambda x: bool(x.any()), lambda x: x.tolist(), lambda x: x.cpu()):
        with pytest.raises((RuntimeError, NotImplementedError)):
            look(mask())


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("landmarks", SAMPLERS.names())
def test_skyformer(landmarks: str, masked: bool, backend: str) -> None:
    inputs, key_mask = draw(), mask() if masked else None
    with use_backend(backend):
        check(skyformer_attention(*inputs, num_landmarks=32, landmarks=landmarks, key_mask=key_mask), inputs)


@pytest.mark.parametrize(
    "options",
    [
        {"kernel": "softmax"},
        {"kernel": "matern"},
        {"solver": "schulz"},
        {"gamma": 1e-9},
        {"num_landmarks": 1000},
        {"generator": torch.Generator().manual_seed(0)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_of_skyformer(options: dict[str, Any]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        inputs = draw(dtype=dtype)
        check(skyformer_attention(*inputs, key_mask=mask(), **{"num_landmarks": 32, **options}), inputs)


def test_explicit_landmarks() -> None:
    inputs, rows = draw(), torch.randint(600, (2, 32), device="meta")
    check(skyformer_attention(*inputs, landmarks=rows), inputs)
    check(skyformer_attention(*inputs, num_landmarks=32, landmarks=lambda *_: rows, key_mask=mask()), inputs)


@pytest.mark.parametrize("causal", [False, True])
def test_kernelized(causal: bool) -> None:
    inputs = draw()
    check(kernelized_attention(*inputs, key_mask=mask(), is_causal=causal), inputs)


def test_the_default_on_a_gpu_is_triton() -> None:
    with FakeTensorMode(), use_backend("auto"):
        q = torch.empty(2, 4, 100, 16, device="cuda")
        with LargeResults(q.numel()) as large:
            assert kernelized_attention(q, q, q).device.type == "cuda"
    assert large.found == ["skyformer.gaussian_product.default"]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["skyformer", "kernelized", "softmax"])
def test_modules(name: str, masked: bool, training: bool) -> None:
    attention = build_attention(name, 2, 16).train(training)
    inputs, key_mask = draw(), mask() if masked else None
    check(attention(*inputs, key_mask=key_mask), inputs)


class LargeResults(TorchDispatchMode):
    """Lists the operations that return new tensors of at least `elements` elements."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements = elements
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        self.found += [
            str(func)
            for x in tree_leaves(out)
            if isinstance(x, Tensor) and x.numel() >= self.elements and x.untyped_storage()._cdata not in given
        ]
        return out


def test_triton_reads_half_precision_and_strided_inputs_where_they_are() -> None:
    inputs = tuple(x.detach() for x in draw(4096))
    with LargeResults(inputs[0].numel()) as large:
        skyformer_attention(*inputs, num_landmarks=32, key_mask=mask(4096))
    assert large.found == ["skyformer.gaussian_product.default"]
