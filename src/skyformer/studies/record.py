"""The record of a study: a JSON file of raw results, rewritten atomically after every cell.

    {"format": 1, "study": ..., "options": {...}, "facts": {...},
     "runs":  [{"command", "commit", "started", "threads", "machine", "versions"}, ...],
     "cells": [{"cell": {...}, "run": 0, "seconds": 1.5, "result": {...}}, ...]}

"runs" lists the invocations of the command. Each cell has the number of the one that measured it, so a record that was
interrupted and resumed shows the commit and the machine of every result.
"""

from __future__ import annotations

import json
import shlex
import sys
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Generic

from skyformer.environment import describe_environment, installed_version
from skyformer.errors import DataError, InputError
from skyformer.files import write_atomic
from skyformer.studies.base import CellT, Fact, ResultT, Study

FORMAT = 1
_PACKAGES = ("skyformer", "transformers", "lightning")
"""Packages whose versions may change a result."""


@dataclass(frozen=True)
class Invocation:
    """One invocation of the command, and the environment of its results."""

    command: str
    commit: str | None
    started: str
    threads: int
    machine: Mapping[str, str | int]
    versions: Mapping[str, str]

    @staticmethod
    def now(threads: int) -> Invocation:
        here = describe_environment(threads)
        packages = {package: installed_version(package) for package in _PACKAGES}
        installed = {package: version for package, version in packages.items() if version is not None}
        return Invocation(
            command=shlex.join(["skyformer", *(without_folders(argument) for argument in sys.argv[1:])]),
            commit=here.commit,
            started=here.started,
            threads=threads,
            machine={"processor": here.cpu, "cores": here.cores, "system": here.platform},
            versions={"python": here.python, "torch": here.torch, **installed},
        )


@dataclass(frozen=True)
class Measured(Generic[ResultT]):
    """The result of a cell, the number of the invocation that measured it, and the seconds that took, if known."""

    result: ResultT
    invocation: int
    seconds: float | None


@dataclass
class Record(Generic[CellT, ResultT]):
    """Everything that a study has measured so far."""

    study: str
    options: Mapping[str, Any]
    facts: Mapping[str, Fact]
    invocations: list[Invocation] = field(default_factory=list)
    cells: dict[CellT, Measured[ResultT]] = field(default_factory=dict)
    _lines: dict[CellT, str] = field(default_factory=dict, repr=False, compare=False)

    def results(self) -> dict[CellT, ResultT]:
        return {cell: measured.result for cell, measured in self.cells.items()}

    def write(self, path: Path) -> None:
        """Write the file atomically: after an interruption it is the old record or the new one."""
        options = {name: without_folders(x) if isinstance(x, str) else x for name, x in self.options.items()}
        head = {
            "format": FORMAT,
            "study": self.study,
            "options": options,
            "facts": self.facts,
            "runs": [asdict(each) for each in self.invocations],
        }
        write_atomic(path, _one_cell_per_line(head, [self._line(cell) for cell in self.cells]))

    def _line(self, cell: CellT) -> str:
        """A cell as JSON, made only once because the record is written after every cell."""
        if cell not in self._lines:
            m = self.cells[cell]
            content = {
                "cell": asdict(cell),  # type: ignore[call-overload]
                "run": m.invocation,
                "seconds": None if m.seconds is None else round(m.seconds, 3),
                "result": asdict(m.result),  # type: ignore[call-overload]
            }
            self._lines[cell] = json.dumps(content, allow_nan=False)
        return self._lines[cell]


def record_path(study: str, folder: Path) -> Path:
    return folder / f"{study}.json"


def read_record(study: type[Study[Any, CellT, ResultT]], path: Path) -> Record[CellT, ResultT]:
    """The record at `path`; a `DataError` says what is wrong with it."""
    advice = "move it away, or discard it with --fresh"
    try:
        content = json.loads(path.read_text())
        version = content.get("format") if isinstance(content, dict) else None
        if not isinstance(version, int):
            raise ValueError("it has no format")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not the record of a study ({error}); {advice}") from None
    if version > FORMAT:
        raise DataError(f"{path} has format {version}, this version reads {FORMAT}; upgrade skyformer")
    if content.get("study") != study.name:
        raise DataError(f"{path} holds the study {content.get('study')!r}, not {study.name!r}; {advice}")
    try:
        return _from_json(study, content)
    except DataError as error:
        raise DataError(f"{path} does not fit this version's study {study.name!r}: {error}; {advice}") from None


@dataclass(frozen=True)
class _Stored:
    """The parts of a record that do not depend on the study."""

    options: dict[str, Any]
    facts: dict[str, Fact]
    runs: tuple[Invocation, ...]
    cells: tuple[dict[str, Any], ...]
    format: int
    study: str


