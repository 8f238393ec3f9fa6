"""How well the nine attentions learn Long Range Arena (Table 1, Figures 2 and 4), with any training budget.

Each cell is one run of `skyformer train` with a preset that is the same for all attentions. An interrupted run is
resumed, and a finished one is read instead of trained again. A run that stays at chance, or whose loss becomes NaN or
infinite, is reported like any other.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from skyformer.attention import list_attentions
from skyformer.errors import DataError, DivergedError
from skyformer.report.figures import Figure, Panel, Series
from skyformer.report.paper import ACCURACY, TASK_TITLES, tasks_among
from skyformer.report.tables import Table, number
from skyformer.studies.base import Fact, Study, check_names, option
from skyformer.studies.frames import in_order
from skyformer.studies.record import significant
from skyformer.studies.registry import register_study

if TYPE_CHECKING:
    from skyformer.lra.dataset import Task
    from skyformer.training.config import RunConfig
    from skyformer.training.runs import Run

FULL_BUDGET = "skyformer sweep --task all --attention all --seeds 0,1,2 --preset paper"
SMALL_LISTOPS = (
    "task.max_length=128",
    "task.limit=1000",
    "optim.warmup_steps=10",
    "loop.steps=100",
    "loop.eval_every=25",
)
_CURVE_POINTS = 25

Point = TypeVar("Point")


@dataclass(frozen=True)
class Options:
    preset: str = option("study", help="Preset of `skyformer train`; paper for the paper's budget.")
    changes: tuple[str, ...] = option(
        (), small=SMALL_LISTOPS, help="Changes to the preset, as in `skyformer train --set`."
    )
    tasks: tuple[str, ...] = option(
        ("listops", "image", "text", "retrieval", "pathfinder"),
        small=("listops",),
        help="Tasks, in the order to train.",
    )
    attentions: tuple[str, ...] = option(tuple(ACCURACY), small=("skyformer", "softmax"), help="Attentions.")
    seeds: tuple[int, ...] = option((0,), help="Seeds for every task and attention.")
    more_seeds: tuple[int, ...] = option(
        (1, 2), small=(), help="Additional seeds for the attentions in --repeated on the tasks in --repeated-tasks."
    )
    repeated: tuple[str, ...] = option(
        ("skyformer", "kernelized", "softmax"), help="Attentions that are also trained with --more-seeds."
    )
    repeated_tasks: tuple[str, ...] = option(
        ("listops", "image", "text"), help="Tasks that are also trained with --more-seeds."
    )
    data_dir: str | None = option(
        None, help="Folder of the prepared data; short ListOps is generated if it is missing."
    )
    runs_dir: str = option(
        "studies/accuracy/runs", small="studies/small/accuracy/runs", help="Folder of the trained runs."
    )


@dataclass(frozen=True)
class Cell:
    """One run. `config` and `data` are digests of its settings and of the prepared data, so results with other settings
    or data are never mixed up with these."""

    task: str
    attention: str
    seed: int
    config: str
    data: str


@dataclass(frozen=True)
class Result:
    """The result of a run. Accuracies are None if it diverged, and `diverged` says how. The points of the dev curve are
    (step, seconds, accuracy, loss), those of the training curve (step, loss). `chance` is the share of the most common
    label in the test set, and `seconds_a_step` is the time per training step."""

    test_accuracy: float | None
    dev_accuracy: float | None
    best_step: int | None
    seconds_a_step: float | None
    diverged: str
    dev_curve: tuple[tuple[float | None, ...], ...]
    train_curve: tuple[tuple[float | None, ...], ...]
    chance: float
    train_examples: int
    dev_examples: int
    test_examples: int
    length: int
    steps: int
    batch_size: int
    learning_rate: float
    note: str

    @property
    def at_chance(self) -> bool:
        """Whether always answering the most common label does as well, within two standard errors of the test."""
        error = math.sqrt(self.chance * (1 - self.chance) / self.test_examples)
        return self.test_accuracy is not None and self.test_accuracy <= self.chance + 2 * error


@register_study
class Accuracy(Study[Options, Cell, Result]):
    name = "accuracy"
    title = "Accuracy on Long Range Arena at a reduced budget (Table 1, Figures 2 and 4)"

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        check_names("task", (*options.tasks, *options.repeated_tasks), TASK_TITLES)
        check_names("attention", (*options.attentions, *options.repeated), list_attentions())

    def facts(self) -> Mapping[str, Fact]:
        return {"preset": self.options.preset}

    def cells(self) -> Sequence[Cell]:
        options = self.options
        data = self._data()
        wanted = [(t, a, s) for t in options.tasks for s in options.seeds for a in options.attentions]
        repeated = [t for t in options.tasks if t in options.repeated_tasks]
        chosen = [attention for attention in options.repeated if attention in options.attentions]
        wanted += [(t, a, s) for t in repeated for s in options.more_seeds for a in chosen]
        # All seeds of the repeated tasks come first, because they matter most if the study is stopped early.
        ordered = sorted(wanted, key=lambda each: (each[0] not in repeated, each[2] not in options.seeds))
        return [Cell(t, a, s, self._config(t, a, s).digest(), data[t]) for t, a, s in ordered]

    def measure(self, cell: Cell) -> Result:
        from skyformer.studies.tasks import runs_of_data
        from skyformer.training import open_run, train_or_resume

        config = self._config(cell.task, cell.attention, cell.seed)
        data = config.task.load(self.options.data_dir)
        runs_dir, diverged = runs_of_data(self.options.runs_dir, data), ""
        try:
            train_or_resume(config, runs_dir=runs_dir, data_dir=self.options.data_dir, progress=False)
        except DivergedError as error:
            # The rest of the message is the path of a checkpoint on this machine.
            diverged = str(error).partition("; last checkpoint")[0]
        return _read(open_run(runs_dir / config.run_name()), config, data, diverged)

    def _config(self, task: str, attention: str | None = None, seed: int | None = None) -> RunConfig:
        from skyformer.training import load_preset

        changes = self.options.changes
        return load_preset(task, self.options.preset, attention=attention, seed=seed, overrides=changes)

    def _data(self) -> dict[str, str]:
        """A digest of each task's data; all missing data is reported in one error before anything is trained."""
        from skyformer.studies.tasks import data_digest, study_data

        digests, missing = {}, []
        for name in self.options.tasks:
            try:
                task = study_data(self._config(name), self.options.data_dir)
            except DataError as error:
                missing.append(str(error))
            else:
                digests[name] = data_digest(task)
        if missing:
            raise DataError("; ".join(missing))
        return digests

    @classmethod
    def tables(cls, results: Mapping[Cell, Result]) -> Sequence[Table]:
        return [_accuracy_table(results), _protocol_table(results), _run_table(results)]

    @classmethod
    def figures(cls, results: Mapping[Cell, Result]) -> Sequence[Figure]:
        time, step = "training time (s)", "step"
        return [
            _curves(results, "figure", "Accuracy on the dev set over time", time, 1, 2, "accuracy (%)", 100),
            _curves(results, "loss", "Loss on the dev set over time", time, 1, 3, "cross entropy", 1),
            _curves(results, "steps", "Accuracy on the dev set over steps", step, 0, 2, "accuracy (%)", 100),
        ]


