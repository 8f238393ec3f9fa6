"""The demo: train some attentions on short ListOps and compare accuracy, time and memory."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from skyformer.errors import TrainingError
from skyformer.files import dump_json, write_atomic
from skyformer.lra.dataset import Task, load_task
from skyformer.lra.preparation import prepare
from skyformer.lra.tasks import Split
from skyformer.report.figures import Figure, Mark, Panel, Series, draw_figure
from skyformer.report.progress import Progress
from skyformer.report.tables import Table, duration, percent
from skyformer.training.config import RunConfig
from skyformer.training.metrics import MetricRow
from skyformer.training.runs import Run, RunResult
from skyformer.training.sweeps import plan, run_of, sweep

TASK, PRESET = "listops", "short"
FASTER_FROM = 1024
"""Sequence length from which Skyformer is faster than softmax attention."""


@dataclass(frozen=True)
class DemoRun:
    """A finished run with its result, its evaluations on the dev set and the time per step."""

    run: Run
    result: RunResult
    curve: tuple[MetricRow, ...]
    milliseconds_per_step: float

    @classmethod
    def of(cls, run: Run) -> DemoRun:
        assert run.result is not None
        rows = run.metrics()
        seconds = typical_step(rows) or 1 / run.result.steps_per_second
        return cls(run, run.result, tuple(row for row in rows if row.split == Split.DEV), 1000 * seconds)

    @property
    def megabytes(self) -> float:
        return (self.result.peak_memory_bytes or 0) / 1e6


@dataclass(frozen=True)
class Comparison:
    """Runs that differ only in the attention; `chance` is the share of the most common label in the test set."""

    runs: tuple[DemoRun, ...]
    chance: float
    longest: int

    @property
    def note(self) -> str:
        return self.runs[0].result.note

    def table(self) -> Table:
        """One row per attention, and one for chance."""
        header = ["attention", "test accuracy %", "dev accuracy %", "ms per step", "peak memory MB", "total time"]
        rows = [_cells(run) for run in self.runs]
        rows.append(["(chance)", percent(self.chance), "", "", "", ""])
        return Table("", header, rows, "\n".join([self._verdict(), *self._at_this_length(), self.note]))

    def _verdict(self) -> str:
        """The first attention compared with the last."""
        ours, theirs = self.runs[0], self.runs[-1]
        return (
            f"{ours.result.attention} took {ours.milliseconds_per_step / theirs.milliseconds_per_step:.2f}x the time "
            f"per step and {ours.megabytes / theirs.megabytes:.2f}x the memory of {theirs.result.attention}."
        )

    def _at_this_length(self) -> list[str]:
        if self.longest >= FASTER_FROM or "skyformer" not in {run.result.attention for run in self.runs}:
            return []
        return [
            f"Sequences of up to {self.longest} tokens are short: softmax attention is cheap here. Skyformer is faster "
            f"from about {FASTER_FROM:,} tokens; measure it on this machine with: skyformer bench attention"
        ]

    def write(self, command: str, folder: Path) -> list[Path]:
        """Write demo.json and the figure; returns the files."""
        content = {
            "command": command,
            "environment": asdict(self.runs[0].run.environment),
            "note": self.note,
            "chance": self.chance,
            "runs": [_record(run) for run in self.runs],
        }
        file = folder / "demo.json"
        write_atomic(file, dump_json(content))
        return [file, *draw_figure(self._figure(), folder)]

    def _figure(self) -> Figure:
        curves = [_accuracy_series(run) for run in self.runs]
        end = max(x for series in curves for x in series.x)
        chance = Series("chance", [0, end], [100 * self.chance] * 2, mark=Mark.DASHED)
        panels = [
            Panel("accuracy", "training time (s)", "dev accuracy (%)", [*curves, chance]),
            self._bars("time per step", "ms", [run.milliseconds_per_step for run in self.runs]),
            self._bars("peak memory", "MB", [run.megabytes for run in self.runs]),
        ]
        return Figure("demo", f"short ListOps; {self.note}", panels)

    def _bars(self, title: str, unit: str, values: Sequence[float]) -> Panel:
        names = [run.result.attention for run in self.runs]
        bars = [Series(name, [x], [y], mark=Mark.BARS) for x, (name, y) in enumerate(zip(names, values, strict=True))]
        return Panel(title, "", unit, bars)


def _cells(run: DemoRun) -> list[str]:
    result = run.result
    accuracies = [percent(result.test_accuracy), percent(result.dev_accuracy)]
    costs = [f"{run.milliseconds_per_step:.1f}", f"{run.megabytes:,.0f}", duration(result.seconds)]
    return [result.attention, *accuracies, *costs]


def _record(run: DemoRun) -> dict[str, Any]:
    curve = [asdict(row) for row in run.curve]
    numbers = {"milliseconds_per_step": run.milliseconds_per_step, "dev_curve": curve}
    return {**run.result.model_dump(mode="json"), **numbers}


def _accuracy_series(run: DemoRun) -> Series:
    return Series(run.result.attention, [row.seconds for row in run.curve], [100 * row.accuracy for row in run.curve])


def typical_step(rows: Sequence[MetricRow]) -> float | None:
    """Seconds per step: the median between two log points, so that a pause of the machine does not count.

    Evaluations are log points too, so their time does not count either. None if there is no log point of training.
    """
    intervals, step, seconds = [], 0, 0.0
    for row in rows:
        if row.split == Split.TRAIN and row.step > step:
            intervals.append((row.seconds - seconds) / (row.step - step))
        step, seconds = row.step, row.seconds
    return statistics.median(intervals) if intervals else None


def plan_demo(attentions: Sequence[str], steps: int | None, seed: int, overrides: Sequence[str]) -> list[RunConfig]:
    """The configs of the demo; another number of steps keeps the warm-up at a tenth of them."""
    warmup = [] if steps is None else [f"optim.warmup_steps={max(1, steps // 10)}"]
    return plan([TASK], attentions, [seed], PRESET, [*warmup, *overrides], steps)


def run_demo(configs: Sequence[RunConfig], output: Path, progress: Progress | None = None) -> Comparison:
    """Prepare the data in `output`/data, train in `output`/runs what is not trained yet, and compare.

    Args:
        configs: from `plan_demo`.
    """
    data_dir, runs_dir = output / "data", output / "runs"
    task = _prepare(configs[0], data_dir)
    for outcome in sweep(configs, runs_dir=runs_dir, data_dir=data_dir, progress=progress):
        if outcome.result is None:
            raise TrainingError(f"{outcome.config.run_name()} {outcome}")
    counts = task.manifest.splits[Split.TEST].label_counts
    runs = tuple(DemoRun.of(run_of(config, runs_dir)) for config in configs)
    return Comparison(runs, max(counts) / sum(counts), configs[0].task.longest)


def _prepare(config: RunConfig, data_dir: Path) -> Task:
    name, seed, limit, length = config.task.name, config.task.data_seed, config.task.limit, config.task.max_length
    prepare(name, data_dir=data_dir, seed=seed, limit=limit, max_length=length)
    return load_task(name, data_dir, seed=seed, limit=limit, max_length=length)
