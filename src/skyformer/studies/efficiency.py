"""What a training step costs (Table 2): seconds, hours for the paper's 50,000 steps, and peak memory.

Each cell is one attention on one task with the paper's settings, measured in a process of its own on real batches. A
step is forward, backward, gradient clipping and optimiser.

- Batches "padded": every example is padded to the longest length of its task, as in the paper.
- Batches "similar lengths": as this package trains. Five batches represent an epoch, one from the middle of each fifth
  of its batches sorted by length; the time of a step is their mean. The warm-up uses the longest batch of the epoch, so
  that the memory peak is that of a whole run. Images all have one length, so they are measured only with padding.
- Attention "softmax, materialised": the matrix of scores is formed and kept for the backward pass.
- Attention "softmax, recomputed": softmax as the paper's authors ran it, with dropout of the attention weights; the
  matrix of scores is formed, and formed again in the backward pass (activation checkpointing). If it was measured on
  all tasks, costs are divided by its costs, else by those of materialised softmax.

The settings are those of the preset `paper_v1`, whose attentions have no dropout of their weights; `--preset paper`
measures the steps of the runs that the study `arena` collects.

The speed of a machine changes from minute to minute. Therefore all attentions are measured one after the other, in
several rounds, and the round with the median time counts. These two forms of softmax are measured in the first round
only: they take as long as all the others together, and differ from them by far more than rounds do.

A step that does not fit in memory is repeated with half as many examples, and so on. The record lists the batch sizes
that did not fit; the tables scale the costs of the smaller batch up and mark them.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from skyformer.attention import list_attentions
from skyformer.errors import InputError
from skyformer.lra.tasks import TASKS, task_spec
from skyformer.processes import free_bytes
from skyformer.report.figures import Figure, Mark, Panel, Series
from skyformer.report.paper import COSTS, TASK_TITLES, tasks_among
from skyformer.report.tables import NOTHING, Table, from_frame, number, yes_or_no
from skyformer.studies.base import Fact, Study, check_names, option
from skyformer.studies.frames import in_order, task_table, to_frame, with_paper
from skyformer.studies.fresh_steps import (
    MATERIALISED,
    RECOMPUTED,
    SOFTMAX_FORMS,
    Request,
    Steps,
    measure_steps,
    padded_length,
    save_batches,
)
from skyformer.studies.record import significant
from skyformer.studies.registry import register_study

if TYPE_CHECKING:
    from pandas import DataFrame

    from skyformer.lra.batching import Batch
    from skyformer.lra.dataset import Task
    from skyformer.training.config import RunConfig

PADDED, SIMILAR = "padded", "similar lengths"
KIND_TITLES = {PADDED: "padded batches", SIMILAR: "batches of similar lengths"}
ATTENTIONS = (*SOFTMAX_FORMS, *COSTS)
PAPER_STEPS = 50_000
FIFTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
GB = 2**30
RESERVE = GB
"""Free memory that steps may not use: for what their process holds before the first step, and for other processes."""

FORMS = tuple(form.removeprefix("softmax, ") for form in SOFTMAX_FORMS)
SEED = 0
"""Seed for weights and batches."""

FASTER_BY = 1.15
"""The goal: Skyformer takes at most this many times as long as the fastest other attention."""


@dataclass(frozen=True)
class Options:
    tasks: tuple[str, ...] = option(tuple(TASK_TITLES), small=("listops",), help="Tasks of Long Range Arena.")
    attentions: tuple[str, ...] = option(
        tuple(COSTS),
        small=("linformer", "skyformer"),
        help="Attentions.",
    )
    forms: tuple[str, ...] = option(
        FORMS, help="Forms of softmax that form the matrix of scores: materialised, recomputed, both or none."
    )
    preset: str = option("paper_v1", help="Preset of `skyformer train`: paper_v1, or paper as the runs of `arena`.")
    batches: tuple[str, ...] = option((PADDED, SIMILAR), help="How batches are made: padded, similar lengths, or both.")
    length: int | None = option(
        None, small=256, least=1, help="Longest sequence in tokens: texts are cut to it, ListOps is generated up to it."
    )
    rounds: int = option(
        3, small=1, least=1, help="Measurements per attention; softmax that forms its scores is measured only once."
    )
    seconds: float = option(6.0, small=0.5, above=0, help="Approximate seconds of timed steps per measurement.")
    memory: float | None = option(None, above=0, help="Memory limit of a step in GB; none: the free memory.")
    pathfinder_limit: int = option(3000, least=1, help="Pathfinder images per split, as prepared with --limit.")
    listops_limit: int | None = option(
        None, small=1000, least=1, help="ListOps examples per split; they are generated if they are missing."
    )
    data_dir: str | None = option(None, help="Folder of the prepared data.")


@dataclass(frozen=True)
class Cell:
    """length: tokens of the longest sequence of the task; of a pair, of one of its two sequences."""

    task: str
    length: int
    batches: str
    attention: str
    round: int = 0


@dataclass(frozen=True)
class Result:
    """What timed steps took.

    seconds, lengths: for each timed step, its time and the padded length of its batch.
    before_bytes, peak_bytes: memory of the process before the first step, and at most.
    reference_seconds: time of a fixed computation just before, which shows how fast the machine was.
    batch_size: examples per step as measured, None if not even one fitted. whole_batch: the paper's batch size.
    did_not_fit: the larger batch sizes that were tried. limit_gb: the memory that a step was allowed to take.
    """

    seconds: tuple[float, ...]
    lengths: tuple[int, ...]
    before_bytes: int | None
    peak_bytes: int | None
    reference_seconds: float | None
    batch_size: int | None
    whole_batch: int
    did_not_fit: tuple[int, ...]
    limit_gb: float

    @property
    def scaled(self) -> bool:
        return self.batch_size != self.whole_batch

    def step_seconds(self) -> float | None:
        """Of a step with the whole batch: the median for each length, averaged over all timed steps."""
        if self.batch_size is None:
            return None
        medians = {
            length: statistics.median(s for s, at in zip(self.seconds, self.lengths, strict=True) if at == length)
            for length in set(self.lengths)
        }
        return statistics.mean(medians[length] for length in self.lengths) * self.whole_batch / self.batch_size

    def hours(self) -> float | None:
        """Hours for all steps of the paper."""
        seconds = self.step_seconds()
        return None if seconds is None else seconds * PAPER_STEPS / 3600

    def memory_gb(self) -> float | None:
        """Memory that steps with the whole batch add at most to what the process held before them."""
        if self.batch_size is None or self.peak_bytes is None or self.before_bytes is None:
            return None
        return (self.peak_bytes - self.before_bytes) / GB * self.whole_batch / self.batch_size


Results = Mapping[Cell, Result]
Quantity = Callable[[Result], float | None]
QUANTITIES: dict[str, Quantity] = {
    "hours": Result.hours,
    "memory": Result.memory_gb,
    "seconds": Result.step_seconds,
}


@register_study
class Efficiency(Study[Options, Cell, Result]):
    name = "efficiency"
    title = "Time and memory of a training step (Table 2)"
    is_timing_study = True

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        check_names("task", options.tasks, TASKS)
        check_names("attention", options.attentions, list_attentions())
        check_names("form of softmax", options.forms, FORMS)
        check_names("preset of this study", (options.preset,), ("paper_v1", "paper"))
        check_names("kind of batches", options.batches, (PADDED, SIMILAR))

    def facts(self) -> Mapping[str, Fact]:
        """Loads all data, so that missing data is reported before anything is measured."""
        from skyformer.studies.tasks import data_fact

        data = {f"{task} data": data_fact(self._data[task]) for task in self.options.tasks}
        chosen = self.options
        return {"preset": chosen.preset, "seconds": chosen.seconds, "memory": chosen.memory, "seed": SEED, **data}

    def cells(self) -> Sequence[Cell]:
        """Cells to compare come one after the other, because the speed of the machine may change."""
        forms = tuple(f"softmax, {form}" for form in self.options.forms)
        return [
            Cell(task, self._config(task, "softmax").task.longest, batches, attention, number)
            for task in self.options.tasks
            for batches in kinds_of(task, self.options.batches)
            for number in range(self.options.rounds)
            for attention in (forms if number == 0 else ()) + self.options.attentions
        ]

    def measure(self, cell: Cell) -> Result:
        config = self._config(cell.task, "softmax" if cell.attention in SOFTMAX_FORMS else cell.attention)
        with tempfile.TemporaryDirectory(prefix="skyformer-") as folder:
            file = str(Path(folder) / "batches.pt")
            save_batches(choose_batches(self._data[cell.task], config, cell.batches), file)
            return self._measure_what_fits(cell, config, file)

    def _measure_what_fits(self, cell: Cell, config: RunConfig, file: str) -> Result:
        from skyformer.training.config import to_yaml

        whole = size = config.loop.batch_size
        did_not_fit: list[int] = []
        while True:
            limit = self._limit()
            request = Request(
                config=to_yaml(config),
                form=cell.attention if cell.attention in SOFTMAX_FORMS else None,
                batches=file,
                batch_size=size,
                threads=torch.get_num_threads(),
                seconds=self.options.seconds,
                may_add=limit,
            )
            steps = measure_steps(request)
            if steps is None:
                did_not_fit.append(size)
                size //= 2
            if steps is not None or size == 0:
                return _result(steps, size, whole, did_not_fit, limit)

    def _limit(self) -> int:
        """The memory in bytes that a step may take now."""
        if self.options.memory is not None:
            return int(self.options.memory * GB)
        free = free_bytes()
        return 2**62 if free is None else max(0, free - RESERVE)

    @cached_property
    def _data(self) -> dict[str, Task]:
        from skyformer.studies.tasks import study_data

        return {task: study_data(self._config(task, "softmax"), self.options.data_dir) for task in self.options.tasks}

    def _config(self, task: str, attention: str) -> RunConfig:
        from skyformer.studies.tasks import run_config

        chosen = self.options
        limits = {"pathfinder": chosen.pathfinder_limit, "listops": chosen.listops_limit}
        if chosen.length is None or task_spec(task).image_side is not None:
            return run_config(task, chosen.preset, attention, SEED, limits.get(task))
        return run_config(task, chosen.preset, attention, SEED, limits.get(task), task_max_length=chosen.length)

    @classmethod
    def tables(cls, results: Results) -> Sequence[Table]:
        costs = _costs_by_kind(results)
        shares = (("hours", "Time"), ("memory", "Memory"))
        return [
            *_verdict_tables(costs),
            *map(_cost_table, costs),
            *(_share_table(each, *quantity) for each in costs if each.has_baseline for quantity in shares),
            *(task_table(f"Seconds per step, {each.title}", each.ours("seconds text")) for each in costs),
            *_memory_tables(results),
            _speed_table(results),
        ]

    @classmethod
    def figures(cls, results: Results) -> Sequence[Figure]:
        shares = [_share_figure(results)] if Costs(results, PADDED).has_baseline else []
        drawn = [*shares, *map(_cost_figure, _costs_by_kind(results))]
        return [figure for figure in drawn if figure.panels]


def kinds_of(task: str, kinds: Sequence[str] = (PADDED, SIMILAR)) -> Sequence[str]:
    """The kinds of batches that are measured: images have one length, so padded batches count as both kinds."""
    return (PADDED,) if task_spec(task).image_side is not None else kinds


def choose_batches(task: Task, config: RunConfig, kind: str) -> list[Batch]:
    """The batches of a cell: the first is the warm-up, the others are timed."""
    from skyformer.lra.batching import TrainingBatches, collate

    similar = kind == SIMILAR
    lengths = task.train.lengths()
    sampler = TrainingBatches(lengths, config.loop.batch_size, seed=config.seed, group_by_length=similar)
    # One batch of an epoch may be smaller.
    whole = [rows for rows in map(sampler.batch, range(sampler.steps_per_epoch)) if len(rows) == config.loop.batch_size]
    if not whole:
        raise InputError(
            f"the {task.spec.name} data must have at least one batch of {config.loop.batch_size} examples; got "
            f"{len(task.train)} examples"
        )
    if similar:
        ordered = sorted(whole, key=lambda rows: int(lengths[rows].max()))
        chosen = [ordered[-1], *(ordered[int(share * len(ordered))] for share in FIFTHS)]
    else:
        chosen = [whole[0], whole[-1]]
    longest = None if similar else task.spec.max_length
    warm_up, *timed = (collate([task.train[row] for row in rows], longest) for rows in chosen)
    # If all have the same length, one is enough.
    return [warm_up, *(timed if len({padded_length(batch) for batch in timed}) > 1 else timed[:1])]


def _result(steps: Steps | None, size: int, whole: int, did_not_fit: Sequence[int], limit: int) -> Result:
    return Result(
        seconds=tuple(round(each, 4) for each in steps.seconds) if steps else (),
        lengths=steps.lengths if steps else (),
        before_bytes=steps.before_bytes if steps else None,
        peak_bytes=steps.peak_bytes if steps else None,
        reference_seconds=significant(steps.reference_seconds) if steps else None,
        batch_size=size or None,
        whole_batch=whole,
        did_not_fit=tuple(did_not_fit),
        limit_gb=round(limit / GB, 3),
    )


class Costs:
    """Costs with one kind of batches, as data frames with one row per attention and one column per task."""

    def __init__(self, results: Results, kind: str) -> None:
        self.kind, self.title = kind, KIND_TITLES[kind]
        self.attentions = in_order((cell.attention for cell in results), ATTENTIONS)
        self.tasks = tasks_among(results)
        of_kind = {cell: result for cell, result in results.items() if cell.batches in kinds_of(cell.task, (kind,))}
        recomputed = {cell.task for cell in of_kind if cell.attention == RECOMPUTED}
        self.baseline = RECOMPUTED if recomputed == set(self.tasks) else MATERIALISED
        self._lengths = {(cell.task, cell.length) for cell in results}
        texts = {f"{name} text": partial(_shown, quantity) for name, quantity in QUANTITIES.items()}
        self.rounds = to_frame(Cell, of_kind, **QUANTITIES, **texts)

    @cached_property
    def _median_rounds(self) -> DataFrame:
        """For each task and attention the round with the median time, or the faster of the two in the middle."""
        ordered = self.rounds.sort_values("seconds", kind="stable")
        rounds = ordered.groupby(["task", "attention"])["round"]
        return ordered[rounds.cumcount() == (rounds.transform("size") - 1) // 2]

    def ours(self, quantity: str) -> DataFrame:
        """A quantity, or "... text" of it; missing where nothing was measured or, as a number, where it did not fit."""
        by_task = self._median_rounds.pivot(index="attention", columns="task", values=quantity)
        return by_task.reindex(index=self.attentions, columns=self.tasks)

    def paper(self, quantity: str) -> DataFrame:
        """The paper's hours or memory, for tasks measured at its lengths. Its softmax stands in the row `baseline`."""
        import pandas

        rows = [getattr(cost, quantity) for cost in COSTS.values()]
        frame = pandas.DataFrame(rows, index=list(COSTS), columns=list(TASK_TITLES)).rename({"softmax": self.baseline})
        return frame[[task for task in self.tasks if self._is_full_length(task)]].reindex(columns=self.tasks)

    def _is_full_length(self, task: str) -> bool:
        return {length for name, length in self._lengths if name == task} == {task_spec(task).max_length}

    def shares(self, quantity: str) -> tuple[DataFrame, DataFrame]:
        """The costs divided by those of `baseline`: ours and the paper's."""
        ours, papers = map(self._divide_by_softmax, (self.ours(quantity), self.paper(quantity)))
        return ours, papers.reindex_like(ours)

    def _divide_by_softmax(self, costs: DataFrame) -> DataFrame:
        softmax = costs.reindex([self.baseline]).iloc[0]
        return costs / softmax.where(softmax > 0)

    @property
    def has_baseline(self) -> bool:
        return self.baseline in self.attentions

    @property
    def baseline_title(self) -> str:
        return {MATERIALISED: "materialised softmax", RECOMPUTED: "softmax as the paper ran it"}[self.baseline]


