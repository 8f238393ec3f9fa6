"""Prepare one's own data: read it, encode the texts, split it, and store it as the five tasks are stored.

The folder is named after a hash of the content and of all options. Changed files are therefore other data, in another
folder, and runs on them are other runs.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from skyformer.checks import check_at_least
from skyformer.errors import DataError, InputError
from skyformer.lra.examples import ROWS_PER_BATCH, Batches, Examples, Integers, Ragged, choose, hold_out
from skyformer.lra.folders import Manifest, Variant, data_dir_or_default, find_changed, read_manifest
from skyformer.lra.own import LONGEST_TEXT, NAME, TOKENIZER_FOLDER, OwnData, as_name
from skyformer.lra.preparation import (
    STAGING,
    Prepared,
    delete_leftovers,
    lock_folder,
    put_in_place,
    write_splits,
)
from skyformer.lra.storage import SplitWriter, StoredSplit
from skyformer.lra.tasks import TASKS, Split, TaskSpec
from skyformer.own.encoding import Encoder, make_encoder
from skyformer.own.reading import Part, Row, Source, check_columns, find_parts
from skyformer.report.progress import Progress, Silent

_VERSION = 1
"""Part of the digest; raised when the same files would be prepared differently."""
_FEWEST_ROWS = 3
_MOST_LABELS = 10_000
_SHOWN_LABELS = 10
_GENERIC_NAMES = ("train", "training", "data", "dataset")


def own_data(
    data: Source,
    *,
    dev: Source = None,
    test: Source = None,
    text: str = "text",
    label: str = "label",
    text_b: str | None = None,
    tokenizer: str | Path | None = None,
    name: str | None = None,
    seed: int = 0,
    limit: int | None = None,
    data_dir: Path | str | None = None,
    progress: Progress | None = None,
) -> Prepared:
    """Prepare texts with labels for training, unless they are prepared already.

    Args:
        data: a JSONL, CSV, TSV or Parquet file; a folder of `datasets`, or one with files called train, dev and test; a
            `datasets.Dataset` or `DatasetDict`; or lists: (texts, labels), for pairs (texts, second texts, labels).
        dev, test: the other splits, if `data` does not have them. A split that is missing is held out of the training
            data: a tenth of it, with the labels in proportion.
        text, label: the columns of texts and labels; labels may be names, whole numbers or booleans.
        text_b: the column of the second texts of pairs.
        tokenizer: the name or folder of a Hugging Face tokenizer; by default a text is read as its UTF-8 bytes.
        name: what the data is called in the names of runs; by default the name of the file.
        seed: decides which examples are held out.
        limit: at most this many examples per split.
        data_dir, progress: as in `skyformer.lra.prepare`.

    Returns:
        The prepared data, for `skyformer.training.load_preset`.
    """
    parts = find_parts(data, dev, test)
    if isinstance(data, tuple | list) and len(data) == 3:
        text_b = text_b or "text_b"
    columns = {"--text": text, "--label": label, **({"--text-b": text_b} if text_b else {})}
    for part in parts.values():
        check_columns(part, columns)
    check_at_least("seed", seed, 0)
    if limit is not None:
        check_at_least("limit", limit, 1)
    reader = _Reader(text, text_b, label, make_encoder(tokenizer), progress or Silent())
    job = _Job(
        parts,
        reader,
        _checked_name(name or _default_name(data)),
        seed,
        limit,
        _files({Split.TRAIN: data, Split.DEV: dev, Split.TEST: test}),
        None if tokenizer is None else _resolved(tokenizer),
    )
    folder = data_dir_or_default(data_dir) / f"{job.name}-{job.digest}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with lock_folder(folder, reader.progress):
            return _prepare_locked(job, folder)
    except OSError as error:
        raise DataError(f"cannot prepare {job.name} in {folder}: {error}") from error


def _files(given: Mapping[Split, Source]) -> dict[str, str]:
    """The files and folders from which the data can be prepared again; none if a part of it is only in memory."""
    paths = {str(split): source for split, source in given.items() if source is not None}
    if not all(isinstance(source, str | Path) for source in paths.values()):
        return {}
    return {split: str(Path(str(source)).expanduser().resolve()) for split, source in paths.items()}


def prepare_again(variant: Variant, data_dir: Path | str | None = None) -> Prepared:
    """Prepare data again from the files that a config names; an error if they are gone or have changed."""
    own = variant.own
    assert own is not None
    folder = data_dir_or_default(data_dir) / variant.name
    missing = f"the data of this run, {variant.name}, is missing or damaged in {folder.parent}"
    if not own.files:
        raise DataError(f"{missing}, and was not read from files; call own_data with the same data again")
    gone = [file for file in own.files.values() if not Path(file).exists()]
    if gone:
        raise DataError(
            f"{missing}, and {gone[0]} does not exist any more; put it back, or name the folder of the data"
        )
    prepared = own_data(
        own.train,
        dev=own.dev,
        test=own.test,
        text=own.text,
        label=own.label,
        text_b=own.text_b,
        tokenizer=own.tokenizer,
        name=variant.task,
        seed=variant.seed,
        limit=variant.limit,
        data_dir=data_dir,
    )
    if prepared.folder != folder:
        raise DataError(
            f"{missing}, and its files have changed: {', '.join(own.files.values())} now give {prepared.folder.name}. "
            "Put the old files back, or train a new run with --data"
        )
    return prepared


def _resolved(tokenizer: str | Path) -> str:
    """A folder as a complete path, so that it is found from anywhere."""
    return str(Path(tokenizer).resolve()) if Path(tokenizer).is_dir() else str(tokenizer)


def _default_name(data: Source) -> str:
    if not isinstance(data, str | Path):
        return "data"
    path = Path(data).resolve()
    stem = path.name.partition(".")[0]
    return as_name(path.parent.name if stem.lower() in _GENERIC_NAMES else stem)


def _checked_name(name: str) -> str:
    if not NAME.fullmatch(name) or name in TASKS:
        raise InputError(
            "name must be of lower case letters, digits and _, start with a letter, have at most 40 characters and not "
            f"be one of {', '.join(TASKS)}; got {name!r}"
        )
    return name


@dataclass(frozen=True)
class _Reader:
    """Columns and encoder; turns rows into tokens and labels, and reports all that is wrong with them."""

    text: str
    text_b: str | None
    label: str
    encoder: Encoder
    progress: Progress

    @property
    def texts(self) -> list[str]:
        return [self.text] if self.text_b is None else [self.text, self.text_b]

    def write(self, part: Part, split: Split, path: Path) -> tuple[StoredSplit, list[str]]:
        """Store the encoded texts of a part; returns them and the labels."""
        labels: list[str] = []
        spec = TaskSpec("own", "", ("",), (0, 0, 0), LONGEST_TEXT, self.encoder.num_symbols, len(self.texts) == 2)
        title = f"reading {Path(part.name).name}"
        self.progress.begin(title)
        with SplitWriter(path, spec) as writer:
            rows = part.rows()
            while batch := list(islice(rows, ROWS_PER_BATCH)):
                labels += [self._label(part, place, row) for place, row in batch]
                texts = [self._encode(part, column, batch) for column in self.texts]
                zeros = np.zeros(len(batch), np.uint8)
                writer.write(Examples(texts[0], zeros, [place for place, _ in batch], *texts[1:]))
                self.progress.update(title, advance=len(batch))
        self.progress.end(title)
        if not labels:
            raise DataError(f"{part.name} has no rows")
        return StoredSplit(path), labels

    def _encode(self, part: Part, column: str, batch: list[tuple[str, Row]]) -> Ragged:
        texts = [checked_text(part, place, row, column) for place, row in batch]
        encoded = self.encoder(texts)
        for (place, _), symbols in zip(batch, encoded, strict=True):
            if not len(symbols):
                raise DataError(_empty(part, place, column, "is empty, or only of characters that the tokenizer drops"))
        return Ragged.from_rows([symbols[:LONGEST_TEXT] for symbols in encoded])

    def _label(self, part: Part, place: str, row: Row) -> str:
        return as_label(row.get(self.label), f"{part.name} {place}", self.label)


def checked_text(part: Part, place: str, row: Row, column: str) -> str:
    """The text of a row; an error says where it is missing or empty."""
    if column not in row:
        raise DataError(f"{part.name} {place} has no column {column!r}; it has: {', '.join(map(repr, row))}")
    text = row[column]
    if text is None or (isinstance(text, str) and not text.strip()):
        raise DataError(_empty(part, place, column, "is empty"))
    if not isinstance(text, str):
        raise DataError(f"{part.name} {place}: the column {column!r} must be text; got {type(text).__name__}")
    return text


def _empty(part: Part, place: str, column: str, problem: str) -> str:
    return f"{part.name} {place}: the text in column {column!r} {problem}; remove the row or fill it in"


def as_label(value: Any, place: str, column: str) -> str:
    """The name of a label: text as it is, and whole numbers and booleans as they are written."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str) and value.strip():
        return value.strip()
    problem = "is missing" if value is None or value == "" or value != value else f"is {value!r}"
    raise DataError(f"{place}: the label in column {column!r} {problem}; expected a name or a whole number")


