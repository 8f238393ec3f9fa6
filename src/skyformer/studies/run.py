"""Running a study: the cells that its record lacks, one after the other or side by side, each kept as soon as it is
measured."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from skyformer.errors import InputError, TrainingError
from skyformer.processes import end_with_parent, is_oom_error
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
    jobs: int = 1,
    fresh: bool = False,
    report: Report = lambda done, total, text: None,
) -> Record[CellT, ResultT]:
    """Measures what the record in `folder` lacks, in `jobs` processes of `threads` each; `fresh` forgets it first."""
    if jobs > 1 and study.times_things:
        raise InputError(f"--jobs must be 1 for {study.name}: it takes times, and its cells would slow each other down")
    torch.set_num_threads(threads)
    path = record_path(study.name, folder)
    plan, facts = list(dict.fromkeys(study.cells())), dict(study.facts())
    if not plan:
        raise InputError(f"the options of {study.name} leave nothing to measure; one of their lists is empty")
    record: Record[CellT, ResultT] = Record(study.name, {}, facts)
    if path.exists() and not fresh:
        record = read_record(type(study), path)
        check_continues(record, set(plan), facts, path)
    record.options = asdict(study.options)  # type: ignore[call-overload]
    missing = [cell for cell in plan if cell not in record.cells]
    if missing:
        record.runs.append(Run.now(threads))
    done = len(plan) - len(missing)
    measured = _one_by_one(study, missing) if jobs == 1 else _side_by_side(study, missing, threads, jobs)
    under_way = [describe(cell) for cell in missing] if jobs == 1 else [f"{jobs} side by side"] * len(missing)
    report(done, len(plan), under_way[0] if missing else "done")
    for number, (cell, result, seconds) in enumerate(measured, 1):
        record.cells[cell] = Measured(result, len(record.runs) - 1, seconds)
        record.write(path)
        report(done + number, len(plan), under_way[number] if number < len(missing) else "done")
    return record


def describe(cell: object) -> str:
    """A cell in a few words: its values, but for those that are empty."""
    values = asdict(cell).values()  # type: ignore[call-overload]
    return " ".join(str(value) for value in values if value not in (None, ""))


def _one_by_one(
    study: Study[OptionsT, CellT, ResultT], cells: Sequence[CellT]
) -> Iterator[tuple[CellT, ResultT, float]]:
    for cell in cells:
        yield cell, *_timed(study, cell)


def _side_by_side(
    study: Study[OptionsT, CellT, ResultT], cells: Sequence[CellT], threads: int, jobs: int
) -> Iterator[tuple[CellT, ResultT, float]]:
    """In the order in which they are done. If one fails, those under way are still waited for before the failure is
    told; whatever else ends this, ends the workers."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, initializer=_start_worker, initargs=(threads,)) as pool:
        waiting = {pool.submit(_measure, type(study), study.options, cell): cell for cell in cells}
        try:
            failure: Exception | None = None
            for future in as_completed(waiting):
                if future.cancelled():
                    continue
                error = future.exception()
                if error is None:
                    yield waiting[future], *future.result()
                elif failure is None:
                    failure = error if isinstance(error, Exception) else RuntimeError(repr(error))
                    pool.shutdown(wait=False, cancel_futures=True)
            if failure is not None:
                raise failure
        except BrokenProcessPool as error:
            raise TrainingError(
                "a worker of the study was killed, perhaps for want of memory; the same command goes on (without "
                "--fresh), with fewer --jobs if need be"
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in multiprocessing.active_children():
                worker.terminate()


def _start_worker(threads: int) -> None:
    end_with_parent()
    torch.set_num_threads(threads)


@cache
def _study_of(study: type[Study[Any, Any, Any]], options: Any) -> Study[Any, Any, Any]:
    """A worker keeps its study, with the data that it has loaded."""
    return study(options)


def _measure(study: type[Study[Any, Any, Any]], options: Any, cell: Any) -> tuple[Any, float]:
    return _timed(_study_of(study, options), cell)


def _timed(study: Study[Any, CellT, ResultT], cell: CellT) -> tuple[ResultT, float]:
    start = time.perf_counter()
    try:
        result = study.measure(cell)
    except (RuntimeError, MemoryError) as error:
        if not is_oom_error(repr(error)):
            raise
        raise TrainingError(
            f"there is not enough memory for a part of {study.name} ({describe(cell)}); what was measured before it is "
            "kept. Shorter lengths, fewer examples or fewer --jobs take less"
        ) from error
    return result, time.perf_counter() - start
