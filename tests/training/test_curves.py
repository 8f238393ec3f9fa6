"""Curves: one panel per task, one line per attention, and the same runs give the same files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from skyformer.report.figures import Mark
from skyformer.training.collect import collect_runs, summarise
from skyformer.training.curves import MEASURES, curves_of, draw_curves
from tests.training.fakes import a_config, finish, start, write_curve


def test_seeds_are_averaged_at_the_steps_they_share(tmp_path: Path) -> None:
    write_curve(finish(a_config(seed=0), tmp_path), [(0.2, 2.0, 10), (0.4, 1.5, 20), (0.5, 1.0, 30)])
    write_curve(finish(a_config(seed=1), tmp_path), [(0.3, 2.0, 14), (0.4, 1.9, 28)])
    (summary,) = summarise(collect_runs(tmp_path))
    (curve,) = curves_of(summary, "listops")
    assert curve.label == "skyformer"
    assert [[(p.step, p.accuracy, p.seconds) for p in group] for group in curve.points()] == [
        [(100, 0.2, 10), (100, 0.3, 14)],
        [(200, 0.4, 20), (200, 0.4, 28)],
    ]
    series = curve.series(MEASURES[0])
    assert (series.x, series.y) == ([12, 24], [25, 40])
    assert (series.low, series.high) == ([20, 40], [30, 40])


def test_an_unfinished_run_has_its_own_dashed_line(tmp_path: Path) -> None:
    finish(a_config(seed=0), tmp_path)
    write_curve(start(a_config(seed=1), tmp_path), [(0.2, 2.0, 10)])
    start(a_config(seed=2), tmp_path)
    (summary,) = summarise(collect_runs(tmp_path))
    curves = curves_of(summary, "listops")
    assert [curve.label for curve in curves] == ["skyformer", "skyformer (seed 1, interrupted)"]
    assert [curve.series(MEASURES[0]).mark for curve in curves] == [Mark.LINE, Mark.POINTS]


def test_two_figures_per_setting_and_the_same_files_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyformer.report.figures.FORMATS", ("svg",))
    for attention in ("skyformer", "softmax"):
        for seed in (0, 1):
            finish(a_config("listops", attention, seed=seed), tmp_path / "runs", accuracy=0.4 + seed / 10)
    finish(a_config("text", overrides=["optim.lr=1e-3"]), tmp_path / "runs")
    summaries = summarise(collect_runs(tmp_path / "runs"))
    first, second = draw_curves(summaries, tmp_path / "first"), draw_curves(summaries[:1], tmp_path / "second")
    assert [re.sub("[0-9a-f]{8}", "DIGEST", file.name) for file in first] == [
        *("accuracy-cpu.svg", "loss-cpu.svg"),
        *("accuracy-cpu-DIGEST.svg", "loss-cpu-DIGEST.svg"),
    ]
    assert [file.read_bytes() for file in first[:2]] == [file.read_bytes() for file in second]


def test_without_curves_there_is_no_figure(tmp_path: Path) -> None:
    start(a_config(), tmp_path / "runs")
    assert draw_curves(summarise(collect_runs(tmp_path / "runs")), tmp_path / "plots") == []
    assert not (tmp_path / "plots").exists()
