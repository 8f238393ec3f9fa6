"""`skyformer bench attention` as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.conftest import without_processes as without_processes
from tests.cli.typed import CommandLine


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(monkeypatch, capsys, "bench", "attention")


@pytest.mark.usefixtures("without_processes")
def test_it_writes_a_table_a_file_and_two_pictures(bench: CommandLine, tmp_path: Path) -> None:
    small = ["--lengths", "64,128", "--landmarks", "16", "--head-dim", "8", "--repeats", "1", "--threads", "1"]
    done = bench(*small, "--output", tmp_path)
    assert done.code == 0, done.errors
    assert "skyformer" in done.output
    record = json.loads((tmp_path / "attention.json").read_text())
    assert {row["name"] for row in record["rows"]} == {"sdpa", "kernelized", "skyformer"}
    assert record["machine"]["threads"] == 1
    assert (tmp_path / "attention.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "attention.svg").read_text()


@pytest.mark.parametrize(
    ("option", "value", "promised"),
    [
        ("--lengths", "many", "whole numbers separated by commas; got 'many'"),
        ("--attention", "skyfromer", "Did you mean 'skyformer'?"),
        ("--dtype", "int8", "known: bfloat16, float16, float32, float64"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(bench: CommandLine, option: str, value: str, promised: str) -> None:
    done = bench(option, value)
    assert done.code == 2
    assert promised in done.errors
    assert done.errors.count("\n") == 1


def test_help_names_every_option() -> None:
    command = [sys.executable, "-m", "skyformer.cli.main", "bench", "attention", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    for option in ("--lengths", "--batch", "--heads", "--head-dim", "--landmarks", "--dtype", "--threads", "--repeats"):
        assert option in done.stdout
