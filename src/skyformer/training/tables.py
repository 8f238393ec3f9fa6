"""Runs as tables in a terminal: all of them one by one, or seeds averaged in the layout of the paper's Table 1."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table
from rich.text import Text

from skyformer.report.paper import ACCURACY, ACCURACY_BLOCKS, TASK_TITLES, PaperAccuracy
from skyformer.report.tables import NOTHING, duration, percent
from skyformer.training.collect import Cell, RunRow, Summary

AVERAGE = "AVG"


def runs_table(rows: Sequence[RunRow]) -> Table:
    """Every run in a line; `run_remarks` belong below it."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    table.add_column("run", overflow="fold", min_width=16)
    table.add_column("state", no_wrap=True)
    for title in ("step", "dev %", "test %", "time"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("preset", min_width=9)
    for row in rows:
        table.add_row(*map(Text, _run_cells(row)))
    return table


def _run_cells(row: RunRow) -> tuple[str, ...]:
    step = NOTHING if row.step is None else f"{row.step:,}/{row.steps:,}"
    numbers = (percent(row.dev_accuracy), percent(row.test_accuracy), duration(row.seconds))
    return (row.name, row.state, step, *numbers, _preset_mark(row))


def _preset_mark(row: RunRow) -> str:
    if row.preset is None:
        return NOTHING
    marks = ["reduced"] * bool(row.preset_note) + ["changed"] * bool(row.changes or row.options)
    return f"{row.preset} ({', '.join(marks)})" if marks else row.preset


def run_remarks(rows: Sequence[RunRow]) -> list[str]:
    """Why runs failed, what was changed in them, and how their presets depart from the paper."""
    wrong = [f"{row.name} {row.state}: {row.reason}" for row in rows if row.reason]
    changed: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        for settings in (row.changes, row.options):
            changed.setdefault(settings, []).append(row.name)
    changes = [f"changed in {_some(names)}: {', '.join(key)}" for key, names in changed.items() if key]
    notes = dict.fromkeys(f"preset {row.preset} of {row.task} is {row.preset_note}" for row in rows if row.preset_note)
    return [*wrong, *changes, *notes]


def _some(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


@dataclass(frozen=True)
class Line:
    """One attention, with the options it was changed by, and its cells by task."""

    attention: str
    options: tuple[str, ...]
    cells: dict[str, Cell]

    @property
    def title(self) -> str:
        name = self.attention if self.paper is None else self.paper.title
        return f"{name} ({', '.join(self.options)})" if self.options else name

    @property
    def paper(self) -> PaperAccuracy | None:
        return ACCURACY.get(self.attention)

    def average(self, tasks: Sequence[str]) -> float | None:
        """The average of our means, if there is one for every task."""
        if not all(task in self.cells for task in tasks):
            return None
        return sum(self.cells[task].mean for task in tasks) / len(tasks)


class PaperLayout:
    """A summary arranged as Table 1: a line an attention, in the paper's blocks, and a column a task."""

    def __init__(self, summary: Summary, tasks: Collection[str] = (), attentions: Collection[str] = ()) -> None:
        shown = set(tasks) or {row.task for row in summary.rows if row.task is not None}
        self.summary = summary
        self.tasks = [task for task in TASK_TITLES if task in shown]
        self.has_average = len(self.tasks) > 1
        self.titles = [TASK_TITLES[task] for task in self.tasks] + [AVERAGE] * self.has_average
        self.counts = {len(cell.rows) for cell in summary.cells}
        blocks = [[line for name in block for line in self._lines(name)] for block in self._blocks(attentions)]
        self.blocks = [block for block in blocks if block]

    def _blocks(self, attentions: Collection[str]) -> list[list[str]]:
        blocks = [[row.attention for row in block] for block in ACCURACY_BLOCKS]
        blocks.append(sorted({cell.attention for cell in self.summary.cells} - set(ACCURACY)))
        return [[name for name in block if not attentions or name in attentions] for block in blocks]

    def _lines(self, attention: str) -> list[Line]:
        """A line for each choice of options; without any run, one for the paper's numbers."""
        found: dict[tuple[str, ...], dict[str, Cell]] = {}
        for cell in self.summary.cells:
            if cell.attention == attention:
                found.setdefault(cell.options, {})[cell.task] = cell
        return [Line(attention, options, found[options]) for options in sorted(found)] or [Line(attention, (), {})]

    def ours(self, line: Line) -> list[str]:
        """Mean and spread for each column."""
        cells = [self._mean_and_spread(line.cells.get(task)) for task in self.tasks]
        return cells + [percent(line.average(self.tasks))] * self.has_average

    def _mean_and_spread(self, cell: Cell | None) -> str:
        if cell is None:
            return NOTHING
        spread = "" if cell.spread is None else f"±{percent(cell.spread)}"
        count = f" [{len(cell.rows)}]" if len(self.counts) > 1 else ""
        return f"{percent(cell.mean)}{spread}{count}"

    def papers(self, line: Line) -> list[str]:
        """The paper's number for each column; its average is over the same tasks."""
        if line.paper is None:
            return [NOTHING] * len(self.titles)
        numbers = [line.paper.on(task) for task in self.tasks]
        return [f"{number:.2f}" for number in numbers + [line.paper.average(self.tasks)] * self.has_average]

    @property
    def title(self) -> str:
        return f"Test accuracy in %, {describe(self.summary)}"

    def remarks(self) -> list[str]:
        """What the numbers must be read with."""
        average = "; AVG is over the tasks shown" if self.has_average else ""
        notes = [f"{task} is {note}" for task, note in self.summary.notes]
        left_out = [f"{row.name} ({row.state})" for row in self.summary.left_out]
        return [self._meaning() + average, *notes] + [f"not counted: {', '.join(left_out)}"] * bool(left_out)

    def _meaning(self) -> str:
        if not self.counts:
            return "no run is finished"
        if len(self.counts) > 1:
            return "mean ± sample standard deviation over seeds [number of seeds]"
        (count,) = self.counts
        return "one seed each" if count == 1 else f"mean ± sample standard deviation over {count} seeds"


def describe(summary: Summary) -> str:
    """The setting in a few words; one that is not the paper's says so."""
    reduced = " (reduced)" if summary.notes else ""
    changes = f" with {', '.join(summary.changes)}" if summary.changes else ""
    warning = "" if summary.as_in_paper else "; NOT THE PAPER'S SETTING"
    return f"preset {summary.preset}{reduced}{changes}{warning}"


def summary_table(layout: PaperLayout) -> Table:
    """Ours, and the paper's in brackets; the layout's title belongs above it, its remarks below."""
    table = Table()
    table.add_column("attention", overflow="fold", min_width=14)
    for title in layout.titles:
        table.add_column(title, justify="right")
    for block in layout.blocks:
        table.add_section()
        for line in block:
            pairs = zip(layout.ours(line), layout.papers(line), strict=True)
            table.add_row(Text(line.title), *(Text(f"{ours} ({paper})") for ours, paper in pairs))
    return table
