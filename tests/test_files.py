"""Atomic writes, reads that report damage, and hashes."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import pytest

from skyformer import files
from skyformer.errors import DataError
from skyformer.files import dump_json, read_document, read_json, sha256_of, write_atomic


def fail_with_full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class TestWriteAtomic:
    @pytest.mark.parametrize("content", ["größer\n", b"\x00\xff"])
    def test_writes_text_and_bytes_into_new_folders(self, tmp_path: Path, content: str | bytes) -> None:
        file = tmp_path / "new" / "folder" / "file"
        write_atomic(file, content)
        assert file.read_bytes() == (content.encode() if isinstance(content, str) else content)
        assert [path.name for path in file.parent.iterdir()] == ["file"]

    @pytest.mark.parametrize("step", ["fsync", "replace"])
    def test_full_disk_leaves_the_old_file_and_nothing_else(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
    ) -> None:
        file = tmp_path / "file"
        write_atomic(file, "old")
        monkeypatch.setattr(*((files.os, "fsync") if step == "fsync" else (Path, "replace")), fail_with_full_disk)
        with pytest.raises(OSError, match="No space left"):
            write_atomic(file, "new")
        assert file.read_text() == "old"
        assert [path.name for path in tmp_path.iterdir()] == ["file"]


class TestReading:
    def test_round_trip(self, tmp_path: Path) -> None:
        write_atomic(tmp_path / "a.json", dump_json({"a": [1, None]}))
        assert read_json(tmp_path / "a.json") == {"a": [1, None]}

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"{", "is not JSON"),
            (b"[" * 100_000, "is not JSON"),
            (b"[1]", "expected a JSON object, got list"),
            (b"\xff", "is not UTF-8 text"),
            (b" " * (2**22 + 1), "is larger than 4,194,304 bytes"),
        ],
        ids=["truncated", "nested", "list", "binary", "large"],
    )
    def test_damage_is_reported_with_the_file(self, tmp_path: Path, content: bytes, message: str) -> None:
        file = tmp_path / "a.json"
        file.write_bytes(content)
        with pytest.raises(DataError, match=message) as raised:
            read_json(file)
        assert str(file) in str(raised.value)

    def test_missing_file_is_reported(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="cannot be read: No such file"):
            read_document(tmp_path / "missing")

    def test_json_has_no_nan(self) -> None:
        with pytest.raises(ValueError, match="not JSON compliant"):
            dump_json(float("nan"))


def test_sha256(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    assert sha256_of(tmp_path / "file") == hashlib.sha256(b"content").hexdigest()