@dataclass(frozen=True)
class _Job:
    """One preparation."""

    parts: Mapping[Split, Part]
    reader: _Reader
    name: str
    seed: int
    limit: int | None
    files: dict[str, str]
    tokenizer: str | None

    @property
    def source(self) -> str:
        return ", ".join(dict.fromkeys(Path(part.name).name for part in self.parts.values()))

    @property
    def digest(self) -> str:
        facts = {
            "version": _VERSION,
            "parts": {split: part.digest() for split, part in self.parts.items()},
            "columns": [self.reader.text, self.reader.text_b, self.reader.label],
            "encoder": self.reader.encoder.digest(),
            "seed": self.seed,
            "limit": self.limit,
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]


def _prepare_locked(job: _Job, folder: Path) -> Prepared:
    manifest = None
    with suppress(DataError):  # a damaged manifest protects no files
        manifest = read_manifest(folder)
    has_tokenizer = job.tokenizer is None or (folder / TOKENIZER_FOLDER).is_dir()
    if manifest is not None and has_tokenizer and not find_changed(folder, manifest):
        return Prepared(folder, manifest, fresh=False)
    delete_leftovers(folder, manifest)
    staging = folder / STAGING
    staging.mkdir()
    try:
        manifest = _build(job, folder, staging)
    except DataError:
        # Not even an empty folder is left of data that cannot be used.
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return Prepared(folder, manifest, fresh=True)


