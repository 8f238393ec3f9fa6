"""Damaged prepared data is refused before it is opened, and intact data is hashed only once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from skyformer.errors import DataError
from skyformer.lra import folders, load_task, prepare
from skyformer.lra.folders import VERIFIED
from tests.helpers import refused

OPTIONS = {"limit": 16, "max_length": 64}


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    return prepare("listops", data_dir=tmp_path, **OPTIONS).folder


def flip_a_byte(file: Path, *, times: bool = True) -> None:
    before = file.stat()
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes(content)
    if not times:
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("used_before", [False, True])
@pytest.mark.parametrize("times", [False, True], ids=["old time", "new time"])
def test_a_changed_file_is_named_with_the_command(prepared: Path, used_before: bool, times: bool) -> None:
    if used_before:
        load_task("listops", prepared.parent, **OPTIONS)
    [file] = prepared.glob("dev-*.arrow")
    flip_a_byte(file, times=times)
    with refused(DataError, str(file), "SHA-256", "data prepare listops", "--force"):
        load_task("listops", prepared.parent, **OPTIONS)


def test_preparing_again_without_force_repairs_it(prepared: Path) -> None:
    [file] = prepared.glob("dev-*.arrow")
    content = file.read_bytes()
    flip_a_byte(file)
    assert prepare("listops", data_dir=prepared.parent, **OPTIONS).fresh
    assert file.read_bytes() == content


def test_intact_files_are_hashed_once(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_task("listops", prepared.parent, **OPTIONS)
    monkeypatch.setattr(folders, "sha256_of", lambda file: pytest.fail(f"{file} is hashed again"))
    load_task("listops", prepared.parent, **OPTIONS)


def test_a_damaged_stamp_or_a_folder_that_is_read_only_is_no_obstacle(
    prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a folder of a version that wrote no stamp."""
    (prepared / VERIFIED).write_text("{")
    load_task("listops", prepared.parent, **OPTIONS)
    assert len((prepared / VERIFIED).read_text()) > 1
    (prepared / VERIFIED).unlink()

    def read_only(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(folders, "write_atomic", read_only)
    assert len(load_task("listops", prepared.parent, **OPTIONS).train) == 16
