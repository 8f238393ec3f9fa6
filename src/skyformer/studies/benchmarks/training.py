"""Training steps per second of whole runs of `skyformer.training.train`.

- overhead: `train` on ListOps with the `cpu` preset, against a bare loop of the same model on the same batches. The two
  take their steps alternately, and their losses must agree.
- text: the paper's preset on the prepared Text task, Skyformer against softmax attention on the same batches: of
  similar lengths, and padded to the longest. Runs alternate, round by round. A step lasts until the next one starts, so
  it includes data, logging and progress.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from skyformer.errors import SkyformerError
from skyformer.report.tables import Table, number
from skyformer.studies.base import Fact, Study, check_names, option
from skyformer.studies.benchmarks.timing import rounded, seconds_of
from skyformer.studies.registry import register_benchmark
from skyformer.studies.targets import Target, at_least

if TYPE_CHECKING:
    from skyformer.training.config import RunConfig

OVERHEAD, TEXT, LOADING = "overhead", "text", "loading"
PARTS = (OVERHEAD, TEXT)
WARM_UP = 2
LISTOPS_EXAMPLES = 2000
LOSS_TOLERANCE = 1e-4
LARGEST_OVERHEAD, LARGEST_LOADING_SHARE = 0.05, 0.05
LEAST_SPEED_UP = {"similar lengths": 2.0, "padded": 4.0}


@dataclass(frozen=True)
class Options:
    parts: tuple[str, ...] = option(PARTS, small=(OVERHEAD,), help="What to measure: overhead, text.")
    steps: int = option(12, least=1, help="Timed steps of each run on Text, after the warm-up.")
    rounds: int = option(3, least=1, help="Runs on Text for each attention.")
    overhead_steps: int = option(100, small=10, least=1, help="Timed steps on ListOps, after the warm-up.")
    data_dir: str | None = option(None, help="Folder of the prepared Text task.")


@dataclass(frozen=True)
class Cell:
    part: str
    batches: str = ""
    attention: str = ""
    round: int = 0


@dataclass(frozen=True)
class Result:
    """Seconds of each step, or of loading each batch; bare_seconds: those of the bare loop."""

    seconds: tuple[float, ...]
    bare_seconds: tuple[float, ...] = ()


@register_benchmark
class TrainingBenchmark(Study[Options, Cell, Result]):
    name = "training"
    title = "Training steps per second of whole runs"
    is_timing_study = True

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        check_names("part", options.parts, PARTS)

    def facts(self) -> Mapping[str, Fact]:
        return {"steps": self.options.steps, "overhead steps": self.options.overhead_steps}

    def cells(self) -> Sequence[Cell]:
        overhead = [Cell(OVERHEAD)] if OVERHEAD in self.options.parts else []
        runs = [
            Cell(TEXT, batches, attention, number)
            for batches in LEAST_SPEED_UP
            for number in range(self.options.rounds)
            for attention in ("skyformer", "softmax")
        ]
        loading = [Cell(LOADING, batches, "skyformer") for batches in LEAST_SPEED_UP]
        return [*overhead, *([*runs, *loading] if TEXT in self.options.parts else [])]

    def measure(self, cell: Cell) -> Result:
        if cell.part == OVERHEAD:
            return _measure_overhead(self.options.overhead_steps)
        config = _text_config(cell)
        if cell.part == LOADING:
            return Result(_time_loading(config, self.options.data_dir, self.options.steps))
        return Result(_time_run(config, self.options.data_dir, self.options.steps))

    @classmethod
    def targets(cls, results: Mapping[Cell, Result]) -> Sequence[Target]:
        overhead = results.get(Cell(OVERHEAD))
        found = [] if overhead is None else [_overhead_target(overhead)]
        for batches, least in LEAST_SPEED_UP.items():
            ours, softmax = (_all_seconds(results, batches, name) for name in ("skyformer", "softmax"))
            loading = results.get(Cell(LOADING, batches, "skyformer"))
            if ours and softmax:
                ratio = (len(ours) / sum(ours)) / (len(softmax) / sum(softmax))
                what = f"Text, {batches}: steps per second of skyformer / softmax"
                found.append(at_least(what, ratio, least))
            if ours and loading is not None:
                share = statistics.mean(loading.seconds) / statistics.mean(ours)
                what = f"Text, {batches}: share of a Skyformer step spent loading data"
                found.append(_share_target(what, share, LARGEST_LOADING_SHARE))
        return found

    @classmethod
    def tables(cls, results: Mapping[Cell, Result]) -> Sequence[Table]:
        rows = [
            [cell.part, cell.batches, cell.attention, str(cell.round), number(1 / statistics.mean(result.seconds))]
            for cell, result in results.items()
        ]
        return [Table("Steps, or loaded batches, per second", ["part", "batches", "attention", "round", "/s"], rows)]


def _all_seconds(results: Mapping[Cell, Result], batches: str, attention: str) -> list[float]:
    """The seconds of every step on Text, over all rounds."""
    chosen = [r for c, r in results.items() if (c.part, c.batches, c.attention) == (TEXT, batches, attention)]
    return [seconds for result in chosen for seconds in result.seconds]


def _share_target(what: str, share: float, limit: float) -> Target:
    return Target(what, f"at most {limit:.0%}", f"{share:.2%}", share <= limit)


def _overhead_target(result: Result) -> Target:
    """Compared step by step, because the two steps of a pair do the same work at the same time."""
    bare = statistics.median(result.bare_seconds)
    added = statistics.median(one - other for one, other in zip(result.seconds, result.bare_seconds, strict=True))
    what = f"overhead of train() on a step of {1e3 * bare:.0f} ms"
    return _share_target(what, added / bare, LARGEST_OVERHEAD)


def _measure_overhead(steps: int) -> Result:
    from skyformer.studies.tasks import batches_of, study_data
    from skyformer.training.building import Trainee

    config = _overhead_config(steps)
    with tempfile.TemporaryDirectory() as folder:
        batches = batches_of(study_data(config, folder), config)
        trainee, bare = Trainee(config), []

        def bare_step(loss_of_run: float) -> None:
            losses = []
            bare.append(seconds_of(lambda: losses.append(trainee.step(next(batches)))))
            if not abs(losses[0] - loss_of_run) <= LOSS_TOLERANCE:
                raise SkyformerError(f"the two loops do not train the same: losses {losses[0]} and {loss_of_run}")

        seconds = _time_run(config, folder, steps, bare_step)
    return Result(seconds, rounded(bare[WARM_UP:]))


def _overhead_config(steps: int) -> RunConfig:
    """Saves and logs more often than the preset, so that the measurement includes both."""
    often = {"loop_checkpoint_every": max(1, steps // 2), "loop_log_every": 10}
    return _config("listops", "cpu", "skyformer", LISTOPS_EXAMPLES, **often)


def _text_config(cell: Cell) -> RunConfig:
    return _config("text", "paper_v1", cell.attention, loop_pad_to_max=str(cell.batches == "padded").lower())


def _config(task: str, preset: str, attention: str, limit: int | None = None, **settings: object) -> RunConfig:
    from skyformer.studies.tasks import run_config

    hardware = {"hardware_accelerator": "cpu", "hardware_threads": torch.get_num_threads()}
    return run_config(task, preset, attention, 0, limit, **settings, **hardware)


class _Enough(Exception):  # noqa: N818
    """Ends a run when all steps are timed."""


def _time_run(
    config: RunConfig, data_dir: str | None, steps: int, between: Callable[[float], None] = lambda loss: None
) -> tuple[float, ...]:
    """Train for `steps` steps after the warm-up; returns the seconds from each step's start to that of the next.

    `between` is called between two steps with the loss of the first; its own time is not counted.
    """
    from skyformer.training import train

    clock: Any = _step_clock(WARM_UP + steps, between)
    with tempfile.TemporaryDirectory() as runs:
        try:
            train(config, runs_dir=runs, data_dir=data_dir, callbacks=[clock])
        except _Enough:
            return rounded(clock.seconds[WARM_UP:])
    raise SkyformerError(f"the run ended after {len(clock.seconds)} steps; use fewer --steps")


def _step_clock(steps: int, between: Callable[[float], None]) -> Any:
    from lightning.pytorch.callbacks import Callback

    class StepClock(Callback):
        def __init__(self) -> None:
            self.seconds: list[float] = []
            self.start: float | None = None

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if self.start is not None:
                self.seconds.append(time.perf_counter() - self.start)
                between(float(pl_module.parts[-1].loss))
                if len(self.seconds) == steps:
                    raise _Enough
            self.start = time.perf_counter()

    return StepClock()


def _time_loading(config: RunConfig, data_dir: str | None, steps: int) -> tuple[float, ...]:
    """Seconds until each of the batches of these steps is loaded."""
    from skyformer.studies.tasks import batches_of, study_data

    batches = batches_of(study_data(config, data_dir), config)
    return rounded([seconds_of(lambda: next(batches)) for _ in range(WARM_UP + steps)][WARM_UP:])
