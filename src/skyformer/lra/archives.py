"""Read archives that may be damaged or hostile: streamed, never extracted to disk, with a limit on every size.

The filters of `tarfile` guard extraction to disk only; here nothing is extracted, and what they do not bound is memory.
Paths that lead outside, links, devices and sparse files are still refused: the official archives contain none.
"""

from __future__ import annotations

import gzip
import io
import lzma
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
"""Bytes that headers and padding between two members may take before the archive is refused."""


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
    """An xz stream with a limit on the decoder's memory, which `lzma.open` does not offer."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._decoder = lzma.LZMADecompressor(memlimit=_XZ_MEMORY)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        data = self._decode(len(view))
        view[: len(data)] = data
        return len(data)

    def _decode(self, size: int) -> bytes:
        while not self._decoder.eof:
            fresh = self._raw.read(_READ_SIZE) if self._decoder.needs_input else b""
            if self._decoder.needs_input and not fresh:
                raise EOFError("xz stream ended before its end marker")
            data = self._decoder.decompress(fresh, size)
            if data:
                return data
        return b""


class _LimitedReader(io.RawIOBase):
    """Passes bytes on until a budget is used up, so that no header or member can exhaust memory."""

    def __init__(self, stream: IO[bytes], path: Path, limits: Limits) -> None:
        self._stream, self._path, self._limits = stream, path, limits
        self._total = 0
        self.budget = _HEADER_ALLOWANCE

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> bytes:
        data = self._stream.read(_READ_SIZE if size is None or size < 0 else size)
        self._total += len(data)
        self.budget -= len(data)
        if self.budget < 0 or self._total > self._limits.total_bytes:
            raise DataError(
                f"{self._path} is too large when decompressed (more than {self._limits.total_bytes:,} bytes in total, "
                f"or a header of more than {_HEADER_ALLOWANCE:,}): it is not the official archive."
            )
        return data


@contextmanager
def open_decompressed(path: Path) -> Iterator[IO[bytes]]:
    """A file's content, decompressed if its first bytes say that it is gzip or xz."""
    with read_errors_name(path):
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
            for number, info in enumerate(archive):
                if number >= limits.members:
                    raise DataError(f"{path} contains over {limits.members:,} files: it is not the official archive.")
                _check_member(info, path, limits)
                limited.budget = _HEADER_ALLOWANCE + info.size
                content = archive.extractfile(info) if info.isreg() and wanted(info.name) else None
                if content is not None:
                    yield info.name, content
        limited.budget = _HEADER_ALLOWANCE
        while limited.read(_READ_SIZE):
            pass


def read_files(path: Path, inner: str, wanted: Callable[[str], bool], limits: Limits) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of the wanted files of an archive, or of its extracted folder.

    Args:
        path: the archive, the folder `inner` that it contains, or the folder that `inner` is in.
    """
    if path.is_dir():
        root = path / inner if (path / inner).is_dir() else path
        for file in root.rglob("*"):
            if wanted(file.relative_to(root).as_posix()) and file.is_file():
                with read_errors_name(file):
                    yield file.relative_to(root).as_posix(), file.read_bytes()
        return
    for name, content in tar_members(path, wanted, limits):
        with read_errors_name(path):
            yield name, content.read()
