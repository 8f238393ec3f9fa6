"""`skyformer bench attention` as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "skyformer.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_it_writes_a_table_a_file_and_two_pictures(tmp_path: Path) -> None:
    small = ["--lengths", "64,128", "--landmarks", "16", "--head-dim", "8", "--repeats", "1", "--threads", "1"]
    done = run("bench", "attention", *small, "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "skyformer" in done.stdout
    record = json.loads((tmp_path / "attention.json").read_text())
    assert {row["name"] for row in record["rows"]} == {"sdpa", "kernelized", "skyformer"}
    assert record["machine"]["threads"] == 1
    assert (tmp_path / "attention.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "attention.svg").read_text()


def test_bad_input_is_one_line_and_exit_code_2() -> None:
    for arguments, promised in (
        (["--lengths", "many"], "whole numbers separated by commas; got 'many'"),
        (["--attention", "skyfromer"], "Did you mean 'skyformer'?"),
        (["--dtype", "int8"], "known: bfloat16, float16, float32, float64"),
    ):
        done = run("bench", "attention", *arguments)
        assert done.returncode == 2
        assert promised in done.stderr
        assert "Traceback" not in done.stderr


def test_help_names_every_option() -> None:
    done = run("bench", "attention", "--help")
    for option in ("--lengths", "--batch", "--heads", "--head-dim", "--landmarks", "--dtype", "--threads", "--repeats"):
        assert option in done.stdout
