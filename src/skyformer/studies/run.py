"""Running a study: the cells that its record lacks, one after the other, each kept as soon as it is measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import torch

from skyformer.studies.base import Study
from skyformer.studies.record import Measured, Record, Run, check_continues, read_record, record_path

OptionsT = TypeVar("OptionsT")
CellT = TypeVar("CellT")
ResultT = TypeVar("ResultT")

Report = Callable[[int, int, str], None]
"""Gets the number of cells done, the number in all, and what is measured now."""


def run_study(
    study: Study[OptionsT, CellT, ResultT],
    folder: Path,
    *,
    threads: int = 1,
    fresh: bool = False,
    report: Report = lambda done, total, text: None,
) -> Record[CellT, ResultT]:
    """Measures what the record in `folder` lacks. `fresh` forgets what it has."""
    torch.set_num_threads(threads)
    path = record_path(study.name, folder)
    plan, facts = list(dict.fromkeys(study.cells())), dict(study.facts())
    record: Record[CellT, ResultT] = Record(study.name, {}, facts)
    if path.exists() and not fresh:
        record = read_record(type(study), path)
        check_continues(record, set(plan), facts, path)
    record.options = asdict(study.options)  # type: ignore[call-overload]
    missing = [cell for cell in plan if cell not in record.cells]
    if missing:
        record.runs.append(Run.now(threads))
    for number, cell in enumerate(missing, len(plan) - len(missing)):
        report(number, len(plan), describe(cell))
        start = time.perf_counter()
        result = study.measure(cell)
        record.cells[cell] = Measured(result, len(record.runs) - 1, time.perf_counter() - start)
        record.write(path)
    report(len(plan), len(plan), "done")
    return record


def describe(cell: object) -> str:
    """A cell in a few words: its values, but for those that are empty."""
    values = asdict(cell).values()  # type: ignore[call-overload]
    return " ".join(str(value) for value in values if value not in (None, ""))
