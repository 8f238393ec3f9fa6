"""Curves: a panel a task, a line an attention, and the same figures give the same file."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyformer.training.collect import collect_runs, summarise
from skyformer.training.curves import curves_of, draw_curves
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


def test_a_run_that_is_not_finished_is_drawn_for_itself(tmp_path: Path) -> None:
    finish(a_config(seed=0), tmp_path)
    write_curve(start(a_config(seed=1), tmp_path), [(0.2, 2.0, 10)])
    start(a_config(seed=2), tmp_path)
    (summary,) = summarise(collect_runs(tmp_path))
    assert [curve.label for curve in curves_of(summary, "listops")] == ["skyformer", "skyformer (seed 1, interrupted)"]


def test_two_figures_a_setting_twice(tmp_path: Path) -> None:
    for attention in ("skyformer", "softmax"):
        for seed in (0, 1):
            finish(a_config("listops", attention, seed=seed), tmp_path / "runs", accuracy=0.4 + seed / 10)
    finish(a_config("text", overrides=["optim.lr=1e-3"]), tmp_path / "runs")
    files = draw_curves(summarise(collect_runs(tmp_path / "runs")), tmp_path / "plots")
    names = sorted(file.name for file in files)
    assert names[:2] == ["accuracy-cpu-" + names[0][13:21] + ".png", "accuracy-cpu-" + names[0][13:21] + ".svg"]
    assert {"accuracy-cpu.png", "accuracy-cpu.svg", "loss-cpu.png", "loss-cpu.svg"} < set(names)
    assert len(names) == 8
    for file in files:
        content = file.read_bytes()
        assert content.startswith(b"\x89PNG") if file.suffix == ".png" else b"<svg" in content


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_same_figures_give_the_same_file(tmp_path: Path, ending: str) -> None:
    finish(a_config(), tmp_path / "runs")
    summaries = summarise(collect_runs(tmp_path / "runs"))
    for folder in ("first", "second"):
        draw_curves(summaries, tmp_path / folder)
    name = f"loss-cpu.{ending}"
    assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


def test_without_curves_there_is_no_figure(tmp_path: Path) -> None:
    start(a_config(), tmp_path / "runs")
    assert draw_curves(summarise(collect_runs(tmp_path / "runs")), tmp_path / "plots") == []
    assert not (tmp_path / "plots").exists()
