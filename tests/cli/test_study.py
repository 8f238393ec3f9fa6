"""`skyformer study` as a user runs it; most tests use the toy study of squares."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from skyformer.cli.index import commands_of
from skyformer.cli.study import build_app
from skyformer.errors import DataError, InterruptedRunError
from skyformer.registry import Registry
from skyformer.studies.base import StudyClass
from tests.cli.conftest import CommandLine
from tests.studies.tiny_bert import write_text, write_tiny_bert
from tests.studies.toy import Cell, Result, Squares


@pytest.fixture(autouse=True)
def _one_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other formats are tested with the report; drawing them takes most of the time here."""
    monkeypatch.setattr("skyformer.report.figures.FORMATS", ("svg",))


@pytest.fixture
def skyformer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(monkeypatch, capsys, "study")


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, skyformer: CommandLine, tmp_path: Path) -> CommandLine:
    """The command line with the study of squares, and another that lacks its data."""

    class Lacking(Squares):
        name = "cubes"

        def measure(self, cell: Cell) -> Result:
            raise DataError("text is not prepared")

    studies: Registry[StudyClass] = Registry("study")
    studies.register(Lacking)
    studies.register(Squares)
    monkeypatch.setattr(
        "skyformer.cli.study.study_app", build_app(commands_of(studies), studies.get, Path("studies"), "Toys.")
    )
    monkeypatch.chdir(tmp_path)
    Squares.fails_at = None
    return skyformer


def test_a_study_leaves_results_tables_and_figures_and_render_draws_them_again(
    skyformer: CommandLine, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    model, text = write_tiny_bert(tmp_path / "tiny-bert"), write_text(tmp_path / "words.txt", 100)
    inputs = ["--model", model, "--text", text, "--weights", "pretrained", "--lengths", "16"]
    output = tmp_path / "output"
    small = ["approximation", "--small", *inputs, "--features", "4", "--gammas", "0.1", "--output", output]
    done = skyformer(*small)
    assert done.code == 0, done.errors
    assert "All methods, pretrained weights, n = 16" in done.output
    names = {file.name for file in output.iterdir()}
    assert {"approximation.json", "table.md", "table.tex", "figure.svg", "landmarks.svg", "gamma.svg"} <= names
    record = json.loads((output / "approximation.json").read_text())
    assert record["runs"][0]["command"].startswith(
        "skyformer study approximation --small --model tiny-bert --text words"
    )
    assert str(tmp_path) not in json.dumps(record)
    (output / "figure.svg").unlink()
    assert skyformer("approximation", "--render", "--output", output).code == 0
    assert (output / "figure.svg").exists()


def test_options_of_a_study_are_options_of_its_command(toy: CommandLine) -> None:
    done = toy("squares", "--seeds", "0,1", "--power", "1", "--loud", "--small", "--threads", "1")
    assert done.code == 0, done.errors
    content = json.loads(Path("studies/small/squares/squares.json").read_text())
    assert content["options"] == {"seeds": [0, 1], "power": 1.0, "note": None, "loud": True}
    done = toy("squares", "--small")
    assert done.code == 2
    assert "was measured with power 1.0, this command has 2.0" in done.errors
    assert "--output" in done.errors
    assert "--seeds must be a whole number, or several" in toy.refused("squares", "--seeds", "many")


def test_a_missed_target_is_reported_with_exit_code_1(toy: CommandLine) -> None:
    done = toy("squares", "--power", "3")
    assert "FAIL" in done.output
    assert done.code == 1
    assert "squares missed 2 of 6 targets: square of 4" in done.errors
    assert toy("squares", "--render").code == 0


@pytest.mark.parametrize(
    ("stop", "code", "name"),
    [
        (KeyboardInterrupt(), 130, "SIGINT"),
        (InterruptedRunError("stopped by SIGTERM; resume with: skyformer train", 15), 143, "SIGTERM"),
    ],
)
def test_an_interrupt_explains_how_to_resume(
    toy: CommandLine, monkeypatch: pytest.MonkeyPatch, stop: BaseException, code: int, name: str
) -> None:
    measure, allowed = Squares.measure, iter([False, True])

    def interrupt(self: Squares, cell: Cell) -> Result:
        if not next(allowed, False):
            raise stop
        return measure(self, cell)

    monkeypatch.setattr(Squares, "measure", interrupt)
    done = toy("squares")
    assert done.code == code
    assert f"stopped by {name}; nothing was measured yet" in done.errors
    done = toy("squares")
    assert done.code == code
    assert f"stopped by {name}; run the same command again to resume from studies/squares/squares.json" in done.errors
    assert "skyformer train" not in done.errors
    assert "resuming from" in toy("squares").output
    done = toy("squares", "--fresh")
    assert "resuming from" not in done.output
    assert "nothing was measured yet" in done.errors, "the saved record is that of the command before"
    allowed = iter([True])
    assert "run the same command again without --fresh to resume" in toy("squares", "--fresh").errors


def test_an_interrupt_while_figures_are_drawn_is_explained_too(
    toy: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("skyformer.studies.files.write_report", interrupt)
    done = toy("squares")
    assert done.code == 130
    assert "run the same command again to resume" in done.errors


def test_all_studies_run_even_if_one_lacks_its_data(toy: CommandLine) -> None:
    done = toy("all", "--small")
    assert Path("studies/small/squares/table.md").exists()
    assert done.code == 2
    assert "1 of 2 failed. cubes: text is not prepared" in done.errors
