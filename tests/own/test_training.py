"""Runs on own data, from the command line to predictions for a file: tied to their data, resumable, comparable."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path

import pytest

from skyformer.errors import DataError, InputError
from skyformer.own import own_data
from skyformer.own.reading import FilePart
from skyformer.training import fit
from skyformer.training.config import from_yaml, to_yaml
from skyformer.training.fitting import fitting_settings
from skyformer.training.loggers import check_loggers
from skyformer.training.presets import change_config, load_preset
from skyformer.training.runs import list_runs
from tests.cli.conftest import CommandLine
from tests.helpers import refused
from tests.own.test_preparation import ROWS, loaded, write_csv, write_jsonl

TINY = ["model.dim=8", "model.hidden_dim=8", "model.num_layers=1", "hardware.accelerator=cpu", "hardware.threads=1"]
OPTIONS = [word for setting in TINY for word in ("--set", setting)]


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def skyformer(runs_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    monkeypatch.setenv("SKYFORMER_RUNS", str(runs_dir))
    return CommandLine(monkeypatch, capsys)


def test_from_a_file_to_predictions(skyformer: CommandLine, tmp_path: Path, runs_dir: Path, data_dir: Path) -> None:
    file = write_jsonl(tmp_path / "films.jsonl", ROWS)
    done = skyformer("train", "--data", file, "--steps", 6, *OPTIONS, "--logger", "csv")
    assert done.code == 0, done.errors
    assert "labels: good 66.7%, bad 33.3%" in done.errors
    run = list_runs(runs_dir)[0]
    assert (run.folder / "csv" / "metrics.csv").is_file()
    assert run.name.startswith("films-skyformer-standard-seed0-")
    assert "is finished already" in skyformer.refused("train", "--config", run.folder / "config.yaml")
    assert "leave out --data" in skyformer.refused("train", "--resume", run.name, "--data", file)

    evaluated = json.loads(skyformer("evaluate", run.config.digest(), "--json").output)
    assert run.result is not None
    assert evaluated["accuracy"] == run.result.test_accuracy
    on_file = json.loads(skyformer("evaluate", run.name, "--data", file, "--json").output)
    assert on_file["examples"] == len(ROWS)
    by_code = [fit.evaluate(run, split=split) for split in ("train", "dev", "test")]
    assert on_file["loss"] == pytest.approx(sum(each.loss * each.examples for each in by_code) / len(ROWS), rel=1e-4)
    strange = write_jsonl(tmp_path / "strange.jsonl", [{"text": "x", "label": "so-so"}])
    assert "line 1 has the label 'so-so', which was not in" in skyformer.refused(
        "evaluate", run.name, "--data", strange
    )

    new = write_csv(tmp_path / "new.csv", [{"id": n, "text": row["text"]} for n, row in enumerate(ROWS)])
    assert skyformer("predict", run.name, "--input", new, "--output", tmp_path / "out.csv").code == 0
    with (tmp_path / "out.csv").open(newline="") as opened:
        predicted = list(csv.DictReader(opened))
    assert [row["text"] for row in predicted] == [row["text"] for row in ROWS]
    assert {row["prediction"] for row in predicted} <= {"good", "bad"}
    one = json.loads(skyformer("predict", run.name, ROWS[1]["text"], "--json").output)[0]
    assert (one["name"], max(one["probabilities"].values())) == (
        predicted[1]["prediction"],
        pytest.approx(float(predicted[1]["probability"]), rel=1e-5),
    )
    assert "'prediction' already" in skyformer.refused(
        "predict", run.name, "--input", tmp_path / "out.csv", "--output", tmp_path / "again.csv"
    )

    uneven = write_jsonl(tmp_path / "uneven.jsonl", [{"text": "a"}, {"text": "b", "probabilities": "kept"}])
    assert skyformer("predict", run.name, "--input", uneven, "--output", tmp_path / "out.parquet").code == 0
    again = FilePart(tmp_path / "out.parquet")
    assert [row["probabilities"] for _, row in again.rows()] == [None, "kept"]
    assert "line 2 has the column 'probabilities' already" in skyformer.refused(
        "predict", run.name, "--input", uneven, "--output", tmp_path / "again.jsonl"
    )

    (tmp_path / "empty.csv").write_text("text\n")
    assert "has no rows" in skyformer.refused(
        "predict", run.name, "--input", tmp_path / "empty.csv", "--output", tmp_path / "none.csv"
    )
    shown = skyformer("data", "show", data_dir.glob("films-*").__next__().name, "-n", 1).output
    assert "film," in shown
    folder = next(data_dir.glob("films-*")).name
    assert "--limit can be used only with" in skyformer.refused("data", "show", folder, "--limit", 3)
    # The data can be deleted: it is read again from its file, unless the file has changed.
    shutil.rmtree(data_dir)
    assert skyformer("evaluate", run.name).code == 0
    (stored,) = data_dir.glob("films-*/test-*.arrow")
    stored.write_bytes(stored.read_bytes()[:-8])
    assert "train on the same file again" in skyformer.refused("data", "show", stored.parent.name)
    assert skyformer("evaluate", run.name).code == 0
    shutil.rmtree(data_dir)
    write_jsonl(file, ROWS[:-1])
    assert "its files have changed" in skyformer.refused("evaluate", run.name)

    listed = skyformer("runs", "--task", "films", "--summary").output
    assert f"Test accuracy in %, preset standard, data {run.config.task.variant().name}" in listed
    assert "PAPER" not in listed


def test_the_same_from_lists_in_code(tmp_path: Path, runs_dir: Path) -> None:
    data = own_data(([row["text"] for row in ROWS], [row["label"] for row in ROWS]), name="films")
    config = load_preset(data, attention="softmax", overrides=TINY, steps=4)
    result = fit.train(config, runs_dir=runs_dir, progress=False)
    assert result.test_examples == 6
    assert from_yaml(to_yaml(config)) == config
    assert change_config(config, seed=3).replace(seed=0) == config
    assert "loop.stop_after=2" in change_config(config, ["loop.stop_after=2"]).note
    with refused(InputError, "task.limit cannot be set for own data"):
        load_preset(data, overrides=["task.limit=3"])
    with refused(InputError, "task.limit cannot be set for own data"):
        change_config(config, ["task.limit=3"])
    shutil.rmtree(data.folder)
    with refused(DataError, "was not read from files", "own_data"):
        fit.train(config.replace(seed=1), runs_dir=runs_dir, progress=False)


def test_a_sweep_over_attentions(skyformer: CommandLine, tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "films.jsonl", ROWS)
    planned = skyformer(
        "sweep", "--data", file, "--attention", "skyformer,softmax", "--seeds", "0,1", "--preset", "quick", "--dry-run"
    )
    assert planned.code == 0, planned.errors
    names = [line.partition(":")[0] for line in planned.output.splitlines()]
    assert [name.rpartition("-")[0] for name in names] == [
        f"films-{attention}-quick-seed{seed}" for seed in (0, 1) for attention in ("skyformer", "softmax")
    ]


@pytest.mark.parametrize(
    ("words", "promised"),
    [
        ("train text --data x.jsonl", "name a task or give --data, not both"),
        ("train text --text review", "--text can be used only with --data"),
        ("train --data nothing.jsonl", "nothing.jsonl does not exist"),
        ("sweep --attention all", "name tasks with --task"),
        ("predict nothing --input x.jsonl", "both --input FILE and --output FILE"),
    ],
)
def test_wrong_commands(skyformer: CommandLine, words: str, promised: str) -> None:
    assert promised in skyformer.refused(*words.split())


@pytest.mark.parametrize(
    ("logger", "promised"),
    [
        ("wand", "unknown logger 'wand'"),
        ("csv:flush=1", "unknown option of the logger 'csv': 'flush'"),
        ("csv:flush", "must be NAME or NAME:OPTION=VALUE"),
        ("json.JSONDecoder", "must be a subclass of Lightning's Logger"),
        ("nowhere.Logger", "cannot be imported"),
    ],
)
def test_wrong_loggers(logger: str, promised: str) -> None:
    config = load_preset("listops", overrides=[f"loop.loggers=[{json.dumps(logger)}]"])
    assert config.digest() == load_preset("listops").digest()
    with pytest.raises(InputError, match=re.escape(promised)):
        check_loggers(config)


def test_presets_fit_the_data_and_the_machine(tmp_path: Path) -> None:
    words = "word " * 400
    data = own_data(([words[: 5 * n] for n in range(1, 401)], [0, 1] * 200))
    task = loaded(data)
    quick, standard, large = (fitting_settings(task, "standard", cores) for cores in (1, 2, 64))
    assert quick["task"]["max_length"] == 1024
    assert quick["loop"]["batch_size"] == 16
    assert quick["loop"]["steps"] <= standard["loop"]["steps"] <= large["loop"]["steps"] == 20 * 20
    assert fitting_settings(task, "quick", 2)["task"]["max_length"] == 512
    assert fitting_settings(task, "long", 2)["task"]["max_length"] == 1920