def _shown(quantity: Quantity, result: Result) -> str:
    """The quantity as text, with a ~ if it was scaled up from a smaller batch."""
    value = quantity(result)
    return "does not fit" if value is None else ("~" if result.scaled else "") + number(value)


def _costs_by_kind(results: Results) -> list[Costs]:
    return [Costs(results, kind) for kind in KIND_TITLES if any(cell.batches == kind for cell in results)]


def _cost_table(costs: Costs) -> Table:
    """Table 2; the paper's numbers are shown only for padded batches, because the paper padded its batches."""
    import pandas

    parts = {}
    for name, title in (("hours", "Time (h)"), ("memory", "Memory (GB)")):
        ours = costs.ours(f"{name} text")
        parts[title] = with_paper(ours, costs.paper(name)) if costs.kind == PADDED else ours
    note = (
        f"Hours for {PAPER_STEPS:,} steps, and the memory that steps add at most to that of their process, in GB of "
        "2^30 bytes. A ~ marks numbers scaled up from a smaller batch. In brackets: the paper, on a V100."
    )
    return task_table(f"Table 2, {costs.title}", pandas.concat(parts, axis=1), note)


def _share_table(costs: Costs, quantity: str, title: str) -> Table:
    ours, papers = costs.shares(quantity)
    note = "In brackets: the same for the paper's numbers."
    title = f"{title} divided by that of {costs.baseline_title}, {costs.title}"
    return task_table(title, with_paper(ours.map(number), papers), note)