def _from_json(study: type[Study[Any, CellT, ResultT]], content: Any) -> Record[CellT, ResultT]:
    stored: _Stored = _decode(_Stored, content, "")
    record: Record[CellT, ResultT] = Record(study.name, stored.options, stored.facts, list(stored.runs))
    kinds = {"cell": study.cell_type, "run": int, "seconds": float | None, "result": study.result_type}
    for number, each in enumerate(stored.cells):
        _check_names(each, kinds, kinds, f"cells.{number}")
        cell, run, seconds, result = (_decode(kinds[key], each[key], f"cells.{number}.{key}") for key in kinds)
        record.cells[cell] = Measured(result, run, seconds)
    return record


def _decode(kind: Any, value: Any, place: str) -> Any:
    """JSON as the type `kind`: objects become dataclasses and lists tuples, also inside each other."""
    kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    matching = [each for each in kinds if _fits(each, value)]
    if not matching:
        expected = " or ".join(getattr(each, "__name__", str(each)) for each in kinds)
        raise DataError(f"{place or 'it'} must be {expected}; got {json.dumps(value)[:80]}")
    kind = matching[0]
    if isinstance(kind, type) and is_dataclass(kind):
        hints = _field_types(kind)
        required = [each.name for each in fields(kind) if each.default is each.default_factory is MISSING]
        _check_names(value, hints, required, place)
        return kind(**{name: _decode(hints[name], each, f"{place}.{name}".lstrip(".")) for name, each in value.items()})
    if isinstance(value, list):
        members = typing.get_args(kind) or (Any, ...)
        kinds = members[:1] * len(value) if members[-1] is ... else members
        if len(kinds) != len(value):
            raise DataError(f"{place} must have {len(kinds)} entries; got {len(value)}")
        return tuple(_decode(*each, f"{place}.{number}") for number, each in enumerate(zip(kinds, value, strict=True)))
    return value


def _fits(kind: Any, value: Any) -> bool:
    """Whether a value from JSON may be of this type."""
    plain = dict if is_dataclass(kind) else typing.get_origin(kind) or kind
    if plain is Any:
        return True
    if plain is typing.Literal:
        return value in typing.get_args(kind)
    if isinstance(value, bool) or value is None:
        return plain is type(value)
    if plain is float:
        return isinstance(value, int | float)
    json_type = next((each for each in (str, int, dict, Mapping) if issubclass(plain, each)), list)
    return isinstance(value, json_type)


def _check_names(value: dict[str, Any], known: Collection[str], required: Collection[str], place: str) -> None:
    inside = f" in {place}" if place else ""
    for name in required:
        if name not in value:
            raise DataError(f"{name!r} is missing{inside}")
    for name in value:
        if name not in known:
            raise DataError(f"{name!r} is unknown{inside}")


@cache
def _field_types(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def check_continues(
    record: Record[CellT, ResultT], plan: set[CellT] | None, facts: Mapping[str, Fact], path: Path
) -> None:
    """Check that the stored record has the same facts, and no cell outside the plan; cells may be missing. Without a
    plan, all cells are allowed, and facts that only one of the two has."""
    advice = "choose another folder with --output, or discard the saved results with --fresh"
    both = record.facts.keys() & facts.keys()
    for name in {**record.facts, **facts}:
        if plan is None and name not in both:
            continue
        stored, now = record.facts.get(name), facts.get(name)
        if stored != now:
            raise InputError(f"{path} was measured with {name} {stored!r}, this command has {now!r}; {advice}")
    stray = next((cell for cell in record.cells if plan is not None and cell not in plan), None)
    if stray is not None:
        raise InputError(f"{path} has results that this command would not measure, such as {stray}; {advice}")


def without_folders(argument: str) -> str:
    """A path outside the working folder as its last name alone, also after `--option=`; anything else unchanged.
    A record does not show where the user keeps files."""
    option, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
    path = Path(value)
    outside = path.is_absolute() or ".." in path.parts
    return option + equals + (path.name if outside else value)


def significant(x: float, digits: int = 4) -> float | None:
    """x rounded for the record; None if it is not finite, because JSON has no NaN."""
    rounded = float(f"{x:.{digits}g}")
    return rounded if abs(rounded) < float("inf") else None


def _one_cell_per_line(head: dict[str, Any], cells: Sequence[str]) -> str:
    """JSON with one line per cell, so that two records can be compared with diff."""
    opening = json.dumps({**head, "cells": []}, indent=1, allow_nan=False).removesuffix("[]\n}")
    return opening + ("[\n  " + ",\n  ".join(cells) + "\n ]\n}\n" if cells else "[]\n}\n")
