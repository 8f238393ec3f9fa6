"""Rows of one's own data: JSONL, CSV, TSV and Parquet files, folders of `datasets`, `Dataset` objects and lists.

Every source becomes a `Part` per split, which has columns and yields its rows with their place, for messages.
"""

from __future__ import annotations

import csv
import difflib
import hashlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from skyformer.errors import DataError, InputError
from skyformer.files import sha256_of
from skyformer.lra.archives import open_decompressed, read_errors_name
from skyformer.lra.tasks import Split

Row = Mapping[str, Any]
Source = Any
"""A path, a `datasets.Dataset` or `DatasetDict`, or lists: texts and labels, or texts, second texts and labels."""

SPLIT_NAMES = {
    "train": Split.TRAIN,
    **dict.fromkeys(("dev", "validation", "valid", "eval"), Split.DEV),
    "test": Split.TEST,
}
_SEPARATORS = {".csv": ",", ".tsv": "\t"}
JSON = (".jsonl", ".ndjson", ".json")
FORMATS = (*JSON, *_SEPARATORS, ".parquet")
_COMPRESSED = (".gz", ".xz")
_LONGEST_LINE = 2**28
_DATASET_FILES = ("dataset_dict.json", "state.json", "dataset_info.json")


class Part(Protocol):
    """One split of a source."""

    name: str

    def columns(self) -> list[str]:
        """The names of the columns."""

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Each row with its place, such as "line 3"."""

    def digest(self) -> str:
        """A hash of the content."""


def find_parts(data: Source, dev: Source = None, test: Source = None) -> dict[Split, Part]:
    """The splits of a source; those that are missing are held out of the training data later."""
    parts = _parts_of(data)
    for split, source in ((Split.DEV, dev), (Split.TEST, test)):
        if source is None:
            continue
        if split in parts:
            raise InputError(f"{parts[Split.TRAIN].name} has a {split} split already; leave out --{split}")
        parts[split] = only_part(source)
    return parts


def _parts_of(data: Source) -> dict[Split, Part]:
    if isinstance(data, str | Path):
        path = Path(data).expanduser()
        if not path.exists():
            raise DataError(f"{path} does not exist; expected a file ({', '.join(FORMATS)}) or a folder of `datasets`")
        return _folder_parts(path) if path.is_dir() else {Split.TRAIN: FilePart(path)}
    if isinstance(data, tuple | list):
        return {Split.TRAIN: ListPart(*data)}
    if isinstance(data, Mapping):
        return _named_parts([(str(name), DatasetPart(part, str(name))) for name, part in data.items()], "the dataset")
    if hasattr(data, "column_names"):
        return {Split.TRAIN: DatasetPart(data, "the dataset")}
    raise InputError(
        "data must be a path, a datasets.Dataset or DatasetDict, or a tuple of lists (texts, labels); got "
        f"{type(data).__name__}"
    )


def only_part(source: Source) -> Part:
    """The rows of a file, a dataset or lists without splits."""
    parts = _parts_of(source)
    if len(parts) > 1:
        raise InputError(f"{source} has several splits; expected one file or dataset")
    return parts[Split.TRAIN]


def _named_parts(parts: Sequence[tuple[str, Part]], where: str) -> dict[Split, Part]:
    found: dict[Split, Part] = {}
    for name, part in parts:
        if (split := SPLIT_NAMES.get(name)) in found:
            raise DataError(f"{where} has two {split} splits, {found[split].name} and {part.name}; remove one")
        if split is not None:
            found[split] = part
    if Split.TRAIN not in found:
        raise DataError(f"{where} has no split called train; found: {', '.join(name for name, _ in parts) or 'none'}")
    return found


def _folder_parts(folder: Path) -> dict[Split, Part]:
    """A folder that `datasets` saved, or one with files called train, dev or validation, and test."""
    if any((folder / name).is_file() for name in _DATASET_FILES):
        import datasets

        try:
            loaded = datasets.load_from_disk(str(folder))
        except Exception as error:
            raise DataError(f"{folder} cannot be read as a folder of `datasets`: {error}") from error
        named = loaded if isinstance(loaded, Mapping) else {"train": loaded}
        parts = [(name, DatasetPart(part, f"{folder} ({name})")) for name, part in named.items()]
        return _named_parts(parts, str(folder))
    files = [FilePart(file) for file in sorted(folder.iterdir()) if _suffix(file) in FORMATS]
    return _named_parts([(part.path.name.partition(".")[0], part) for part in files], str(folder))


def _suffix(path: Path) -> str:
    plain = path.with_suffix("") if path.suffix.lower() in _COMPRESSED else path
    return plain.suffix.lower()


class FilePart:
    """A file; its suffix names the format. JSONL, CSV and TSV may be compressed with gzip or xz."""

    def __init__(self, path: Path) -> None:
        if _suffix(path) not in FORMATS:
            raise DataError(f"{path} must be a file of one of these formats: {', '.join(FORMATS)}; got {path.suffix!r}")
        self.path, self.name = path, str(path)

    def columns(self) -> list[str]:
        if _suffix(self.path) == ".parquet":
            return list(self._parquet().schema_arrow.names)
        first = next(self.rows(), None)
        if first is None:
            raise DataError(f"{self.path} has no rows")
        return list(first[1])

    def digest(self) -> str:
        return sha256_of(self.path)

    def rows(self) -> Iterator[tuple[str, Row]]:
        suffix = _suffix(self.path)
        if suffix == ".parquet":
            yield from self._parquet_rows()
        elif suffix in JSON:
            yield from self._json_rows()
        else:
            yield from self._csv_rows(_SEPARATORS[suffix])

    @contextmanager
    def _text(self, newline: str | None) -> Iterator[io.TextIOWrapper]:
        with read_errors_name(self.path), open_decompressed(self.path) as stream:
            try:
                # utf-8-sig: spreadsheets put a byte order mark before the first name.
                yield io.TextIOWrapper(stream, encoding="utf-8-sig", newline=newline)
            except UnicodeDecodeError as error:
                raise DataError(f"{self.path} must be UTF-8 text: {error.reason} at byte {error.start:,}") from None

    def _json_rows(self) -> Iterator[tuple[str, Row]]:
        with self._text("\n") as lines:
            for number, line in enumerate(iter(lambda: lines.readline(_LONGEST_LINE), ""), 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    advice = "; a list of objects must be written one object per line" if line.strip()[0] == "[" else ""
                    raise DataError(f"{self.path} line {number} is not JSON: {error}{advice}") from None
                if not isinstance(row, dict):
                    raise DataError(
                        f"{self.path} line {number} must be a JSON object with the columns as names; got "
                        f"{type(row).__name__}"
                    )
                yield f"line {number}", row

    def _csv_rows(self, separator: str) -> Iterator[tuple[str, Row]]:
        csv.field_size_limit(_LONGEST_LINE)
        with self._text("") as lines:
            reader = csv.reader(lines, delimiter=separator, strict=True)
            try:
                header = next(reader, [])
                if len(set(header)) < len(header):
                    raise DataError(f"{self.path} has two columns of the same name: {', '.join(header)}")
                if len(header) == 1 and any(other in header[0] for other in ";\t,|"):
                    raise DataError(
                        f"{self.path} must have {separator!r} between its columns; its first line is {header[0][:80]!r}"
                    )
                first = reader.line_num + 1
                for fields in reader:
                    if fields and len(fields) != len(header):
                        raise DataError(
                            f"{self.path} line {first}: expected {len(header)} fields ({', '.join(header)}); got "
                            f"{len(fields)}. Texts that contain the separator or line breaks must be quoted"
                        )
                    if fields:
                        yield f"line {first}", dict(zip(header, fields, strict=True))
                    first = reader.line_num + 1
            except csv.Error as error:
                raise DataError(f"{self.path} line {reader.line_num}: {error}") from None

    def _parquet(self) -> Any:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            return pq.ParquetFile(self.path)
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{self.path} cannot be read as Parquet: {str(error).splitlines()[0]}") from error

    def _parquet_rows(self) -> Iterator[tuple[str, Row]]:
        number = 0
        for batch in self._parquet().iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield f"row {number}", row


class DatasetPart:
    """A `datasets.Dataset`; a column of class labels yields their names."""

    def __init__(self, dataset: Any, name: str) -> None:
        self.dataset, self.name = dataset, name

    def columns(self) -> list[str]:
        return list(self.dataset.column_names)

    def rows(self) -> Iterator[tuple[str, Row]]:
        named = {
            column: feature for column, feature in (self.dataset.features or {}).items() if hasattr(feature, "int2str")
        }
        for number, row in enumerate(self.dataset, 1):
            for column, feature in named.items():
                value = row[column]
                row[column] = feature.int2str(value) if value is not None and value >= 0 else None
            yield f"row {number}", row

    def digest(self) -> str:
        return _rows_digest(self)


class ListPart:
    """Lists of equal length: texts and labels, or texts, second texts and labels."""

    def __init__(self, *lists: Sequence[Any]) -> None:
        if len(lists) not in (2, 3):
            raise InputError(
                f"lists must be (texts, labels), or (texts, second texts, labels) for pairs; got {len(lists)} of them"
            )
        lengths = [len(each) for each in lists]
        if len(set(lengths)) > 1:
            raise InputError(f"texts and labels must have the same length; got {', '.join(map(str, lengths))}")
        self.lists, self.name = lists, "the lists"

    def columns(self) -> list[str]:
        return ["text", "label"] if len(self.lists) == 2 else ["text", "text_b", "label"]

    def rows(self) -> Iterator[tuple[str, Row]]:
        names = self.columns()
        for number, values in enumerate(zip(*self.lists, strict=True)):
            # Numbers of numpy and torch become Python's.
            plain = [value.item() if hasattr(value, "item") else value for value in values]
            yield f"row {number}", dict(zip(names, plain, strict=True))

    def digest(self) -> str:
        return _rows_digest(self)


def _rows_digest(part: Part) -> str:
    digest = hashlib.sha256()
    for _, row in part.rows():
        digest.update(json.dumps(row, sort_keys=True, default=repr).encode("utf-8", "surrogatepass") + b"\n")
    return digest.hexdigest()


def check_columns(part: Part, wanted: Mapping[str, str]) -> None:
    """Check that a part has the wanted columns, given by the option that names each."""
    known = part.columns()
    for option, column in wanted.items():
        if column not in known:
            close = difflib.get_close_matches(column, known, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise DataError(
                f"{part.name} has no column {column!r}; its columns are: {', '.join(map(repr, known))}. Name the "
                f"right one with {option}.{hint}"
            )
