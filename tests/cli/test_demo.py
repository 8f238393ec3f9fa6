"""`skyformer demo`: two runs, a table and files that agree with them, and nothing trained twice."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from skyformer.studies.demo import typical_step
from skyformer.training import open_run, sweeps
from skyformer.training.metrics import MetricRow
from tests.cli.conftest import CommandLine
from tests.training.in_process import InProcess

SMALL = [
    *("--steps", "4", "--set", "task.limit=48", "--set", "task.max_length=64", "--set", "loop.eval_every=2"),
    *("--set", "model.dim=16", "--set", "hardware.threads=1"),
]


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    monkeypatch.setattr(sweeps, "LocalExecutor", InProcess)
    monkeypatch.setattr("skyformer.report.figures.FORMATS", ("svg",))
    return CommandLine(monkeypatch, capsys, "demo")


def test_both_are_trained_and_compared(
    demo: CommandLine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tmp_path = tmp_path / "my runs"
    done = demo("--output", tmp_path, *SMALL)
    assert done.code == 0, done.errors
    figures = json.loads((tmp_path / "demo.json").read_text())
    assert [run["attention"] for run in figures["runs"]] == ["skyformer", "softmax"]
    for figure in figures["runs"]:
        result = open_run(figure["run"], tmp_path / "runs").result
        assert result is not None
        assert figure["test_accuracy"] == result.test_accuracy
        assert [point["step"] for point in figure["dev_curve"]] == [2, 4]
        assert f"{100 * result.test_accuracy:.2f}" in done.output
        assert figure["milliseconds_per_step"] > 0
    assert "up to 64 tokens are short" in " ".join(done.output.split())
    (advised,) = [line.partition("skyformer evaluate ")[2] for line in done.output.splitlines() if "evaluate" in line]
    evaluated = CommandLine(monkeypatch, capsys, "evaluate")(*shlex.split(advised))
    assert evaluated.code == 0, evaluated.errors
    assert 0.1 <= figures["chance"] < 0.6
    assert "reduced" in done.output
    assert {file.name for file in tmp_path.glob("demo.*")} == {"demo.json", "demo.svg"}

    finished = {file: file.stat().st_mtime_ns for file in tmp_path.glob("runs/*/result.json")}
    again = demo("--output", tmp_path, *SMALL)
    assert again.code == 0
    assert {file: file.stat().st_mtime_ns for file in tmp_path.glob("runs/*/result.json")} == finished


def test_a_stall_does_not_count_in_the_time_of_a_step() -> None:
    """Steps of 2, 50, 2 and 3 seconds; an evaluation of 7 between them is no step."""
    rows = [
        *(MetricRow(step, "train", 1.0, 0.5, 1e-3, seconds) for step, seconds in ((10, 20.0), (20, 520.0))),
        MetricRow(20, "dev", 1.0, 0.5, None, 527.0),
        *(MetricRow(step, "train", 1.0, 0.5, 1e-3, seconds) for step, seconds in ((30, 547.0), (40, 577.0))),
    ]
    assert typical_step(rows) == pytest.approx(2.5)
    assert typical_step(rows[2:3]) is None