def _build(job: _Job, folder: Path, staging: Path) -> Manifest:
    read = {
        split: job.reader.write(part, split, staging / f"reading-{split}.arrow") for split, part in job.parts.items()
    }
    names = _label_names(job.parts[Split.TRAIN], read[Split.TRAIN][1])
    numbers = {split: _label_numbers(job.parts[split], labels, names) for split, (_, labels) in read.items()}
    rows = _choose_rows(job, numbers)
    longest = max(int(stored.lengths().max()) for stored, _ in read.values())
    own = OwnData(
        digest=folder.name.rpartition("-")[2],
        **job.files,
        text=job.reader.text,
        text_b=job.reader.text_b,
        label=job.reader.label,
        tokenizer=job.tokenizer,
        labels=names,
        num_symbols=job.reader.encoder.num_symbols,
        longest=longest,
    )
    variant = Variant.of(job.name, seed=job.seed, limit=job.limit, own=own)
    chosen = _batches({split: read[part][0] for split, (part, _) in rows.items()}, numbers, rows)
    total = sum(len(some) for _, some in rows.values())
    writers = write_splits(chosen, list(Split), variant, staging, job.reader.progress, "writing", total)
    job.reader.encoder.save(folder)
    return put_in_place(folder, variant, job.source, writers)


