"""`skyformer report` as a user types it; tests/browser opens what it writes."""

from __future__ import annotations

import html
import json
import math
import re
import shutil
from pathlib import Path

import pytest

from skyformer.report.figures import Figure, Panel, Series
from skyformer.report.page import Page, Section, plots_of, render, sort_value
from skyformer.studies.overview import find
from tests.cli.conftest import CommandLine
from tests.training.fakes import a_config, finish

RESULTS = Path(__file__).parents[2] / "results"


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for seed in range(2):
        finish(a_config("text", "skyformer", seed=seed), folder)
    return folder


def test_the_command_and_its_errors(runs_dir: Path, skyformer: CommandLine, tmp_path: Path) -> None:
    output = tmp_path / "new" / "report.html"
    done = skyformer("report", next(runs_dir.glob("text-*")), RESULTS / "tilted", "-o", output)
    assert done.code == 0, done.errors
    assert done.output.strip() == f"wrote {output}: 1 runs, 1 records of studies"
    assert "text-s" in output.read_text()
    assert "nowhere does not exist" in skyformer.refused("report", tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "has neither a run" in skyformer.refused("report", tmp_path / "empty")
    damaged = tmp_path / "damaged" / "efficiency.json"
    damaged.parent.mkdir()
    damaged.write_text('{"format": 1, "study": "efficiency", "cells": [{}], "runs": [], "options": {}, "facts": {}}')
    assert "does not fit this version's study" in skyformer.refused("report", damaged)
    damaged.write_text('{"format": 1, "study": "unknown", "cells": [], "runs": []}')
    assert "unknown study 'unknown'" in skyformer.refused("report", damaged)


def test_runs_and_records_are_found_at_any_depth(runs_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(RESULTS / "tilted", tmp_path / "studies" / "tilted")
    shutil.copytree(runs_dir, tmp_path / "runs" / "today")
    found = find([tmp_path, tmp_path / "runs"])
    assert len(found.runs) == 2
    assert [file.name for file in found.records] == ["tilted.json"]


def test_plots_of_a_study_name_every_series_and_have_no_infinite_numbers() -> None:
    labels = ("Skyformer", "Skyformer (this package)", "Nystromformer")
    lines = [Series(label, [1, 2], [1.0, math.inf], [0.5, math.inf], [2.0, math.inf]) for label in labels]
    page = Page("A study", [Section("One", plots_of(Figure("one", "", [Panel("", "x", "y", lines)] * 2)))])
    content = re.search(r'type="application/json"[^>]*>(.*?)</script>', render(page), re.DOTALL)
    assert content is not None
    plots = json.loads(html.unescape(content[1]), parse_constant=pytest.fail)
    for plot in plots:
        traces = [trace for trace in plot["views"][0]["traces"] if trace["showlegend"]]
        assert [trace["name"] for trace in traces] == list(labels)
        assert len({trace["line"]["color"] for trace in traces}) == 3
        assert [trace["y"] for trace in traces] == [[1.0, None]] * 3


def test_what_cells_are_sorted_by() -> None:
    texts = ["1,230", "-2.5e-05", "10.7x", "61.00±1.00 [3]", "2 h 10 min", "4 min 05 s", "**3**", "-", "text", ""]
    expected = [1230.0, -2.5e-05, 10.7, 61.0, 7800.0, 245.0, 3.0, None, None, None]
    assert [sort_value(text) for text in texts] == expected
