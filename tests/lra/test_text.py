"""IMDb: the archive and its extracted folder give the same reviews."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyformer.errors import DataError
from skyformer.lra import text
from skyformer.lra.tasks import Split

from .fake_files import review_files, write_folder, write_tar

EXTRA = {
    "aclImdb/README": b"",
    "aclImdb/train/unsup/0_0.txt": b"unlabelled",
    "aclImdb/train/urls_pos.txt": b"",
}


def test_archive_and_folder_give_the_same(tmp_path: Path) -> None:
    files = review_files(3) | EXTRA
    parts = dict(text.read(write_tar(tmp_path / "reviews.tar.gz", files)))
    assert list(parts) == [Split.TRAIN, Split.TEST]
    train = parts[Split.TRAIN]
    assert train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert train.sources[0] == "train/neg/0_2.txt"
    assert train.tokens.rows()[0].tobytes() == "neg train 0 é".encode()
    for split, part in text.read(write_folder(tmp_path / "folder", files)):
        assert part.tokens.values.tobytes() == parts[split].tokens.values.tobytes()
        assert part.sources == parts[split].sources


def test_order_is_by_number_not_by_archive(tmp_path: Path) -> None:
    files = dict(reversed(review_files(12).items()))
    sources = dict(text.read(write_tar(tmp_path / "reviews.tar.gz", files)))[Split.TEST].sources
    assert sources[9:12] == ["test/neg/9_2.txt", "test/neg/10_2.txt", "test/neg/11_2.txt"]


def test_cut_to_four_thousand_bytes(tmp_path: Path) -> None:
    files = review_files(1)
    files["aclImdb/train/pos/0_7.txt"] = b"x" * 9_999
    _, part = next(text.read(write_tar(tmp_path / "reviews.tar.gz", files)))
    assert part.tokens.lengths.max() == 4_000


@pytest.mark.parametrize("missing", ["train/pos", "test/neg"])
def test_incomplete(tmp_path: Path, missing: str) -> None:
    files = {name: content for name, content in review_files(2).items() if missing not in name}
    with pytest.raises(DataError, match="no reviews in"):
        list(text.read(write_folder(tmp_path / "folder", files)))
