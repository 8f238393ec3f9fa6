"""Hostile names, notes, numbers and sizes: shown harmlessly, or refused by an error that names them."""

from __future__ import annotations

import csv
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from skyformer.cli.output import say
from skyformer.errors import DataError, InputError
from skyformer.lra import prepare
from skyformer.model import ModelConfig
from skyformer.report.progress import Lines
from skyformer.report.tables import Table, as_csv, print_table, visible
from skyformer.training.config import from_yaml, parse_yaml
from skyformer.training.runs import open_run
from tests.helpers import refused
from tests.training.fakes import finished_run, result_of

HOSTILE = "run\x1b]0;title\x07\x1b[31m\u202e\r\x9b"
SHOWN = r"run\x1b]0;title\x07\x1b[31m\u202e\r\x9b"


def test_control_characters_are_shown_as_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    assert visible(HOSTILE) == SHOWN
    assert visible("größer ± 1 …\nnext", lines=True) == "größer ± 1 …\nnext"
    assert visible("a\nb") == r"a\nb"
    print_table(Table(HOSTILE, ["name", HOSTILE], [[HOSTILE, "1"], ["a\nb", "2"]], HOSTILE))
    say(HOSTILE)
    Lines().note(HOSTILE)
    printed = capsys.readouterr()
    assert printed.out.count("title") == 5
    for character in "\x1b\x07\u202e\r\x9b":
        assert character not in printed.out + printed.err
    assert SHOWN in printed.err


def test_errors_of_the_command_are_harmless() -> None:
    command = [sys.executable, "-m", "skyformer", "evaluate", os.fsdecode(b"\xff\x1b[31m")]
    ended = subprocess.run(command, capture_output=True, check=False)
    assert ended.returncode == 2
    assert b"error: there is no run" in ended.stderr
    assert b"Traceback" not in ended.stderr
    assert b"\x1b" not in ended.stderr


@pytest.mark.parametrize("cell", ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)"])
def test_csv_cells_are_no_formulas(cell: str) -> None:
    written = as_csv(Table("", ["name"], [[cell], [f"**{cell}**"]]))
    assert list(csv.reader(io.StringIO(written)))[1:] == [[f"'{cell}"]] * 2


@pytest.mark.parametrize("cell", ["-", "-1.5", "+3e-05", "-1,230", "-12.5%", "name", "", "a=b", "-inf"])
def test_other_csv_cells_stay(cell: str) -> None:
    assert list(csv.reader(io.StringIO(as_csv(Table("", ["a", "b"], [[cell, "x"]])))))[1] == [cell, "x"]


def test_csv_may_be_printed_on_a_terminal() -> None:
    assert as_csv(Table("", ["name"], [[HOSTILE]])) == f"name\n{SHOWN}\n"


@pytest.mark.parametrize("accuracy", [-0.01, 1.01, 1e300])
def test_accuracies_are_between_0_and_1(accuracy: float, tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    with pytest.raises(ValueError, match="test_accuracy"):
        result_of(run, accuracy)
    file = run.folder / "result.json"
    file.write_text(file.read_text().replace('"dev_accuracy": 0.6', f'"dev_accuracy": {accuracy}'))
    with refused(DataError, str(file), "dev_accuracy"):
        _ = open_run(run.folder).result


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("loop: {steps: 1, steps: 2}", ["'steps' is given 2 times"]),
        ("steps: 1\nseed: 0\nsteps: 1", ["'steps' is given 2 times"]),
        ("seed: 0x10", ["whole number", "0x10"]),
        ("seed: 010", ["whole number", "010"]),
        ("seed: 1:30", ["whole number", "1:30"]),
        ("seed: " + "9" * 5000, ["whole number", "at most 20 digits"]),
        ("seed: " + "9" * 4000, ["whole number", "at most 20 digits"]),
    ],
)
def test_yaml_is_refused_by_name(text: str, words: list[str]) -> None:
    with refused(InputError, "config.yaml is not valid YAML", *words):
        from_yaml(text, "config.yaml")


def test_plain_yaml_numbers() -> None:
    assert parse_yaml("[0, -7, +3, 10_000, 18446744073709551615, 3e-4]", "it") == [0, -7, 3, 10_000, 2**64 - 1, 3e-4]


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"num_layers": 1_000_000}, "num_layers"),
        ({"num_classes": 10**9}, "num_classes"),
        ({"vocab_size": 2**31}, "vocab_size"),
        ({"dim": 2**20, "hidden_dim": 2**20}, "dim"),
        ({"num_layers": int("9" * 4000)}, "num_layers"),
    ],
)
def test_models_without_end_are_refused_before_they_are_built(settings: dict[str, int], word: str) -> None:
    with pytest.raises(InputError, match=word) as caught:
        ModelConfig(**{"vocab_size": 10, "max_length": 16, "hidden_dim": 128} | settings)
    assert len(str(caught.value)) < 400


def test_too_many_labels_for_transformers() -> None:
    hf = pytest.importorskip("skyformer.hf")
    with refused(InputError, "num_labels"):
        hf.SkyformerConfig(num_labels=10**9)


def test_names_that_are_not_utf_8(tmp_path: Path) -> None:
    source = tmp_path / os.fsdecode(b"data-\xff")
    source.mkdir()
    with refused(DataError, "must have a name in UTF-8"):
        prepare("text", source=source, data_dir=tmp_path / "prepared")
    rows = list(csv.reader(io.StringIO(as_csv(Table("", ["name"], [[source.name]])))))
    assert rows[1] == [r"data-\udcff"]
