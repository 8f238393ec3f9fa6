"""Long Range Arena at the paper's lengths (Table 1, Figures 2 and 4): a record of runs that were trained elsewhere.

Such runs take hours to days, so this study does not train: `skyformer sweep` does, in as many sessions and on as many
machines as needed, and this study collects what there is, finished or not. Every cell is one run at the step that
it has reached. Collecting again adds runs, and runs that have advanced; it never loses a run that is no longer there.

The time axis is that of an idle machine: the step times the seconds per step from a record of the study `efficiency`,
with batches of similar lengths. So it does not matter what else a machine did while it trained. The record that was
named last counts for all runs, also for those collected before.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from skyformer.errors import DataError
from skyformer.report.figures import Figure, Mark, Panel, Series
from skyformer.report.paper import ACCURACY, CURVE_STEPS, CURVES, TASK_TITLES, tasks_among
from skyformer.report.tables import NOTHING, Table, number
from skyformer.studies.accuracy import thinned
from skyformer.studies.base import Fact, Study, option
from skyformer.studies.frames import in_order
from skyformer.studies.record import read_record, significant
from skyformer.studies.registry import register_study

if TYPE_CHECKING:
    from pandas import DataFrame

    from skyformer.training.runs import Run

EVALUATIONS = 5
"""The table of evaluations has about this many columns."""


@dataclass(frozen=True)
class Options:
    runs_dir: str = option("runs", small="studies/small/accuracy/runs", help="Folder of the runs, or of such folders.")
    preset: str = option("paper", small="study", help="Runs of this preset are collected.")
    efficiency: str | None = option(
        None, help="Record of `skyformer study efficiency`, from which the seconds per step are taken."
    )


@dataclass(frozen=True)
class Cell:
    """A run, named with a digest of its settings, at the step that it has reached; `data` is a digest of its data."""

    task: str
    attention: str
    seed: int
    run: str
    data: str
    step: int
    finished: bool


@dataclass(frozen=True)
class Result:
    """A run so far. `steps` is the step at which it ends and `schedule` that at which its learning rate is zero. The
    points of dev_curve are (step, accuracy, loss), those of train_curve (step, loss). `idle_seconds` is the time of a
    step on an idle machine, None if it was not measured, and `idle_settings` says how it was measured. Test accuracy is
    None unless the run is finished."""

    steps: int
    schedule: int
    length: int
    batch_size: int
    changes: tuple[str, ...]
    test_accuracy: float | None
    test_examples: int | None
    best_step: int | None
    dev_curve: tuple[tuple[float | None, ...], ...]
    train_curve: tuple[tuple[float | None, ...], ...]
    idle_seconds: float | None
    threads: int
    processor: str
    commit: str | None
    idle_settings: str | None = None

    def dev_accuracy(self, step: float | None = None) -> float | None:
        """The accuracy of the evaluation at a step, or of the last one."""
        found = [point[1] for point in self.dev_curve if step is None or point[0] == step]
        return found[-1] if found else None


@register_study
class Arena(Study[Options, Cell, Result]):
    name = "arena"
    title = "Accuracy on Long Range Arena at the paper's lengths (Table 1, Figures 2 and 4)"
    keeps_other_cells = True
    no_cells = "--runs-dir has no run of the preset that has logged a step"

    def facts(self) -> Mapping[str, Fact]:
        return {"preset": self.options.preset}

    def cells(self) -> Sequence[Cell]:
        found = []
        for run in self._runs():
            config = run.config
            of_preset = config.preset == self.options.preset and config.task.own is None
            if of_preset and (step := _last_step(run)):
                where = (config.task.name, config.model.attention, config.seed)
                found.append(Cell(*where, run.name, _digest(run), step, run.finished))
        return found

    def measure(self, cell: Cell) -> Result:
        # Two folders may have runs of the same name, on other data or at an earlier step.
        run = next(
            run for run in self._runs() if (run.name, _digest(run)) == (cell.run, cell.data) and _reaches(run, cell)
        )
        return self.refresh(cell, _read(run, cell))

    def refresh(self, cell: Cell, result: Result) -> Result:
        """With the seconds per step of the record that the options name, if they name one."""
        if self.options.efficiency is None:
            return result
        seconds, settings = self._idle
        known = cell.task in seconds.columns and cell.attention in seconds.index
        found = float(seconds.loc[cell.attention, cell.task]) if known else float("nan")
        measured = None if found != found else significant(found)
        return replace(result, idle_seconds=measured, idle_settings=None if measured is None else settings)

    @cached_property
    def _idle(self) -> tuple[DataFrame, str]:
        """Seconds per step by attention and task, from the record of efficiency; and its preset and threads."""
        from skyformer.studies.efficiency import SIMILAR, Costs, Efficiency

        record = read_record(Efficiency, Path(self.options.efficiency or ""))
        settings = f"preset {record.facts.get('preset')}, threads: {record.facts.get('threads')}"
        return Costs(record.results(), SIMILAR).ours("seconds"), settings

    def _runs(self) -> list[Run]:
        """The runs in the folder, and in the folders in it."""
        from skyformer.training.runs import list_runs

        folder = Path(self.options.runs_dir)
        if not folder.is_dir():
            raise DataError(f"--runs-dir must be a folder of runs; there is none at {folder}")
        inner = [each for each in sorted(folder.iterdir()) if each.is_dir() and not each.name.startswith(".")]
        return [run for each in (folder, *inner) for run in list_runs(each)]

    @classmethod
    def tables(cls, results: Mapping[Cell, Result]) -> Sequence[Table]:
        runs = one_per_seed(latest(results))
        by_step = [_evaluation_table(runs, task) for task in tasks_among(runs)]
        return [_accuracy_table(runs), *by_step, _run_table(latest(results))]

    @classmethod
    def figures(cls, results: Mapping[Cell, Result]) -> Sequence[Figure]:
        runs, time = one_per_seed(latest(results)), "training time on an idle machine (hours)"
        drawn = [
            _curves(runs, "figure", "Accuracy on the dev set", time, 1, "accuracy (%)", 100, timed=True),
            _curves(runs, "loss", "Loss on the dev set", time, 2, "cross entropy", 1, timed=True),
            _curves(runs, "steps", "Accuracy on the dev set", "step", 1, "accuracy (%)", 100),
            _paper_figure(runs),
        ]
        return [figure for figure in drawn if figure.panels]


def _last_step(run: Run) -> int:
    """The last step with a row of metrics; 0 before the first."""
    return max((row.step for row in run.metrics()), default=0)


def _digest(run: Run) -> str:
    """A digest of the run's data."""
    return "unknown" if run.data is None else run.data.digest()


