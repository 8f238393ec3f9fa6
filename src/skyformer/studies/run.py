"""Running a study: measure the cells that its record lacks, one by one or in parallel, and save each at once."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, replace
from functools import cache
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from typing import Any

import torch

from skyformer.environment import processor_name
from skyformer.errors import InputError, TrainingError
from skyformer.processes import end_with_parent, is_oom_error
from skyformer.report.progress import Progress, Silent
from skyformer.studies.base import CellT, Fact, ResultT, Study, StudyClass
from skyformer.studies.record import Invocation, Measured, Record, check_continues, read_record, record_path


def run_study(
    study: Study[Any, CellT, ResultT],
    folder: Path,
    *,
    threads: int = 1,
    jobs: int = 1,
    fresh: bool = False,
    progress: Progress | None = None,
) -> Record[CellT, ResultT]:
    """Measure what the record in `folder` lacks.

    Args:
        threads: CPU threads of each process.
        jobs: number of processes that measure in parallel.
        fresh: discard the stored record.
        progress: where to report the number of measured cells.

    Returns:
        The complete record, as it is stored.
    """
    if jobs > 1 and study.is_timing_study:
        raise InputError(
            f"--jobs must be 1 for {study.name}: it measures time, and parallel cells slow each other down"
        )
    torch.set_num_threads(threads)
    plan, path = list(dict.fromkeys(study.cells())), record_path(study.name, folder)
    if not plan and (fresh or not (study.keeps_other_cells and path.exists())):
        raise InputError(f"the options of {study.name} leave nothing to measure: {study.no_cells}")
    record = _open_record(study, plan, path, fresh)
    if _refresh(study, record):
        record.write(path)
    missing = [cell for cell in plan if cell not in record.cells]
    if missing:
        record.invocations.append(Invocation.now(threads))
    measured = _one_by_one(study, missing) if jobs == 1 else _in_parallel(study, missing, threads, jobs)
    progress = progress or Silent()
    progress.begin(study.name, total=len(plan), done=len(plan) - len(missing))
    for number in range(len(missing)):
        progress.update(study.name, text=describe(missing[number]) if jobs == 1 else f"{jobs} in parallel")
        cell, result, seconds = next(measured)
        record.cells[cell] = Measured(result, len(record.invocations) - 1, seconds)
        record.write(path)
        progress.update(study.name, advance=1)
    progress.end(study.name)
    return record


def _open_record(
    study: Study[Any, CellT, ResultT], plan: Sequence[CellT], path: Path, fresh: bool
) -> Record[CellT, ResultT]:
    """The stored record if it can be continued, else a new one."""
    facts = {**(_machine_facts() if study.is_timing_study else {}), **study.facts()}
    record: Record[CellT, ResultT] = Record(study.name, {}, facts)
    if path.exists() and not fresh:
        record = read_record(type(study), path)
        check_continues(record, None if study.keeps_other_cells else set(plan), facts, path)
        record.facts = {**record.facts, **facts}
    record.options = asdict(study.options)
    return record


def _refresh(study: Study[Any, CellT, ResultT], record: Record[CellT, ResultT]) -> bool:
    """Refresh all stored results; whether one has changed."""
    changed = False
    for cell, stored in record.cells.items():
        result = study.refresh(cell, stored.result)
        record.cells[cell] = replace(stored, result=result)
        changed |= result != stored.result
    return changed


def _machine_facts() -> dict[str, Fact]:
    """Times measured on different machines, or with different numbers of threads, do not belong in one record."""
    return {"processor": processor_name(), "cores": os.cpu_count() or 1, "threads": torch.get_num_threads()}


def describe(cell: object) -> str:
    """A cell in a few words: what its class says, or else its values without empty ones."""
    if type(cell).__str__ is not object.__str__:
        return str(cell)
    values = asdict(cell).values()  # type: ignore[call-overload]
    return " ".join(str(value) for value in values if value not in (None, ""))


def _one_by_one(study: Study[Any, CellT, ResultT], cells: Sequence[CellT]) -> Iterator[tuple[CellT, ResultT, float]]:
    for cell in cells:
        yield cell, *_timed(study, cell)


def _in_parallel(
    study: Study[Any, CellT, ResultT], cells: Sequence[CellT], threads: int, jobs: int
) -> Iterator[tuple[CellT, ResultT, float]]:
    """Yield cells in the order in which they finish.

    If a cell fails, those that are already being measured are finished first; then the error is raised. Any other end,
    such as Ctrl-C, stops the workers.
    """
    context = _WorkerContext()
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
                "a worker of the study was killed, perhaps because the system ran out of memory; run the same command "
                "again (without --fresh) to resume, with fewer --jobs if it happens again"
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in context.workers:
                worker.terminate()


class _WorkerContext(SpawnContext):
    """Starts processes and remembers them, so that only these are stopped later, and no other child of the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.workers: list[SpawnProcess] = []

    def Process(self, *args: Any, **kwargs: Any) -> SpawnProcess:  # type: ignore[override]  # noqa: N802
        self.workers.append(SpawnProcess(*args, **kwargs))
        return self.workers[-1]


def _start_worker(threads: int) -> None:
    end_with_parent()
    torch.set_num_threads(threads)


@cache
def _study_of(study: StudyClass, options: Any) -> Study[Any, Any, Any]:
    """A worker keeps its study, with the data that it has loaded."""
    return study(options)


def _measure(study: StudyClass, options: Any, cell: Any) -> tuple[Any, float]:
    return _timed(_study_of(study, options), cell)


def _timed(study: Study[Any, CellT, ResultT], cell: CellT) -> tuple[ResultT, float]:
    start = time.perf_counter()
    try:
        result = study.measure(cell)
    except (RuntimeError, MemoryError) as error:
        if not is_oom_error(repr(error)):
            raise
        raise TrainingError(
            f"{study.name} ran out of memory at {describe(cell)}; earlier results are saved. Use shorter lengths, "
            "fewer examples or fewer --jobs"
        ) from error
    return result, time.perf_counter() - start
