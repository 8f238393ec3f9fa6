"""The Arrow file of one split: a writer that counts what it writes, and a memory-mapped reader."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from skyformer.errors import DataError
from skyformer.files import sha256_of
from skyformer.lra.examples import ROWS_PER_BATCH, Batches, Examples, Integers, Ragged, Symbols
from skyformer.lra.folders import SplitRecord
from skyformer.lra.tasks import Split, TaskSpec, symbol_type

if TYPE_CHECKING:
    import pyarrow as pa


def _arrow_schema(spec: TaskSpec) -> pa.Schema:
    import datasets

    symbols = datasets.Sequence(datasets.Value(symbol_type(spec.num_symbols)))
    columns: dict[str, Any] = {"tokens": symbols}
    if spec.paired:
        columns["second"] = symbols
    columns |= {"label": datasets.Value(symbol_type(spec.num_classes)), "source": datasets.Value("string")}
    return datasets.Features(columns).arrow_schema


class SplitWriter:
    """Writes examples to an Arrow file and counts them."""

    def __init__(self, path: Path, spec: TaskSpec) -> None:
        import pyarrow as pa

        self.path = path
        self._spec = spec
        self._schema = _arrow_schema(spec)
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

    def __len__(self) -> int:
        return int(self._labels.sum())

    def write(self, examples: Examples) -> None:
        if not len(examples):
            return
        self._check(examples)
        self._stream.write_batch(_to_batch(examples, self._schema))
        self._lengths += [text.lengths for text in examples.texts]
        self._labels += np.bincount(examples.labels, minlength=self._spec.num_classes)

    def _check(self, examples: Examples) -> None:
        longest, largest = max(int(text.lengths.max()) for text in examples.texts), int(examples.labels.max())
        if longest > self._spec.max_length:
            raise DataError(
                f"an example of {self._spec.name} must have at most {self._spec.max_length} tokens; got {longest}"
            )
        if largest >= self._spec.num_classes:
            raise DataError(
                f"a label of {self._spec.name} must be from 0 to {self._spec.num_classes - 1}; got {largest}"
            )

    def record(self, split: Split) -> SplitRecord:
        """The manifest's entry for the file, once it is closed."""
        if not self._lengths:
            raise DataError(f"the {split} split of {self._spec.name} is empty: it needs at least one example")
        sha256 = sha256_of(self.path)
        lengths = np.concatenate(self._lengths)
        return SplitRecord(
            file=f"{split}-{sha256[:16]}.arrow",
            examples=len(self),
            symbols=int(lengths.sum()),
            shortest=int(lengths.min()),
            longest=int(lengths.max()),
            label_counts=tuple(self._labels.tolist()),
            bytes=self.path.stat().st_size,
            sha256=sha256,
        )


def _to_batch(examples: Examples, schema: pa.Schema) -> pa.RecordBatch:
    import pyarrow as pa

    columns = [
        pa.ListArray.from_arrays(
            pa.array(text.offsets.astype(np.int32)), pa.array(text.values, schema.field("tokens").type.value_type)
        )
        for text in examples.texts
    ]
    columns += [pa.array(examples.labels, schema.field("label").type), pa.array(examples.sources, pa.string())]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


class _RaggedColumn:
    """A column of lists; each row is a view of the memory-mapped file."""

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


class StoredSplit:
    """A split on disk, memory-mapped: opening it takes the same short time at any size."""

    def __init__(self, path: Path) -> None:
        import datasets
        import pyarrow as pa

        try:
            table = datasets.Dataset.from_file(str(path)).data
        except (OSError, pa.ArrowException) as error:
            reason = str(error).splitlines()[0]
            raise DataError(f"{path} cannot be opened ({reason}); prepare the task again with --force") from error
        self._sources = table.column("source")
        self.labels: Symbols = table.column("label").to_numpy()
        self.tokens = _RaggedColumn(table.column("tokens"))
        self.second = _RaggedColumn(table.column("second")) if "second" in table.column_names else None

    def __len__(self) -> int:
        return len(self.labels)

    def source(self, row: int) -> str:
        """Where an example comes from."""
        return str(self._sources[row].as_py())

    def texts(self, row: int) -> list[Symbols]:
        """The tokens of an example, and in a paired task those of its second text."""
        columns = [self.tokens] if self.second is None else [self.tokens, self.second]
        return [column[row] for column in columns]

    def lengths(self) -> Integers:
        """Number of tokens of each example; of a pair, that of the longer text."""
        lengths = self.tokens.lengths
        return lengths if self.second is None else np.maximum(lengths, self.second.lengths)

    def batches(self, split: Split, rows: Integers) -> Batches:
        """The chosen rows as examples of `split`, some at a time."""
        for start in range(0, len(rows), ROWS_PER_BATCH):
            chosen = rows[start : start + ROWS_PER_BATCH].tolist()
            texts = [Ragged.from_rows(column) for column in zip(*(self.texts(row) for row in chosen), strict=True)]
            sources = [self.source(row) for row in chosen]
            yield split, Examples(texts[0], self.labels[chosen], sources, *texts[1:])
