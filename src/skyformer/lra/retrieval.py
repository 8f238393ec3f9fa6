"""Retrieval: pairs of ACL papers as bytes, from LRA's `new_aan_pairs.{train,eval,test}.tsv`.

A line has five fields separated by tabs: label, two paper ids and two texts. There is no header and no quoting.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path, PurePosixPath
from typing import IO

from skyformer.errors import DataError
from skyformer.lra.archives import Limits, check_file, open_decompressed, read_errors_name, tar_members
from skyformer.lra.download import OfficialSource
from skyformer.lra.examples import Batches, Row, in_batches
from skyformer.lra.tasks import TASKS, Split

OFFICIAL = OfficialSource("https://storage.googleapis.com/long-range-arena/lra_release.gz")
FILES = {
    Split.TRAIN: "new_aan_pairs.train.tsv",
    Split.DEV: "new_aan_pairs.eval.tsv",
    Split.TEST: "new_aan_pairs.test.tsv",
}
_SUFFIXES = ("", ".xz", ".gz")
_LIMITS = Limits(members=5_000_000, member_bytes=2**35, total_bytes=2**38)
_LONGEST_LINE = 2**25
_ROWS_PER_BATCH = 500
_LABELS = {b"0": 0, b"0.0": 0, b"1": 1, b"1.0": 1}
_MAX_LENGTH = TASKS["retrieval"].max_length


def read(path: Path) -> Batches:
    """The pairs in the order of the files."""
    if path.is_dir() or ".tsv" in path.suffixes:
        return _from_files(_find_files(path))
    return _from_archive(path)


def _find_files(path: Path) -> dict[Split, Path]:
    """The three files in a folder, at any depth, or next to the given one."""
    folder = path if path.is_dir() else path.parent
    if not path.exists():
        raise DataError(f"{path} does not exist")
    found = {}
    for split, name in FILES.items():
        candidates = [file for suffix in _SUFFIXES for file in sorted(folder.rglob(name + suffix))]
        if not candidates:
            raise DataError(
                f"{folder} contains no {name}, {name}.xz or {name}.gz; expected LRA's three new_aan_pairs files"
            )
        check_file(folder, candidates[0], _LIMITS.member_bytes)
        found[split] = candidates[0]
    return found


def _from_files(files: dict[Split, Path]) -> Batches:
    for split, path in files.items():
        with open_decompressed(path) as stream:
            yield from in_batches(split, _parse(stream, path, str(path)), _ROWS_PER_BATCH)


def _from_archive(path: Path) -> Batches:
    split_of = {name: split for split, name in FILES.items()}
    missing = set(FILES)
    for name, content in tar_members(path, lambda name: PurePosixPath(name).name in split_of, _LIMITS):
        split = split_of[PurePosixPath(name).name]
        yield from in_batches(split, _parse(content, path, f"{path}: {name}"), _ROWS_PER_BATCH)
        missing.discard(split)
        if not missing:
            # The rest of lra_release is gigabytes of other tasks.
            return
    names = ", ".join(FILES[split] for split in sorted(missing))
    raise DataError(f"{path} contains no {names}; expected LRA's lra_release archive")


def _parse(stream: IO[bytes], path: Path, name: str) -> Iterator[Row]:
    total = 0
    for number in count(1):
        with read_errors_name(path):
            line = stream.readline(_LONGEST_LINE)
        if not line:
            return
        total += len(line)
        if total > _LIMITS.member_bytes:
            raise DataError(f"{name} is too large: more than {_LIMITS.member_bytes:,} bytes when decompressed")
        yield _parse_line(line, f"{name} line {number}")


def _parse_line(line: bytes, place: str) -> Row:
    fields = line.rstrip(b"\r\n").split(b"\t")
    if len(fields) != 5 or len(line) >= _LONGEST_LINE:
        raise DataError(f"{place}: expected five fields between tabs (label, id, id, text, text); got {len(fields)}")
    label, first_id, second_id, first, second = fields
    if label not in _LABELS:
        raise DataError(f"{place}: the label must be 0.0 or 1.0; got {label[:20]!r}")
    source = f"{first_id.decode(errors='replace')} {second_id.decode(errors='replace')}"
    return Row(first[:_MAX_LENGTH], _LABELS[label], source, second[:_MAX_LENGTH])