def _reaches(run: Run, cell: Cell) -> bool:
    """Whether the run has come as far as its cell says; it may have gone on since."""
    return _last_step(run) >= cell.step and run.finished >= cell.finished


def _read(run: Run, cell: Cell) -> Result:
    """The run up to the step of its cell."""
    from skyformer.training.collect import changes_to_preset

    config, environment = run.config, run.environment
    result = run.result if cell.finished else None
    rows = [row for row in run.metrics() if row.step <= cell.step]
    return Result(
        steps=config.loop.last_step,
        schedule=config.loop.steps,
        length=config.task.longest,
        batch_size=config.loop.batch_size * config.loop.accumulate,
        changes=tuple(changes_to_preset(config)),
        test_accuracy=None if result is None else significant(result.test_accuracy),
        test_examples=None if result is None else result.test_examples,
        best_step=None if result is None else result.best_step,
        dev_curve=tuple(
            (row.step, significant(row.accuracy), significant(row.loss)) for row in rows if row.split == "dev"
        ),
        train_curve=tuple(
            (row.step, significant(row.loss)) for row in thinned([row for row in rows if row.split == "train"])
        ),
        idle_seconds=None,
        threads=environment.threads,
        processor=environment.cpu,
        commit=environment.commit,
    )


def latest(results: Mapping[Cell, Result]) -> dict[Cell, Result]:
    """Every run once: as it was collected last."""
    furthest: dict[tuple[str, str], Cell] = {}
    for cell in results:
        key = (cell.run, cell.data)
        if key not in furthest or (cell.step, cell.finished) > (furthest[key].step, furthest[key].finished):
            furthest[key] = cell
    places = {name: place for place, name in enumerate(_attentions(results))}
    tasks = list(TASK_TITLES)
    ordered = sorted(
        furthest.values(), key=lambda cell: (tasks.index(cell.task), places[cell.attention], cell.seed, cell.run)
    )
    return {cell: results[cell] for cell in ordered}


