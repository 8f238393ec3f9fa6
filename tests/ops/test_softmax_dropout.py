"""Softmax attention with dropout on the CPU: the same as the dense product with the same mask."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from skyformer import softmax_attention
from skyformer.ops import softmax_dropout
from tests.helpers import scattered_mask

P = 0.3
SCALE = 0.7


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three queries per block, the last one with fewer."""
    monkeypatch.setattr(softmax_dropout, "BLOCK_ELEMENTS", 30)


def draw(length: int = 8, size: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (torch.randn(2, 2, n, 4, dtype=torch.float64) for n in (length, size, size))
    return query.requires_grad_(), key.requires_grad_(), value.requires_grad_()


def attend(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None) -> Tensor:
    torch.manual_seed(5)
    return softmax_attention(query, key, value, key_mask=key_mask, scale=SCALE, dropout_p=P)


def dense(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None) -> Tensor:
    """Values that are unit vectors show the mask, which is then applied to the whole matrix of weights."""
    units = torch.eye(key.shape[2], dtype=query.dtype).expand(*key.shape[:3], -1)
    kept = attend(query, key, units, key_mask).detach() != 0
    scores = SCALE * query @ key.mT
    if key_mask is not None:
        scores = scores.masked_fill(~key_mask[:, None, None], -torch.inf)
    rounded = round(P * 2**16) / 2**16
    return (scores.softmax(-1) * kept / (1 - rounded)) @ value


@pytest.mark.parametrize("masked", [False, True])
def test_values_and_gradients_are_those_of_the_dense_product(masked: bool) -> None:
    inputs = draw()
    key_mask = scattered_mask(2, 9) if masked else None
    found, expected = attend(*inputs, key_mask), dense(*inputs, key_mask)
    torch.testing.assert_close(found, expected)
    grad = torch.randn_like(found)
    for ours, theirs in zip(
        torch.autograd.grad(found, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_every_weight_is_dropped_with_probability_p() -> None:
    query, key, _ = (x.detach() for x in draw(100, 100))
    units = torch.eye(100, dtype=torch.float64).expand(2, 2, -1, -1)
    kept = (attend(query, key, units, None) != 0).double()
    assert float(kept.mean()) == pytest.approx(1 - P, abs=4 * (P * (1 - P) / kept.numel()) ** 0.5)
    assert not torch.equal(kept[0, 0], kept[0, 1])
    assert not torch.equal(kept[0, 0], kept[1, 0])


def test_an_example_without_valid_keys_is_zero_and_has_no_gradient() -> None:
    inputs = draw()
    key_mask = torch.tensor([[True], [False]]).expand(2, 9)
    out = attend(*inputs, key_mask)
    assert not out[1].any()
    gradients = torch.autograd.grad(out.sum(), inputs)
    assert all(torch.isfinite(gradient).all() and not gradient[1].any() for gradient in gradients)


@pytest.mark.parametrize("sizes", [(0, 3), (3, 0)])
def test_nothing_to_attend_to(sizes: tuple[int, int]) -> None:
    out = attend(*draw(*sizes), None)
    assert out.shape == (2, 2, sizes[0], 4)
    assert not out.any()


def test_half_precision_stays() -> None:
    query, key, value = (x.detach().bfloat16() for x in draw())
    out = attend(query, key, value, None)
    expected = attend(query.float(), key.float(), value.float(), None)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, atol=0.02, rtol=0.02)