def _read(run: Run, config: RunConfig, task: Task, diverged: str) -> Result:
    """The result of a finished or diverged run."""
    result, rows, loop = run.result, run.metrics(), config.loop
    train, dev, test = (task.manifest.splits[split] for split in task.manifest.splits)
    return Result(
        test_accuracy=None if result is None else significant(result.test_accuracy),
        dev_accuracy=None if result is None else significant(result.dev_accuracy),
        best_step=None if result is None else result.best_step,
        seconds_a_step=None if result is None else significant(1 / result.steps_per_second),
        diverged=diverged,
        dev_curve=tuple(
            (row.step, significant(row.seconds), significant(row.accuracy), significant(row.loss))
            for row in thinned([row for row in rows if row.split == "dev"])
        ),
        train_curve=tuple(
            (row.step, significant(row.loss)) for row in thinned([row for row in rows if row.split == "train"])
        ),
        chance=max(test.label_counts) / sum(test.label_counts),
        train_examples=train.examples,
        dev_examples=min(dev.examples, loop.dev_limit or dev.examples),
        test_examples=min(test.examples, loop.test_limit or test.examples),
        length=config.task.longest,
        steps=loop.last_step,
        batch_size=loop.batch_size * loop.accumulate,
        learning_rate=config.optim.lr,
        note=config.note,
    )


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most 25 of the points, evenly spaced, including the first and the last."""
    if len(points) <= _CURVE_POINTS:
        return list(points)
    return [points[round(place * (len(points) - 1) / (_CURVE_POINTS - 1))] for place in range(_CURVE_POINTS)]


def _attentions(results: Mapping[Cell, Result]) -> list[str]:
    return in_order((cell.attention for cell in results), ACCURACY)


def _of(results: Mapping[Cell, Result], task: str, attention: str) -> list[Result]:
    return [result for cell, result in results.items() if (cell.task, cell.attention) == (task, attention)]


def _mean(runs: Sequence[Result]) -> float | None:
    """The mean test accuracy in percent of the runs that finished."""
    accuracies = [100 * run.test_accuracy for run in runs if run.test_accuracy is not None]
    return statistics.fmean(accuracies) if accuracies else None


def _best(results: Mapping[Cell, Result], task: str) -> float | None:
    """The highest mean among attentions with no run at chance or diverged."""
    groups = [_of(results, task, name) for name in _attentions(results)]
    learned = [runs for runs in groups if not any(run.at_chance or run.diverged for run in runs)]
    return max((mean for runs in learned if (mean := _mean(runs)) is not None), default=None)


def _accuracy_table(results: Mapping[Cell, Result]) -> Table:
    tasks = tasks_among(results)
    best = {task: _best(results, task) for task in tasks}
    rows = []
    for name in _attentions(results):
        cells = [name]
        for task in tasks:
            runs = _of(results, task, name)
            shown, mean = _accuracy(runs), _mean(runs)
            cells += [f"**{shown}**" if mean is not None and mean == best[task] else shown, _paper(name, task)]
        rows.append([*cells, *_averages(results, name, tasks)])
    chances = [next(result.chance for cell, result in results.items() if cell.task == task) for task in tasks]
    rows.append(["(chance)", *(text for chance in chances for text in (f"{100 * chance:.1f}", "")), "", ""])
    groups = [("", 1), *((TASK_TITLES[task], 2) for task in tasks), ("average", 2)]
    return Table("Test accuracy in percent", ["attention", *["ours", "paper"] * (len(tasks) + 1)], rows, _NOTE, groups)


_NOTE = (
    "Ours: reduced tasks and a reduced budget, see the protocol. Only the order of attentions can be compared with the "
    "paper, not the accuracies. Mean over seeds, with the standard deviation if there are several. A star: at least "
    "one run is at chance, that is, at most two standard errors above the share of the most common label. "
    f"The paper's budget, which needs GPUs: {FULL_BUDGET}"
)


def _accuracy(runs: Sequence[Result]) -> str:
    mean = _mean(runs)
    if mean is None:
        return "diverged" if runs else "-"
    finished = [100 * run.test_accuracy for run in runs if run.test_accuracy is not None]
    spread = f" ± {statistics.stdev(finished):.1f}" if len(finished) > 1 else ""
    star = "*" if any(run.at_chance for run in runs) else ""
    lost = f" ({len(runs) - len(finished)} of {len(runs)} diverged)" if len(finished) < len(runs) else ""
    return f"{mean:.1f}{spread}{star}{lost}"


def _paper(attention: str, task: str) -> str:
    return f"{ACCURACY[attention].on(task):.2f}" if attention in ACCURACY else "-"


def _averages(results: Mapping[Cell, Result], attention: str, tasks: Sequence[str]) -> list[str]:
    """Our average and the paper's over the tasks of the record; ours only if no task is missing."""
    means = [_mean(_of(results, task, attention)) for task in tasks]
    found = [mean for mean in means if mean is not None]
    ours = f"{statistics.fmean(found):.1f}" if found and len(found) == len(tasks) else "-"
    return [ours, f"{ACCURACY[attention].average(tasks):.2f}" if attention in ACCURACY else "-"]


