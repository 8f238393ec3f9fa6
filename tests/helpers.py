"""What several test files share: comparisons with gradients, scattered masks, and errors that say enough."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from skyformer.testing.suite import backward, relative_error

Function = Callable[..., Tensor]

SMALL_REFERENCES = Path(__file__).parent / "references"
"""Outputs and gradients of the authors' implementation for one example and one head of each case."""


def authors_outputs(case: str) -> list[dict[str, Tensor]]:
    """Inputs, outputs and gradients of the authors' implementation, for the case "full" or "padded".

    The second item, with all examples and heads, exists if SKYFORMER_TEST_REFERENCES names the folder that has it.
    """
    load_file = pytest.importorskip("safetensors.torch").load_file
    folders = [SMALL_REFERENCES]
    if folder := os.environ.get("SKYFORMER_TEST_REFERENCES"):
        folders.append(Path(folder) / "golden")
    return [load_file(folder / f"{case}.safetensors") for folder in folders]


def reference_error(tensors: dict[str, Tensor], name: str, attention: Function) -> float:
    """The largest relative error of the output, with masked rows set to zero, and of its three gradients."""
    inputs = tuple(tensors[x].clone().requires_grad_() for x in "qkv")
    out = attention(*inputs) * tensors["key_mask"][:, None, :, None]
    found = (out, *backward(out, inputs, tensors["grad_out"]))
    parts = ("out", "grad_q", "grad_k", "grad_v")
    return max(relative_error(x, tensors[f"{name}.{part}"]) for x, part in zip(found, parts, strict=True))


def assert_same_with_gradients(
    actual: Function, expected: Function, inputs: tuple[Tensor, ...], rtol: float = 1e-9, atol: float = 1e-10
) -> None:
    """Two functions of the same inputs agree, and so do their gradients for a random gradient of the output."""
    left, right = actual(*inputs), expected(*inputs)
    grad = torch.randn_like(right)
    torch.testing.assert_close(left, right, rtol=rtol, atol=atol)
    for a, e in zip(backward(left, inputs, grad), backward(right, inputs, grad), strict=True):
        torch.testing.assert_close(a, e, rtol=rtol, atol=atol)


def scattered_mask(batch: int, length: int, keep: float = 0.6, seed: int = 0) -> Tensor:
    """bool (B, n) with holes anywhere, and at least one True a row."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(batch, length, generator=generator) < keep
    mask[torch.arange(batch), torch.randint(length, (batch,), generator=generator)] = True
    return mask


@contextmanager
def refused(error: type[Exception], *words: str) -> Iterator[None]:
    """The block raises exactly `error`, with all of `words` in its message: argument, expectation and value."""
    with pytest.raises(error) as caught:
        yield
    assert type(caught.value) is error
    for word in words:
        assert word in str(caught.value)
