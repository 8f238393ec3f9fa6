"""All that a study leaves beside its record: table.md, table.tex, and each figure as PNG, SVG and PDF."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from skyformer.files import write_atomic
from skyformer.report.figures import draw_figure
from skyformer.report.tables import as_latex, as_markdown
from skyformer.studies.base import Study
from skyformer.studies.record import Record


def write_report(study: type[Study[Any, Any, Any]], record: Record[Any, Any], folder: Path) -> list[Path]:
    """Tables and figures from the record alone; returns the files."""
    results = record.results()
    tables = study.tables(results)
    markdown, latex = folder / "table.md", folder / "table.tex"
    write_atomic(markdown, _heading(study, record) + "\n" + as_markdown(tables))
    write_atomic(latex, as_latex(tables))
    drawn = [draw_figure(figure, folder) for figure in study.figures(results)]
    return [markdown, latex, *(file for files in drawn for file in files)]


def _heading(study: type[Study[Any, Any, Any]], record: Record[Any, Any]) -> str:
    """What the tables come from, so that they can be read alone."""
    lines = [f"## {study.title}", ""]
    facts = ", ".join(f"{name} {value}" for name, value in record.facts.items())
    if facts:
        lines.append(f"- {facts}")
    for run in record.runs:
        machine = f"{run.machine['processor']}, {run.threads} of {run.machine['cores']} cores"
        versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
        lines.append(f"- `{run.command}`, {run.started}, commit {run.commit or 'unknown'}, {machine}, {versions}")
    return "\n".join(lines) + "\n"
