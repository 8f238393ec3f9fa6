"""Seeded choices keep the classes in proportion."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from skyformer.lra.sampling import choose, hold_out

labels_strategy = st.lists(st.integers(0, 3), min_size=1, max_size=200)


@given(labels_strategy, st.integers(0, 250), st.integers(0, 5))
def test_choice_is_in_proportion(labels: list[int], count: int, seed: int) -> None:
    array = np.array(labels, np.uint8)
    chosen = choose(array, count, seed)
    assert len(chosen) == min(count, len(array)) == len(set(chosen.tolist()))
    assert chosen.tolist() == sorted(chosen.tolist())
    for label in range(4):
        expected = len(chosen) * np.mean(array == label)
        assert abs(np.sum(array[chosen] == label) - expected) <= 4


def test_exact_tenth_of_balanced_classes() -> None:
    labels = np.repeat(np.arange(2, dtype=np.uint8), 12_500)
    kept, held_out = hold_out(labels, 2_500, seed=0)
    assert np.bincount(labels[held_out]).tolist() == [1_250, 1_250]
    assert sorted([*kept, *held_out]) == list(range(25_000))


def test_seed_decides() -> None:
    labels = np.zeros(100, np.uint8)
    assert choose(labels, 10, 1).tolist() == choose(labels, 10, 1).tolist()
    assert choose(labels, 10, 1).tolist() != choose(labels, 10, 2).tolist()
