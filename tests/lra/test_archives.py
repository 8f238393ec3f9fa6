"""Damaged and hostile archives are refused by an error that names them."""

from __future__ import annotations

import io
import lzma
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from skyformer.errors import DataError
from skyformer.lra.archives import Limits, open_decompressed, read_files

from .fake_files import write_folder, write_tar

LIMITS = Limits(members=10, member_bytes=10_000, total_bytes=100_000)
FILES = {"a/one.txt": b"1" * 3000, "a/two.txt": bytes(range(256)) * 8}


def read(path: Path, limits: Limits = LIMITS) -> dict[str, bytes]:
    return dict(read_files(path, "inner", lambda name: name.endswith(".txt"), limits))


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz"])
def test_every_compression(tmp_path: Path, mode: str) -> None:
    assert read(write_tar(tmp_path / "archive", FILES, mode)) == FILES


@pytest.mark.parametrize("inner", ["", "inner"])
def test_extracted_folder(tmp_path: Path, inner: str) -> None:
    write_folder(tmp_path / inner, FILES | {"a/other.bin": b""})
    assert read(tmp_path) == FILES


@pytest.mark.parametrize("mode", ["w:gz", "w:xz"])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.99])
def test_truncated(tmp_path: Path, mode: str, share: float) -> None:
    path = write_tar(tmp_path / "archive.tar", FILES, mode)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(DataError, match=r"archive\.tar"):
        read(path)


@pytest.mark.parametrize(("mode", "place"), [("w:gz", 0.5), ("w:xz", 0.5), ("w:gz", -8)])
def test_changed_byte(tmp_path: Path, mode: str, place: float) -> None:
    """In the middle, or in the checksum at the very end."""
    path = write_tar(tmp_path / "archive.tar", FILES, mode)
    data = bytearray(path.read_bytes())
    data[int(place if place < 0 else len(data) * place)] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"archive\.tar"):
        read(path)


@pytest.mark.parametrize("content", [b"", b"plain text, no archive", b"\x1f\x8bnot gzip", b"\xfd7zXZ\x00not xz"])
def test_not_an_archive(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "archive.tar"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"archive\.tar"):
        read(path)


def special(name: str, kind: bytes, target: str = "/etc/passwd") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def with_size(name: str, size: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size = size
    return info


@pytest.mark.parametrize(
    ("info", "message"),
    [
        (tarfile.TarInfo("../outside.txt"), "a path outside"),
        (tarfile.TarInfo("/absolute.txt"), "a path outside"),
        (tarfile.TarInfo("a/../../b.txt"), "a path outside"),
        (special("link.txt", tarfile.SYMTYPE), "link"),
        (special("hard.txt", tarfile.LNKTYPE), "link"),
        (special("fifo.txt", tarfile.FIFOTYPE), "special file"),
        (special("device.txt", tarfile.CHRTYPE), "special file"),
        (with_size("huge.txt", 10**12), "too large"),
    ],
)
def test_hostile_members(tmp_path: Path, info: tarfile.TarInfo, message: str) -> None:
    path = tmp_path / "archive.tar"
    with tarfile.open(path, "w") as archive:
        archive.addfile(info, io.BytesIO(b"") if info.size == 0 else None)
    with pytest.raises(DataError, match=message) as caught:
        read(path)
    assert str(path) in str(caught.value)


def test_too_many_members(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "archive.tar", {f"{number}.txt": b"" for number in range(11)})
    with pytest.raises(DataError, match="over 10 files"):
        read(path)


def test_bomb(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "archive.tar", {f"{number}.txt": b"0" * 9_000 for number in range(9)})
    with pytest.raises(DataError, match="too large"):
        read(path, Limits(members=100, member_bytes=10_000, total_bytes=50_000))


def test_bomb_hidden_in_a_header(tmp_path: Path) -> None:
    """A file name is a header of any length, which tarfile reads into memory before it can be checked."""
    path = tmp_path / "archive.tar"
    with tarfile.open(path, "w:gz", format=tarfile.GNU_FORMAT) as archive:
        archive.addfile(tarfile.TarInfo("x" * 50_000_000))
    with pytest.raises(DataError, match="too large"):
        read(path, Limits(members=100, member_bytes=10_000, total_bytes=10**9))


def test_xz_with_a_huge_dictionary_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "archive.tar.xz"
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 1, "dict_size": 2**30}]
    path.write_bytes(_xz_header_with(filters))
    with pytest.raises(DataError, match=r"archive\.tar\.xz"):
        read(path)


def _xz_header_with(filters: list[dict[str, int]]) -> bytes:
    """A valid stream that asks its reader for a gigabyte: compressed small, its dictionary byte raised."""
    import zlib

    data = bytearray(lzma.compress(b"tiny", filters=[{**filters[0], "dict_size": 2**16}]))
    header = slice(12, 12 + (data[12] + 1) * 4 - 4)
    dictionary = data.index(b"\x21\x01", 12) + 2
    data[dictionary] = 36
    data[header.stop : header.stop + 4] = zlib.crc32(bytes(data[header])).to_bytes(4, "little")
    return bytes(data)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere"):
        read(tmp_path / "nowhere")


@pytest.mark.parametrize("compress", [bytes, lzma.compress])
def test_open_decompressed(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "file"
    path.write_bytes(compress(b"line one\nline two\n"))
    with open_decompressed(path) as stream:
        assert list(stream) == [b"line one\n", b"line two\n"]
