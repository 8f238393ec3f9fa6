"""`skyformer runs` as a user types it."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from tests.cli.typed import CommandLine
from tests.training.fakes import a_config, finish, start


@pytest.fixture
def runs_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two attentions on Text with three seeds, one unfinished run of ListOps, one that cannot be read."""
    folder = tmp_path / "runs"
    monkeypatch.setenv("SKYFORMER_RUNS", str(folder))
    for seed in range(3):
        finish(a_config("text", "skyformer", seed=seed), folder, accuracy=0.60 + seed / 100)
        finish(a_config("text", "softmax", seed=seed), folder, accuracy=0.55)
    start(a_config("listops", seed=0), folder)
    broken = start(a_config("listops", seed=1), folder)
    (broken.folder / "config.yaml").write_text("{")
    return folder


@pytest.fixture
def runs(runs_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
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


def test_a_task_in_the_other_formats(runs: CommandLine) -> None:
    (record,) = csv.DictReader(
        io.StringIO(runs("--task", "text", "--attention", "skyformer", "--format", "csv").output)
    )
    assert (record["mean"], record["count"], record["paper"]) == ("0.61", "3", "0.647")
    document = json.loads(runs("--task", "text", "--format", "json").output)
    assert (len(document["runs"]), len(document["means"])) == (6, 2)
    latex = runs("--task", "text", "--format", "latex").output
    assert r"61.00$\pm$1.00 & 64.70 \\" in latex


def test_a_list_or_a_summary_can_be_asked_for(runs: CommandLine) -> None:
    assert a_config("text", seed=2).run_name() in runs("--task", "text", "--list").output
    summary = runs("--summary").output
    assert "AVG" in summary
    assert "Not counted" in summary
    assert len(list(csv.DictReader(io.StringIO(runs("--format", "csv").output)))) == 8


def test_curves(runs: CommandLine, tmp_path: Path) -> None:
    outcome = runs("--task", "text", "--plot", tmp_path / "plots")
    assert "wrote" in outcome.errors
    names = {f"{measure}-cpu.{suffix}" for measure in ("accuracy", "loss") for suffix in ("pdf", "png", "svg")}
    assert {file.name for file in (tmp_path / "plots").iterdir()} == names


def test_no_runs_are_no_error(runs: CommandLine, tmp_path: Path) -> None:
    outcome = runs("--runs-dir", tmp_path / "none")
    assert outcome.code == 0
    assert "no such runs in" in outcome.errors
    assert json.loads(runs("--runs-dir", tmp_path / "none", "--format", "json").output) == {"runs": [], "means": []}
    assert "nothing to draw" in runs("--runs-dir", tmp_path / "none", "--plot", tmp_path).errors


@pytest.mark.parametrize(
    ("words", "promised"),
    [
        (["--task", "txt"], "unknown task 'txt'"),
        (["--attention", "skyfromer"], "Did you mean 'skyformer'?"),
        (["--preset", "papr"], "Did you mean 'paper'?"),
        (["--format", "latex", "--list"], "remove --list"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(runs: CommandLine, words: list[str], promised: str) -> None:
    outcome = runs(*words)
    assert outcome.code == 2
    assert promised in outcome.errors
    assert len(outcome.errors.strip().splitlines()) == 1