def one_per_seed(runs: Mapping[Cell, Result]) -> dict[Cell, Result]:
    """One run for each task, attention and seed, so that no seed counts twice in a mean: of runs with different
    settings or data those with the longest sequences, schedule and training, so that a short trial does not count, and
    of these a finished one if there is one, and else the one that has gone furthest."""
    chosen: dict[tuple[str, str, int], Cell] = {}

    def place(cell: Cell) -> tuple[int, ...]:
        run = runs[cell]
        return run.length, run.schedule, run.steps, cell.finished, cell.step

    for cell in sorted(runs, key=place):
        chosen[cell.task, cell.attention, cell.seed] = cell
    return {cell: run for cell, run in runs.items() if cell in chosen.values()}


def _of(runs: Mapping[Cell, Result], task: str, attention: str) -> dict[Cell, Result]:
    return {cell: run for cell, run in runs.items() if (cell.task, cell.attention) == (task, attention)}


def _attentions(runs: Mapping[Cell, Result]) -> list[str]:
    return in_order((cell.attention for cell in runs), ACCURACY)


def _accuracy_table(runs: Mapping[Cell, Result]) -> Table:
    """The layout of Table 1: one row per attention, ours and the paper's for each task."""
    tasks, rows = tasks_among(runs), []
    for name in in_order((*ACCURACY, *_attentions(runs)), ACCURACY):
        cells = [name]
        for task in tasks:
            papers = f"{ACCURACY[name].on(task):.2f}" if name in ACCURACY else NOTHING
            cells += [_accuracy(_of(runs, task, name)), papers]
        rows.append(cells)
    note = (
        "Ours: the test accuracy of finished runs, mean and standard deviation over seeds if there are several. In "
        "brackets: the dev accuracy of runs that are not finished, at the last step that was evaluated. No seed counts "
        "twice. The paper's: runs of 50,000 steps, mean of three seeds; on Text its dev set is the test set."
    )
    groups = [("", 1), *((TASK_TITLES[task], 2) for task in tasks)]
    return Table("Accuracy in percent", ["attention", *["ours", "paper"] * len(tasks)], rows, note, groups)


def _accuracy(runs: Mapping[Cell, Result]) -> str:
    tests = [100 * run.test_accuracy for run in runs.values() if run.test_accuracy is not None]
    spread = f" ± {statistics.stdev(tests):.2f}" if len(tests) > 1 else ""
    parts = [f"{statistics.mean(tests):.2f}{spread}"] if tests else []
    for cell, run in runs.items():
        last = run.dev_accuracy()
        if run.test_accuracy is None and last is not None:
            parts.append(f"(seed {cell.seed}: {100 * last:.1f} at {run.dev_curve[-1][0]:,})")
    return ", ".join(parts) or NOTHING


def _evaluation_table(runs: Mapping[Cell, Result], task: str) -> Table:
    """Dev accuracy by step, the mean over seeds."""
    here = {cell: run for cell, run in runs.items() if cell.task == task}
    steps = sorted({int(point[0] or 0) for run in here.values() for point in run.dev_curve})
    shown = steps if len(steps) <= 2 * EVALUATIONS else steps[:: len(steps) // EVALUATIONS]
    rows = []
    for name in _attentions(here):
        cells = []
        for step in shown:
            found = [run.dev_accuracy(step) for run in _of(here, task, name).values()]
            values = [100 * value for value in found if value is not None]
            count = f" ({len(values)} seeds)" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.1f}{count}" if values else NOTHING)
        if any(cell != NOTHING for cell in cells):
            rows.append([name, *cells])
    return Table(f"{TASK_TITLES[task]}: accuracy on the dev set in percent", ["step", *map("{:,}".format, shown)], rows)


