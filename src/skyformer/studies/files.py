"""The files that are made from a record: table.md, table.tex, and each figure as PNG, SVG and PDF."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from skyformer.files import write_atomic
from skyformer.report.figures import draw_figure
from skyformer.report.tables import Table, as_latex, as_markdown
from skyformer.studies.base import StudyClass
from skyformer.studies.record import Record
from skyformer.studies.targets import targets_table


def write_report(study: StudyClass, record: Record[Any, Any], folder: Path) -> list[Path]:
    """Write tables and figures from the record alone; returns the files."""
    tables = report_tables(study, record)
    markdown, latex = folder / "table.md", folder / "table.tex"
    write_atomic(markdown, _heading(study, record) + "\n" + as_markdown(tables))
    write_atomic(latex, as_latex(tables))
    drawn = [draw_figure(figure, folder) for figure in study.figures(record.results())]
    return [markdown, latex, *(file for files in drawn for file in files)]


def report_tables(study: StudyClass, record: Record[Any, Any]) -> list[Table]:
    """The tables of a record, with its targets first."""
    targets = study.targets(record.results())
    return [*([targets_table(targets)] if targets else []), *study.tables(record.results())]


def _heading(study: StudyClass, record: Record[Any, Any]) -> str:
    """Title, facts, commands and machines, so that the tables can be read alone."""
    lines = [f"## {study.title}", ""]
    facts = ", ".join(f"{name} {value}" for name, value in record.facts.items())
    if facts:
        lines.append(f"- {facts}")
    for each in record.invocations:
        machine = f"{each.machine['processor']}, {each.threads} of {each.machine['cores']} cores"
        versions = ", ".join(f"{name} {version}" for name, version in each.versions.items())
        lines.append(f"- `{each.command}`, {each.started}, commit {each.commit or 'unknown'}, {machine}, {versions}")
    return "\n".join(lines) + "\n"
