"""Runs and records of studies on disk as one page: curves, means, tables, and the config behind every number."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from skyformer.errors import DataError
from skyformer.files import read_document, write_atomic
from skyformer.report.colours import attention_of
from skyformer.report.figures import Mark, Panel, Series
from skyformer.report.page import (
    Cell,
    Curve,
    Document,
    Page,
    Plot,
    Row,
    Section,
    SortableTable,
    View,
    plots_of,
    render,
    table_of,
)
from skyformer.report.paper import TASK_TITLES
from skyformer.report.tables import NOTHING, duration, number, percent
from skyformer.studies.base import StudyClass
from skyformer.studies.files import report_tables
from skyformer.studies.record import Measured, Record, read_record
from skyformer.studies.registry import BENCHMARKS, STUDIES
from skyformer.training.collect import RunRow, Summary, finite_metrics, row_of, summarise
from skyformer.training.metrics import MetricRow
from skyformer.training.runs import CONFIG_FILE, ENVIRONMENT_FILE, RESULT_FILE, try_run

_MEASURES = (
    ("dev accuracy (%)", "dev", "accuracy", 100.0),
    ("dev loss", "dev", "loss", 1.0),
    ("training loss", "train", "loss", 1.0),
    ("training accuracy (%)", "train", "accuracy", 100.0),
)
_AXES = (("steps", "step"), ("training time (s)", "seconds"))


@dataclass(frozen=True)
class Found:
    """Folders of runs, and files with records of studies."""

    runs: list[Path] = field(default_factory=list)
    records: list[Path] = field(default_factory=list)


def write_overview(paths: Sequence[Path], output: Path) -> Found:
    """Write the page of all runs and records at `paths` to `output`; returns what is in it.

    Args:
        paths: runs, records of studies (JSON), or folders that have these up to three levels below them.
    """
    found = find(paths)
    write_atomic(output, render(overview(found)))
    return found


def find(paths: Sequence[Path]) -> Found:
    """The runs and records at or below `paths`; a path without any is an error."""
    runs: dict[Path, None] = {}
    records: dict[Path, None] = {}
    for path in paths:
        if not path.exists():
            raise DataError(f"{path} does not exist; expected a run, the folder of a study, or a folder of these")
        configs = [path / CONFIG_FILE, *_below(path, CONFIG_FILE)] if path.is_dir() else []
        below = [path] if path.is_file() else sorted({*path.glob("*.json"), *_below(path, "*.json")})
        own_runs = [config.parent for config in configs if config.is_file() and not config.parent.name.startswith(".")]
        own_records = [file for file in below if file.parent not in own_runs and _study_name(file) is not None]
        if not own_runs and not own_records:
            raise DataError(
                f"{path} has neither a run (a folder with {CONFIG_FILE}) nor the record of a study (a JSON file that "
                "`skyformer study` or `skyformer bench` has written)"
            )
        runs |= dict.fromkeys(own_runs)
        records |= dict.fromkeys(own_records)
    return Found(list(runs), list(records))


def _below(folder: Path, pattern: str) -> list[Path]:
    return sorted(file for levels in ("*", "*/*", "*/*/*") for file in folder.glob(f"{levels}/{pattern}"))


def _study_name(file: Path) -> str | None:
    """The study of a record; None if the file is no record. The name may be that of an unknown study."""
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    is_record = isinstance(content, dict) and {"study", "cells", "runs"} <= content.keys()
    return str(content["study"]) if is_record else None


def overview(found: Found) -> Page:
    """The page of some runs and records."""
    sections = [*([_runs_section(found.runs)] if found.runs else []), *map(_study_section, found.records)]
    runs = f"{len(found.runs)} run{'s' * (len(found.runs) != 1)}"
    records = f"{len(found.records)} record{'s' * (len(found.records) != 1)} of studies"
    how = "Click a number or a curve to see its config; drag in a plot to zoom, double-click to zoom out."
    return Page("Skyformer report", sections, [f"{runs}, {records}. {how}"])


def _runs_section(folders: Sequence[Path]) -> Section:
    rows = sorted(map(row_of, map(try_run, folders)), key=lambda row: (row.task or "", row.attention or "", row.name))
    documents = {row.folder: _run_document(row) for row in rows}
    summaries = summarise(rows)
    means, mean_documents = _means_table(summaries, documents)
    tables = [*([means] if means.rows else []), _runs_table(rows, documents)]
    return Section("Runs", _curves(rows, documents), tables, [*mean_documents, *documents.values()])


def _run_document(row: RunRow) -> Document:
    parts = [f"state: {row.state}{f' ({row.reason})' if row.reason else ''}"]
    for name in (CONFIG_FILE, RESULT_FILE, ENVIRONMENT_FILE):
        file = Path(row.folder) / name
        if file.exists():
            try:
                parts.append(f"--- {name}\n{read_document(file).rstrip()}")
            except DataError as damaged:
                parts.append(f"--- {damaged}")
    return Document(row.name, "\n\n".join(parts))


def _runs_table(rows: Sequence[RunRow], documents: dict[str, Document]) -> SortableTable:
    header = ["run", "task", "attention", "seed", "preset", "state", "step", "dev %", "test %", "time", "steps per s"]
    header += ["peak memory MB", "parameters"]
    shown = []
    for row in rows:
        memory = None if row.peak_memory_bytes is None else row.peak_memory_bytes / 1e6
        text = [row.name, row.task, row.attention, row.seed, row.preset, row.state, row.step]
        numbers = [percent(row.dev_accuracy), percent(row.test_accuracy), duration(row.seconds)]
        numbers += [number(row.steps_per_second), number(memory), _text(row.parameters)]
        cells = [Cell(each, documents[row.folder]) for each in (*map(_text, text), *numbers)]
        shown.append(Row(cells, row.attention or ""))
    return SortableTable("All runs", header, shown)


def _text(value: object) -> str:
    if value is None or value == "":
        return NOTHING
    return f"{value:,}" if isinstance(value, int) else str(value)


def _means_table(summaries: Sequence[Summary], documents: dict[str, Document]) -> tuple[SortableTable, list[Document]]:
    """Means over seeds, and for each a document that lists its runs."""
    header = ["task", "attention", "setting", "seeds", "test %", "spread", "paper %"]
    rows, lists = [], []
    for summary in summaries:
        for mean in summary.means:
            runs = [documents[row.folder] for row in mean.rows]
            document = runs[0]
            if len(runs) > 1:
                document = Document(f"mean of {mean.task}, {mean.attention}, {summary}", "", runs)
                lists.append(document)
            setting = ", ".join([str(summary), *mean.options])
            numbers = [str(mean.count), percent(mean.mean), percent(mean.spread)]
            cells = [Cell(mean.task), Cell(mean.attention), Cell(setting)]
            cells += [Cell(each, document) for each in numbers] + [Cell(percent(mean.paper))]
            rows.append(Row(cells, mean.attention))
    return SortableTable("Mean test accuracy over seeds", header, rows), lists


def _curves(rows: Sequence[RunRow], documents: dict[str, Document]) -> list[Plot]:
    """A plot per task, with a curve per run."""
    tasks = dict.fromkeys([*TASK_TITLES, *(row.task for row in rows if row.task is not None)])
    plots = []
    for task in tasks:
        metrics = {row: points for row in rows if row.task == task and (points := finite_metrics(row))}
        if metrics:
            views = [_view(measure, axis, metrics, documents) for measure in _MEASURES for axis in _AXES]
            plots.append(Plot(TASK_TITLES.get(task, task), [view for view in views if view.curves]))
    return plots


def _view(
    measure: tuple[str, str, str, float],
    axis: tuple[str, str],
    metrics: dict[RunRow, list[MetricRow]],
    documents: dict[str, Document],
) -> View:
    (y_label, split, y_name, scale), (x_label, x_name) = measure, axis
    curves = []
    for row, points in metrics.items():
        own = [point for point in points if point.split == split]
        x, y = [getattr(point, x_name) for point in own], [scale * getattr(point, y_name) for point in own]
        if own:
            label = ", ".join([str(row.attention), *row.options, *row.changes, f"seed {row.seed}"])
            mark = Mark.LINE if row.state == "finished" else Mark.DASHED
            curves.append(Curve(Series(label, x, y, mark=mark), row.attention or "", documents[row.folder]))
    return View(Panel("", x_label, y_label, [curve.series for curve in curves]), curves)


def _study_section(file: Path) -> Section:
    name = _study_name(file)
    registry = BENCHMARKS if name in BENCHMARKS.names() else STUDIES
    study = registry.get(name)
    record = read_record(study, file)
    invocations = [_invocation_document(study, record, number) for number in range(len(record.invocations))]
    head = {"options": record.options, "facts": record.facts}
    document = Document(f"{study.name}: options, facts and invocations", _json(head), invocations)
    tables = [table_of(table, document) for table in report_tables(study, record)]
    plots = [plot for figure in study.figures(record.results()) for plot in plots_of(figure, document)]
    return Section(study.title, plots, [*tables, _cells_table(record, invocations)], [document, *invocations])


def _invocation_document(study: StudyClass, record: Record[Any, Any], number: int) -> Document:
    return Document(f"{study.name}: invocation {number}", _json(asdict(record.invocations[number])))


def _json(content: object) -> str:
    return json.dumps(content, indent=2, default=str)


def _cells_table(record: Record[Any, Any], invocations: Sequence[Document]) -> SortableTable:
    """Every measurement: what it depends on and what it gave, linked to the invocation that measured it."""
    rows = [(asdict(cell), _numbers(each), invocations[each.invocation]) for cell, each in record.cells.items()]
    columns = list(dict.fromkeys(name for cell, _, _ in rows for name in cell))
    results = list(dict.fromkeys(name for _, numbers, _ in rows for name in numbers))
    shown = [
        Row(
            [Cell(_text(cell.get(name)), document) for name in columns]
            + [Cell(numbers.get(name, NOTHING), document) for name in results],
            attention_of(str(cell.get("attention", cell.get("method", "")))) or "",
        )
        for cell, numbers, document in rows
    ]
    return SortableTable("All measurements", [*columns, *results], shown, folded=True)


def _numbers(measured: Measured[Any]) -> dict[str, str]:
    """The numbers and texts of a result; of a list of numbers, the median."""
    found = {}
    for name, value in asdict(measured.result).items():
        if isinstance(value, int | float | str) or value is None:
            found[name] = number(value) if isinstance(value, float) else _text(value)
        elif members := list(_floats(value)):
            found[f"{name} (median of {len(members)})"] = number(statistics.median(members))
    return {**found, "seconds to measure": number(measured.seconds)}


def _floats(value: Any) -> Iterable[float]:
    return (each for each in value if isinstance(each, int | float)) if isinstance(value, list | tuple) else ()
