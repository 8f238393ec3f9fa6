"""LRA's own Pathfinder images: PNG files in folders, and metadata that says which label each has.

LRA's metadata files are called `.npy`, but those of its release are plain text. Both kinds are read, and
neither by unpickling.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath

import numpy as np
from PIL import Image, UnidentifiedImageError

from skyformer.errors import DataError
from skyformer.lra.examples import Examples, Ragged, Symbols
from skyformer.lra.paddles import SIDE
from skyformer.lra.pathfinder import Level

_NPY_MAGIC = b"\x93NUMPY"
_LARGEST_METADATA = 2**28
_BATCH_ROWS = 1_000
_LABELS = {"0": 0, "1": 1}


@dataclass(frozen=True)
class _Entry:
    """One line of metadata."""

    folder: str
    file: str
    label: int

    @property
    def source(self) -> str:
        return f"{self.folder}/{self.file}"


def read(path: Path, level: Level) -> Iterator[Examples]:
    """The images of a level in the order of its metadata, some at a time."""
    root = _level_folder(path, level)
    entries = (entry for metadata in _metadata_files(root) for entry in _read_metadata(metadata))
    while some := list(islice(entries, _BATCH_ROWS)):
        files = [_find_image(root, entry) for entry in some]
        # LRA's release holds a few files without content, which LRA leaves out too.
        kept = [(entry, file) for entry, file in zip(some, files, strict=True) if file.stat().st_size]
        yield Examples(
            Ragged.from_rows([_read_image(file).reshape(-1) for _, file in kept]),
            np.array([entry.label for entry, _ in kept], np.uint8),
            [entry.source for entry, _ in kept],
        )


def _level_folder(path: Path, level: Level) -> Path:
    """The folder that holds the level: the one given, or one of LRA's names within it."""
    if not path.is_dir():
        raise DataError(f"{path} is not a folder; expected one with LRA's imgs and metadata")
    for candidate in (path / level.folder, path / "pathfinder32" / level.folder):
        if candidate.is_dir():
            return candidate
    return path


def _metadata_files(root: Path) -> list[Path]:
    files = sorted((root / "metadata").glob("*.npy"), key=_number) or sorted(root.glob("metadata*.npy"))
    if not files:
        raise DataError(f"{root} holds no metadata/*.npy and no metadata*.npy; expected LRA's Pathfinder folder")
    return files


def _number(path: Path) -> tuple[int, str]:
    return (int(path.stem) if path.stem.isdigit() else -1, path.stem)


def _read_metadata(path: Path) -> list[_Entry]:
    if path.stat().st_size > _LARGEST_METADATA:
        raise DataError(f"{path} has an absurd size, {path.stat().st_size:,} bytes")
    with path.open("rb") as file:
        is_array = file.read(len(_NPY_MAGIC)) == _NPY_MAGIC
    rows = _array_rows(path) if is_array else _text_rows(path)
    return [_entry(row, f"{path} line {number}") for number, row in enumerate(rows, 1)]


def _array_rows(path: Path) -> list[list[str]]:
    try:
        # Mapped, so that a header that claims an absurd shape is found out before memory is asked for.
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise DataError(
            f"{path} cannot be read as a plain array ({error}). Pickled arrays are refused, because "
            f"loading one can run any code; where you trust it, convert it with "
            f"np.save(path, array.astype(str))."
        ) from error
    if array.ndim != 2 or array.dtype.kind not in "US":
        raise DataError(f"{path} holds {array.dtype} of shape {array.shape}, expected rows of text")
    rows: list[list[str]] = array.astype(str).tolist()
    return rows


def _text_rows(path: Path) -> list[list[str]]:
    try:
        return [line.split() for line in path.read_text("utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is neither a NumPy array nor text") from error


def _entry(row: list[str], place: str) -> _Entry:
    if len(row) < 4 or row[3] not in _LABELS:
        raise DataError(f"{place}: expected folder, file, number and label (0 or 1), got {' '.join(row[:4])!r}")
    entry = _Entry(row[0], row[1], _LABELS[row[3]])
    name = PurePosixPath(entry.source)
    if name.is_absolute() or ".." in name.parts:
        raise DataError(f"{place}: the path {entry.source!r} leads outside the folder")
    return entry


def _find_image(root: Path, entry: _Entry) -> Path:
    """Where metadata says, or one folder up, where copies of a single batch keep them."""
    candidates = (root / entry.folder / entry.file, root / Path(entry.folder).parent / entry.file)
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise DataError(f"{candidates[0]} is missing, although the metadata names it")


def _read_image(path: Path) -> Symbols:
    try:
        with Image.open(path, formats=["PNG"]) as image:
            if image.size != (SIDE, SIDE):
                raise DataError(f"{path} is {image.width}x{image.height} pixels, expected {SIDE}x{SIDE}")
            return np.asarray(image.convert("L"))
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
        raise DataError(f"{path} cannot be read as a PNG image ({error})") from error
