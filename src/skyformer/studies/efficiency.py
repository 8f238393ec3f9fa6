"""What a training step costs (Table 2): seconds, hours for the paper's 50,000 steps, and peak memory.

Each cell is one attention on one task at the paper's settings, measured in a process of its own on real batches:
forward, backward, clipping and optimiser.

- batches "padded": every example padded to the longest length of its task, as the paper ran it.
- batches "similar lengths": as this package trains. Five batches stand for an epoch, one from the middle of each fifth
  of its batches by length; their mean is the time of a step. The warm-up is on the longest batch of the epoch, so that
  the peak of memory is that of a whole run. Images are of one length, and padded ones stand for both.
- attention "softmax, materialised": as the paper ran softmax, with the matrix of scores formed and kept.

A machine changes its speed from minute to minute, so attentions are measured in rounds, one after the other in each,
and the round with the median time stands for its attention. Softmax as the paper ran it is measured in the first only:
it takes as long as half of the others together, and differs from them by far more than rounds do.

A step that does not fit in memory is tried with half the examples, and so on; the record says which sizes did not fit,
and tables scale what was measured to the whole batch and mark it.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from skyformer.attention import list_attentions
from skyformer.errors import InputError
from skyformer.lra.tasks import TASKS, task_spec
from skyformer.processes import free_bytes
from skyformer.report.figures import Figure, Mark, Panel, Series
from skyformer.report.paper import COSTS, TASK_TITLES, tasks_among
from skyformer.report.tables import Table, number, yes_or_no
from skyformer.studies.base import Fact, Study, check_names, option
from skyformer.studies.fresh_steps import Request, Steps, padded_length, run_in_fresh_process, save_batches
from skyformer.studies.record import significant
from skyformer.studies.registry import register_study

if TYPE_CHECKING:
    from skyformer.lra.batching import Batch
    from skyformer.lra.dataset import Task
    from skyformer.training.config import RunConfig

MATERIALISED = "softmax, materialised"
PADDED, SIMILAR = "padded", "similar lengths"
ATTENTIONS = (
    MATERIALISED,
    "softmax",
    "kernelized",
    "nystromformer",
    "linformer",
    "informer",
    "performer",
    "reformer",
    "bigbird",
    "skyformer",
)
PAPER_STEPS = 50_000
FIFTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
GB = 2**30
RESERVE = GB
"""Of the free memory, left for what a process holds before its first step, and for everything else."""

SEED = 0
"""Of weights and batches."""

FASTER_BY = 1.15
"""Skyformer may take so many times as long as the fastest attention of the zoo."""


@dataclass(frozen=True)
class Options:
    tasks: tuple[str, ...] = option(tuple(TASK_TITLES), small=("listops",), help="Tasks of Long Range Arena.")
    attentions: tuple[str, ...] = option(
        tuple(each for each in ATTENTIONS if each != MATERIALISED),
        small=("linformer", "skyformer"),
        help="Attentions; materialised softmax, which the paper used, is always measured as well.",
    )
    batches: tuple[str, ...] = option((PADDED, SIMILAR), help="How batches are made: padded, similar lengths, or both.")
    length: int | None = option(
        None, small=256, least=1, help="Longest sequence in tokens: texts are cut to it, ListOps is generated up to it."
    )
    rounds: int = option(
        3, small=1, least=1, help="Measurements per attention; materialised softmax is measured only once."
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
    """length: the longest of the task, in tokens; half a pair."""

    task: str
    length: int
    batches: str
    attention: str
    round: int = 0


@dataclass(frozen=True)
class Result:
    """Seconds of the timed steps and the padded lengths of their batches; bytes before the first step and at most.

    reference_seconds: of a computation that is always the same, taken just before: how fast the machine was.
    batch_size: examples a step as measured, None if not even one fitted. whole_batch: the paper's.
    did_not_fit: the batch sizes that were tried before. limit_gb: what a step was allowed to take.
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
        """A step with the whole batch: the median at each length, averaged over the lengths as they occur."""
        if self.batch_size is None:
            return None
        medians = {
            length: statistics.median(s for s, at in zip(self.seconds, self.lengths, strict=True) if at == length)
            for length in set(self.lengths)
        }
        return statistics.mean(medians[length] for length in self.lengths) * self.whole_batch / self.batch_size

    def hours(self) -> float | None:
        """All steps of the paper."""
        seconds = self.step_seconds()
        return None if seconds is None else seconds * PAPER_STEPS / 3600

    def memory_gb(self) -> float | None:
        """What steps with the whole batch add at most to what the process holds before them."""
        if self.batch_size is None or self.peak_bytes is None or self.before_bytes is None:
            return None
        return (self.peak_bytes - self.before_bytes) / GB * self.whole_batch / self.batch_size


