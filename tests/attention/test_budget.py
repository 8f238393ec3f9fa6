"""The suggested budget reaches the error on inputs that it was not chosen on, and padding does not change it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from skyformer import suggest_budget, tilted_attention
from skyformer.attention.tilted import SMALLEST_BUDGET
from skyformer.errors import InputError, MaskError, UnknownNameError
from skyformer.testing.suite import LargestStorage, insert_masked
from tests.attention.test_tilted import exact, smooth
from tests.helpers import refused


def errors(query: Tensor, key: Tensor, value: Tensor, budget: int, kernel: str = "softmax") -> Tensor:
    expected = exact(kernel)(query, key, value)
    difference = tilted_attention(query, key, value, budget=budget, kernel=kernel) - expected
    return torch.linalg.matrix_norm(difference, 2) / torch.linalg.matrix_norm(expected, 2)


@pytest.mark.parametrize("kernel", ["softmax", "gaussian"])
def test_the_budget_reaches_epsilon_on_the_whole_output(kernel: str) -> None:
    query, key, value = smooth(700, heads=4)
    inputs = 3 * query, 3 * key, value
    budget = suggest_budget(*inputs, epsilon=0.02, kernel=kernel)
    assert 64 < budget < 700
    assert float(errors(*inputs, budget, kernel).max()) < 1.2 * 0.02
    assert float(errors(*inputs, budget // 2, kernel).max()) > 0.02


def test_the_budget_of_some_heads_serves_others() -> None:
    budget = suggest_budget(*smooth(700, heads=6), epsilon=0.02, share=0.9)
    assert float(errors(*smooth(700, heads=6, seed=1), budget).median()) < 0.02


def test_a_smaller_error_takes_a_larger_budget() -> None:
    inputs = smooth(500)
    budgets = [suggest_budget(*inputs, epsilon=epsilon) for epsilon in (0.2, 0.02, 0.002)]
    assert budgets == sorted(budgets)
    assert budgets[0] < budgets[-1]


def test_share_leaves_the_hardest_heads_out() -> None:
    easy = smooth(300, heads=3)
    hard = [4 * torch.randn(1, 1, 300, 8, dtype=torch.float64) for _ in range(3)]
    inputs = [torch.cat(pair, 1) for pair in zip(easy, hard, strict=True)]
    assert suggest_budget(*inputs, epsilon=0.05, share=0.75) == suggest_budget(*easy, epsilon=0.05)
    assert suggest_budget(*inputs, epsilon=0.05) > suggest_budget(*easy, epsilon=0.05)


def test_padding_does_not_change_it() -> None:
    inputs = smooth(200)
    positions = torch.randperm(260)[:200].sort().values
    padded = [insert_masked(x, positions) for x in inputs]
    mask = torch.zeros(1, padded[0].shape[2], dtype=torch.bool)
    mask[:, positions] = True
    assert suggest_budget(*padded, epsilon=0.03, key_mask=mask) == suggest_budget(*inputs, epsilon=0.03)


@pytest.mark.parametrize("length", [1, 3, 40])
def test_short_inputs_and_examples_without_keys(length: int) -> None:
    inputs = smooth(length)
    assert suggest_budget(*inputs, epsilon=0.01) <= 64
    assert suggest_budget(*inputs, epsilon=0.01, key_mask=torch.zeros(1, length, dtype=torch.bool)) <= 64


@pytest.mark.parametrize("shape", [(0, 2, 5, 4), (1, 0, 5, 4), (1, 2, 0, 4)])
def test_nothing_to_approximate_takes_the_smallest_budget(shape: tuple[int, ...]) -> None:
    query, key = torch.randn(shape), torch.randn(*shape[:2], 300, 4)
    assert suggest_budget(query, key, key, epsilon=0.1) == SMALLEST_BUDGET


def test_no_matrix_of_the_sequences_size_is_made() -> None:
    query, key, value = (x.float() for x in smooth(4000, heads=1))
    with LargestStorage() as largest:
        suggest_budget(query, key, value, epsilon=0.1, num_rows=64)
    assert largest.bytes < 4000 * 4000 / 4


def test_bad_input_is_refused() -> None:
    inputs = smooth(20)
    with refused(InputError, "epsilon", "above 0"):
        suggest_budget(*inputs, epsilon=0.0)
    with refused(InputError, "share", "at most 1"):
        suggest_budget(*inputs, epsilon=0.1, share=1.5)
    with refused(InputError, "num_rows", "at least 1"):
        suggest_budget(*inputs, epsilon=0.1, num_rows=0)
    with refused(UnknownNameError, "kernel", "laplacian"):
        suggest_budget(*inputs, epsilon=0.1, kernel="laplacian")
    with refused(MaskError, "key_mask", "(1, 20)"):
        suggest_budget(*inputs, epsilon=0.1, key_mask=torch.ones(1, 5, dtype=torch.bool))
