"""How a prepared task lies on disk: Arrow files, and a manifest that makes them count.

A task's folder holds one Arrow file a split and `manifest.json`, which names each file with its size and
hash. Files are named after their content, and the manifest is put in place last, in one step: until then
the old manifest and its files stand. So a preparation can be killed at any moment, and whatever no manifest
names is swept away by the next.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, ValidationError

from skyformer.errors import DataError, InputError
from skyformer.lra.examples import Examples, Integers, Ragged, Symbols
from skyformer.lra.listops import ListOpsOptions
from skyformer.lra.pathfinder import Level
from skyformer.lra.tasks import Split, TaskSpec, task_spec

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
STAGING = "staging"
_BATCH_ROWS = 1_000


class Variant(BaseModel):
    """Which version of a task: the options that decide its content."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: str
    seed: int = 0
    limit: int | None = None
    level: Level | None = None
    max_length: int | None = None

    @classmethod
    def of(
        cls,
        task: str,
        *,
        seed: int = 0,
        limit: int | None = None,
        level: str | None = None,
        max_length: int | None = None,
    ) -> Variant:
        """The variant with these options, each checked; texts are kept whole whatever `max_length` is."""
        task_spec(task).cut_to(max_length)
        if seed < 0:
            raise InputError(f"seed must not be negative, got {seed}")
        if limit is not None and limit < 1:
            raise InputError(f"limit must be at least 1 example a split, got {limit}")
        if level is not None and task != "pathfinder":
            raise InputError(f"only pathfinder has levels, {task} does not: leave out level={level!r}")
        return cls(
            task=task,
            seed=seed,
            limit=limit,
            level=_level(level) if task == "pathfinder" else None,
            max_length=_shorter(max_length) if task == "listops" else None,
        )

    @property
    def spec(self) -> TaskSpec:
        return task_spec(self.task).cut_to(self.max_length)

    @property
    def name(self) -> str:
        """The folder: the task, then whatever differs from the default."""
        parts = [self.task]
        if self.level not in (None, Level.HARD):
            parts.append(self.level.value)
        if self.max_length is not None:
            parts.append(f"length{self.max_length}")
        if self.seed:
            parts.append(f"seed{self.seed}")
        if self.limit is not None:
            parts.append(f"limit{self.limit}")
        return "-".join(parts)

    def size(self, split: Split) -> int:
        """How many examples a generated split has."""
        whole = self.spec.sizes[split]
        return whole if self.limit is None else min(self.limit, whole)


def _level(name: str | None) -> Level:
    if name is None:
        return Level.HARD
    if name not in list(Level):
        raise InputError(f"unknown pathfinder level {name!r}; known: {', '.join(Level)}")
    return Level(name)


def _shorter(max_length: int | None) -> int | None:
    """The length of ListOps where it is not LRA's own."""
    if max_length is None or ListOpsOptions.up_to(max_length) == ListOpsOptions():
        return None
    return max_length


