"""Rows of different lengths survive being put end to end."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from skyformer.lra.examples import Examples, Ragged


@given(st.lists(st.binary(max_size=20)))
def test_rows_come_back(rows: list[bytes]) -> None:
    ragged = Ragged.from_rows(rows)
    assert [row.tobytes() for row in ragged.rows()] == rows
    assert ragged.offsets[-1] == sum(map(len, rows))


@given(st.lists(st.binary(max_size=20), min_size=1), st.data())
def test_take(rows: list[bytes], data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1)))
    taken = Ragged.from_rows(rows).take(np.array(chosen, np.int64))
    assert [row.tobytes() for row in taken.rows()] == [rows[number] for number in chosen]


def test_matrix() -> None:
    ragged = Ragged.from_matrix(np.arange(6, dtype=np.uint8).reshape(2, 3))
    assert [row.tolist() for row in ragged.rows()] == [[0, 1, 2], [3, 4, 5]]


def test_examples_take_keeps_columns_together() -> None:
    examples = Examples(
        Ragged.from_rows([b"a", b"b"]), np.array([0, 1], np.uint8), ["x", "y"], Ragged.from_rows([b"c", b"d"])
    )
    taken = examples.take(np.array([1]))
    assert taken.sources == ["y"]
    assert taken.labels.tolist() == [1]
    assert taken.second is not None
    assert taken.second.values.tobytes() == b"d"
