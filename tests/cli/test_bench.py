"""`skyformer bench` as a user runs it; the commands are built as those of `skyformer study`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from skyformer.studies.benchmarks import attention
from tests.cli.typed import CommandLine


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(monkeypatch, capsys, "bench")


def test_attention_leaves_results_tables_and_figures(
    bench: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyformer.report.figures.FORMATS", ("svg",))
    monkeypatch.setattr(attention, "measure_fresh", lambda name, shape: attention.measure_here(name, vars(shape), 1))
    small = ["--lengths", "64,128", "--landmarks", "16", "--head-dim", "8", "--repeats", "1", "--threads", "1"]
    done = bench("attention", *small, "--output", tmp_path)
    assert done.code == 0, done.errors
    assert "skyformer" in done.output
    record = json.loads((tmp_path / "attention.json").read_text())
    assert {row["name"] for row in record["cells"][0]["result"]["rows"]} == {"sdpa", "kernelized", "skyformer"}
    assert record["facts"]["threads"] == 1
    assert "<svg" in (tmp_path / "figure.svg").read_text()


@pytest.mark.parametrize(
    ("option", "value", "promised"),
    [
        ("--lengths", "many", "--lengths must be a whole number, or several separated by commas; got 'many'"),
        ("--lengths", "0", "--lengths must be at least 1; got 0"),
        ("--attention", "skyfromer", "Did you mean 'skyformer'?"),
        ("--dtype", "int8", "known: bfloat16, float16, float32, float64"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(bench: CommandLine, option: str, value: str, promised: str) -> None:
    done = bench("attention", option, value)
    assert done.code == 2
    assert promised in done.errors
    assert done.errors.count("\n") == 1


def test_help_lists_benchmarks_and_their_options(bench: CommandLine) -> None:
    listed = bench("--help").output
    names = "attention conversion data huggingface interleaved-steps targets training training-step"
    for name in names.split():
        assert name in listed
    options = bench("attention", "--help").output
    for option in (
        "--lengths",
        "--batch",
        "--heads",
        "--head-dim",
        "--landmarks",
        "--dtype",
        "--threads",
        "--no-peers",
    ):
        assert option in options
