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

from skyformer.errors import InterruptedRunError
from skyformer.lra import prepare
from skyformer.training import fit
from skyformer.training.config import RunConfig, to_yaml
from skyformer.training.runs import Run, create_run, list_runs
from tests.cli.conftest import CommandLine
from tests.training.fakes import SMALL, finished_run, result_of, small_config

SETTINGS = [word for override in (*SMALL, "task.limit=12", "task.max_length=64") for word in ("--set", override)]


class Trained:
    """Replaces `fit.train`: remembers its arguments and writes a result without training."""

    config: RunConfig | None = None

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
    prepare("listops", limit=12, max_length=64)
    command = ["train", "listops", *SETTINGS, "--set", "loop.batch_size=2", "--steps", 4]
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


def test_options_reach_the_run(skyformer: CommandLine, trained: Trained, runs_dir: Path, tmp_path: Path) -> None:
    settings = ["--attention", "kernelized", "--preset", "cpu", "--set", "optim.lr=3e-4", "--steps", 5000, "--seed", 1]
    hardware = ["--devices", 2, "--strategy", "ddp", "--precision", "bf16-mixed", "--accelerator", "cpu"]
    command = ["train", "text", *settings, *hardware, "--threads", 3]
    shown = skyformer(*command, "--show-config")
    assert not runs_dir.exists()
    assert trained.config is None
    places = ["--runs-dir", tmp_path / "r", "--data-dir", tmp_path / "d", "--no-progress"]
    outcome = skyformer(*command, *places)
    config = trained.config
    assert config is not None
    assert shown.output == to_yaml(config)
    assert (config.model.attention, config.preset, config.optim.lr) == ("kernelized", "cpu", 3e-4)
    assert (config.loop.steps, config.seed) == (5000, 1)
    assert (config.hardware.devices, config.hardware.strategy, config.hardware.precision) == (2, "ddp", "bf16-mixed")
    assert (config.hardware.accelerator, config.hardware.threads) == ("cpu", 3)
    assert trained.options == {"runs_dir": tmp_path / "r", "data_dir": tmp_path / "d", "progress": False}
    assert str(tmp_path / "r") in outcome.output
    assert "[reduced: " in outcome.output


def test_a_whole_config(skyformer: CommandLine, trained: Trained, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(small_config(seed=4)))
    skyformer("train", "--config", file)
    assert trained.config == small_config(seed=4)


def test_only_one_of_many_processes_speaks(
    skyformer: CommandLine, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "is_main_process", lambda: False)
    assert skyformer("train", "text").output == ""


@pytest.mark.parametrize(
    ("error", "promised"),
    [
        (
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "runs/x/state.json"),
            "no space left on the disk: runs/x/state.json; free some space",
        ),
        (NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), "runs/x"), "runs/x"),
    ],
)
def test_errors_of_the_disk_are_one_line(
    skyformer: CommandLine, monkeypatch: pytest.MonkeyPatch, error: OSError, promised: str
) -> None:
    monkeypatch.setattr(fit, "train", raising(error))
    assert promised in skyformer.refused("train", "text")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_an_interrupt_is_one_line_and_the_signals_code(
    skyformer: CommandLine, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int
) -> None:
    interrupted = InterruptedRunError("stopped at step 3; resume with: skyformer train --resume x", number)
    monkeypatch.setattr(fit, "train", raising(interrupted))
    outcome = skyformer("train", "text")
    assert (outcome.code, outcome.errors) == (code, f"{interrupted}\n")


