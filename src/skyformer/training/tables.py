"""Tables of runs: one run per row, or means over seeds in the layout of the paper's Table 1; CSV and JSON of both."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from skyformer.report.paper import ACCURACY, ACCURACY_BLOCKS, TASK_TITLES, PaperAccuracy
from skyformer.report.tables import NOTHING, Table, as_csv, duration, percent
from skyformer.training.collect import RunRow, SeedMean, Summary

AVERAGE = "AVG"
MEAN_COLUMNS = [field.name for field in fields(SeedMean) if field.name != "rows"]


def runs_table(rows: Sequence[RunRow]) -> Table:
    """One row per run; the note has the reasons of failures, changed settings and how presets differ from the paper."""
    header = ["run", "state", "step", "dev %", "test %", "time", "preset"]
    return Table("", header, [_run_cells(row) for row in rows], "\n".join(_run_remarks(rows)))


def _run_cells(row: RunRow) -> list[str]:
    step = NOTHING if row.step is None else f"{row.step:,}/{row.steps:,}"
    numbers = [percent(row.dev_accuracy), percent(row.test_accuracy), duration(row.seconds)]
    return [row.name, row.state, step, *numbers, _preset_mark(row)]


def _preset_mark(row: RunRow) -> str:
    if row.preset is None:
        return NOTHING
    marks = ["reduced"] * bool(row.preset_note) + ["changed"] * bool(row.shown_changes or row.options)
    return f"{row.preset} ({', '.join(marks)})" if marks else row.preset


def _run_remarks(rows: Sequence[RunRow]) -> list[str]:
    reasons = [f"{row.name} {row.state}: {row.reason}" for row in rows if row.reason]
    changed: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        for settings in (row.shown_changes, row.options):
            changed.setdefault(settings, []).append(row.name)
    changes = [f"changed in {_first_and_count(names)}: {', '.join(key)}" for key, names in changed.items() if key]
    notes = dict.fromkeys(f"preset {row.preset} of {row.task} is {row.preset_note}" for row in rows if row.preset_note)
    return [*reasons, *changes, *notes]


def _first_and_count(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


@dataclass(frozen=True)
class _Row:
    """One attention with its changed options, and its means by task."""

    attention: str
    options: tuple[str, ...]
    means: dict[str, SeedMean]

    @property
    def title(self) -> str:
        name = self.attention if self.paper is None else self.paper.title
        return f"{name} ({', '.join(self.options)})" if self.options else name

    @property
    def paper(self) -> PaperAccuracy | None:
        return ACCURACY.get(self.attention)

    def ours(self, tasks: Sequence[str], *, show_counts: bool) -> list[str]:
        """Mean and spread for each task, then the average if there are several tasks and a mean for each."""
        cells = [_mean_and_spread(self.means.get(task), show_counts) for task in tasks]
        known = [self.means[task].mean for task in tasks if task in self.means]
        average = sum(known) / len(tasks) if len(known) == len(tasks) else None
        return cells + [percent(average)] * (len(tasks) > 1)

    def papers(self, tasks: Sequence[str]) -> list[str]:
        """The paper's accuracy for each task, then its average over the same tasks."""
        if self.paper is None:
            return [NOTHING] * (len(tasks) + (len(tasks) > 1))
        numbers = [self.paper.on(task) for task in tasks] + [self.paper.average(tasks)] * (len(tasks) > 1)
        return [f"{number:.2f}" for number in numbers]


def _mean_and_spread(mean: SeedMean | None, show_counts: bool) -> str:
    if mean is None:
        return NOTHING
    spread = "" if mean.spread is None else f"±{percent(mean.spread)}"
    count = f" [{mean.count}]" if show_counts else ""
    return f"{percent(mean.mean)}{spread}{count}"


