"""Tables and figures of a study, drawn from its record alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyformer.report.figures import Figure, Panel, Series, draw_figure
from skyformer.report.tables import Table, as_latex, as_markdown, escape, number
from skyformer.studies import run_study
from skyformer.studies.files import write_report
from skyformer.studies.record import read_record, record_path
from tests.studies.toy import Options, Squares


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("squares")
    run_study(Squares(Options(seeds=(0,))), folder)
    record = read_record(Squares, record_path("squares", folder))
    return {file.name: file for file in write_report(Squares, record, folder)}


def test_a_report_has_tables_and_figures_in_every_format(files: dict[str, Path]) -> None:
    assert sorted(files) == ["figure.pdf", "figure.png", "figure.svg", "table.md", "table.tex"]
    assert files["figure.png"].read_bytes().startswith(b"\x89PNG")
    assert files["figure.pdf"].read_bytes().startswith(b"%PDF")
    assert "<svg" in files["figure.svg"].read_text()


def test_a_long_title_stays_within_a_narrow_figure(tmp_path: Path) -> None:
    from matplotlib import image

    title = "The quick brown fox jumps over the lazy dog, again and again, until the evening comes"
    panel = Panel("all", "x", "y", [Series("line", [1.0, 2.0], [1.0, 2.0])])
    (png,) = [file for file in draw_figure(Figure("long", title, [panel]), tmp_path) if file.suffix == ".png"]
    picture = image.imread(png)[..., :3]
    margins = picture[:, :2], picture[:, -2:]
    assert all((margin == 1).all() for margin in margins), "ink at the edge: the title is cut"


def test_tables_have_the_results_and_their_environment(files: dict[str, Path]) -> None:
    markdown, latex = files["table.md"].read_text(), files["table.tex"].read_text()
    assert "| square of 4 | at most 20 | 16 | pass |" in markdown
    assert "| x_4 & 5% | **16** |" in markdown
    assert "commit" in markdown
    assert r"x\_4 \& 5\% & \textbf{16} \\" in latex
    assert r"\multicolumn{1}{c}{power}" in latex


def test_the_same_record_gives_the_same_files(files: dict[str, Path], tmp_path: Path) -> None:
    record = read_record(Squares, record_path("squares", files["table.md"].parent))
    again = write_report(Squares, record, tmp_path)
    assert {file.name: file.read_bytes() for file in again} == {name: file.read_bytes() for name, file in files.items()}


def test_numbers_have_three_significant_digits() -> None:
    shown = [number(x) for x in (None, 0, 0.0312, 1.049, 31.24, 1234.5, 2.13e7, 2.1e-5)]
    assert shown == ["-", "0", "0.0312", "1.05", "31.2", "1,234", "2.1e+07", "2.1e-05"]


def test_special_characters_are_escaped() -> None:
    assert escape("a_b 50% #1 {x} <y> ~ ^ \\") == (
        r"a\_b 50\% \#1 \{x\} $<$y$>$ \textasciitilde{} \textasciicircum{} \textbackslash{}"
    )
    table = Table("T", ["a|b"], [["c|d"]])
    assert "a\\|b" in as_markdown([table])
    assert "a|b" in as_latex([table])
