"""`skyformer sweep` as a user types it; the processes of the runs are fakes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from skyformer.attention import list_attentions
from skyformer.errors import InputError
from skyformer.lra import prepare
from skyformer.training import sweeps
from skyformer.training.ray_sweeps import parse_memory
from tests.cli.conftest import CommandLine
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
def sweep(
    skyformer: CommandLine, runs_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> CommandLine:
    runs_dir.mkdir()
    monkeypatch.setattr(sweeps, "SKYFORMER", (sys.executable, "-S", fake_train.__file__))
    small = [word for setting in SMALL for word in ("--set", setting)]
    return CommandLine(monkeypatch, capsys, "sweep", "--task", "listops", "--preset", "cpu", *small)


def test_a_line_per_run_a_table_and_exit_code_1_for_a_failure(sweep: CommandLine, runs_dir: Path) -> None:
    configs = {name: a_config("listops", name, overrides=SMALL) for name in ("softmax", "skyformer")}
    for config in configs.values():
        finish(config, runs_dir / "library")
    (runs_dir / "orders.json").write_text(json.dumps({configs["softmax"].run_name(): ["fail", "finish"]}))
    words = ("--attention", "softmax,skyformer", "--seeds", "0")
    outcome = sweep(*words)
    assert outcome.code == 1
    finished = "finished, test accuracy 40.00% in 1 min 40 s [preset cpu, not the paper's setting]"
    assert "[1/2] listops softmax seed 0: failed: the loss is nan at step 8" in outcome.errors
    assert f"[2/2] listops skyformer seed 0: {finished}" in outcome.errors
    (error,) = [line for line in outcome.errors.splitlines() if line.startswith("error")]
    assert error.startswith("error: listops-softmax-cpu-seed0-")
    assert "the loss is nan" in error
    assert outcome.output.count("cpu (reduced, changed)") == 1
    again = sweep(*words, "--jobs", "2")
    assert again.code == 0, again.errors
    assert again.errors.count("finished before") == 1
    assert again.output.count("cpu (reduced, changed)") == 2


def test_a_dry_run_says_what_would_be_done_and_does_nothing(sweep: CommandLine, runs_dir: Path) -> None:
    finish(a_config("listops", seed=0, overrides=SMALL), runs_dir)
    start(a_config("listops", seed=1, overrides=SMALL), runs_dir, step=750)
    before = sorted(runs_dir.rglob("*"))
    lines = sweep("--seeds", "0,1,2", "--dry-run").output.splitlines()
    assert [line.partition(": ")[2] for line in lines] == [
        "finished, test accuracy 40.00%: skip",
        "resume from about step 750 of 5,000",
        "train 5,000 steps",
    ]
    assert len(sweep("--attention", "all", "--dry-run").output.splitlines()) == 3 * len(list_attentions())
    assert sorted(runs_dir.rglob("*")) == before


def test_memory_with_and_without_units() -> None:
    sizes = {"1000": 1000, "500MB": 500_000_000, "4GB": 4_000_000_000, "1.5GiB": 1_610_612_736, "2 g": 2_000_000_000}
    assert {text: parse_memory(text) for text in sizes} == sizes
    for nonsense in ("", "GB", "4 apples", "-1GB"):
        with refused(InputError, repr(nonsense)):
            parse_memory(nonsense)