def _label_names(part: Part, labels: list[str]) -> tuple[str, ...]:
    """All labels of the training data: numbers in order of size, names in alphabetical order."""
    names = set(labels)
    if len(names) == 1:
        raise DataError(f"{part.name} has only one label, {labels[0]!r}; a classifier needs at least two")
    if len(names) > _MOST_LABELS or (len(names) > 100 and len(names) > len(labels) / 2):
        raise DataError(
            f"{part.name} has {len(names):,} different labels in {len(labels):,} rows, such as {labels[0][:50]!r}; is "
            "--label the right column?"
        )
    numbers = all(_is_number(name) for name in names)
    # "1" and "01" are different labels of the same size.
    return tuple(sorted(names, key=lambda name: (int(name) if numbers else 0, name)))


def _is_number(name: str) -> bool:
    return name.removeprefix("-").isdecimal() and len(name) < 20


def _label_numbers(part: Part, labels: list[str], names: tuple[str, ...]) -> Integers:
    number = {name: place for place, name in enumerate(names)}
    unknown = Counter(label for label in labels if label not in number)
    if unknown:
        label, count = unknown.most_common(1)[0]
        raise DataError(
            f"{part.name} has the label {label!r} in {count:,} rows, which is not in the training data; known: "
            f"{', '.join(names[:20])}{', ...' * (len(names) > 20)}"
        )
    return np.array([number[label] for label in labels], np.int64)


def _choose_rows(job: _Job, labels: Mapping[Split, Integers]) -> dict[Split, tuple[Split, Integers]]:
    """The rows of each split, and the part they are in: its own, or that of the training data."""
    rows = {split: (split, np.arange(len(numbers))) for split, numbers in labels.items()}
    train = labels[Split.TRAIN]
    held_out = [split for split in (Split.TEST, Split.DEV) if split not in labels]
    if len(train) < _FEWEST_ROWS:
        raise DataError(
            f"{job.parts[Split.TRAIN].name} has {len(train)} rows; at least {_FEWEST_ROWS} are needed for training"
        )
    for split in held_out:
        remaining = rows[Split.TRAIN][1]
        kept, some = hold_out(train[remaining], max(1, len(train) // 10), job.seed)
        rows |= {Split.TRAIN: (Split.TRAIN, remaining[kept]), split: (Split.TRAIN, remaining[some])}
    if job.limit is None:
        return rows
    return {
        split: (part, some[choose(labels[part][some], job.limit, job.seed)]) for split, (part, some) in rows.items()
    }


def _batches(
    stored: Mapping[Split, StoredSplit],
    labels: Mapping[Split, Integers],
    rows: Mapping[Split, tuple[Split, Integers]],
) -> Batches:
    for split in Split:
        part, some = rows[split]
        start = 0
        for _, examples in stored[split].batches(split, some):
            numbers = labels[part][some[start : start + len(examples)]]
            start += len(examples)
            yield split, replace(examples, labels=numbers)


def describe(prepared: Prepared) -> str:
    """One line about prepared data: its folder, its splits, and how frequent its labels are."""
    manifest = prepared.manifest
    sizes = ", ".join(f"{record.examples:,} {split}" for split, record in manifest.splits.items())
    train = manifest.splits[Split.TRAIN]
    shares = {
        name: count / train.examples
        for name, count in zip(manifest.variant.spec.label_names, train.label_counts, strict=True)
    }
    frequent = sorted(shares, key=lambda name: -shares[name])
    shown = ", ".join(f"{name} {shares[name]:.1%}" for name in frequent[:_SHOWN_LABELS])
    more = f" and {len(frequent) - _SHOWN_LABELS} more" if len(frequent) > _SHOWN_LABELS else ""
    unit = "bytes" if manifest.variant.own is None or manifest.variant.own.tokenizer is None else "tokens"
    return (
        f"{manifest.variant.task}: {sizes} from {manifest.source} in {prepared.folder}; {train.shortest:,} to "
        f"{train.longest:,} {unit}; labels: {shown}{more}"
    )
