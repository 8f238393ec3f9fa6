"""Retrieval: the pairs are read from the release archive, a folder or one of its files."""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest

from skyformer.errors import DataError
from skyformer.lra import retrieval
from skyformer.lra.tasks import Split

from .fake_files import pair_files, pair_lines, write_folder, write_tar


def counts(path: Path) -> dict[Split, int]:
    totals = dict.fromkeys(Split, 0)
    for split, examples in retrieval.read(path):
        totals[split] += len(examples)
    return totals


def test_release_archive(tmp_path: Path) -> None:
    files = {f"lra_release/tsv_data/{name}": data for name, data in pair_files(7).items()}
    path = write_tar(tmp_path / "lra_release.gz", {"lra_release/other.bin": b"0" * 100_000} | files)
    assert counts(path) == dict.fromkeys(Split, 7)


@pytest.mark.parametrize("suffix", ["", ".xz"])
def test_folder_and_single_file(tmp_path: Path, suffix: str) -> None:
    pack = lzma.compress if suffix else bytes
    files = {f"tsv/{name}{suffix}": pack(data) for name, data in pair_files(501).items()}
    write_folder(tmp_path, files)
    assert counts(tmp_path) == dict.fromkeys(Split, 501)
    assert counts(tmp_path / "tsv" / f"new_aan_pairs.eval.tsv{suffix}") == dict.fromkeys(Split, 501)


def test_content(tmp_path: Path) -> None:
    write_folder(tmp_path, pair_files(2))
    _, examples = next(retrieval.read(tmp_path))
    assert examples.labels.tolist() == [0, 1]
    assert examples.sources == ["P0 Q0", "P1 Q1"]
    assert examples.second is not None
    assert examples.second.rows()[0].tobytes() == b"cd" * 50


def test_both_texts_are_cut(tmp_path: Path) -> None:
    write_folder(tmp_path, {name: pair_lines(1, length=3_000) for name in pair_files(1)})
    _, examples = next(retrieval.read(tmp_path))
    assert examples.second is not None
    assert examples.tokens.lengths.tolist() == examples.second.lengths.tolist() == [4_000]


def test_quotes_have_no_meaning(tmp_path: Path) -> None:
    files = pair_files(1)
    files["new_aan_pairs.train.tsv"] = b'1.0\ta\tb\t"open\tclose" it\n'
    write_folder(tmp_path, files)
    _, examples = next(retrieval.read(tmp_path))
    assert examples.tokens.values.tobytes() == b'"open'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"1.0\ta\tb\ttext\n", "line 2: expected five fields .* got 4"),
        (b"2.0\ta\tb\ttext\ttext\n", "line 2: the label must be 0.0 or 1.0; got b'2.0'"),
        (b"\n", "line 2: expected five fields"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: bytes, message: str) -> None:
    files = pair_files(1)
    files["new_aan_pairs.train.tsv"] += line
    write_folder(tmp_path, files)
    with pytest.raises(DataError, match=message):
        counts(tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    files = pair_files(1)
    del files["new_aan_pairs.eval.tsv"]
    with pytest.raises(DataError, match=r"no new_aan_pairs\.eval\.tsv"):
        counts(write_tar(tmp_path / "lra_release.gz", files))
    with pytest.raises(DataError, match=r"no new_aan_pairs\.eval\.tsv"):
        counts(write_folder(tmp_path / "folder", files))


def test_truncated_xz(tmp_path: Path) -> None:
    files = {f"{name}.xz": lzma.compress(data) for name, data in pair_files(50).items()}
    files["new_aan_pairs.train.tsv.xz"] = files["new_aan_pairs.train.tsv.xz"][:-20]
    with pytest.raises(DataError, match=r"train\.tsv\.xz is truncated"):
        counts(write_folder(tmp_path, files))
