"""Dropout from packed random bits: the distribution, the gradient and the generator of nn.Dropout."""

from __future__ import annotations

import pytest
import torch

from skyformer.model.dropout import Dropout


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_entries_are_dropped_with_probability_p_whichever_bits_they_come_from(p: float) -> None:
    torch.manual_seed(0)
    size = 400_000
    kept = (Dropout(p)(torch.ones(size)) != 0).view(-1, 4).double()
    error = (p * (1 - p) / len(kept)) ** 0.5
    assert ((kept.mean(0) - (1 - p)).abs() < 4 * error).all()
    together = torch.corrcoef(kept.T) - torch.eye(4)
    assert together.abs().max() < 4 / len(kept) ** 0.5


def test_what_is_kept_is_scaled_so_that_the_mean_stays() -> None:
    out = Dropout(0.1)(torch.full((7, 13), 3.0))
    levels = 2**16
    kept = 3.0 * levels / (levels - round(0.1 * levels))
    torch.testing.assert_close(out[out != 0].unique(), torch.tensor([kept]))


def test_the_gradient_is_the_mask() -> None:
    x = torch.randn(5, 3, 11, dtype=torch.float64).transpose(0, 1).requires_grad_()
    out = Dropout(0.3)(x)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(gradient * x, out)
    assert (gradient == 0).any()


def test_the_same_seed_drops_the_same_entries() -> None:
    torch.manual_seed(1)
    first = Dropout(0.5)(torch.ones(33))
    torch.manual_seed(1)
    assert torch.equal(Dropout(0.5)(torch.ones(33)), first)
    assert not torch.equal(Dropout(0.5)(torch.ones(33)), first)


@pytest.mark.parametrize("p", [0.0, 1e-6])
def test_hardly_any_dropout_is_torchs(p: float) -> None:
    x = torch.randn(4, 4)
    torch.testing.assert_close(Dropout(p)(x), x, rtol=1e-5, atol=0)


def test_everything_may_be_dropped() -> None:
    assert not Dropout(1.0)(torch.ones(3)).any()


def test_evaluation_changes_nothing() -> None:
    x = torch.randn(4)
    assert torch.equal(Dropout(0.5).eval()(x), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_dtype_stays(dtype: torch.dtype) -> None:
    assert Dropout(0.1)(torch.ones(2, 0, 3, dtype=dtype)).dtype == dtype
    assert Dropout(0.1)(torch.ones(5, dtype=dtype)).dtype == dtype


def test_shapes_can_be_traced() -> None:
    assert Dropout(0.1)(torch.ones(2, 3, device="meta")).shape == (2, 3)
