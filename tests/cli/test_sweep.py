"""`skyformer sweep` as a user types it; the processes of the runs are fakes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from skyformer.errors import InputError
from skyformer.lra import prepare
from skyformer.training import sweeps
from skyformer.training.ray_sweeps import parse_memory
from tests.cli.typed import CommandLine
from tests.helpers import refused
from tests.training import fake_train
from tests.training.fakes import a_config, finish, start

SMALL = ("task.limit=20", "task.max_length=64")


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    prepare("listops", limit=20, max_length=64, data_dir=folder)
    return folder


@pytest.fixture
def runs_dir(tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "runs"
    folder.mkdir()
    monkeypatch.setattr(sweeps, "SKYFORMER", (sys.executable, "-S", fake_train.__file__))
    monkeypatch.setenv("SKYFORMER_RUNS", str(folder))
    monkeypatch.setenv("SKYFORMER_DATA", str(data_dir))
    return folder


@pytest.fixture
def sweep(runs_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    small = [word for setting in SMALL for word in ("--set", setting)]
    return CommandLine(monkeypatch, capsys, "sweep", "--preset", "cpu", *small)


def library(runs_dir: Path, attentions: str, seeds: str, **orders: str) -> None:
    """The finished runs for the fake training; keywords order another ending for the runs of an attention."""
    configs = [
        a_config("listops", attention, seed=int(seed), overrides=SMALL)
        for attention in attentions.split()
        for seed in seeds.split()
    ]
    for config in configs:
        finish(config, runs_dir / "library")
    words = {config.run_name(): orders.get(config.model.attention, "finish").split() for config in configs}
    (runs_dir / "orders.json").write_text(json.dumps(words))


def test_a_line_per_run_and_a_table(sweep: CommandLine, runs_dir: Path) -> None:
    library(runs_dir, "softmax skyformer", "0 1")
    outcome = sweep("--task", "listops", "--attention", "softmax,skyformer", "--seeds", "0,1", "--jobs", "2")
    assert outcome.code == 0, outcome.errors
    lines = [line for line in outcome.errors.splitlines() if line.startswith("[")]
    assert [line.split()[0] for line in lines] == ["[1/4]", "[2/4]", "[3/4]", "[4/4]"]
    assert "finished, test accuracy 40.00% in 1 min 40 s [preset cpu, not the paper's setting]" in lines[0]
    assert outcome.output.count("cpu (reduced, changed)") == 4
    again = sweep("--task", "listops", "--attention", "softmax,skyformer", "--seeds", "0,1")
    assert again.errors.count("finished before") == 4


def test_all_attentions(sweep: CommandLine) -> None:
    outcome = sweep("--task", "listops", "--attention", "all", "--dry-run")
    assert len(outcome.output.splitlines()) == 9 * 3


def test_a_failure_is_named_and_exit_code_1(sweep: CommandLine, runs_dir: Path) -> None:
    library(runs_dir, "softmax skyformer", "0", softmax="fail")
    outcome = sweep("--task", "listops", "--attention", "softmax,skyformer", "--seeds", "0")
    assert outcome.code == 1
    assert "[1/2] listops softmax seed 0: failed: the loss is nan at step 8" in outcome.errors
    assert "[2/2] listops skyformer seed 0: finished" in outcome.errors
    (error,) = [line for line in outcome.errors.splitlines() if line.startswith("error")]
    assert error.startswith("error: listops-softmax-cpu-seed0-")
    assert "the loss is nan" in error


def test_a_dry_run_says_what_would_be_done_and_does_nothing(sweep: CommandLine, runs_dir: Path) -> None:
    finish(a_config("listops", seed=0, overrides=SMALL), runs_dir)
    start(a_config("listops", seed=1, overrides=SMALL), runs_dir, step=750)
    before = sorted(runs_dir.rglob("*"))
    lines = sweep("--task", "listops", "--seeds", "0,1,2", "--dry-run").output.splitlines()
    assert [line.partition(": ")[2] for line in lines] == [
        "finished, test accuracy 40.00%: skip",
        "resume from about step 750 of 5,000",
        "train 5,000 steps",
    ]
    assert sorted(runs_dir.rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "promised"),
    [
        (["--task", "lstops"], "Did you mean 'listops'?"),
        (["--task", "listops", "--attention", "skyfromer"], "Did you mean 'skyformer'?"),
        (["--task", "listops", "--preset", "cpuu"], "Did you mean 'cpu'?"),
        (["--task", "listops", "--set", "optim.lrr=1"], "Did you mean 'optim.lr'?"),
        (["--task", "listops", "--seeds", "0,x"], "whole numbers separated by commas; got '0,x'"),
        (["--task", "listops", "--seeds", ""], "at least one seed"),
        (["--task", "listops", "--seeds", "-1"], "seed"),
        (["--task", "listops", "--steps", "3"], "optim.warmup_steps"),
        (["--task", "listops", "--address", "head:6379"], "--address can be used only with --engine ray"),
        (["--task", "listops", "--engine", "ray", "--memory", "much"], "such as 500MB or 4GB; got 'much'"),
        (["--task", "listops", "--engine", "ray", "--address", "here"], "HOST:PORT"),
        (["--task", "listops", "--set", "task.limit=30"], "run: skyformer data prepare listops"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    sweep: CommandLine, runs_dir: Path, words: list[str], promised: str
) -> None:
    outcome = sweep(*words)
    assert outcome.code == 2
    assert promised in outcome.errors
    assert len(outcome.errors.strip().splitlines()) == 1
    assert list(runs_dir.iterdir()) == []


def test_memory_with_and_without_units() -> None:
    sizes = {"1000": 1000, "500MB": 500_000_000, "4GB": 4_000_000_000, "1.5GiB": 1_610_612_736, "2 g": 2_000_000_000}
    assert {text: parse_memory(text) for text in sizes} == sizes
    for nonsense in ("", "GB", "4 apples", "-1GB"):
        with refused(InputError, repr(nonsense)):
            parse_memory(nonsense)