def _protocol_table(results: Mapping[Cell, Result]) -> Table:
    """The settings that are the same for all attentions."""
    header = ["task", "length", "steps", "batch", "learning rate", "train", "dev", "test", "seeds", "note"]
    rows = []
    for task in tasks_among(results):
        cells = [cell for cell in results if cell.task == task]
        one = results[cells[0]]
        counts = (one.train_examples, one.dev_examples, one.test_examples)
        seeds = ", ".join(str(seed) for seed in sorted({cell.seed for cell in cells}))
        sizes = [f"{size:,}" for size in (one.length, one.steps, one.batch_size)]
        examples = [f"{count:,}" for count in counts]
        rows.append(
            [TASK_TITLES[task], *sizes, f"{one.learning_rate:g}", *examples, seeds, one.note or "as in the paper"]
        )
    note = "train: examples of the training set; dev, test: examples used in an evaluation."
    return Table("The protocol, which is the same for every attention", header, rows, note)


def _run_table(results: Mapping[Cell, Result]) -> Table:
    header = ["task", "attention", "seed", "test %", "dev %", "best step", "s per step", "outcome"]
    order = {name: place for place, name in enumerate(_attentions(results))}
    places = {name: place for place, name in enumerate(TASK_TITLES)}
    listed = sorted(results, key=lambda cell: (places[cell.task], order[cell.attention], cell.seed))
    rows = [[TASK_TITLES[cell.task], cell.attention, str(cell.seed), *_run_cells(results[cell])] for cell in listed]
    note = (
        "Dev accuracy is that of the best evaluation, and its model is the one that is tested. Times are of runs that "
        "were trained in parallel."
    )
    return Table("All runs", header, rows, note)


