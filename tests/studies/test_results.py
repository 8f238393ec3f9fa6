"""The committed results: every study's tables and figures are those that its committed record gives."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from skyformer.report.figures import FORMATS, Figure
from skyformer.studies import files, list_studies, study_class
from skyformer.studies.record import read_record, record_path

RESULTS = Path(__file__).parents[2] / "results"


@pytest.mark.parametrize("name", list_studies())
def test_committed_tables_are_those_of_the_record(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(files, "draw_figure", lambda figure, folder: drawn.append(figure) or [])
    study = study_class(name)
    files.write_report(study, read_record(study, record_path(name, RESULTS / name)), tmp_path)
    for table in ("table.md", "table.tex"):
        assert (tmp_path / table).read_text() == (RESULTS / name / table).read_text()
    committed = {file.name for file in (RESULTS / name).iterdir() if file.suffix[1:] in FORMATS}
    assert committed == {f"{figure.name}.{suffix}" for figure in drawn for suffix in FORMATS}


NUMBER = re.compile(r"\d(?:[\d,]*\d)?(?:\.\d+)?(?:e[+-]\d+)?")


BEFORE_ITS_TABLES = {"embedded": "**Figure 1 as drawn.**"}
"""The words after which a study's tables begin, where it has no section of its own; they end at the next bold words."""


def _part_of_the_page(name: str) -> str:
    page = (RESULTS.parent / "docs" / "reproduction.md").read_text()
    if name in BEFORE_ITS_TABLES:
        return page.split(BEFORE_ITS_TABLES[name])[1].split("\n**")[0]
    section = page.split(f"\n## {name.capitalize()}\n")[1].split("\n## ")[0]
    return section.split("**What we found.**")[1]


@pytest.mark.parametrize("name", list_studies())
def test_tables_of_the_documentation_agree_with_the_results(name: str) -> None:
    rows = [line.split("|")[1:-1] for line in _part_of_the_page(name).splitlines() if line[:2] == "| "]
    # The last column of the table of efficiency is from a benchmark.
    cells = [cell for row in rows for cell in (row[:-1] if name == "efficiency" else row)]
    found = {number for cell in cells for number in NUMBER.findall(cell)}
    assert len(found) > 20
    assert found <= set(NUMBER.findall((RESULTS / name / "table.md").read_text()))
