"""Training steps of Skyformer and the other approximations on Long Range Arena, interleaved in one process.

The study of efficiency measures each attention in a process of its own, minutes apart, and a shared machine changes its
speed by more than these attentions differ. Here all of them take the same step directly after each other, in random
order, at the paper's settings and on the batches of that study. Freed memory is returned to the system before each
step, because memory that the previous step left in the heap would make the next one faster. Needs the prepared tasks,
Pathfinder with --limit 3000.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skyformer.errors import TrainingError
from skyformer.lra.tasks import TASKS
from skyformer.processes import release_free_memory
from skyformer.report.paper import TASK_TITLES
from skyformer.report.tables import Table, number
from skyformer.studies.base import Study, check_names, option
from skyformer.studies.benchmarks.timing import StepTimes, Times, interleave, rounded, seconds_of
from skyformer.studies.efficiency import FASTER_BY, choose_batches, kinds_of
from skyformer.studies.registry import register_benchmark
from skyformer.studies.targets import Target, at_most

if TYPE_CHECKING:
    from skyformer.lra.batching import Batch
    from skyformer.training.building import Trainee

SEED = 0
OURS = "skyformer"
ATTENTIONS = (OURS, "nystromformer", "linformer", "informer", "performer", "reformer", "bigbird")


@dataclass(frozen=True)
class Options:
    tasks: tuple[str, ...] = option(tuple(TASK_TITLES), small=("listops",), help="Tasks of Long Range Arena.")
    repeats: int = option(5, small=2, least=1, help="Repetitions of each step.")
    pathfinder_limit: int = option(3000, least=1, help="Pathfinder images per split, as prepared with --limit.")
    listops_limit: int | None = option(None, small=1000, help="ListOps examples per split; generated if missing.")
    data_dir: str | None = option(None, help="Folder of the prepared data.")


@dataclass(frozen=True)
class Cell:
    task: str
    batches: str
    limit: int | None
    repeats: int


@register_benchmark
class InterleavedSteps(Study[Options, Cell, Times]):
    name = "interleaved-steps"
    title = "Training steps on Long Range Arena, interleaved in one process"
    is_timing_study, default_threads = True, 2

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        check_names("task", options.tasks, TASKS)

    def cells(self) -> Sequence[Cell]:
        limits = {"pathfinder": self.options.pathfinder_limit, "listops": self.options.listops_limit}
        return [
            Cell(task, kind, limits.get(task), self.options.repeats)
            for task in self.options.tasks
            for kind in kinds_of(task)
        ]

    def measure(self, cell: Cell) -> Times:
        """Time every attention on every batch; the first batch is for the warm-up."""
        from skyformer.studies.tasks import run_config, study_data
        from skyformer.training.building import Trainee

        configs = {name: run_config(cell.task, "paper", name, SEED, cell.limit) for name in ATTENTIONS}
        data = study_data(configs[OURS], self.options.data_dir)
        warm_up, *batches = choose_batches(data, configs[OURS], cell.batches)
        trainees = {name: Trainee(config) for name, config in configs.items()}
        for name, trainee in trainees.items():
            _checked_step(name, trainee, warm_up)
        seconds: dict[str, list[tuple[float, ...]]] = {name: [] for name in trainees}
        for number_of_batch, batch in enumerate(batches):
            runs = {name: _timed_step(name, trainee, batch) for name, trainee in trainees.items()}
            times = interleave(runs, cell.repeats, before=release_free_memory, seed=number_of_batch)
            for name, taken in times.items():
                seconds[name].append(rounded(taken))
        return Times(tuple(StepTimes(name, tuple(taken)) for name, taken in seconds.items()))

    @classmethod
    def targets(cls, results: Mapping[Cell, Times]) -> Sequence[Target]:
        """Skyformer compared with the fastest of the others."""
        found = []
        for cell, times in results.items():
            others = [row for row in times.rows if row.attention != OURS]
            fastest = min(others, key=StepTimes.typical).attention
            what = f"{TASK_TITLES[cell.task]}, batches {cell.batches}: time of {OURS} / {fastest}"
            found.append(at_most(what, times.ratio(OURS, fastest), FASTER_BY))
        return found

    @classmethod
    def tables(cls, results: Mapping[Cell, Times]) -> Sequence[Table]:
        rows = [
            [TASK_TITLES[cell.task], cell.batches, *(number(each.typical()) for each in times.rows)]
            for cell, times in results.items()
        ]
        return [Table("Seconds per training step", ["task", "batches", *ATTENTIONS], rows)]


def _timed_step(name: str, trainee: Trainee, batch: Batch) -> Callable[[], float]:
    return lambda: seconds_of(lambda: _checked_step(name, trainee, batch))


def _checked_step(name: str, trainee: Trainee, batch: Batch) -> None:
    loss = trainee.step(batch)
    if not math.isfinite(loss):
        raise TrainingError(f"the loss of {name} is {loss}; steps that do not train are not timed")