Results = Mapping[Cell, Result]
Quantity = Callable[[Result], float | None]


@register_study
class Efficiency(Study[Options, Cell, Result]):
    name = "efficiency"
    title = "Time and memory of a training step (Table 2)"
    options_type, cell_type, result_type = Options, Cell, Result
    is_timing_study = True

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        check_names("task", options.tasks, TASKS)
        check_names("attention", options.attentions, list_attentions())
        check_names("kind of batches", options.batches, (PADDED, SIMILAR))

    def facts(self) -> Mapping[str, Fact]:
        """Loads all data, so that what is missing is told before anything is measured."""
        from skyformer.studies.tasks import data_fact

        data = {f"{task} data": data_fact(self._data[task]) for task in self.options.tasks}
        return {"seconds": self.options.seconds, "memory": self.options.memory, "seed": SEED, **data}

    def cells(self) -> Sequence[Cell]:
        """What is compared with each other is measured one after the other: the machine may change its speed."""
        return [
            Cell(task, self._config(task, "softmax").task.longest, batches, attention, number)
            for task in self.options.tasks
            for batches in kinds_of(task, self.options.batches)
            for number in range(self.options.rounds)
            for attention in ((MATERIALISED,) if number == 0 else ()) + self.options.attentions
        ]

    def measure(self, cell: Cell) -> Result:
        config = self._config(cell.task, "softmax" if cell.attention == MATERIALISED else cell.attention)
        with tempfile.TemporaryDirectory(prefix="skyformer-") as folder:
            file = str(Path(folder) / "batches.pt")
            save_batches(choose_batches(self._data[cell.task], config, cell.batches), file)
            return self._measure_what_fits(cell, config, file)

    def _measure_what_fits(self, cell: Cell, config: RunConfig, file: str) -> Result:
        from skyformer.training.config import to_yaml

        whole = size = config.loop.batch_size
        did_not_fit: list[int] = []
        while size:
            limit = self._limit()
            request = Request(
                config=to_yaml(config),
                materialised=cell.attention == MATERIALISED,
                batches=file,
                batch_size=size,
                threads=torch.get_num_threads(),
                seconds=self.options.seconds,
                may_add=limit,
            )
            steps = run_in_fresh_process(request)
            if steps is not None:
                return _result(steps, size, whole, did_not_fit, limit)
            did_not_fit.append(size)
            size //= 2
        return Result((), (), None, None, None, None, whole, tuple(did_not_fit), _gb(limit))

    def _limit(self) -> int:
        """Bytes that a step may take now."""
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
            return run_config(task, "paper", attention, SEED, limits.get(task))
        return run_config(task, "paper", attention, SEED, limits.get(task), task_max_length=chosen.length)

    @classmethod
    def tables(cls, results: Results) -> Sequence[Table]:
        kinds = [kind for kind in (PADDED, SIMILAR) if any(cell.batches == kind for cell in results)]
        tables = [*_verdict(results, kinds), *(_costs(results, kind) for kind in kinds)]
        tables += [table for kind in kinds for table in _ratios(results, kind)]
        return [*tables, *(_seconds(results, kind) for kind in kinds), *_not_fitting(results), _drift(results)]

    @classmethod
    def figures(cls, results: Results) -> Sequence[Figure]:
        drawn = [_ratio_figure(results), *(_cost_figure(results, kind) for kind in (PADDED, SIMILAR))]
        return [figure for figure in drawn if figure.panels]


