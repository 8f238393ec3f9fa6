"""What several test files share: comparisons with gradients, scattered masks, and errors that say enough."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from tests.attention.suite import backward

Function = Callable[..., Tensor]


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
    """The block raises exactly `error`, with all of `words` in its message: the argument, what it wants, what came."""
    with pytest.raises(error) as caught:
        yield
    assert type(caught.value) is error
    for word in words:
        assert word in str(caught.value)
