"""Tables and figures of a study, drawn from its record alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyformer.report.study_files import write_report
from skyformer.report.study_tables import as_latex, as_markdown, escape
from skyformer.studies import run_study
from skyformer.studies.record import read_record, record_path
from skyformer.studies.show import Table
from tests.studies.toy import Options, Squares


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    run_study(Squares(Options(seeds=(0,))), tmp_path)
    record = read_record(Squares, record_path("squares", tmp_path))
    return {file.name: file for file in write_report(Squares, record, tmp_path)}


def test_it_leaves_tables_and_figures_of_every_kind(files: dict[str, Path]) -> None:
    assert sorted(files) == ["figure.pdf", "figure.png", "figure.svg", "table.md", "table.tex"]
    assert files["figure.png"].read_bytes().startswith(b"\x89PNG")
    assert files["figure.pdf"].read_bytes().startswith(b"%PDF")
    assert "<svg" in files["figure.svg"].read_text()


def test_tables_carry_the_figures_and_where_they_come_from(files: dict[str, Path]) -> None:
    markdown, latex = files["table.md"].read_text(), files["table.tex"].read_text()
    assert "| x_4 & 5% | **16** |" in markdown
    assert "commit" in markdown
    assert r"x\_4 \& 5\% & \textbf{16} \\" in latex
    assert r"\multicolumn{1}{c}{power}" in latex


def test_the_same_record_gives_the_same_files(files: dict[str, Path], tmp_path: Path) -> None:
    before = {name: file.read_bytes() for name, file in files.items()}
    write_report(Squares, read_record(Squares, record_path("squares", tmp_path)), tmp_path)
    assert {name: file.read_bytes() for name, file in files.items()} == before


def test_special_characters_survive() -> None:
    assert escape("a_b 50% #1 {x} <y> ~ ^ \\") == (
        r"a\_b 50\% \#1 \{x\} $<$y$>$ \textasciitilde{} \textasciicircum{} \textbackslash{}"
    )
    table = Table("T", ["a|b"], [["c|d"]])
    assert "a\\|b" in as_markdown([table])
    assert "a|b" in as_latex([table])