def kinds_of(task: str, kinds: Sequence[str] = (PADDED, SIMILAR)) -> Sequence[str]:
    """Images are of one length: padded batches stand for both kinds."""
    return (PADDED,) if task_spec(task).image_side is not None else kinds


def choose_batches(task: Task, config: RunConfig, kind: str) -> list[Batch]:
    """What a cell trains on: a batch to warm up with, then those that are timed."""
    from skyformer.lra.batching import TrainingBatches, collate

    similar = kind == SIMILAR
    lengths = task.train.lengths()
    sampler = TrainingBatches(lengths, config.loop.batch_size, seed=config.seed, group_by_length=similar)
    # The last batch of an epoch may be a smaller one.
    whole = [rows for rows in map(sampler.batch, range(sampler.steps_per_epoch)) if len(rows) == config.loop.batch_size]
    if not whole:
        raise InputError(
            f"the {task.spec.name} data must have {config.loop.batch_size} examples for a batch; got {len(task.train)}"
        )
    if similar:
        ordered = sorted(whole, key=lambda rows: int(lengths[rows].max()))
        chosen = [ordered[-1], *(ordered[int(share * len(ordered))] for share in FIFTHS)]
    else:
        chosen = [whole[0], whole[-1]]
    longest = None if similar else task.spec.max_length
    warm_up, *timed = (collate([task.train[row] for row in rows], longest) for rows in chosen)
    # Where all are as long as each other, one stands for all.
    return [warm_up, *(timed if len({padded_length(batch) for batch in timed}) > 1 else timed[:1])]


def _result(steps: Steps, size: int, whole: int, did_not_fit: Sequence[int], limit: int) -> Result:
    seconds = tuple(round(each, 4) for each in steps.seconds)
    reference = significant(steps.reference_seconds)
    return Result(
        seconds,
        steps.lengths,
        steps.before_bytes,
        steps.peak_bytes,
        reference,
        size,
        whole,
        tuple(did_not_fit),
        _gb(limit),
    )


def _gb(limit: int) -> float:
    return round(limit / GB, 3)


def _attentions(results: Results) -> list[str]:
    """In the order of Table 2, then whatever else was measured."""
    present = dict.fromkeys(cell.attention for cell in results)
    return [*(name for name in ATTENTIONS if name in present), *(name for name in present if name not in ATTENTIONS)]