def test_resume_takes_only_the_settings_of_the_run(
    skyformer: CommandLine, runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resumed: list[Path] = []

    def resume(run: Run, **_: object) -> object:
        resumed.append(run.folder)
        return result_of(run)

    monkeypatch.setattr(fit, "resume", resume)
    run = create_run(small_config("text", seed=1), runs_dir)
    same = "text --attention skyformer --preset paper --seed 1 --steps 10 --set model.dim=8 --set model.features=4"
    for words in ("", same):
        outcome = skyformer("train", *words.split(), "--resume", run.name)
        assert outcome.code == 0
        assert outcome.output.endswith(f"-> {run.folder}\n")
    assert resumed == [run.folder] * 2
    assert skyformer("train", "--resume", run.name, "--show-config").output == to_yaml(run.config)
    other = "image --preset cpu --attention softmax --set optim.lr=3e-4 --set model.features=8 --steps 20 --seed 2"
    error = skyformer.refused("train", "--resume", run.name, *other.split(), "--devices", 2)
    for difference in (
        "task.name is text, not image",
        "preset is paper, not cpu",
        "model.attention is skyformer, not softmax",
        "optim.lr is 0.0001, not 0.0003",
        "model.attention_options.num_landmarks is 4, not 8",
        "loop.steps is 10, not 20",
        "seed is 1, not 2",
        "hardware.devices is auto, not 2",
    ):
        assert difference in error
    assert len(resumed) == 2


def test_predict_texts(skyformer: CommandLine, runs_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = finished_run(runs_dir)
    lines = skyformer("predict", run.folder, "good", "bad").output.splitlines()
    assert len(lines) == 2
    for line in lines:
        label, _, rest = line.partition(": ")
        assert label in ("0 (negative)", "1 (positive)")
        assert [part.split()[0] for part in rest.split(", ")] == ["negative", "positive"]
    (tmp_path / "review.txt").write_text("good")
    assert skyformer("predict", run.name, "--file", tmp_path / "review.txt").output == f"{lines[0]}\n"
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(b"good")))
    assert skyformer("predict", run.name, "-").output == f"{lines[0]}\n"
    error = skyformer.refused("predict", run.name, "x" * 4001)
    assert "4,001 bytes, and this model reads at most 4,000" in error
    assert skyformer("predict", run.name, "x" * 4001, "--cut").code == 0
    # After `--` there are no options.
    assert skyformer("predict", run.name, "--", "--debug").code == 0
    assert "--text can be used only with --input FILE" in skyformer.refused("predict", run.name, "a", "--text", "b")
    error = skyformer.refused("predict", run.name, "--input", "x.csv", "--output", "y.csv", "--cut", "--json")
    assert "--cut, --json can be used only without --input" in error


def test_predict_pairs_and_pictures(skyformer: CommandLine, runs_dir: Path) -> None:
    pairs = finished_run(runs_dir, small_config("retrieval"))
    assert len(skyformer("predict", pairs.name, "a", "b", "c", "d").output.splitlines()) == 2
    assert "retrieval needs 2 texts per prediction; got 3 inputs" in skyformer.refused("predict", pairs.name, *"abc")
    pictures = finished_run(runs_dir, small_config("pathfinder"))
    assert "nowhere.png cannot be read as an image" in skyformer.refused("predict", pictures.name, "nowhere.png")


def test_evaluate_in_one_line(skyformer: CommandLine, runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = finished_run(runs_dir)
    error = skyformer.refused("evaluate", run.name, "--data-dir", "d")
    assert "run: skyformer data prepare text --data-dir d" in error
    assert "--label can be used only with --data FILE" in skyformer.refused("evaluate", run.name, "--label", "b")
    error = skyformer.refused("evaluate", run.name, "--data", "x.csv", "--split", "dev", "--sequence-parallel", 2)
    assert "--split, --sequence-parallel can be used only without --data" in error
    asked: dict[str, Any] = {}

    def evaluate(run: Run, **options: Any) -> fit.Evaluation:
        asked.update(options)
        return fit.Evaluation(0.5, 0.75, 2500)

    monkeypatch.setattr(fit, "evaluate", evaluate)
    outcome = skyformer("evaluate", run.name, "--split", "dev", "--batch-size", 7)
    assert outcome.output.startswith(f"{run.name}: dev accuracy 75.00%, loss 0.5000, 2,500 examples [changed: ")
    assert asked == {"split": "dev", "data_dir": None, "batch_size": 7, "progress": True, "sequence_parallel": 1}
