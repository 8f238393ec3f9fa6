"""Damaged and hostile archives are refused by an error that names them."""

from __future__ import annotations

import io
import lzma
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from skyformer.errors import DataError
from skyformer.lra.archives import Limits, open_decompressed, read_errors_name, read_files
from tests.helpers import refused

from .fake_files import write_folder, write_tar

LIMITS = Limits(members=10, member_bytes=10_000, total_bytes=50_000)
FILES = {"a/one.txt": b"1" * 3000, "a/two.txt": bytes(range(256)) * 8}


def read(path: Path, limits: Limits = LIMITS) -> dict[str, bytes]:
    return dict(read_files(path, "inner", lambda name: name.endswith(".txt"), limits))


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz"])
def test_every_compression(tmp_path: Path, mode: str) -> None:
    assert read(write_tar(tmp_path / "archive", FILES, mode)) == FILES


def test_an_xz_file_may_have_several_streams(tmp_path: Path) -> None:
    first, second = b"one " * 50_000, b"two " * 50_000
    path = tmp_path / "streams.xz"
    path.write_bytes(lzma.compress(first) + bytes(8) + lzma.compress(second) + lzma.compress(b"") + bytes(4))
    with open_decompressed(path) as stream:
        assert stream.read() == first + second
    path.write_bytes(path.read_bytes() + b"rubbish")
    with refused(DataError, str(path)), read_errors_name(path), open_decompressed(path) as stream:
        stream.read()


@pytest.mark.parametrize("inner", ["", "inner"])
def test_extracted_folder(tmp_path: Path, inner: str) -> None:
    write_folder(tmp_path / inner, FILES | {"a/other.bin": b""})
    assert read(tmp_path) == FILES


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :]


def with_huge_dictionary(_: bytes) -> bytes:
    """A valid xz stream that asks its reader for a gigabyte: compressed small, its dictionary byte raised."""
    data = bytearray(lzma.compress(b"tiny", filters=[{"id": lzma.FILTER_LZMA2, "preset": 1, "dict_size": 2**16}]))
    header = slice(12, 12 + (data[12] + 1) * 4 - 4)
    data[data.index(b"\x21\x01", 12) + 2] = 36
    data[header.stop : header.stop + 4] = zlib.crc32(bytes(data[header])).to_bytes(4, "little")
    return bytes(data)


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "a third": lambda data: data[: len(data) // 3],
    "all but one per cent": lambda data: data[: int(len(data) * 0.99)],
    "changed in the middle": lambda data: flipped(data, len(data) // 2),
    "changed checksum": lambda data: flipped(data, len(data) - 8),
    "empty": lambda data: b"",
    "text": lambda data: b"plain text, no archive",
    "only its first bytes": lambda data: data[:6] + b"something else",
    "huge dictionary": with_huge_dictionary,
}


@pytest.mark.parametrize("mode", ["w:gz", "w:xz"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_archives_are_named(tmp_path: Path, mode: str, damage: str) -> None:
    path = write_tar(tmp_path / "archive.tar", FILES, mode)
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    with refused(DataError, str(path)):
        read(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with refused(DataError, str(tmp_path / "nowhere")):
        read(tmp_path / "nowhere")


def member(name: str, kind: bytes = tarfile.REGTYPE, size: int = 0) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.size, info.linkname = kind, size, "/etc/passwd"
    return info


@pytest.mark.parametrize(
    ("info", "message"),
    [
        (member("../outside.txt"), "a path outside"),
        (member("/absolute.txt"), "a path outside"),
        (member("a/../../b.txt"), "a path outside"),
        (member("link.txt", tarfile.SYMTYPE), "link"),
        (member("hard.txt", tarfile.LNKTYPE), "link"),
        (member("fifo.txt", tarfile.FIFOTYPE), "special file"),
        (member("device.txt", tarfile.CHRTYPE), "special file"),
        (member("huge.txt", size=10**12), "too large"),
    ],
)
def test_hostile_members(tmp_path: Path, info: tarfile.TarInfo, message: str) -> None:
    path = tmp_path / "archive.tar"
    with tarfile.open(path, "w") as archive:
        archive.addfile(info, io.BytesIO(b"") if info.size == 0 else None)
    with refused(DataError, message, str(path)):
        read(path)


@pytest.mark.parametrize(("count", "size", "message"), [(11, 0, "over 10 files"), (9, 9_000, "too large")])
def test_too_many_and_too_large_members(tmp_path: Path, count: int, size: int, message: str) -> None:
    path = write_tar(tmp_path / "archive.tar", {f"{number}.txt": b"0" * size for number in range(count)})
    with refused(DataError, message):
        read(path)


def test_bomb_hidden_in_a_header(tmp_path: Path) -> None:
    """A file name is a header of any length, which tarfile reads into memory before it can be checked."""
    path = tmp_path / "archive.tar"
    with tarfile.open(path, "w:gz", format=tarfile.GNU_FORMAT) as archive:
        archive.addfile(tarfile.TarInfo("x" * 5_000_000))
    with refused(DataError, "too large"):
        read(path, Limits(members=100, member_bytes=10_000, total_bytes=10**9))


@pytest.mark.parametrize("compress", [bytes, lzma.compress])
def test_open_decompressed(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "file"
    path.write_bytes(compress(b"line one\nline two\n"))
    with open_decompressed(path) as stream:
        assert list(stream) == [b"line one\n", b"line two\n"]
