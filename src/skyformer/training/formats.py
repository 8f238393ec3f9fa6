"""Runs for other programs: CSV and JSON with everything that is known, and LaTeX in the layout of Table 1."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from skyformer.report.paper import ACCURACY, TASK_TITLES
from skyformer.training.collect import Cell, RunRow, Summary
from skyformer.training.tables import Line, PaperLayout


@dataclass(frozen=True)
class MeanRecord:
    """A mean over seeds, what is behind it, and the paper's number; accuracies are shares of one."""

    preset: str
    changes: tuple[str, ...]
    note: str
    as_in_paper: bool
    task: str
    attention: str
    options: tuple[str, ...]
    count: int
    mean: float
    spread: float | None
    paper: float | None
    seeds: tuple[int, ...]
    accuracies: tuple[float, ...]
    runs: tuple[str, ...]


def mean_records(summaries: Sequence[Summary]) -> list[MeanRecord]:
    """The cells of all summaries, one after the other."""
    return [_mean_record(summary, cell) for summary in summaries for cell in summary.cells]


def _mean_record(summary: Summary, cell: Cell) -> MeanRecord:
    return MeanRecord(
        preset=summary.preset,
        changes=summary.changes,
        note=dict(summary.notes).get(cell.task, ""),
        as_in_paper=summary.as_in_paper and not cell.options,
        task=cell.task,
        attention=cell.attention,
        options=cell.options,
        count=len(cell.rows),
        mean=cell.mean,
        spread=cell.spread,
        paper=_paper_share(cell),
        seeds=tuple(cell.seeds),
        accuracies=tuple(cell.accuracies),
        runs=tuple(row.name for row in cell.rows),
    )


def _paper_share(cell: Cell) -> float | None:
    known = cell.attention in ACCURACY and cell.task in TASK_TITLES
    return round(ACCURACY[cell.attention].on(cell.task) / 100, 4) if known else None


def runs_csv(rows: Sequence[RunRow]) -> str:
    """Every run in a line."""
    return _csv(RunRow, rows)


def means_csv(summaries: Sequence[Summary]) -> str:
    """Every mean in a line."""
    return _csv(MeanRecord, mean_records(summaries))


def _csv(kind: type[RunRow] | type[MeanRecord], records: Sequence[RunRow] | Sequence[MeanRecord]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(kind)], lineterminator="\n")
    writer.writeheader()
    for record in records:
        writer.writerow({name: _csv_value(value) for name, value in asdict(record).items()})
    return text.getvalue()


def _csv_value(value: Any) -> Any:
    return "; ".join(map(str, value)) if isinstance(value, tuple) else value


def as_json(rows: Sequence[RunRow], summaries: Sequence[Summary]) -> str:
    """The runs and their means in one document."""
    document = {"runs": [asdict(row) for row in rows], "means": [asdict(mean) for mean in mean_records(summaries)]}
    return json.dumps(document, indent=2, allow_nan=False)


def as_latex(layout: PaperLayout) -> str:
    """The layout as a table environment, with ours and the paper's in columns of their own."""
    columns = range(len(layout.titles))
    heads = [f"\\multicolumn{{2}}{{c}}{{{title}}}" for title in layout.titles]
    lines = [
        "% needs \\usepackage{booktabs}",
        "\\begin{table}",
        f"\\caption{{{_escaped('. '.join([layout.title, *layout.remarks()]))}.}}",
        "\\centering",
        f"\\begin{{tabular}}{{l{'cc' * len(columns)}}}",
        "\\toprule",
        _row("", heads),
        " ".join(f"\\cmidrule(lr){{{2 * column + 2}-{2 * column + 3}}}" for column in columns),
        _row("Model", ["ours", "paper"] * len(columns)),
    ]
    for block in layout.blocks:
        lines += ["\\midrule", *(_row(_escaped(line.title), _pairs(layout, line)) for line in block)]
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", "\\end{table}"])


def _row(first: str, cells: Sequence[str]) -> str:
    return " & ".join([first, *cells]) + " \\\\"


def _pairs(layout: PaperLayout, line: Line) -> list[str]:
    pairs = zip(layout.ours(line), layout.papers(line), strict=True)
    return [_escaped(text) for pair in pairs for text in pair]


def _escaped(text: str) -> str:
    special = {character: f"\\{character}" for character in "&%$#_{}"}
    special |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    # A bracket after \\ would be taken for its argument, so those of ours stand in braces.
    special |= {"±": r"$\pm$", "<": "$<$", ">": "$>$", "[": "{[}", "]": "{]}", '"': "''"}
    return "".join(special.get(character, character) for character in text)
