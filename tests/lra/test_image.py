"""CIFAR-10: read from archive or folder, checked against its MD5 sums, and converted to grey."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from skyformer.errors import DataError
from skyformer.lra import image
from skyformer.lra.tasks import Split

from .fake_files import cifar_files, write_folder, write_tar


def test_grey() -> None:
    planes = np.array([[[255, 0, 0, 255, 10], [0, 255, 0, 255, 20], [0, 0, 255, 255, 30]]], np.uint8)
    assert image.grey(planes).tolist() == [[76, 150, 29, 255, 18]]


def test_archive_and_folder_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {f"cifar-10-batches-bin/{name}": data for name, data in cifar_files(monkeypatch).items()}
    archive = write_tar(tmp_path / "cifar.tar.gz", files | {"cifar-10-batches-bin/readme.html": b""})
    folder = write_folder(tmp_path / "folder", files)
    from_archive, from_folder = list(image.read(archive)), list(image.read(folder))
    assert [split for split, _ in from_archive] == [Split.TRAIN] * 5 + [Split.TEST]
    for (_, one), (_, other) in zip(from_archive, from_folder, strict=True):
        assert np.array_equal(one.tokens.values, other.tokens.values)
        assert np.array_equal(one.labels, other.labels)
    assert from_archive[1][1].sources[3] == "data_batch_2.bin:3"
    assert set(from_archive[0][1].tokens.lengths) == {1024}


def test_wrong_hash_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = cifar_files(monkeypatch)
    files["data_batch_3.bin"] = files["data_batch_3.bin"][:-1] + b"!"
    with pytest.raises(DataError, match=r"data_batch_3\.bin is damaged, its MD5 is"):
        list(image.read(write_folder(tmp_path, files)))


def test_missing_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = cifar_files(monkeypatch)
    del files["test_batch.bin"]
    with pytest.raises(DataError, match=r"lacks test_batch\.bin"):
        list(image.read(write_tar(tmp_path / "cifar.tar.gz", files)))
