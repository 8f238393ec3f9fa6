"""Reading archives that may be damaged or hostile: streamed, never unpacked to disk, every size bounded.

Nothing is written, so a path cannot escape; it is refused all the same, because an archive that tries is
not the official one. Links, devices and sparse files are refused too.
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
# Between two members an archive may spend this much on headers and padding before it counts as hostile.
_HEADER_ALLOWANCE = 2**20


@dataclass(frozen=True)
class Limits:
    """What an official archive stays well below."""

    members: int
    member_bytes: int
    total_bytes: int


@contextmanager
def blaming(path: Path) -> Iterator[None]:
    """Turn whatever goes wrong while reading `path` into an error that names it."""
    try:
        yield
    except EOFError as error:
        raise DataError(f"{path} ends too early: it is truncated. Download it again, or copy it again.") from error
    except (tarfile.TarError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} cannot be read as an archive ({error}): it is damaged or of another kind.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


class _XzReader(io.RawIOBase):
    """An xz stream with a bound on the decoder's memory, which `lzma.open` does not offer."""

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


class _MeteredReader(io.RawIOBase):
    """Passes bytes on until a budget is spent, so that no header or member can be absurdly large."""

    def __init__(self, stream: IO[bytes], path: Path, limits: Limits) -> None:
        self._stream, self._path, self._limits = stream, path, limits
        self._total = 0
        self.budget = _HEADER_ALLOWANCE

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> bytes:
        wanted = _READ_SIZE if size is None or size < 0 else size
        data = self._stream.read(wanted)
        self._total += len(data)
        self.budget -= len(data)
        if self.budget < 0 or self._total > self._limits.total_bytes:
            raise DataError(
                f"{self._path} unpacks to an absurd size (over {self._limits.total_bytes:,} bytes in all, "
                f"or a huge header): it is not the official archive."
            )
        return data


@contextmanager
def open_decompressed(path: Path) -> Iterator[IO[bytes]]:
    """A file's content, decompressed if it is gzip or xz by its first bytes."""
    with blaming(path):
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
    name = PurePosixPath(info.name)
    if name.is_absolute() or ".." in name.parts:
        raise DataError(f"{path} holds {info.name!r}, a path that leads outside: it is not the official archive.")
    if not (info.isreg() or info.isdir()) or info.issparse():
        raise DataError(f"{path} holds {info.name!r}, a link or a special file: it is not the official archive.")
    if info.size > limits.member_bytes:
        raise DataError(
            f"{path} holds {info.name!r} of {info.size:,} bytes, an absurd size (at most "
            f"{limits.member_bytes:,} expected): it is not the official archive."
        )


def tar_members(path: Path, wanted: Callable[[str], bool], limits: Limits) -> Iterator[tuple[str, IO[bytes]]]:
    """Name and content of the wanted files of a tar archive, in its order; read a content before going on.

    When the caller takes them all, the archive is read to its very end, so that its checksum is checked too.
    """
    with open_decompressed(path) as stream, blaming(path):
        metered = _MeteredReader(stream, path, limits)
        with tarfile.open(fileobj=cast(IO[bytes], metered), mode="r|") as archive:
            for number, info in enumerate(archive):
                if number >= limits.members:
                    raise DataError(f"{path} holds over {limits.members:,} files: it is not the official archive.")
                _check_member(info, path, limits)
                metered.budget = _HEADER_ALLOWANCE + info.size
                content = archive.extractfile(info) if info.isreg() and wanted(info.name) else None
                if content is not None:
                    yield info.name, content
        metered.budget = _HEADER_ALLOWANCE
        while metered.read(_READ_SIZE):
            pass


def read_fully(content: IO[bytes], path: Path, name: str) -> bytes:
    """All of a member's bytes."""
    with blaming(path):
        data = content.read()
    if not isinstance(data, bytes):
        raise DataError(f"{path}: {name} has no content")
    return data
