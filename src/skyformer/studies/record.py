"""The record of a study: a JSON file of raw figures, written anew in one step after every cell.

    {"format": 1, "study": ..., "options": {...}, "facts": {...},
     "runs":  [{"command", "commit", "started", "threads", "machine", "versions"}, ...],
     "cells": [{"cell": {...}, "run": 0, "seconds": 1.5, "result": {...}}, ...]}

Each cell names the run that measured it, so a record that was interrupted and continued says which commit and machine
every figure comes from.
"""

from __future__ import annotations

import importlib.metadata
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from skyformer.errors import DataError, InputError, MissingExtraError
from skyformer.files import write_atomic
from skyformer.studies.base import Fact, Study

FORMAT = 1

CellT = TypeVar("CellT")
ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class Run:
    """One invocation of the command, and what its figures must be read with."""

    command: str
    commit: str | None
    started: str
    threads: int
    machine: Mapping[str, str | int]
    versions: Mapping[str, str]

    @staticmethod
    def now(threads: int) -> Run:
        try:
            from skyformer.environment import describe_environment
        except ModuleNotFoundError as error:
            raise MissingExtraError(str(error.name), "model") from error
        here = describe_environment(threads)
        versions = {"python": here.python, "torch": here.torch, **_versions("skyformer", "transformers", "lightning")}
        return Run(
            command=shlex.join(["skyformer", *(without_folders(argument) for argument in sys.argv[1:])]),
            commit=here.commit,
            started=here.started,
            threads=threads,
            machine={"processor": here.cpu, "cores": here.cores, "system": here.platform},
            versions=versions,
        )


@dataclass(frozen=True)
class Measured(Generic[ResultT]):
    """What a cell gave, in which run, and how long it took."""

    result: ResultT
    run: int
    seconds: float


@dataclass
class Record(Generic[CellT, ResultT]):
    """All that a study has measured so far."""

    study: str
    options: Mapping[str, Any]
    facts: Mapping[str, Fact]
    runs: list[Run] = field(default_factory=list)
    cells: dict[CellT, Measured[ResultT]] = field(default_factory=dict)
    _lines: dict[CellT, str] = field(default_factory=dict, repr=False, compare=False)

    def results(self) -> dict[CellT, ResultT]:
        return {cell: measured.result for cell, measured in self.cells.items()}

    def write(self, path: Path) -> None:
        """In one step: whatever interrupts it, the file is the old record or the new one."""
        options = {name: without_folders(x) if isinstance(x, str) else x for name, x in self.options.items()}
        head = {
            "format": FORMAT,
            "study": self.study,
            "options": options,
            "facts": self.facts,
            "runs": [asdict(run) for run in self.runs],
        }
        write_atomic(path, _one_cell_a_line(head, [self._line(cell) for cell in self.cells]))

    def _line(self, cell: CellT) -> str:
        """A cell as JSON, spelt out once: a study writes its record after every cell."""
        if cell not in self._lines:
            m = self.cells[cell]
            content = {"cell": asdict(cell), "run": m.run, "seconds": round(m.seconds, 3), "result": asdict(m.result)}  # type: ignore[call-overload]
            self._lines[cell] = json.dumps(content, allow_nan=False)
        return self._lines[cell]


def record_path(study: str, folder: Path) -> Path:
    return folder / f"{study}.json"


def read_record(study: type[Study[Any, CellT, ResultT]], path: Path) -> Record[CellT, ResultT]:
    """The record at `path`, or an error that says what is wrong with it."""
    advice = "move it away, or begin anew with --fresh"
    try:
        content = json.loads(path.read_text())
        newer = content["format"] > FORMAT
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is no record of a study ({type(error).__name__}: {error}); {advice}") from error
    if newer:
        raise DataError(f"{path} is of format {content['format']}, this version knows {FORMAT}; upgrade skyformer")
    if content.get("study") != study.name:
        raise DataError(f"{path} holds the study {content.get('study')!r}, not {study.name!r}; {advice}")
    try:
        return _from_json(study, content)
    except (KeyError, TypeError) as error:
        raise DataError(f"{path} does not fit this version's study {study.name!r} ({error}); {advice}") from error


def _from_json(study: type[Study[Any, CellT, ResultT]], content: Any) -> Record[CellT, ResultT]:
    record: Record[CellT, ResultT] = Record(study.name, content["options"], content["facts"])
    record.runs = [Run(**run) for run in content["runs"]]
    for each in content["cells"]:
        result = study.result_type(**_with_tuples(each["result"]))
        record.cells[study.cell_type(**_with_tuples(each["cell"]))] = Measured(result, each["run"], each["seconds"])
    return record


def check_continues(record: Record[CellT, ResultT], plan: set[CellT], facts: Mapping[str, Fact], path: Path) -> None:
    """The stored record has the same facts and no cell outside the plan; it may lack any."""
    advice = "give another folder with --output, or begin anew with --fresh"
    for name in {**record.facts, **facts}:
        stored, now = record.facts.get(name), facts.get(name)
        if stored != now:
            raise InputError(f"{path} was made with {name} {stored!r}, this run has {now!r}; {advice}")
    stray = next((cell for cell in record.cells if cell not in plan), None)
    if stray is not None:
        raise InputError(f"{path} holds figures outside this run's plan, such as {stray}; {advice}")


def without_folders(argument: str) -> str:
    """A path outside the working folder by its last name alone, also after `--option=`; anything else as it is. Where
    somebody keeps their files is no part of a record."""
    option, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
    path = Path(value)
    outside = path.is_absolute() or ".." in path.parts
    return option + equals + (path.name if outside else value)


def significant(x: float, digits: int = 4) -> float | None:
    """x rounded for the record, None if it is not finite: JSON knows no NaN."""
    rounded = float(f"{x:.{digits}g}")
    return rounded if abs(rounded) < float("inf") else None


def _one_cell_a_line(head: dict[str, Any], cells: Sequence[str]) -> str:
    """JSON with a line for every cell, so that a difference between two records can be read."""
    opening = json.dumps({**head, "cells": []}, indent=1, allow_nan=False).removesuffix("[]\n}")
    return opening + ("[\n  " + ",\n  ".join(cells) + "\n ]\n}\n" if cells else "[]\n}\n")


def _with_tuples(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_with_tuples(each) for each in value)
    if isinstance(value, dict):
        return {key: _with_tuples(each) for key, each in value.items()}
    return value


def _versions(*packages: str) -> dict[str, str]:
    """The packages that may decide a figure, where installed."""
    found = {}
    for package in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