def _verdict_tables(all_costs: Sequence[Costs]) -> list[Table]:
    """Skyformer compared with the paper's Skyformer, and with the fastest other attention."""
    rows = []
    for costs in all_costs:
        for task in costs.tasks:
            against_paper = _against_paper(costs, task)
            if against_paper:
                rows.append([TASK_TITLES[task], costs.kind, *against_paper, *_against_fastest(costs, task)])
    if not rows:
        return []
    header = ["task", "batches", *["ours", "paper's", "better"] * 2, "name", "ratio", "single rounds", "goal met"]
    groups = [("", 2), ("time", 3), ("memory", 3), ("fastest other attention", 4)]
    note = (
        f"Time and memory of Skyformer divided by those of {all_costs[0].baseline_title}. Fastest other attention: "
        "Skyformer's time divided by its time, the same within single rounds, and whether the ratio is at most "
        f"{FASTER_BY:g}."
    )
    return [Table("Time and memory of Skyformer", header, rows, note, groups)]


def _against_paper(costs: Costs, task: str) -> list[str]:
    """For time and memory: ours, the paper's, and whether ours is better. Empty where a number is missing."""
    texts = []
    for quantity in ("hours", "memory"):
        ours, papers = (shares[task].get("skyformer", math.nan) for shares in costs.shares(quantity))
        if math.isnan(ours) or math.isnan(papers):
            return []
        texts += [number(ours), number(papers), yes_or_no(ours < papers)]
    return texts


