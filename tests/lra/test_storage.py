"""Arrow files: what is written comes back, and impossible examples are refused."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyformer.errors import DataError
from skyformer.lra.examples import Examples, Row
from skyformer.lra.storage import SplitWriter, StoredSplit
from skyformer.lra.tasks import TASKS, Split

pairs = st.lists(
    st.builds(Row, st.binary(max_size=30), st.integers(0, 1), st.text(max_size=5), st.binary(max_size=30)), min_size=1
)


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


def test_empty_split(tmp_path: Path) -> None:
    with SplitWriter(tmp_path / "split.arrow", TASKS["text"]) as writer:
        pass
    with pytest.raises(DataError, match="the dev split of text is empty"):
        writer.record(Split.DEV)


def test_chosen_rows(tmp_path: Path) -> None:
    with SplitWriter(tmp_path / "split.arrow", TASKS["text"]) as writer:
        writer.write(Examples.from_rows([Row(b"ab", 0, "x"), Row(b"c", 1, "y"), Row(b"", 1, "z")]))
    ((split, examples),) = StoredSplit(tmp_path / "split.arrow").batches(Split.TEST, np.array([2, 0]))
    assert (split, examples.sources, examples.labels.tolist()) == (Split.TEST, ["z", "x"], [1, 0])
    assert examples.tokens.values.tobytes() == b"ab"


def test_a_file_that_is_not_arrow(tmp_path: Path) -> None:
    (tmp_path / "split.arrow").write_bytes(b"nonsense")
    with pytest.raises(DataError, match="cannot be opened"):
        StoredSplit(tmp_path / "split.arrow")
