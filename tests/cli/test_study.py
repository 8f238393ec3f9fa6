"""`skyformer study` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from skyformer.cli import main as command_line
from skyformer.errors import DataError, InterruptedRunError
from skyformer.studies import list_studies
from skyformer.studies.approximation import Approximation
from tests.studies.tiny_bert import write_text, write_tiny_bert


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str, str]:
    """Exit code, output and errors of the console script."""
    monkeypatch.setattr("sys.argv", ["skyformer", *arguments])
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


@pytest.fixture(autouse=True)
def _one_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """The formats are tested with the report; drawing is most of the time here."""
    monkeypatch.setattr("skyformer.report.figures.FORMATS", ("svg",))


@pytest.fixture
def skyformer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda *arguments: run(capsys, monkeypatch, *(str(argument) for argument in arguments))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("inputs")
    model, text = write_tiny_bert(folder / "tiny-bert"), write_text(folder / "words.txt", 100)
    return ["--model", str(model), "--text", str(text), "--weights", "pretrained", "--lengths", "16"]


def test_it_leaves_a_record_tables_and_figures_which_render_draws_again(
    skyformer: Any, inputs: list[str], tmp_path: Path
) -> None:
    small = ["study", "approximation", "--small", *inputs, "--features", "4", "--gammas", "0.1", "--output", tmp_path]
    code, out, err = skyformer(*small)
    assert code == 0, err
    assert "All methods, pretrained weights, n = 16" in out
    names = {file.name for file in tmp_path.iterdir()}
    assert {"approximation.json", "table.md", "table.tex", "figure.svg", "landmarks.svg", "gamma.svg"} <= names
    record = json.loads((tmp_path / "approximation.json").read_text())
    assert record["runs"][0]["command"].startswith(
        "skyformer study approximation --small --model tiny-bert --text words"
    )
    assert str(tmp_path.parent) not in json.dumps(record)
    (tmp_path / "figure.svg").unlink()
    code, _, _ = skyformer("study", "approximation", "--render", "--output", tmp_path)
    assert code == 0
    assert (tmp_path / "figure.svg").exists()


def test_other_settings_need_another_folder(skyformer: Any, inputs: list[str], tmp_path: Path) -> None:
    few = ["study", "dimension", *inputs, "--epsilons", "0.5", "--heads", "1", "--seeds", "0", "--draws", "1"]
    few += ["--counts", "4", "--draw-length", "16", "--targets", "0.5", "--held-out", "1", "--output", tmp_path]
    assert skyformer(*few)[0] == 0
    code, _, err = skyformer(*few, "--epsilons", "0.4")
    assert code == 2
    assert "outside this run's plan" in err
    assert "--output" in err


@pytest.mark.parametrize(
    ("arguments", "promised"),
    [
        (["approximation", "--lengths", "many"], "--lengths must be a whole number, or several"),
        (
            ["approximation", "--small", "--text", "no/such/file.txt"],
            "--text must be a readable UTF-8 file; no/such/file.txt",
        ),
        (["dimension", "--render", "--output", "no/such/folder"], "run the study without --render first"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(skyformer: Any, arguments: list[str], promised: str) -> None:
    code, _, err = skyformer("study", *arguments)
    assert code == 2
    assert promised in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("stop", "code", "name"),
    [
        (KeyboardInterrupt(), 130, "SIGINT"),
        (InterruptedRunError("stopped by SIGTERM; go on with: skyformer train", 15), 143, "SIGTERM"),
    ],
)
def test_an_interrupt_says_how_to_go_on(
    skyformer: Any, inputs: list[str], tmp_path: Path, monkeypatch: Any, stop: BaseException, code: int, name: str
) -> None:
    measure, allowed = Approximation.measure, iter([False, True])

    def interrupt(self: Approximation, cell: Any) -> Any:
        if not next(allowed, False):
            raise stop
        return measure(self, cell)

    monkeypatch.setattr(Approximation, "measure", interrupt)
    command = ["study", "approximation", "--small", *inputs, "--features", "4", "--output", tmp_path]
    found, _, err = skyformer(*command)
    assert found == code
    assert f"stopped by {name}; nothing was measured yet" in " ".join(err.split())
    found, _, err = skyformer(*command)
    assert found == code
    assert f"stopped by {name}; the same command goes on" in " ".join(err.split())
    assert "skyformer train" not in err
    found, out, _ = skyformer(*command)
    assert "going on from" in out
    _, out, err = skyformer(*command, "--fresh")
    assert "going on from" not in out
    assert "nothing was measured yet" in " ".join(err.split()), "the record that is there is that of the last command"
    allowed = iter([True])
    _, _, err = skyformer(*command, "--fresh")
    assert "the same command without --fresh goes on" in " ".join(err.split())


def test_an_interrupt_while_figures_are_drawn_is_told_too(
    skyformer: Any, inputs: list[str], tmp_path: Path, monkeypatch: Any
) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("skyformer.cli.study.write_report", interrupt)
    small = ["--features", "4", "--gammas", "0.1", "--output", tmp_path]
    code, _, err = skyformer("study", "approximation", "--small", *inputs, *small)
    assert code == 130
    assert "the same command goes on" in " ".join(err.split())


def test_a_log_gets_a_line_now_and_then(skyformer: Any, inputs: list[str], tmp_path: Path, monkeypatch: Any) -> None:
    small = ["--features", "4", "--gammas", "0.1"]
    monkeypatch.setattr("skyformer.cli.study.SECONDS_BETWEEN_LINES", 3600)
    _, _, err = skyformer("study", "approximation", "--small", *inputs, *small, "--output", tmp_path / "quick")
    assert "approximation: " not in err
    monkeypatch.setattr("skyformer.cli.study.SECONDS_BETWEEN_LINES", 0)
    _, _, err = skyformer("study", "approximation", "--small", *inputs, *small, "--output", tmp_path / "lines")
    assert "approximation: 1 of " in err


def test_help_lists_studies_and_their_options(skyformer: Any) -> None:
    _, out, _ = skyformer("study", "--help")
    for name in ("approximation", "dimension", "all"):
        assert name in out
    _, out, _ = skyformer("study", "dimension", "--help")
    for option in ("--epsilons", "--draws", "--small", "--output", "--render"):
        assert option in out


def test_all_studies_run_though_one_lacks_its_data(skyformer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, Path]] = []

    def pretend(study: Any, folder: Path, threads: int, jobs: int, fresh: bool) -> None:
        if study.name == "accuracy":
            raise DataError("text is not prepared")
        ran.append((study.name, folder))

    monkeypatch.setattr("skyformer.cli.study._run_and_show", pretend)
    code, _, err = skyformer("study", "all", "--small")
    assert [name for name, _ in ran] == [name for name in list_studies() if name != "accuracy"]
    assert {folder.parent for _, folder in ran} == {Path("studies/small")}
    assert code == 2
    assert "1 of 6 studies could not run. accuracy: text is not prepared" in " ".join(err.split())
