"""`skyformer runs` as a user types it."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from tests.cli.conftest import CommandLine
from tests.training.fakes import a_config, finish, start


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two attentions on Text with three seeds, one unfinished run of ListOps, one that cannot be read."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in range(3):
        finish(a_config("text", "skyformer", seed=seed), folder, accuracy=0.60 + seed / 100)
        finish(a_config("text", "softmax", seed=seed), folder, accuracy=0.55)
    start(a_config("listops", seed=0), folder)
    broken = start(a_config("listops", seed=1), folder)
    (broken.folder / "config.yaml").write_text("{")
    return folder


@pytest.fixture
def runs(skyformer: CommandLine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(monkeypatch, capsys, "runs")


def test_all_runs_with_their_states(runs: CommandLine) -> None:
    outcome = runs()
    assert outcome.code == 0
    table = [line.split() for line in outcome.output.splitlines() if line.startswith(" ")]
    states = sorted(words[1] for words in table if "-seed" in " ".join(words))
    assert states == ["damaged", *["finished"] * 6, "interrupted"]
    assert "preset cpu of text is reduced" in outcome.output


def test_a_task_is_the_papers_table(runs: CommandLine) -> None:
    outcome = runs("--task", "text")
    (skyformer,) = [line for line in outcome.output.splitlines() if "Skyformer" in line]
    assert "61.00±1.00 (64.70)" in skyformer
    assert "NOT THE PAPER'S SETTING" in outcome.output
    assert "Mean ± sample standard deviation over 3 seeds" in outcome.output
    assert "ListOps" not in outcome.output


def test_the_other_formats(runs: CommandLine) -> None:
    (record,) = csv.DictReader(
        io.StringIO(runs("--task", "text", "--attention", "skyformer", "--format", "csv").output)
    )
    assert (record["mean"], record["count"], record["paper"]) == ("0.61", "3", "0.647")
    assert len(list(csv.DictReader(io.StringIO(runs("--format", "csv").output)))) == 8
    document = json.loads(runs("--task", "text", "--format", "json").output)
    assert (len(document["runs"]), len(document["means"])) == (6, 2)
    assert r"61.00$\pm$1.00 & 64.70 \\" in runs("--task", "text", "--format", "latex").output


def test_a_list_or_a_summary_can_be_asked_for(runs: CommandLine) -> None:
    assert a_config("text", seed=2).run_name() in runs("--task", "text", "--list").output
    summary = runs("--summary").output
    assert "AVG" in summary
    assert "Not counted" in summary


def test_curves(runs: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyformer.report.figures.FORMATS", ("svg",))
    assert "wrote" in runs("--task", "text", "--plot", tmp_path).errors
    assert {file.name for file in tmp_path.iterdir()} == {"accuracy-cpu.svg", "loss-cpu.svg"}


def test_no_runs_are_no_error(runs: CommandLine, tmp_path: Path) -> None:
    nowhere = ("--runs-dir", tmp_path / "none")
    outcome = runs(*nowhere)
    assert outcome.code == 0
    assert "no such runs in" in outcome.errors
    assert json.loads(runs(*nowhere, "--format", "json").output) == {"runs": [], "means": []}
    assert "nothing to draw" in runs(*nowhere, "--plot", tmp_path).errors
