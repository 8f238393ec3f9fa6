"""The figure of the README, from records of finished and unfinished runs."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyformer.errors import SkyformerError
from skyformer.studies.arena import Arena
from skyformer.studies.benchmarks.attention import AttentionBenchmark, Cell, Result, Row
from skyformer.studies.record import Measured, Record, read_record, record_path

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "front_figure.py"))


@pytest.fixture
def arena() -> Record[Any, Any]:
    """The committed record, with its runs on Text as if they had been trained with other attentions."""
    return read_record(Arena, record_path("arena", ROOT / "results" / "arena"))


def with_text(record: Record[Any, Any], runs: Sequence[tuple[str, bool]]) -> Record[Any, Any]:
    cell, measured = next((c, m) for c, m in record.cells.items() if c.task == "text" and m.result.dev_curve)
    result = replace(measured.result, idle_seconds=1.0)
    record.cells = {
        replace(cell, attention=name, run=name, finished=finished): Measured(result, 0, 1.0) for name, finished in runs
    }
    return record


@pytest.fixture
def speed() -> Record[Any, Any]:
    rows = [Row(name, (), (1.0,), 1, 1, None) for name in ("sdpa", "performer", "skyformer")]
    cells = {Cell(length): Measured(Result(tuple(rows)), 0, 1.0) for length in (1024, 4096)}
    return Record("attention", {}, {"processor": "a processor", "cores": 2, "threads": 2}, cells=cells)


def test_both_panels_name_attentions_alike(arena: Record[Any, Any], speed: Record[Any, Any]) -> None:
    runs = with_text(arena, [("softmax", False), ("nystromformer", True), ("skyformer", True)])
    panels = [SCRIPT["speed_panel"](speed), SCRIPT["accuracy_panel"](runs)]
    assert [[series.label for series in panel.series] for panel in panels] == [["softmax", "skyformer"]] * 2
    cell = next(iter(runs.cells))
    assert SCRIPT["unfinished"](runs) == [f"softmax ({cell.step:,} of 5,000 steps)"]
    assert "(minutes)" in panels[1].x_label


def test_the_figure_is_drawn_from_stored_records(
    arena: Record[Any, Any], speed: Record[Any, Any], tmp_path: Path
) -> None:
    for study, record in ((AttentionBenchmark, speed), (Arena, with_text(arena, [("skyformer", False)]))):
        path = record_path(study.name, tmp_path / study.name)
        path.parent.mkdir()
        record.write(path)
    files = SCRIPT["draw"](tmp_path, tmp_path)
    assert [file.name for file in files] == ["front.png", "front.svg"]


def test_missing_records_and_runs_are_named(arena: Record[Any, Any], tmp_path: Path) -> None:
    draw: Callable[[Path, Path], list[Path]] = SCRIPT["draw"]
    with pytest.raises(SkyformerError, match="there is no record at"):
        draw(tmp_path, tmp_path)
    with pytest.raises(SkyformerError, match="no run on Text"):
        SCRIPT["accuracy_panel"](with_text(arena, []))