def _against_fastest(costs: Costs, task: str) -> list[str]:
    """Name of the fastest other attention, Skyformer's time divided by its, its range over rounds, and the verdict."""
    seconds = costs.ours("seconds")[task].dropna()
    others = seconds.drop(["skyformer", *SOFTMAX_FORMS], errors="ignore")
    if others.empty:
        return [NOTHING] * 4
    fastest = others.idxmin()
    ratio = seconds["skyformer"] / others[fastest]
    of_task = costs.rounds[costs.rounds["task"] == task]
    rounds = of_task.pivot(index="round", columns="attention", values="seconds")
    single = (rounds["skyformer"] / rounds[fastest]).dropna()
    span = f"{number(single.min())} to {number(single.max())}" if len(single) > 1 else NOTHING
    return [fastest, number(ratio), span, yes_or_no(ratio <= FASTER_BY)]


def _memory_tables(results: Results) -> list[Table]:
    rows = [
        [
            cell.task,
            cell.batches,
            cell.attention,
            str(cell.round),
            f"does not fit in {number(result.limit_gb)} GB with {' or '.join(map(str, result.did_not_fit))} examples",
            "nothing" if result.batch_size is None else f"{result.batch_size} of {result.whole_batch} examples",
        ]
        for cell, result in results.items()
        if result.did_not_fit
    ]
    header = ["task", "batches", "attention", "round", "what happened", "measured"]
    return [Table("Steps that did not fit in memory", header, rows)] if rows else []


