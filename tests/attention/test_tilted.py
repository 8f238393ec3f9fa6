"""Tilted attention keeps the promises, is exact where it says so, and is closer with a larger budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from skyformer.attention.partition import contiguous_parts, tree_parts
from skyformer.attention.tilted import TiltedPlan, tilted_attention
from skyformer.errors import InputError, UnsupportedError
from skyformer.functional import kernelized_attention, softmax_attention
from skyformer.testing.suite import AttentionSuite, relative_error
from tests.helpers import refused, scattered_mask

SMALL = {"num_blocks": 3, "num_exact": 5, "num_cells": 4}


class TestTilted(AttentionSuite):
    name = "tilted"
    options = SMALL


class TestTiltedGaussian(AttentionSuite):
    name = "tilted"
    options = {**SMALL, "kernel": "gaussian"}


class TestTiltedUnordered(AttentionSuite):
    name = "tilted"
    options = {**SMALL, "ordered": False, "slope": False}


def smooth(length: int, heads: int = 2, head_dim: int = 8, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values (1, heads, length, head_dim) of which neighbours resemble each other."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randn(3, 1, heads, length, head_dim, dtype=torch.float64, generator=generator)
    query, key, value = (2 * steps.cumsum(3) / length**0.5).unbind()
    return query, key, value


def exact(kernel: str) -> Any:
    return {"softmax": softmax_attention, "gaussian": kernelized_attention}[kernel]


@pytest.mark.parametrize("kernel", ["softmax", "gaussian"])
def test_is_exact_for_examples_with_few_keys(kernel: str) -> None:
    query, key, value = (torch.cat([x, x, x]) for x in smooth(40))
    mask = scattered_mask(3, 40, keep=0.9)
    mask[1, 9:] = False
    mask[2] = False
    out = tilted_attention(query, key, value, key_mask=mask, kernel=kernel, **SMALL)
    expected = exact(kernel)(query, key, value, key_mask=mask)
    torch.testing.assert_close(out[1][:, mask[1]], expected[1][:, mask[1]], rtol=1e-9, atol=1e-11)
    assert not out[2].any()
    assert relative_error(out[0][:, mask[0]], expected[0][:, mask[0]]) > 1e-6


@pytest.mark.parametrize("kernel", ["softmax", "gaussian"])
def test_one_query_per_block_has_exact_row_sums(kernel: str) -> None:
    # With q = mu, Jensen's bound of every cell is an equality.
    query, key, _ = smooth(30)
    ones = torch.ones_like(key)
    out = tilted_attention(query, key, ones, num_blocks=30, num_exact=2, num_cells=4, kernel=kernel)
    torch.testing.assert_close(out, exact(kernel)(query, key, ones), rtol=1e-9, atol=1e-11)


def test_without_slope_outputs_stay_between_the_values() -> None:
    query, key, value = smooth(100)
    out = tilted_attention(3 * query, 3 * key, value, budget=32, slope=False)
    low, high = value.aminmax(dim=2, keepdim=True)
    assert bool(((out >= low - 1e-9) & (out <= high + 1e-9)).all())


@pytest.mark.parametrize("kernel", ["softmax", "gaussian"])
def test_error_falls_with_the_budget_and_with_the_slope(kernel: str) -> None:
    query, key, value = smooth(600)
    expected = exact(kernel)(query, key, value)

    def error(**options: Any) -> float:
        return relative_error(tilted_attention(query, key, value, kernel=kernel, **options), expected)

    small, large = error(budget=32), error(budget=240)
    assert large < 0.3 * small
    assert large < 0.02
    assert large < error(budget=240, slope=False)


def test_queries_in_no_order() -> None:
    query, key, value = smooth(512)
    shuffled = query[:, :, torch.randperm(512)]
    expected = softmax_attention(shuffled, key, value)
    in_order = relative_error(tilted_attention(shuffled, key, value, budget=48), expected)
    grouped = relative_error(tilted_attention(shuffled, key, value, budget=48, ordered=False), expected)
    assert grouped < 0.6 * in_order


def test_budget_is_spent() -> None:
    for budget in (8, 9, 64, 128, 240, 400, 1000):
        plan = TiltedPlan.of_budget(budget)
        assert plan.cost == budget
        assert plan.num_exact >= 1
    assert TiltedPlan.of_budget(240) == TiltedPlan(32, 144, 64)


def test_refuses_what_it_cannot_do() -> None:
    query, key, value = smooth(20)
    with refused(UnsupportedError, "tilted", "is_causal"):
        tilted_attention(query, key, value, is_causal=True)
    with refused(InputError, "num_cells", "power of two", "12"):
        tilted_attention(query, key, value, num_blocks=2, num_exact=2, num_cells=12)
    with refused(InputError, "either budget or all of", "num_blocks=4"):
        tilted_attention(query, key, value, num_blocks=4)
    with refused(InputError, "budget", "8", "7"):
        tilted_attention(query, key, value, budget=7)
    with pytest.raises(InputError, match="unknown kernel of tilted attention 'laplacian'"):
        tilted_attention(query, key, value, kernel="laplacian")


def test_parts_have_equal_sizes_and_hold_every_valid_row_once() -> None:
    mask = scattered_mask(3, 45)
    points = torch.randn(3, 2, 45, 4)
    for parts in (contiguous_parts(mask, 3, 45, 8, mask.device), tree_parts(points, mask, 8)):
        assert parts.filled is not None
        sizes = parts.filled.sum(-1)
        assert int((sizes.amax(-1) - sizes.amin(-1)).max()) <= 1
        for example in range(3):
            for rows in parts.rows[example]:
                held = rows[parts.filled[example, 0]].sort().values
                assert torch.equal(held, mask[example].nonzero().squeeze(1))


def test_cells_hold_near_points() -> None:
    centres = torch.tensor([[0.0, 0.0], [0.0, 10.0], [30.0, 0.0], [30.0, 10.0]])
    points = centres.repeat_interleave(16, 0) + 0.1 * torch.randn(64, 2)
    points = points[torch.randperm(64)].view(1, 1, 64, 2)
    held = tree_parts(points, None, 4).take(points)
    assert float(held.std(3).max()) < 1
