"""Read archives that may be damaged or hostile: streamed, never extracted to disk, with a limit on every size.

The filters of `tarfile` guard extraction to disk only; here nothing is extracted, and what they do not bound is memory.
Paths that lead outside, links, devices and sparse files are still refused: the official archives contain none.
"""

from __future__ import annotations

import gzip
import io
import itertools
import lzma
import stat
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, cast

from skyformer.errors import DataError

_GZIP_MAGIC = b"\x1f\x8b"
_XZ_MAGIC = b"\xfd7zXZ\x00"
_XZ_MEMORY = 256 * 2**20
_READ_SIZE = 2**18
_HEADER_ALLOWANCE = 2**20
_HEADER_PER_MEMBER = 4096
"""Bytes that all headers and padding may take: the first number once, and the second for each member."""


@dataclass(frozen=True)
class Limits:
    """Upper limits for an archive; the official one stays well below them."""

    members: int
    member_bytes: int
    total_bytes: int


@contextmanager
def read_errors_name(path: Path) -> Iterator[None]:
    """Turn any error from reading `path` into a `DataError` that names it."""
    try:
        yield
    except EOFError as error:
        raise DataError(f"{path} is truncated: it ends too early. Download or copy it again.") from error
    except (tarfile.TarError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} cannot be read as an archive ({error}): it is damaged or not an archive.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


class _XzReader(io.RawIOBase):
    """The streams of an xz file, with a limit on the decoder's memory, which `lzma.open` does not offer."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._begin_stream(b"")

    def _begin_stream(self, start: bytes) -> None:
        self._decoder, self._unread = lzma.LZMADecompressor(memlimit=_XZ_MEMORY), start

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        data = self._decode(len(view))
        view[: len(data)] = data
        return len(data)

    def _decode(self, size: int) -> bytes:
        while not self._decoder.eof or self._has_another_stream():
            fresh = (self._unread or self._raw.read(_READ_SIZE)) if self._decoder.needs_input else b""
            self._unread = b""
            if self._decoder.needs_input and not fresh:
                raise EOFError("xz stream ended before its end marker")
            data = self._decoder.decompress(fresh, size)
            if data:
                return data
        return b""

    def _has_another_stream(self) -> bool:
        """Begin the stream after the finished one, if there is one; zeros may stand between them and at the end."""
        rest = self._decoder.unused_data
        while not (start := rest.lstrip(b"\0")):
            rest = self._raw.read(_READ_SIZE)
            if not rest:
                return False
        self._begin_stream(start)
        return True


class _LimitedReader(io.RawIOBase):
    """Passes bytes on up to a number of bytes, so that no header or member can exhaust memory."""

    def __init__(self, stream: IO[bytes], path: Path, limits: Limits) -> None:
        self._stream, self._path, self._limits = stream, path, limits
        self._total = 0
        self._most = _HEADER_ALLOWANCE

    def allow(self, member_bytes: int) -> None:
        """Permit the content of one more member and the header of the next."""
        self._most += member_bytes + _HEADER_PER_MEMBER

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> bytes:
        data = self._stream.read(_READ_SIZE if size is None or size < 0 else size)
        self._total += len(data)
        if self._total > min(self._most, self._limits.total_bytes):
            raise DataError(
                f"{self._path} is too large when decompressed (more than {self._limits.total_bytes:,} bytes in total, "
                f"or headers of more than {_HEADER_ALLOWANCE:,}): it is not the official archive."
            )
        return data


@contextmanager
def open_decompressed(path: Path) -> Iterator[IO[bytes]]:
    """A file's content, decompressed if its first bytes say that it is gzip or xz."""
    with read_errors_name(path):
        if not path.is_file():
            raise DataError(f"{path} must be a regular file")
        raw = path.open("rb")
    with raw:
        magic = raw.read(len(_XZ_MAGIC))
        raw.seek(0)
        if magic.startswith(_GZIP_MAGIC):
            yield cast(IO[bytes], gzip.GzipFile(fileobj=raw))
        elif magic.startswith(_XZ_MAGIC):
            yield io.BufferedReader(_XzReader(raw), _READ_SIZE)
        else:
            yield raw


def _check_member(info: tarfile.TarInfo, path: Path, limits: Limits) -> None:
    problem = None
    if leads_outside(info.name):
        problem = "a path outside the archive's folder"
    elif not (info.isreg() or info.isdir()) or info.issparse():
        problem = "a link or a special file"
    elif info.size > limits.member_bytes:
        problem = f"{info.size:,} bytes, which is too large (at most {limits.member_bytes:,} expected)"
    if problem:
        raise DataError(f"{path} contains {info.name!r}, {problem}: it is not the official archive.")


def leads_outside(name: str) -> bool:
    """Whether a relative path could lead out of its folder."""
    path = PurePosixPath(name)
    return path.is_absolute() or ".." in path.parts


def tar_members(path: Path, wanted: Callable[[str], bool], limits: Limits) -> Iterator[tuple[str, IO[bytes]]]:
    """Name and content of the wanted files of a tar archive, in its order; read each before asking for the next.

    If the caller takes all of them, the archive is read to its end, so that its checksum is checked too.
    """
    with open_decompressed(path) as stream, read_errors_name(path):
        limited = _LimitedReader(stream, path, limits)
        with tarfile.open(fileobj=cast(IO[bytes], limited), mode="r|") as archive:
            for number in itertools.count():
                info = archive.next()
                if info is None:
                    break
                if number >= limits.members:
                    raise DataError(f"{path} contains over {limits.members:,} files: it is not the official archive.")
                _check_member(info, path, limits)
                # The archive object would remember all members with their headers, and all global headers.
                archive.members = []  # type: ignore[attr-defined]
                archive.pax_headers = {}
                limited.allow(info.size)
                content = archive.extractfile(info) if info.isreg() and wanted(info.name) else None
                if content is not None:
                    yield info.name, content
        while limited.read(_READ_SIZE):
            pass


def _folder_files(root: Path, wanted: Callable[[str], bool], limits: Limits) -> Iterator[tuple[str, bytes]]:
    total, number = 0, 0
    for file in root.rglob("*"):
        name = file.relative_to(root).as_posix()
        if not wanted(name) or file.is_dir():
            continue
        with read_errors_name(file):
            total, number = total + check_file(root, file, limits.member_bytes), number + 1
            if total > limits.total_bytes or number > limits.members:
                raise DataError(
                    f"{root} is too large (more than {limits.total_bytes:,} bytes or {limits.members:,} files): it is "
                    "not the official data"
                )
            content = file.read_bytes()
        yield name, content


def check_file(root: Path, file: Path, most: int) -> int:
    """The size of a file in the folder `root`; links, special files and more than `most` bytes are refused."""
    with read_errors_name(file):
        status = file.lstat()
        if stat.S_ISLNK(status.st_mode) or file.resolve() != root.resolve() / file.relative_to(root):
            raise DataError(f"{file} is a link, or inside one; copy the file that it leads to")
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{file} must be a regular file")
    if status.st_size > most:
        raise DataError(f"{file} has {status.st_size:,} bytes, but at most {most:,} are expected")
    return status.st_size


def read_files(path: Path, inner: str, wanted: Callable[[str], bool], limits: Limits) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of the wanted files of an archive, or of its extracted folder.

    Args:
        path: the archive, the folder `inner` that it contains, or the folder that `inner` is in.
    """
    if path.is_dir():
        root = path / inner if (path / inner).is_dir() else path
        yield from _folder_files(root, wanted, limits)
        return
    for name, content in tar_members(path, wanted, limits):
        with read_errors_name(path):
            yield name, content.read()
