"""Examples in memory and in Arrow files: what is written comes back, and choices keep the classes in proportion."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyformer.errors import DataError
from skyformer.lra.examples import Examples, Ragged, Row, choose, hold_out, in_batches
from skyformer.lra.storage import SplitWriter, StoredSplit
from skyformer.lra.tasks import TASKS, Split

pairs = st.lists(
    st.builds(Row, st.binary(max_size=30), st.integers(0, 1), st.text(max_size=5), st.binary(max_size=30)), min_size=1
)


@settings(max_examples=10)
@given(st.lists(pairs, min_size=1, max_size=4))
def test_round_trip_of_ragged_pairs(batches: list[list[Row]]) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "split.arrow"
        with SplitWriter(path, TASKS["retrieval"]) as writer:
            for batch in batches:
                writer.write(Examples.from_rows(batch))
        stored = StoredSplit(path)
        rows = [row for batch in batches for row in batch]
        texts = [[symbols.tobytes() for symbols in stored.texts(row)] for row in range(len(stored))]
        assert texts == [[row.tokens, row.second] for row in rows]
        assert stored.labels.tolist() == [row.label for row in rows]
        assert [stored.source(row) for row in range(len(rows))] == [row.source for row in rows]
        assert stored.lengths().tolist() == [max(len(row.tokens), len(row.second or b"")) for row in rows]
        record = writer.record(Split.TRAIN)
        assert record.examples == len(rows)
        assert record.symbols == sum(len(row.tokens) + len(row.second or b"") for row in rows)


def test_one_byte_per_symbol_and_no_padding_on_disk(tmp_path: Path) -> None:
    rows = [Row(b"x" * length, 0, "here") for length in range(1000, 1100)]
    with SplitWriter(tmp_path / "split.arrow", TASKS["text"]) as writer:
        writer.write(Examples.from_rows(rows))
    record = writer.record(Split.TRAIN)
    assert record.symbols < record.bytes < record.symbols * 1.2


@pytest.mark.parametrize(
    ("label", "length", "message"),
    [(0, 4_001, "at most 4000 tokens; got 4001"), (2, 5, "from 0 to 1; got 2")],
)
def test_impossible_examples_are_refused(tmp_path: Path, label: int, length: int, message: str) -> None:
    with (
        SplitWriter(tmp_path / "split.arrow", TASKS["text"]) as writer,
        pytest.raises(DataError, match=message),
    ):
        writer.write(Examples.from_rows([Row(b"x" * length, label, "here")]))


def test_chosen_rows(tmp_path: Path) -> None:
    with SplitWriter(tmp_path / "split.arrow", TASKS["text"]) as writer:
        writer.write(Examples.from_rows([Row(b"ab", 0, "x"), Row(b"c", 1, "y"), Row(b"", 1, "z")]))
    ((split, examples),) = StoredSplit(tmp_path / "split.arrow").batches(Split.TEST, np.array([2, 0]))
    assert (split, examples.sources, examples.labels.tolist()) == (Split.TEST, ["z", "x"], [1, 0])
    assert examples.tokens.values.tobytes() == b"ab"


def test_a_file_that_is_not_arrow_and_one_without_examples(tmp_path: Path) -> None:
    (tmp_path / "nonsense.arrow").write_bytes(b"nonsense")
    with pytest.raises(DataError, match="cannot be opened"):
        StoredSplit(tmp_path / "nonsense.arrow")
    with SplitWriter(tmp_path / "split.arrow", TASKS["text"]) as writer:
        pass
    with pytest.raises(DataError, match="the dev split of text is empty"):
        writer.record(Split.DEV)


@given(st.lists(st.binary(max_size=20)))
def test_rows_come_back(rows: list[bytes]) -> None:
    ragged = Ragged.from_rows(rows)
    assert [row.tobytes() for row in ragged.rows()] == rows
    assert ragged.offsets[-1] == sum(map(len, rows))


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
    assert chosen.tolist() == sorted(chosen.tolist()) == choose(array, count, seed).tolist()
    for label in range(4):
        expected = len(chosen) * np.mean(array == label)
        assert abs(np.sum(array[chosen] == label) - expected) <= 4


def test_exact_tenth_of_balanced_classes_chosen_by_the_seed() -> None:
    labels = np.repeat(np.arange(2, dtype=np.uint8), 12_500)
    kept, held_out = hold_out(labels, 2_500, seed=0)
    assert np.bincount(labels[held_out]).tolist() == [1_250, 1_250]
    assert sorted([*kept, *held_out]) == list(range(25_000))
    assert choose(labels, 10, 1).tolist() != choose(labels, 10, 2).tolist()
