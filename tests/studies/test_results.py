"""The committed results: every study's tables and figures are those that its committed record gives."""

from __future__ import annotations

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
