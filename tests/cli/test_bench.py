"""`skyformer bench` as a user runs it; the commands are built as those of `skyformer study`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from skyformer.studies.benchmarks import attention
from tests.cli.conftest import CommandLine


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(monkeypatch, capsys, "bench")


def test_attention_leaves_results_tables_and_figures(
    bench: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyformer.report.figures.FORMATS", ("svg",))
    monkeypatch.setattr(
        attention, "measure_fresh", lambda name, shape, *_: attention.measure_here(name, vars(shape), 1)
    )
    small = ["--lengths", "64", "--landmarks", "16", "--head-dim", "8", "--repeats", "1", "--threads", "1"]
    done = bench("attention", *small, "--output", tmp_path)
    assert done.code == 0, done.errors
    assert "skyformer" in done.output
    record = json.loads((tmp_path / "attention.json").read_text())
    assert {row["name"] for row in record["cells"][0]["result"]["rows"]} == {"sdpa", "kernelized", "skyformer"}
    assert record["facts"]["threads"] == 1
    assert "<svg" in (tmp_path / "figure.svg").read_text()