def find(results: Results, task: str, kind: str, attention: str) -> Result | None:
    """The round with the median time; of two in the middle the faster."""
    rounds = sorted(find_rounds(results, task, kind, attention).values(), key=_time_if_it_fits)
    return rounds[(len(rounds) - 1) // 2] if rounds else None


def find_rounds(results: Results, task: str, kind: str, attention: str) -> dict[int, Result]:
    wanted = (task, *kinds_of(task, (kind,)), attention)
    return {c.round: r for c, r in results.items() if (c.task, c.batches, c.attention) == wanted}


def _time_if_it_fits(result: Result) -> float:
    seconds = result.step_seconds()
    return math.inf if seconds is None else seconds


def ratio_to_softmax(results: Results, task: str, kind: str, attention: str, quantity: Quantity) -> float | None:
    """To softmax as the paper ran it, on the same batches."""
    found = (find(results, task, kind, each) for each in (attention, MATERIALISED))
    own, base = (None if each is None else quantity(each) for each in found)
    return _divide(own, base)


def paper_ratio(results: Results, task: str, attention: str, column: str) -> float | None:
    """The same of the paper's figures."""
    own, base = (paper_cost(results, task, each, column) for each in (attention, MATERIALISED))
    return _divide(own, base)


def paper_cost(results: Results, task: str, attention: str, column: str) -> float | None:
    """The paper's figure, if ours are for its lengths; column is "hours" or "memory"."""
    lengths = {cell.length for cell in results if cell.task == task}
    # The paper's softmax is the materialised one; it has none that is fused.
    row = {MATERIALISED: "softmax", "softmax": ""}.get(attention, attention)
    if row not in COSTS or lengths != {task_spec(task).max_length}:
        return None
    figures: tuple[float, ...] = getattr(COSTS[row], column)
    return figures[list(TASK_TITLES).index(task)]


def _divide(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b


def _shown(result: Result | None, quantity: Quantity) -> str:
    """The figure; with a ~ if it was scaled from a smaller batch."""
    value = None if result is None else quantity(result)
    if result is None or value is None:
        return "-" if result is None else "does not fit"
    return ("~" if result.scaled else "") + number(value)


def _titles(results: Results) -> list[str]:
    return [TASK_TITLES[task] for task in tasks_among(results)]


def _costs(results: Results, kind: str) -> Table:
    """Table 2, with the paper's own figures where it has any: it padded."""
    tasks = tasks_among(results)
    rows = [
        [
            attention,
            *(_cost(results, task, kind, attention, Result.hours, "hours") for task in tasks),
            *(_cost(results, task, kind, attention, Result.memory_gb, "memory") for task in tasks),
        ]
        for attention in _attentions(results)
    ]
    note = (
        f"Hours for {PAPER_STEPS:,} steps, and the most that steps add to the memory of their process, in GB of 2^30 "
        "bytes. A ~ is scaled from a smaller batch. In brackets the paper's, on a V100."
    )
    groups = [("", 1), ("Time (h)", len(tasks)), ("Memory (GB)", len(tasks))]
    return Table(f"Table 2, batches {kind}", ["attention", *_titles(results) * 2], rows, note, groups)


def _cost(results: Results, task: str, kind: str, attention: str, quantity: Quantity, column: str) -> str:
    ours = _shown(find(results, task, kind, attention), quantity)
    papers = paper_cost(results, task, attention, column) if kind == PADDED else None
    return ours if papers is None else f"{ours} ({number(papers)})"


def _ratios(results: Results, kind: str) -> list[Table]:
    """A table for time and one for memory, the paper's ratios in brackets."""
    tasks, tables = tasks_among(results), []
    for name, quantity, column in (("Time", Result.hours, "hours"), ("Memory", Result.memory_gb, "memory")):
        rows = [
            [attention, *(_beside_paper(results, task, kind, attention, quantity, column) for task in tasks)]
            for attention in _attentions(results)
        ]
        title = f"{name} as a share of softmax as the paper ran it, batches {kind}"
        tables.append(Table(title, ["attention", *_titles(results)], rows, "In brackets the paper's shares."))
    return tables


def _beside_paper(results: Results, task: str, kind: str, attention: str, quantity: Quantity, column: str) -> str:
    ours = ratio_to_softmax(results, task, kind, attention, quantity)
    papers = paper_ratio(results, task, attention, column)
    return f"{number(ours)} ({number(papers)})" if papers is not None else number(ours)


def _seconds(results: Results, kind: str) -> Table:
    rows = [
        [
            attention,
            *(_shown(find(results, task, kind, attention), Result.step_seconds) for task in tasks_among(results)),
        ]
        for attention in _attentions(results)
    ]
    return Table(f"Seconds a step, batches {kind}", ["attention", *_titles(results)], rows)


def _verdict(results: Results, kinds: Sequence[str]) -> list[Table]:
    """Skyformer against the paper's Skyformer, and against the fastest of the zoo."""
    rows = []
    for kind in kinds:
        for task in tasks_among(results):
            bars = [
                _against_paper(results, task, kind, quantity, column)
                for quantity, column in ((Result.hours, "hours"), (Result.memory_gb, "memory"))
            ]
            if all(bars):
                rows.append([TASK_TITLES[task], kind, *bars[0], *bars[1], *_against_fastest(results, task, kind)])
    header = [
        "task",
        "batches",
        "ours",
        "paper's",
        "better",
        "ours",
        "paper's",
        "better",
        "fastest",
        "share",
        "in rounds",
        "met",
    ]
    groups = [("", 2), ("time", 3), ("memory", 3), ("zoo", 4)]
    note = (
        "Skyformer's time and memory as shares of softmax as the paper ran it. Zoo: the fastest of all other "
        "attentions, Skyformer's time as a share of its, that share within single rounds, and whether it is at most "
        f"{FASTER_BY:g}."
    )
    return [Table("What Skyformer costs", header, rows, note, groups)] if rows else []


def _against_paper(results: Results, task: str, kind: str, quantity: Quantity, column: str) -> list[str]:
    """Ours, the paper's, and whether ours is better; empty where one of them is missing."""
    ours = ratio_to_softmax(results, task, kind, "skyformer", quantity)
    papers = paper_ratio(results, task, "skyformer", column)
    if ours is None or papers is None:
        return []
    return [number(ours), number(papers), yes_or_no(ours < papers)]


def _against_fastest(results: Results, task: str, kind: str) -> list[str]:
    times = {}
    for attention in _attentions(results):
        result = find(results, task, kind, attention)
        seconds = None if result is None else result.step_seconds()
        if seconds:
            times[attention] = seconds
    own = times.pop("skyformer")
    times.pop(MATERIALISED)
    if not times:
        return ["-", "-", "-", "-"]
    fastest = min(times, key=lambda attention: times[attention])
    share = own / times[fastest]
    return [fastest, number(share), _range_over_rounds(results, task, kind, fastest), yes_or_no(share <= FASTER_BY)]


def _range_over_rounds(results: Results, task: str, kind: str, other: str) -> str:
    """Skyformer's time as a share of another's, the least and the most of those measured in one round."""
    own, others = (find_rounds(results, task, kind, each) for each in ("skyformer", other))
    both = [(own[each].step_seconds(), others[each].step_seconds()) for each in own.keys() & others.keys()]
    shares = [a / b for a, b in both if a and b]
    return f"{number(min(shares))} to {number(max(shares))}" if len(shares) > 1 else "-"


def _not_fitting(results: Results) -> list[Table]:
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


def _drift(results: Results) -> Table:
    """The same computation before every cell: where its times differ, the machine did."""
    rows = []
    for task, kind in dict.fromkeys((cell.task, cell.batches) for cell in results):
        here = [r.reference_seconds for c, r in results.items() if (c.task, c.batches) == (task, kind)]
        taken = [1000 * seconds for seconds in here if seconds is not None]
        if taken:
            spread = [number(f(taken)) for f in (min, statistics.median, max)]
            rows.append([TASK_TITLES[task], kind, *spread])
    note = "Milliseconds of one fixed computation, taken before every cell."
    return Table("How steady the machine was", ["task", "batches", "least", "median", "most"], rows, note)


def _ratio_figure(results: Results) -> Figure:
    """Ours over the paper's: below the diagonal, ours is the smaller share."""
    panels = []
    for name, quantity, column in (("time", Result.hours, "hours"), ("memory", Result.memory_gb, "memory")):
        series = [_ratio_points(results, attention, quantity, column) for attention in _attentions(results)]
        shown = [each for each in series if each.x]
        if shown:
            ends = [min(min(s.x) for s in shown), max(max(s.x) for s in shown)]
            shown.append(Series("as in the paper", ends, ends, mark=Mark.DASHED))
            panels.append(Panel(name, "share in the paper", "share here", shown, x_log=True, y_log=True))
    return Figure("figure", "Shares of softmax as the paper ran it, a point a task, batches padded", panels, columns=2)


def _ratio_points(results: Results, attention: str, quantity: Quantity, column: str) -> Series:
    x, y = [], []
    for task in tasks_among(results):
        ours, papers = (
            ratio_to_softmax(results, task, PADDED, attention, quantity),
            paper_ratio(results, task, attention, column),
        )
        if attention != MATERIALISED and ours and papers:
            x.append(papers)
            y.append(ours)
    return Series(attention, x, y, mark=Mark.POINTS)


def _cost_figure(results: Results, kind: str) -> Figure:
    """Time over memory, a panel a task."""
    panels = []
    for task in tasks_among(results):
        series = []
        for attention in _attentions(results):
            result = find(results, task, kind, attention)
            seconds, memory = (result.step_seconds(), result.memory_gb()) if result else (None, None)
            if seconds and memory:
                series.append(Series(attention, [memory], [seconds], mark=Mark.POINTS))
        if series and any(cell.batches == kind for cell in results):
            panels.append(Panel(TASK_TITLES[task], "memory (GB)", "seconds a step", series, x_log=True, y_log=True))
    return Figure(kind.replace(" ", "_"), f"Time and memory of a training step, batches {kind}", panels)