def summary_table(
    summary: Summary, tasks: Collection[str] = (), attentions: Collection[str] = (), *, paper_columns: bool = False
) -> Table:
    """A summary as Table 1: one row per attention, in the paper's blocks, and one column per task.

    Args:
        tasks, attentions: which columns and rows to show; all with runs, and all of the paper, if empty.
        paper_columns: put the paper's accuracies into their own columns instead of brackets.
    """
    paper_columns &= not summary.own
    known = sorted(summary.tasks) if summary.own else TASK_TITLES
    shown = [task for task in known if task in (tasks or summary.tasks)]
    titles = [TASK_TITLES.get(task, task) for task in shown] + [AVERAGE] * (len(shown) > 1)
    blocks = _blocks(summary, attentions)
    counts = {mean.count for mean in summary.means}
    rows = []
    for row in (row for block in blocks for row in block):
        if summary.own:
            rows.append([row.title, *row.ours(shown, show_counts=len(counts) > 1)])
            continue
        pairs = list(zip(row.ours(shown, show_counts=len(counts) > 1), row.papers(shown), strict=True))
        in_brackets = [f"{ours} ({paper})" for ours, paper in pairs]
        rows.append([row.title, *([cell for pair in pairs for cell in pair] if paper_columns else in_brackets)])
    starts = [sum(map(len, blocks[:number])) for number in range(1, len(blocks))]
    note = "\n".join(
        _summary_remarks(summary, counts, averaged=len(shown) > 1, in_brackets=not paper_columns and not summary.own)
    )
    header = ["attention", *(["ours", "paper"] * len(titles) if paper_columns else titles)]
    groups = [("", 1), *((title, 2) for title in titles)] if paper_columns else ()
    return Table(f"Test accuracy in %, {summary}", header, rows, note, groups, starts)


def _blocks(summary: Summary, attentions: Collection[str]) -> list[list[_Row]]:
    """The paper's blocks of attentions, then those that are not in the paper."""
    names = [[row.attention for row in block] for block in ACCURACY_BLOCKS]
    names.append(sorted({mean.attention for mean in summary.means} - set(ACCURACY)))
    blocks = [
        [row for name in block if not attentions or name in attentions for row in _rows(summary, name)]
        for block in names
    ]
    return [block for block in blocks if block]


def _rows(summary: Summary, attention: str) -> list[_Row]:
    """One row for each choice of options; without any run, one for the paper's accuracies."""
    found: dict[tuple[str, ...], dict[str, SeedMean]] = {}
    for mean in summary.means:
        if mean.attention == attention:
            found.setdefault(mean.options, {})[mean.task] = mean
    rows = [_Row(attention, options, found[options]) for options in sorted(found)]
    return rows or ([] if summary.own else [_Row(attention, (), {})])


def _summary_remarks(summary: Summary, counts: Collection[int], *, averaged: bool, in_brackets: bool) -> list[str]:
    remarks = ["The paper's accuracy is in brackets."] * in_brackets
    remarks.append(_meaning(counts) + ("; AVG is the average over the tasks shown." if averaged else "."))
    remarks += [f"{task} is {note}." for task, note in summary.notes]
    left_out = [f"{row.name} ({row.state})" for row in summary.left_out]
    return remarks + [f"Not counted: {', '.join(left_out)}."] * bool(left_out)


def _meaning(counts: Collection[int]) -> str:
    if not counts:
        return "No run is finished"
    if len(counts) > 1:
        return "Mean ± sample standard deviation over seeds [number of seeds]"
    (count,) = counts
    return "One seed each" if count == 1 else f"Mean ± sample standard deviation over {count} seeds"


def runs_csv(rows: Sequence[RunRow]) -> str:
    """One line per run."""
    return _csv([field.name for field in fields(RunRow)], rows)


def means_csv(summaries: Sequence[Summary]) -> str:
    """One line per mean over seeds."""
    return _csv(MEAN_COLUMNS, [mean for summary in summaries for mean in summary.means])


def _csv(columns: Sequence[str], records: Sequence[RunRow] | Sequence[SeedMean]) -> str:
    return as_csv(Table("", columns, [[_csv_cell(getattr(each, name)) for name in columns] for each in records]))


def _csv_cell(value: Any) -> str:
    if value is None:
        return ""
    return "; ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def as_json(rows: Sequence[RunRow], summaries: Sequence[Summary]) -> str:
    """All runs and all means in one document."""
    means = [mean for summary in summaries for mean in summary.means]
    document = {
        "runs": [asdict(row) for row in rows],
        "means": [{name: getattr(mean, name) for name in MEAN_COLUMNS} for mean in means],
    }
    return json.dumps(document, indent=2, allow_nan=False)
