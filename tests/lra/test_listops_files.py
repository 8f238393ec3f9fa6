"""LRA's ListOps files are read, and checked line by line."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyformer.errors import DataError
from skyformer.lra import listops, listops_files
from skyformer.lra.tasks import Split

GOOD = "Source\tTarget\n( ( [MAX 2 ) 9 ) ] )\t9\r\n[MIN 3 4 ]\t3\n"


def write_all(folder: Path, text: str = GOOD) -> Path:
    for name in listops_files.FILES.values():
        (folder / name).write_text(text)
    return folder


def test_three_files(tmp_path: Path) -> None:
    parts = dict(listops_files.read(write_all(tmp_path)))
    assert list(parts) == list(Split)
    assert parts[Split.DEV].labels.tolist() == [9, 3]
    assert [listops.to_source(row) for row in parts[Split.TEST].tokens.rows()] == ["[MAX 2 9 ]", "[MIN 3 4 ]"]
    assert parts[Split.TRAIN].sources == ["basic_train.tsv:2", "basic_train.tsv:3"]


def test_missing_file_is_named(tmp_path: Path) -> None:
    (write_all(tmp_path) / "basic_val.tsv").unlink()
    with pytest.raises(DataError, match=r"lacks basic_val\.tsv"):
        list(listops_files.read(tmp_path))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[MIN 3 4 ]\t4", "line 2: the expression is 3, but the target says '4'"),
        ("[MIN 3 4 ]", "line 2: the expression is 3, but the target says ''"),
        ("[MIN 3 4\t3", "line 2: .*unclosed"),
        ("[MIN x ]\t3", "line 2: .*'x' is not known"),
        ("[MIN " + "3 " * 2000 + "]\t3", "line 2: 2002 tokens"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        list(listops_files.read(write_all(tmp_path, f"Source\tTarget\n{line}\n")))


def test_reference_file(references: Path) -> None:
    examples = list(listops_files.read_file(references / "data/listops/basic_test.tsv"))
    assert sum(map(len, examples)) == 100
