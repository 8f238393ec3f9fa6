"""Examples in memory: rows of different lengths, and seeded choices that keep the classes in proportion."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from skyformer.lra.examples import Ragged, Row, choose, hold_out, in_batches
from skyformer.lra.tasks import Split


@given(st.lists(st.binary(max_size=20)))
def test_rows_come_back(rows: list[bytes]) -> None:
    ragged = Ragged.from_rows(rows)
    assert [row.tobytes() for row in ragged.rows()] == rows
    assert ragged.offsets[-1] == sum(map(len, rows))


def test_matrix() -> None:
    ragged = Ragged.from_matrix(np.arange(6, dtype=np.uint8).reshape(2, 3))
    assert [row.tolist() for row in ragged.rows()] == [[0, 1, 2], [3, 4, 5]]


def test_batches_keep_the_columns_together() -> None:
    rows = [Row(b"ab", 0, "x", b"c"), Row(b"d", 1, "y", b"ef"), Row(b"", 1, "z", b"")]
    batches = list(in_batches(Split.DEV, rows, size=2))
    assert [(split, len(examples)) for split, examples in batches] == [(Split.DEV, 2), (Split.DEV, 1)]
    first = batches[0][1]
    assert (first.sources, first.labels.tolist()) == (["x", "y"], [0, 1])
    assert [[row.tobytes() for row in text.rows()] for text in first.texts] == [[b"ab", b"d"], [b"c", b"ef"]]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=200), st.integers(0, 250), st.integers(0, 5))
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
