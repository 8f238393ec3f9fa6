"""Softmax and Kernelized Attention with dropout on the CPU: the same as the dense product with the same mask."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from skyformer import kernelized_attention, softmax_attention
from skyformer.ops import softmax_dropout
from tests.helpers import scattered_mask

P = 0.3
SCALE = 0.7


@pytest.fixture(autouse=True, params=["drawn", "tables"])
def _small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three queries per block, the last one with fewer, and both ways to get random bytes."""
    monkeypatch.setattr(softmax_dropout, "BLOCK_ELEMENTS", 30)
    monkeypatch.setattr(softmax_dropout, "BLOCKS_FOR_TABLES", 1 if request.param == "tables" else 10**6)


def draw(length: int = 8, size: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (torch.randn(2, 2, n, 4, dtype=torch.float64) for n in (length, size, size))
    return query.requires_grad_(), key.requires_grad_(), value.requires_grad_()


ATTENTIONS = {"softmax": softmax_attention, "kernelized": kernelized_attention}


def attend(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, p: float = P, name: str = "softmax"
) -> Tensor:
    torch.manual_seed(5)
    return ATTENTIONS[name](query, key, value, key_mask=key_mask, scale=SCALE, dropout_p=p)


def dense(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, p: float, name: str) -> Tensor:
    """Values that are unit vectors show the mask, which is then applied to the whole matrix of weights."""
    units = torch.eye(key.shape[2], dtype=query.dtype).expand(*key.shape[:3], -1)
    kept = attend(query, key, units, key_mask, p, name).detach() != 0
    valid = torch.ones(len(key), key.shape[2], dtype=torch.bool) if key_mask is None else key_mask
    if name == "softmax":
        weights = (SCALE * query @ key.mT).masked_fill(~valid[:, None, None], -torch.inf).softmax(-1)
    else:
        weights = torch.exp(-SCALE * torch.cdist(query, key).square() / 2) * valid[:, None, None]
    return (weights * kept / (1 - softmax_dropout.drop_probability(p))) @ value


@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize("p", [P, 0.011])
@pytest.mark.parametrize("masked", ["none", "scattered", "end"])
def test_values_and_gradients_are_those_of_the_dense_product(masked: str, p: float, name: str) -> None:
    inputs = draw()
    masks = {"none": None, "scattered": scattered_mask(2, 9), "end": torch.arange(9) < torch.tensor([[9], [5]])}
    found, expected = attend(*inputs, masks[masked], p, name), dense(*inputs, masks[masked], p, name)
    torch.testing.assert_close(found, expected)
    grad = torch.randn_like(found)
    for ours, theirs in zip(
        torch.autograd.grad(found, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("p", "used"), [(0.1, 26 / 256), (0.5, 0.5), (0.01, 655 / 65536), (0.999, 65470 / 65536)])
def test_p_is_rounded_to_a_byte_where_that_is_close(p: float, used: float) -> None:
    assert softmax_dropout.drop_probability(p) == used


def test_padding_does_not_change_which_weights_are_dropped() -> None:
    query, key, value = (x.detach() for x in draw(8, 8))
    padded_key, padded_value = (torch.nn.functional.pad(x, (0, 0, 0, 4)) for x in (key, value))
    found = attend(query, padded_key, padded_value, (torch.arange(12) < 8).expand(2, 12))
    assert torch.equal(found, attend(query, key, value, None))


def test_every_weight_is_dropped_with_probability_p() -> None:
    query, key, _ = (x.detach() for x in draw(100, 100))
    units = torch.eye(100, dtype=torch.float64).expand(2, 2, -1, -1)
    kept = (attend(query, key, units, None) != 0).double()
    assert float(kept.mean()) == pytest.approx(1 - P, abs=4 * (P * (1 - P) / kept.numel()) ** 0.5)
    rows = kept.flatten(0, 2)
    # Rows of 100 entries that are drawn independently differ in 42 of them, and never in less than 15.
    differences = torch.cdist(rows, rows, p=0) + 100 * torch.eye(len(rows))
    assert differences.min() > 15


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
