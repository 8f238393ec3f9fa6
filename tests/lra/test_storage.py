"""What is written comes back, and what is damaged is noticed."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyformer.errors import DataError, InputError, UnknownNameError
from skyformer.lra.examples import Examples, Ragged
from skyformer.lra.preparation import prepare
from skyformer.lra.storage import MANIFEST, SplitWriter, StoredSplit, Variant, damage, read_manifest
from skyformer.lra.tasks import TASKS, Split

pairs = st.lists(st.tuples(st.binary(max_size=30), st.binary(max_size=30), st.integers(0, 1)), min_size=1)


@given(st.lists(pairs, min_size=1, max_size=4))
def test_round_trip_of_ragged_pairs(batches: list[list[tuple[bytes, bytes, int]]]) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "split.arrow"
        with SplitWriter(path, TASKS["retrieval"]) as writer:
            for batch in batches:
                first, second, labels = zip(*batch, strict=True)
                sources = [f"row {number}" for number in range(len(batch))]
                writer.write(
                    Examples(Ragged.from_rows(first), np.array(labels, np.uint8), sources, Ragged.from_rows(second))
                )
        stored = StoredSplit(path)
        assert stored.second is not None
        rows = [row for batch in batches for row in batch]
        found = [
            (stored.tokens[i].tobytes(), stored.second[i].tobytes(), int(stored.labels[i])) for i in range(len(stored))
        ]
        assert found == rows
        assert stored.lengths().tolist() == [max(len(a), len(b)) for a, b, _ in rows]
        record = writer.record(Split.TRAIN)
        assert record.examples == len(rows)
        assert record.symbols == sum(len(a) + len(b) for a, b, _ in rows)


def test_one_byte_a_symbol_and_no_padding_on_disk(data_dir: Path) -> None:
    manifest = prepare("listops", limit=50).manifest
    record = manifest.splits[Split.TRAIN]
    assert record.symbols < record.bytes < record.symbols * 1.2


@pytest.mark.parametrize(
    ("labels", "length", "message"), [([0], 4_001, "4001 tokens, at most 4000"), ([2], 5, "expected 0 to 1")]
)
def test_impossible_examples_are_refused(tmp_path: Path, labels: list[int], length: int, message: str) -> None:
    examples = Examples(Ragged.from_rows([b"x" * length]), np.array(labels, np.uint8), ["here"])
    with (
        SplitWriter(tmp_path / "split.arrow", TASKS["text"]) as writer,
        pytest.raises(DataError, match=message),
    ):
        writer.write(examples)


def test_variant_names() -> None:
    assert Variant.of("listops").name == "listops"
    assert Variant.of("pathfinder", level="hard").name == "pathfinder"
    assert Variant.of("pathfinder", level="easy", seed=3, limit=10).name == "pathfinder-easy-seed3-limit10"
    assert Variant.of("listops", max_length=256, seed=3, limit=10).name == "listops-length256-seed3-limit10"
    assert Variant.of("listops", max_length=2000).name == "listops"
    assert Variant.of("text", max_length=100).name == "text"
    assert Variant.of("image", max_length=1024).name == "image"


def test_a_manifest_from_before_there_were_lengths_is_still_read() -> None:
    prepared = prepare("listops", limit=5)
    content = json.loads((prepared.folder / MANIFEST).read_text())
    del content["variant"]["max_length"]
    (prepared.folder / MANIFEST).write_text(json.dumps(content))
    assert read_manifest(prepared.folder) == prepared.manifest


def test_bad_variants() -> None:
    with pytest.raises(UnknownNameError, match="unknown task"):
        Variant.of("audio")
    with pytest.raises(InputError, match="only pathfinder has levels"):
        Variant.of("text", level="easy")
    with pytest.raises(InputError, match="unknown pathfinder level 'brutal'"):
        Variant.of("pathfinder", level="brutal")
    with pytest.raises(InputError, match="at least 1"):
        Variant.of("text", limit=0)
    with pytest.raises(InputError, match="negative"):
        Variant.of("text", seed=-1)
    for max_length in (15, 2001):
        with pytest.raises(InputError, match=f"max_length of listops must be from 16 to 2000, got {max_length}"):
            Variant.of("listops", max_length=max_length)
    with pytest.raises(InputError, match="at least 1024 for pathfinder"):
        Variant.of("pathfinder", max_length=1000)
    with pytest.raises(InputError, match="max_length must be at least 1, got -1"):
        Variant.of("text", max_length=-1)


def test_damage_is_found() -> None:
    prepared = prepare("listops", limit=20)
    path = prepared.folder / prepared.manifest.splits[Split.DEV].file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert damage(prepared.folder, prepared.manifest, thorough=False) == []
    assert "has changed" in damage(prepared.folder, prepared.manifest, thorough=True)[0]
    path.write_bytes(content[:-8])
    assert "the manifest says" in damage(prepared.folder, prepared.manifest, thorough=False)[0]
    path.unlink()
    assert "is missing" in damage(prepared.folder, prepared.manifest, thorough=False)[0]


@pytest.mark.parametrize("content", ["", "{}", "not json", '{"format": 99}'])
def test_damaged_manifest(tmp_path: Path, content: str) -> None:
    (tmp_path / MANIFEST).write_text(content)
    with pytest.raises(DataError, match="is damaged"):
        read_manifest(tmp_path)


def test_manifest_of_another_format() -> None:
    prepared = prepare("listops", limit=5)
    text = (prepared.folder / MANIFEST).read_text()
    (prepared.folder / MANIFEST).write_text(text.replace('"format": 1', '"format": 2'))
    with pytest.raises(DataError, match="has format 2, this version reads 1"):
        read_manifest(prepared.folder)


def test_a_file_that_is_not_arrow(tmp_path: Path) -> None:
    (tmp_path / "split.arrow").write_bytes(b"nonsense")
    with pytest.raises(DataError, match="cannot be opened"):
        StoredSplit(tmp_path / "split.arrow")