def _speed_table(results: Results) -> Table:
    """The time of one fixed computation before every cell; where it differs, so did the speed of the machine."""
    frame = to_frame(Cell, results, milliseconds=lambda result: 1000 * (result.reference_seconds or float("nan")))
    taken = frame.dropna(subset="milliseconds").groupby(["task", "batches"], sort=False)["milliseconds"]
    spread = taken.agg(["min", "median", "max"]).rename(index=TASK_TITLES, level="task")
    note = "Milliseconds of one fixed computation, timed before every cell."
    return from_frame("How steady the machine was", spread.map(number), note)


def _share_figure(results: Results) -> Figure:
    """One column of panels per task, time above memory: a bar for ours and a pale one for the paper's below it."""
    costs, panels = Costs(results, PADDED), []
    names = [name for name in costs.attentions if name not in (*SOFTMAX_FORMS, "softmax")]
    for quantity, title in (("hours", "time"), ("memory", "memory")):
        ours, papers = costs.shares(quantity)
        for task in costs.tasks if papers.notna().any(axis=None) else ():
            bars = [
                Series(name, [float(shares.loc[name, task])], [row + shift], mark=mark)
                for row, name in enumerate(names)
                for shares, shift, mark in ((ours, -0.2, Mark.ROWS), (papers, 0.2, Mark.PALE_ROWS))
                if shares.loc[[name], task].notna().all()
            ]
            if bars:
                where = f"{TASK_TITLES[task]}, {title}"
                panels.append(Panel(where, "share of softmax", "", bars, y_names=names, legend=False))
    title = "Time and memory of a training step, as a share of softmax attention"
    note = (
        f"Padded batches. Dark: here, on a CPU, divided by {costs.baseline_title}. Pale: the paper, on a GPU. "
        "Shorter is better."
    )
    return Figure("figure", title, panels, max(1, len(costs.tasks)), note, same_x=True)


def _cost_figure(costs: Costs) -> Figure:
    """Seconds and memory of a step: one column of panels per task, one row per attention."""
    panels = []
    for quantity, title, label in (("seconds", "time", "seconds per step"), ("memory", "memory", "GB added by a step")):
        values = costs.ours(quantity)
        for task in costs.tasks:
            points = [
                Series(name, [float(x)], [costs.attentions.index(name)], mark=Mark.VALUES)
                for name, x in values[task].dropna().items()
            ]
            if points:
                where = f"{TASK_TITLES[task]}, {title}"
                panels.append(Panel(where, label, "", points, x_log=True, y_names=costs.attentions, legend=False))
    title = f"Cost of a training step, {costs.title}"
    return Figure(costs.kind.replace(" ", "_"), title, panels, max(1, len(costs.tasks)))