class SplitRecord(BaseModel):
    """What the manifest says of one Arrow file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: str
    examples: int
    symbols: int
    shortest: int
    longest: int
    label_counts: tuple[int, ...]
    bytes: int
    sha256: str


class Manifest(BaseModel):
    """What a folder holds, and where that came from."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int
    skyformer: str
    variant: Variant
    source: str
    splits: dict[Split, SplitRecord]

    @property
    def bytes(self) -> int:
        return sum(record.bytes for record in self.splits.values())


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder, or nothing when there is none."""
    path = folder / MANIFEST
    try:
        manifest = Manifest.model_validate_json(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError, ValueError) as error:
        raise DataError(f"{path} is damaged ({_first_line(error)}); prepare the task again with --force") from error
    if manifest.format != FORMAT_VERSION:
        raise DataError(
            f"{path} has format {manifest.format}, this version reads {FORMAT_VERSION}; prepare again with --force"
        )
    return manifest


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


def damage(folder: Path, manifest: Manifest, *, thorough: bool) -> list[str]:
    """What is wrong with the files a manifest names; sizes only, unless thorough."""
    problems = []
    for record in manifest.splits.values():
        path = folder / record.file
        if not path.exists():
            problems.append(f"{path} is missing")
        elif path.stat().st_size != record.bytes:
            problems.append(f"{path} has {path.stat().st_size:,} bytes, the manifest says {record.bytes:,}")
        elif thorough and _sha256(path) != record.sha256:
            problems.append(f"{path} has changed: its SHA-256 is not the manifest's")
    return problems


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _arrow_schema(paired: bool) -> pa.Schema:
    import datasets

    symbols = datasets.Sequence(datasets.Value("uint8"))
    columns: dict[str, Any] = {"tokens": symbols}
    if paired:
        columns["second"] = symbols
    columns |= {"label": datasets.Value("uint8"), "source": datasets.Value("string")}
    return datasets.Features(columns).arrow_schema


class SplitWriter:
    """Writes examples to an Arrow file and keeps count."""

    def __init__(self, path: Path, spec: TaskSpec) -> None:
        import pyarrow as pa

        self.path = path
        self._spec = spec
        self._schema = _arrow_schema(spec.paired)
        self._file = path.open("wb")
        self._stream = pa.ipc.new_stream(self._file, self._schema)
        self._lengths: list[Integers] = []
        self._labels = np.zeros(spec.num_classes, np.int64)

    def __enter__(self) -> SplitWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def write(self, examples: Examples) -> None:
        self._check(examples)
        self._stream.write_batch(_to_batch(examples, self._schema))
        self._lengths += [part.lengths for part in (examples.tokens, examples.second) if part is not None]
        self._labels += np.bincount(examples.labels, minlength=self._spec.num_classes)

    def _check(self, examples: Examples) -> None:
        longest = max((int(part.lengths.max(initial=0)) for part in _parts(examples)), default=0)
        if longest > self._spec.max_length:
            raise DataError(f"an example of {self._spec.name} has {longest} tokens, at most {self._spec.max_length}")
        if len(examples) and int(examples.labels.max()) >= self._spec.num_classes:
            raise DataError(
                f"a label of {self._spec.name} is {examples.labels.max()}, expected 0 to {self._spec.num_classes - 1}"
            )

    def record(self, split: Split) -> SplitRecord:
        """What was written, once it is closed; the file gets its final name."""
        sha256 = _sha256(self.path)
        lengths = np.concatenate([np.zeros(0, np.int64), *self._lengths])
        if not len(lengths):
            raise DataError(f"the {split} split of {self._spec.name} is empty: nothing to prepare")
        return SplitRecord(
            file=f"{split}-{sha256[:16]}.arrow",
            examples=int(self._labels.sum()),
            symbols=int(lengths.sum()),
            shortest=int(lengths.min()),
            longest=int(lengths.max()),
            label_counts=tuple(self._labels.tolist()),
            bytes=self.path.stat().st_size,
            sha256=sha256,
        )


def _parts(examples: Examples) -> list[Ragged]:
    return [part for part in (examples.tokens, examples.second) if part is not None]


def _to_batch(examples: Examples, schema: pa.Schema) -> pa.RecordBatch:
    import pyarrow as pa

    columns = [
        pa.ListArray.from_arrays(pa.array(part.offsets.astype(np.int32)), pa.array(part.values))
        for part in _parts(examples)
    ]
    columns += [pa.array(examples.labels), pa.array(examples.sources, pa.string())]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


class _RaggedColumn:
    """A list column, row by row, straight from the mapped file."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        self._values = [chunk.values.to_numpy(zero_copy_only=True) for chunk in column.chunks]
        self._offsets = [chunk.offsets.to_numpy() for chunk in column.chunks]
        self._first_row = np.cumsum([0, *(len(chunk) for chunk in column.chunks)])

    @property
    def lengths(self) -> Integers:
        per_chunk = [np.diff(offsets).astype(np.int64) for offsets in self._offsets]
        return np.concatenate([np.zeros(0, np.int64), *per_chunk])

    def __getitem__(self, row: int) -> Symbols:
        chunk = int(self._first_row.searchsorted(row, side="right")) - 1
        place = row - int(self._first_row[chunk])
        start, end = self._offsets[chunk][place : place + 2]
        symbols: Symbols = self._values[chunk][start:end]
        return symbols

    def take(self, rows: Iterable[int]) -> Ragged:
        return Ragged.from_rows([self[row] for row in rows])


class StoredSplit:
    """A split on disk, memory-mapped: opening it costs next to nothing, whatever its size."""

    def __init__(self, path: Path) -> None:
        import datasets
        import pyarrow as pa

        try:
            table = datasets.Dataset.from_file(str(path)).data
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{path} cannot be opened ({_first_line(error)}); prepare again with --force") from error
        self._sources = table.column("source")
        self.labels: Symbols = table.column("label").to_numpy()
        self.tokens = _RaggedColumn(table.column("tokens"))
        self.second = _RaggedColumn(table.column("second")) if "second" in table.column_names else None

    def __len__(self) -> int:
        return len(self.labels)

    def source(self, row: int) -> str:
        """Where an example came from."""
        return str(self._sources[row].as_py())

    def lengths(self) -> Integers:
        """Tokens of each example; of a pair, the longer half."""
        lengths = self.tokens.lengths
        return lengths if self.second is None else np.maximum(lengths, self.second.lengths)

    def examples(self, rows: npt.NDArray[np.int64]) -> Iterator[Examples]:
        """Chosen rows, some at a time."""
        for start in range(0, len(rows), _BATCH_ROWS):
            chosen = rows[start : start + _BATCH_ROWS].tolist()
            second = None if self.second is None else self.second.take(chosen)
            sources = [self.source(row) for row in chosen]
            yield Examples(self.tokens.take(chosen), self.labels[chosen], sources, second)


def in_batches(examples: Examples, size: int = _BATCH_ROWS) -> Iterator[Examples]:
    """The same examples, some at a time."""
    for start in range(0, len(examples), size):
        yield examples.take(np.arange(start, min(start + size, len(examples))))


def sweep(folder: Path, manifest: Manifest | None) -> None:
    """Delete what a killed or replaced preparation left behind."""
    kept = {record.file for record in manifest.splits.values()} if manifest else set()
    shutil.rmtree(folder / STAGING, ignore_errors=True)
    for path in folder.glob("*.arrow"):
        # Where a file in use cannot be deleted, the next preparation will.
        if path.name not in kept:
            with suppress(OSError):
                path.unlink()


@contextmanager
def staging(folder: Path) -> Iterator[Path]:
    """A place for files in the making, gone afterwards."""
    place = folder / STAGING
    place.mkdir(parents=True, exist_ok=True)
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def commit(folder: Path, manifest: Manifest, written: dict[Split, Path]) -> None:
    """Make the written files the content of the folder, in one step."""
    for split, path in written.items():
        path.replace(folder / manifest.splits[split].file)
    draft = folder / STAGING / MANIFEST
    with draft.open("w") as file:
        file.write(manifest.model_dump_json(indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    draft.replace(folder / MANIFEST)
    sweep(folder, manifest)
