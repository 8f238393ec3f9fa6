"""Files: atomic writes, reads that report damage, and SHA-256 sums.

Every file that the package leaves behind is written with `write_atomic`, so that a killed process or a full disk leaves
the old content or the new, never a part of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from skyformer.errors import DataError

RUNS_VARIABLE = "SKYFORMER_RUNS"
MAX_DOCUMENT_BYTES = 2**22
"""A config, a manifest or a result is far smaller; a larger file is something else."""


def write_atomic(file: Path, content: str | bytes) -> None:
    """Write `content` to `file` in one step: readers see the old file or the new one, also after a crash.

    The parent folder is created where it is missing.
    """
    if not file.parent.is_dir():
        file.parent.mkdir(parents=True, exist_ok=True)
        sync_folder(file.parent.parent)
    partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as handle:
            handle.write(content.encode() if isinstance(content, str) else content)
            handle.flush()
            os.fsync(handle.fileno())
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(file.parent)


def remove_litter(folder: Path, pattern: str, older_than: float = 0.0) -> None:
    """Remove what killed processes left in `folder`: names that match `pattern`, unchanged for some seconds."""
    for path in folder.glob(pattern):
        with suppress(OSError):
            if time.time() - path.lstat().st_mtime < older_than:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def sync_folder(folder: Path) -> None:
    """Bring a folder's list of names to the disk, so that a rename survives a power failure (not on Windows)."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_of(file: Path) -> str:
    """The SHA-256 sum of a file's content, as hexadecimal digits."""
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def md5_of(file: Path) -> str:
    """The MD5 sum of a file's content, to compare it with a published one."""
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "md5").hexdigest()


def read_up_to(file: Path, most: int) -> bytes:
    """The content of a file; a `DataError` if it cannot be read or has more than `most` bytes."""
    try:
        with file.open("rb") as handle:
            content = handle.read(most + 1)
    except OSError as failed:
        raise DataError(f"{file} cannot be read: {failed.strerror}") from failed
    if len(content) > most:
        raise DataError(f"{file} is larger than {most:,} bytes, which is more than expected")
    return content


def read_document(file: Path) -> str:
    """The text of a small file; a `DataError` says why it cannot be read."""
    try:
        return read_up_to(file, MAX_DOCUMENT_BYTES).decode()
    except UnicodeDecodeError as damaged:
        raise DataError(f"{file} is damaged: it is not UTF-8 text") from damaged


def read_json(file: Path) -> dict[str, Any]:
    """The object in a small JSON file; a `DataError` says what is wrong with it."""
    try:
        content = json.loads(read_document(file))
    except (ValueError, RecursionError) as damaged:
        raise DataError(f"{file} is damaged: it is not JSON ({damaged})") from None
    if not isinstance(content, dict):
        raise DataError(f"{file} is damaged: expected a JSON object, got {type(content).__name__}")
    return content


def dump_json(data: Any) -> str:
    """Data as indented JSON text; NaN and Infinity raise a ValueError, because they are not JSON."""
    return json.dumps(data, indent=2, allow_nan=False) + "\n"


def runs_dir_or_default(runs_dir: Path | str | None = None) -> Path:
    """The given folder, or else that of the environment variable SKYFORMER_RUNS, or else ./runs."""
    return Path(runs_dir or os.environ.get(RUNS_VARIABLE) or "runs").expanduser()
