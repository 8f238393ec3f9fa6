"""`skyformer train`, `evaluate` and `predict` as a user types them."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from collections.abc import Callable
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest
import yaml

from skyformer.errors import InterruptedRunError
from skyformer.lra import prepare
from skyformer.training import fit
from skyformer.training.config import RunConfig, to_yaml
from skyformer.training.runs import Run, create_run, list_runs, open_run
from tests.cli.typed import CommandLine
from tests.training.fakes import SMALL, finished_run, result_of, small_config

SETTINGS = [word for override in SMALL for word in ("--set", override)]


@pytest.fixture(autouse=True)
def runs_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SKYFORMER_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("SKYFORMER_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


@pytest.fixture
def skyformer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(monkeypatch, capsys)


class Trained:
    """Replaces `fit.train`: remembers its arguments and writes a result without training."""

    def __init__(self) -> None:
        self.config: RunConfig | None = None
        self.options: dict[str, Any] = {}

    def __call__(self, config: RunConfig, **options: Any) -> object:
        self.config, self.options = config, options
        run = create_run(config, options["runs_dir"])
        run.write_result(result_of(run))
        return run.result


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Trained:
    fake = Trained()
    monkeypatch.setattr(fit, "train", fake)
    return fake


def raising(error: Exception) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def test_from_data_to_prediction(skyformer: CommandLine, runs_dir: Path) -> None:
    """A real run of four steps, evaluated, used for predictions, and not trained twice."""
    prepare("listops", limit=12)
    command = ["train", "listops", *SETTINGS, "--set", "task.limit=12", "--set", "loop.batch_size=2", "--steps", 4]
    first = skyformer(*command, "--no-progress")
    assert first.code == 0
    run = list_runs(runs_dir)[0]
    assert run.result is not None
    assert f"test accuracy {run.result.test_accuracy:.2%} on 12 examples" in first.output
    assert first.output.count("\n") == 1
    assert first.output.endswith(f"-> {run.folder}\n")

    again = skyformer.refused(*command)
    assert f"test accuracy {run.result.test_accuracy:.4f}" in again
    assert "is finished already" in skyformer.refused("train", "--resume", run.name)

    evaluated = json.loads(skyformer("evaluate", run.name, "--json").output)
    assert evaluated["accuracy"] == run.result.test_accuracy
    assert evaluated["examples"] == 12
    predicted = json.loads(skyformer("predict", run.name, "[MAX 2 9 ]", "[MIN 3 4 ]", "--json").output)
    assert [sorted(one) for one in predicted] == [["label", "name", "probabilities"]] * 2


class TestShowConfig:
    def test_is_what_would_be_trained(self, skyformer: CommandLine, trained: Trained, runs_dir: Path) -> None:
        command = ["train", "text", "--attention", "kernelized", "--set", "optim.lr=3e-4", "--steps", 5000, "--seed", 1]
        shown = skyformer(*command, "--show-config")
        assert not runs_dir.exists()
        assert trained.config is None
        skyformer(*command)
        assert trained.config is not None
        assert shown.output == to_yaml(trained.config)
        assert yaml.safe_load(shown.output)["optim"]["lr"] == 3e-4

    def test_of_a_run(self, skyformer: CommandLine, runs_dir: Path) -> None:
        run = create_run(small_config(), runs_dir)
        assert skyformer("train", "--resume", run.name, "--show-config").output == to_yaml(run.config)


class TestTrain:
    def test_hardware(self, skyformer: CommandLine, trained: Trained) -> None:
        words = ["--devices", 2, "--strategy", "ddp", "--precision", "bf16-mixed", "--accelerator", "cpu"]
        skyformer("train", "text", *words, "--threads", 3)
        assert trained.config is not None
        hardware = trained.config.hardware
        assert (hardware.devices, hardware.strategy, hardware.precision) == (2, "ddp", "bf16-mixed")
        assert (hardware.accelerator, hardware.threads) == ("cpu", 3)

    def test_places(self, skyformer: CommandLine, trained: Trained, tmp_path: Path) -> None:
        outcome = skyformer(
            "train", "text", "--runs-dir", tmp_path / "r", "--data-dir", tmp_path / "d", "--no-progress"
        )
        assert trained.options == {"runs_dir": tmp_path / "r", "data_dir": tmp_path / "d", "progress": False}
        assert str(tmp_path / "r") in outcome.output

    def test_a_reduced_preset_says_so(self, skyformer: CommandLine, trained: Trained) -> None:
        assert "[reduced: " in skyformer("train", "text", "--preset", "cpu").output

    def test_a_whole_config(self, skyformer: CommandLine, trained: Trained, tmp_path: Path) -> None:
        file = tmp_path / "config.yaml"
        file.write_text(to_yaml(small_config(seed=4)))
        skyformer("train", "--config", file)
        assert trained.config == small_config(seed=4)
        assert "--config has every setting; leave out task, seed" in skyformer.refused(
            "train", "text", "--config", file, "--seed", 1
        )

    def test_only_one_of_many_processes_speaks(
        self, skyformer: CommandLine, trained: Trained, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(fit, "is_main_process", lambda: False)
        assert skyformer("train", "text").output == ""


class TestBadInput:
    """Each one line and exit code 2."""

    @pytest.mark.parametrize(
        ("words", "expected"),
        [
            ("train", "name a task to train on: listops, text"),
            (
                "train txet",
                "unknown task 'txet'; known: image, listops, pathfinder, retrieval, text. Did you mean 'text'?",
            ),
            ("train text --attention sofmax", "Did you mean 'softmax'?"),
            ("train text --preset papers", "Did you mean 'paper'?"),
            ("train text --set optim.lrr=1", "Did you mean 'optim.lr'?"),
            ("train text --set lr=1", "Did you mean 'optim.lr'?"),
            ("train text --set optim.lr=fast", "optim.lr must be a valid number; got 'fast'"),
            ("train text --steps 10", "optim.warmup_steps must be below loop.steps; got 80 and 10"),
            ("train text --devices none", "hardware.devices must be 'auto' or be a valid integer; got 'none'"),
            ("train --resume nothing", "there is no run 'nothing'"),
            ("train --config nowhere.yaml", "nowhere.yaml cannot be read"),
            ("evaluate nothing", "there is no run 'nothing'"),
            ("predict nothing text", "there is no run 'nothing'"),
        ],
    )
    def test_a_wrong_command(self, skyformer: CommandLine, words: str, expected: str) -> None:
        assert expected in skyformer.refused(*words.split())

    @pytest.mark.parametrize(
        ("words", "advice"),
        [
            ("text", "skyformer data prepare text\n"),
            (
                "listops --set task.limit=50 --set task.data_seed=2",
                "skyformer data prepare listops --seed 2 --limit 50\n",
            ),
            ("pathfinder --preset cpu --set task.level=easy", "prepare pathfinder --level easy --limit 20000\n"),
        ],
    )
    def test_data_that_is_not_prepared(self, skyformer: CommandLine, runs_dir: Path, words: str, advice: str) -> None:
        error = skyformer.refused("train", *words.split())
        assert "is not prepared in" in error
        assert error.endswith(advice)
        assert not runs_dir.exists()

    def test_evaluating_without_data(self, skyformer: CommandLine, runs_dir: Path) -> None:
        run = finished_run(runs_dir)
        assert "run: skyformer data prepare text --data-dir d" in skyformer.refused(
            "evaluate", run.name, "--data-dir", "d"
        )

    def test_a_text_longer_than_the_model(self, skyformer: CommandLine, runs_dir: Path) -> None:
        run = finished_run(runs_dir)
        error = skyformer.refused("predict", run.name, "x" * 4001)
        assert "4,001 bytes, and this model reads at most 4,000" in error
        assert skyformer("predict", run.name, "x" * 4001, "--cut").code == 0

    def test_no_space_left(self, skyformer: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "runs/x/state.json")
        monkeypatch.setattr(fit, "train", raising(full))
        assert "no space left on the disk: runs/x/state.json; free some space" in skyformer.refused("train", "text")

    def test_a_folder_that_cannot_be_written(self, skyformer: CommandLine, runs_dir: Path) -> None:
        prepare("listops", limit=4)
        runs_dir.touch()
        assert str(runs_dir) in skyformer.refused("train", "listops", "--set", "task.limit=4")


class TestResume:
    @pytest.fixture
    def run(self, runs_dir: Path) -> Run:
        return create_run(small_config("text", seed=1), runs_dir)

    @pytest.fixture(autouse=True)
    def resumed(self, monkeypatch: pytest.MonkeyPatch) -> list[Run]:
        runs: list[Run] = []

        def resume(run: Run, **_: object) -> object:
            runs.append(run)
            return result_of(run)

        monkeypatch.setattr(fit, "resume", resume)
        return runs

    @pytest.mark.parametrize(
        "words",
        [
            "",
            "text --attention skyformer --preset paper --seed 1 --steps 10",
            "--set model.dim=8 --set model.features=4 --set optim.lr=1e-4",
        ],
    )
    def test_with_the_same_settings(self, skyformer: CommandLine, run: Run, resumed: list[Run], words: str) -> None:
        outcome = skyformer("train", *words.split(), "--resume", run.name)
        assert outcome.code == 0
        assert outcome.output.endswith(f"-> {run.folder}\n")
        assert [run.folder for run in resumed] == [run.folder]

    @pytest.mark.parametrize(
        ("words", "difference"),
        [
            ("image", "task.name is text, not image"),
            ("--preset cpu", "preset is paper, not cpu"),
            ("--attention softmax", "model.attention is skyformer, not softmax"),
            ("--set optim.lr=3e-4", "optim.lr is 0.0001, not 0.0003"),
            ("--set model.features=8", "model.attention_options.num_landmarks is 4, not 8"),
            ("--steps 20", "loop.steps is 10, not 20"),
            ("--seed 2", "seed is 1, not 2"),
            ("--devices 2", "hardware.devices is auto, not 2"),
            ("--set optim.lrr=3", "Did you mean 'optim.lr'?"),
        ],
    )
    def test_with_others(
        self, skyformer: CommandLine, run: Run, resumed: list[Run], words: str, difference: str
    ) -> None:
        assert difference in skyformer.refused("train", "--resume", run.name, *words.split())
        assert resumed == []

    def test_with_a_config(self, skyformer: CommandLine, run: Run) -> None:
        file = run.folder / "config.yaml"
        assert "use only one of them" in skyformer.refused("train", "--resume", run.name, "--config", file)


class TestInterrupted:
    @pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
    def test_one_line_and_the_signals_code(
        self, skyformer: CommandLine, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int
    ) -> None:
        interrupted = InterruptedRunError("stopped at step 3; resume with: skyformer train --resume x", number)
        monkeypatch.setattr(fit, "train", raising(interrupted))
        outcome = skyformer("train", "text")
        assert (outcome.code, outcome.errors) == (code, f"{interrupted}\n")


class TestDebug:
    @pytest.mark.parametrize(
        "words", ["--debug train txet", "train --debug txet", "train txet --debug", "evaluate nothing --debug"]
    )
    def test_anywhere_on_the_line(self, skyformer: CommandLine, words: str) -> None:
        outcome = skyformer(*words.split())
        assert outcome.code == 2
        assert "Traceback (most recent call last)" in outcome.errors
        assert outcome.errors.splitlines()[-1].startswith("error: ")

    def test_not_where_options_end(self, skyformer: CommandLine, runs_dir: Path) -> None:
        run = finished_run(runs_dir)
        assert skyformer("predict", run.name, "--", "--debug").code == 0


class TestPredict:
    def test_a_line_for_each_text(self, skyformer: CommandLine, runs_dir: Path) -> None:
        run = finished_run(runs_dir)
        lines = skyformer("predict", run.folder, "good", "bad").output.splitlines()
        assert len(lines) == 2
        for line in lines:
            label, _, rest = line.partition(": ")
            assert label in ("0 (negative)", "1 (positive)")
            assert [part.split()[0] for part in rest.split(", ")] == ["negative", "positive"]

    def test_from_files_and_standard_input(
        self, skyformer: CommandLine, runs_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = finished_run(runs_dir)
        (tmp_path / "review.txt").write_text("good")
        spoken = skyformer("predict", run.name, "good").output
        assert skyformer("predict", run.name, "--file", tmp_path / "review.txt").output == spoken
        monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(b"good")))
        assert skyformer("predict", run.name, "-").output == spoken

    def test_two_papers_at_a_time(self, skyformer: CommandLine, runs_dir: Path) -> None:
        run = finished_run(runs_dir, small_config("retrieval"))
        assert len(skyformer("predict", run.name, "a", "b", "c", "d").output.splitlines()) == 2
        assert "retrieval needs 2 texts per prediction; got 3 inputs" in skyformer.refused("predict", run.name, *"abc")

    def test_a_picture_is_a_file(self, skyformer: CommandLine, runs_dir: Path) -> None:
        run = finished_run(runs_dir, small_config("pathfinder"))
        assert "nowhere.png cannot be read as an image" in skyformer.refused("predict", run.name, "nowhere.png")


def test_evaluate_in_one_line(skyformer: CommandLine, runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = finished_run(runs_dir)
    asked: dict[str, Any] = {}

    def evaluate(run: Run, **options: Any) -> fit.Evaluation:
        asked.update(options)
        return fit.Evaluation(0.5, 0.75, 2500)

    monkeypatch.setattr(fit, "evaluate", evaluate)
    outcome = skyformer("evaluate", run.name, "--split", "dev", "--batch-size", 7)
    assert outcome.output.startswith(f"{run.name}: dev accuracy 75.00%, loss 0.5000, 2,500 examples [changed: ")
    assert asked == {"split": "dev", "data_dir": None, "batch_size": 7}
    assert open_run(run.name).name == run.name