def _run_cells(run: Result) -> list[str]:
    accuracies = ["-" if a is None else f"{100 * a:.1f}" for a in (run.test_accuracy, run.dev_accuracy)]
    best = "-" if run.best_step is None else f"{run.best_step:,}"
    diverged = f"diverged: {run.diverged.partition(', on training examples')[0]}" if run.diverged else ""
    return [*accuracies, best, number(run.seconds_a_step), diverged or ("at chance" if run.at_chance else "learned")]


def _curves(
    results: Mapping[Cell, Result], name: str, title: str, x_label: str, x: int, y: int, y_label: str, scale: float
) -> Figure:
    """One panel per task, one line per attention with its first seed; x and y are positions in a dev curve point."""
    panels = []
    for task in tasks_among(results):
        lines = []
        for attention in _attentions(results):
            seeds = [cell for cell in results if (cell.task, cell.attention) == (task, attention)]
            curve = results[min(seeds, key=lambda cell: cell.seed)].dev_curve if seeds else ()
            points = [(point[x], point[y]) for point in curve]
            xs, ys = [a or 0.0 for a, _ in points], [None if b is None else scale * b for _, b in points]
            lines.append(Series(attention, xs, ys))
        panels.append(Panel(TASK_TITLES[task], x_label, y_label, lines))
    note = "The first seed of each attention. Runs were trained in parallel, so their times are uneven." if x else ""
    return Figure(name, f"{title}, reduced budget", panels, note=note)
