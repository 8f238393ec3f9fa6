"""Every file is read within bounds: headers of archives, decompressed text, files of folders, links, special files."""

from __future__ import annotations

import gzip
import lzma
import os
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from skyformer.errors import DataError
from skyformer.lra import listops, pathfinder, retrieval, text
from skyformer.lra.archives import Limits, open_decompressed, read_files
from skyformer.lra.pathfinder import Level
from tests.helpers import refused

LIMITS = Limits(members=10_000, member_bytes=10_000, total_bytes=2**28)
LINE = b"0.0\tone\ttwo\tfirst text\tsecond text\n"


def everything(path: Path, limits: Limits = LIMITS) -> dict[str, bytes]:
    return dict(read_files(path, "inner", lambda name: name.endswith(".txt"), limits))


def tar_with_headers(path: Path, members: int, header: dict[str, str], kind: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(path, "w:gz", format=kind) as archive:
        for number in range(members):
            info = tarfile.TarInfo(f"{number}.txt")
            info.pax_headers = header
            archive.addfile(info)
    return path


def test_headers_of_many_members_are_bounded_together(tmp_path: Path) -> None:
    path = tar_with_headers(tmp_path / "archive.tar.gz", 40, {"comment": "x" * 500_000})
    tracemalloc.start()
    try:
        with refused(DataError, str(path), "headers"):
            everything(path)
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


def test_headers_are_not_remembered(tmp_path: Path) -> None:
    path = tar_with_headers(tmp_path / "archive.tar.gz", 3000, {"comment": "x" * 2000})
    members = read_files(path, "inner", lambda name: True, LIMITS)
    tracemalloc.start()
    try:
        names = [next(members)[0] for _ in range(3000)]
        # Of tarfile alone: other threads of a long test session allocate too.
        held = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, tarfile.__file__)])
    finally:
        tracemalloc.stop()
    assert names[-1] == "2999.txt"
    assert sum(trace.size for trace in held.traces) < 2**20


@pytest.mark.parametrize(("suffix", "compress"), [(".gz", gzip.compress), (".xz", lzma.compress), ("", bytes)])
def test_decompressed_text_has_a_limit(
    tmp_path: Path, suffix: str, compress: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrieval, "_LIMITS", Limits(members=10, member_bytes=20_000, total_bytes=20_000))
    for name in retrieval.FILES.values():
        (tmp_path / f"{name}{suffix}").write_bytes(compress(LINE * 1000))
    with refused(DataError, "new_aan_pairs.train.tsv", "20,000"):
        list(retrieval.read(tmp_path))


def review(folder: Path) -> Path:
    file = folder / "train" / "pos" / "1_9.txt"
    file.parent.mkdir(parents=True)
    return file


def pairs(folder: Path) -> Path:
    for name in retrieval.FILES.values():
        (folder / name).write_bytes(LINE)
    (folder / "new_aan_pairs.train.tsv").unlink()
    return folder / "new_aan_pairs.train.tsv"


def expressions(folder: Path) -> Path:
    for name in listops.FILES.values():
        (folder / name).write_text("[MAX 1 2 ]\t2\n")
    file = folder / next(iter(listops.FILES.values()))
    file.unlink()
    return file


def metadata(folder: Path) -> Path:
    file = folder / "metadata" / "1.npy"
    file.parent.mkdir()
    return file


READERS = [
    (review, text.read),
    (pairs, retrieval.read),
    (expressions, listops.read),
    (metadata, lambda folder: pathfinder.read(folder, Level.HARD)),
]


@pytest.mark.parametrize(("place", "read"), READERS)
class TestFolders:
    def test_a_link_is_refused(self, tmp_path: Path, place: Callable[[Path], Path], read: Callable) -> None:
        secret = tmp_path / "secret"
        secret.write_text("another file")
        folder = tmp_path / "data"
        folder.mkdir()
        file = place(folder)
        file.symlink_to(secret)
        with refused(DataError, str(file), "is a link"):
            list(read(folder))

    def test_a_fifo_is_refused(self, tmp_path: Path, place: Callable[[Path], Path], read: Callable) -> None:
        file = place(tmp_path)
        os.mkfifo(file)
        with pytest.raises(DataError, match=rf"{file} must be a regular file|lacks {file.name}"):
            list(read(tmp_path))

    def test_a_huge_file_is_refused(self, tmp_path: Path, place: Callable[[Path], Path], read: Callable) -> None:
        file = place(tmp_path)
        with file.open("wb") as handle:
            handle.truncate(2**36)
        with refused(DataError, str(file), f"{2**36:,} bytes"):
            list(read(tmp_path))


def test_a_linked_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "1.npy").write_text("")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "metadata").symlink_to(tmp_path / "elsewhere")
    with refused(DataError, "is a link, or inside one"):
        list(pathfinder.read(tmp_path / "data", Level.HARD))


def test_a_folder_has_a_total_limit(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_bytes(b"x" * 9000)
    assert len(everything(tmp_path)) == 3
    for limits in (Limits(10, 10_000, 20_000), Limits(2, 10_000, 2**28)):
        with refused(DataError, str(tmp_path), "too large"):
            everything(tmp_path, limits)


def test_an_archive_is_a_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "archive.tar")
    with refused(DataError, "archive.tar", "regular file"), open_decompressed(tmp_path / "archive.tar"):
        pass