def _run_table(runs: Mapping[Cell, Result]) -> Table:
    rows = []
    for cell, run in runs.items():
        accuracies = [run.dev_accuracy(), run.test_accuracy]
        rows.append(
            [
                TASK_TITLES[cell.task],
                cell.attention,
                str(cell.seed),
                f"{cell.step:,} of {run.steps:,}",
                "finished" if cell.finished else "not finished",
                *(NOTHING if value is None else f"{100 * value:.2f}" for value in accuracies),
                NOTHING if run.best_step is None else f"{run.best_step:,}",
                number(run.idle_seconds),
                f"{run.length:,}",
                cell.data,
                ", ".join(run.changes) or NOTHING,
            ]
        )
    header = ["task", "attention", "seed", "steps", "state", "dev %", "test %", "best step", "s per step", "length"]
    settings = "; ".join(dict.fromkeys(run.idle_settings for run in runs.values() if run.idle_settings))
    note = (
        "dev: at the last evaluation. best step: the model that was tested. s per step: on an idle machine, from the "
        f"record of efficiency ({settings or 'none was given'}). data: a digest of the prepared data."
    )
    return Table("All runs", [*header, "data", "changes to the preset"], rows, note)


def _curves(
    runs: Mapping[Cell, Result],
    name: str,
    title: str,
    x_label: str,
    y: int,
    y_label: str,
    scale: float,
    timed: bool = False,
) -> Figure:
    """One panel per task, one line per attention: the mean over seeds, with their range."""
    panels = []
    for task in tasks_among(runs):
        lines = []
        for attention in _attentions(runs):
            of = _of(runs, task, attention)
            idle = next((run.idle_seconds for run in of.values() if run.idle_seconds is not None), None)
            line = _line(attention, of, y, scale)
            if line is None or (timed and idle is None):
                continue
            lines.append(replace(line, x=[(step or 0.0) * (idle or 0.0) / 3600 for step in line.x]) if timed else line)
        if lines:
            panels.append(Panel(TASK_TITLES[task], x_label, y_label, lines))
    return Figure(name, f"{title}, at the paper's lengths", panels)


def _line(label: str, runs: Mapping[Cell, Result], y: int, scale: float) -> Series | None:
    """A column of the dev curves by step: the mean over seeds, with their range."""
    by_step: dict[float, list[float]] = {}
    for run in runs.values():
        for point in run.dev_curve:
            if point[0] is not None and point[y] is not None:
                by_step.setdefault(point[0], []).append(scale * (point[y] or 0.0))
    if not by_step:
        return None
    steps = sorted(by_step)
    spread = [(statistics.mean(by_step[step]), min(by_step[step]), max(by_step[step])) for step in steps]
    means, low, high = zip(*spread, strict=True)
    return Series(label, steps, means, low, high)


def _paper_figure(runs: Mapping[Cell, Result]) -> Figure:
    """Ours over the paper's Figure 2: one panel per attention and task of which both have a curve."""
    panels = []
    for task in tasks_among(runs):
        for attention, papers in CURVES.get(task, {}).items():
            if line := _line(attention, _of(runs, task, attention), 1, 100):
                both = [line, Series("the paper", CURVE_STEPS, papers, mark=Mark.DASHED)]
                panels.append(Panel(f"{TASK_TITLES[task]}, {attention}", "step", "accuracy (%)", both))
    note = (
        "Ours: mean and range over seeds, dev set. The paper's: one run, read off its plot; on Text its dev set is the "
        "test set."
    )
    return Figure("paper", "Accuracy by step: ours and the paper's Figure 2", panels, note=note, same_y=True)
