"""LRA's own ListOps files: `basic_{train,val,test}.tsv`, lines of source and target below a header."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from skyformer.errors import DataError, InputError
from skyformer.lra.archives import blaming
from skyformer.lra.examples import Examples, Ragged, Symbols
from skyformer.lra.listops import evaluate_symbols, to_symbols
from skyformer.lra.tasks import TASKS, Split

FILES = {Split.TRAIN: "basic_train.tsv", Split.DEV: "basic_val.tsv", Split.TEST: "basic_test.tsv"}
_HEADER = "Source\tTarget"
_LONGEST_LINE = 2**20
_BATCH_ROWS = 1_000
_MAX_LENGTH = TASKS["listops"].max_length


def read(folder: Path) -> Iterator[tuple[Split, Examples]]:
    """The expressions in the order of the files, some at a time, with the split they belong to."""
    missing = [name for name in FILES.values() if not (folder / name).is_file()]
    if missing:
        raise DataError(f"{folder} lacks {', '.join(missing)}; expected LRA's {', '.join(FILES.values())}")
    for split, name in FILES.items():
        for examples in read_file(folder / name):
            yield split, examples


def read_file(path: Path) -> Iterator[Examples]:
    """One file's expressions, each checked against its target."""
    rows: list[tuple[Symbols, int, str]] = []
    for number, line in enumerate(_lines(path), 1):
        if number == 1 and line == _HEADER:
            continue
        rows.append(_parse(line, path, number))
        if len(rows) == _BATCH_ROWS:
            yield _to_examples(rows)
            rows = []
    if rows:
        yield _to_examples(rows)


def _lines(path: Path) -> Iterator[str]:
    with blaming(path), path.open(encoding="ascii", errors="replace") as file:
        while line := file.readline(_LONGEST_LINE):
            yield line.rstrip("\r\n")


def _parse(line: str, path: Path, number: int) -> tuple[Symbols, int, str]:
    source, tab, target = line.partition("\t")
    try:
        symbols = to_symbols(source)
        value = evaluate_symbols(symbols)
    except InputError as error:
        raise DataError(f"{path} line {number}: {error}") from error
    if not tab or str(value) != target.strip():
        raise DataError(f"{path} line {number}: the expression is {value}, but the target says {target[:20]!r}")
    if len(symbols) > _MAX_LENGTH:
        raise DataError(f"{path} line {number}: {len(symbols)} tokens, at most {_MAX_LENGTH} expected")
    return np.array(symbols, np.uint8), value, f"{path.name}:{number}"


def _to_examples(rows: list[tuple[Symbols, int, str]]) -> Examples:
    symbols, values, sources = zip(*rows, strict=True)
    return Examples(Ragged.from_rows(symbols), np.array(values, np.uint8), list(sources))
