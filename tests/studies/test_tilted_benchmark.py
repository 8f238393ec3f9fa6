"""The benchmark of tilted attention on a small model with random weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from skyformer.errors import UnknownNameError
from skyformer.processes import FreshRun
from skyformer.report.tables import as_markdown
from skyformer.studies import run_study
from skyformer.studies.base import make_options
from skyformer.studies.benchmarks import tilted
from skyformer.studies.benchmarks.attention import Fresh
from skyformer.studies.benchmarks.tilted import PARTS, Cell, Result, TiltedBenchmark, Times
from skyformer.studies.record import read_record
from tests.helpers import refused

SMALL = make_options(TiltedBenchmark, True, {})


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[Cell, Result]:
    """All results of the small version, read from its record; memory is not measured."""
    folder = tmp_path_factory.mktemp("tilted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tilted, "run_in_fresh_process", lambda *_, **__: FreshRun(0, {"added_bytes": 10**9}, "", False))
        patch.setattr(tilted, "measure_fresh", lambda *_: Fresh(1.0, 900, 100))
        run_study(TiltedBenchmark(replace(SMALL, parts=PARTS)), folder)
    return read_record(TiltedBenchmark, folder / "tilted.json").results()


def test_every_part_is_measured(results: dict[Cell, Result]) -> None:
    assert {cell.part for cell in results} == set(PARTS)
    for cell in (Cell("heads", 64, 16), Cell("heads", 64, 16, "gaussian")):
        assert len(results[cell].errors) == 2 * 2 * 4
        assert 0 < max(results[cell].errors) < 0.2
    assert len(results[Cell("heads", 600, 64)].errors) == 2 * 4
    assert all(0.99 < close <= 1.0001 for close in results[Cell("model", 64, 16)].cosines)
    assert (results[Cell("suggestion", 64, 16)].budget or 0) >= 8
    times = results[Cell("times", 512, 240, head_dim=32)].forward
    assert times is not None
    assert times.speed_up() > 0


def test_tables_and_targets_show_what_was_measured(results: dict[Cell, Result]) -> None:
    text = as_markdown(TiltedBenchmark.tables(results))
    assert "| 600 | 64 |" in text
    assert "1.00 (1.00)" in text
    assert "suggested on another passage" in text
    memory = [target for target in TiltedBenchmark.targets(results) if "memory" in target.what]
    assert [(target.measured, target.passed) for target in memory] == [("9x", True)] * 2
    assert TiltedBenchmark.tables({}) == []


def test_a_missed_target_fails() -> None:
    results = {
        Cell("heads", 512, 240): Result(errors=(0.01, 0.02, 0.04)),
        Cell("times", 8192, 400, head_dim=32): Result(forward=Times((1.0,), (2.9,)), step=Times((1.0,), (2.0,))),
    }
    found = {target.what.split(": ")[1]: target.passed for target in TiltedBenchmark.targets(results)}
    assert found == {
        "median error of heads": False,
        "upper quartile of errors": True,
        "speed-up over sdpa, forward": False,
        "speed-up over sdpa, forward and backward": True,
    }


def test_outputs_that_are_not_finite_miss_the_targets() -> None:
    results = {
        Cell("heads", 512, 240): Result(errors=(0.01, None, None)),
        Cell("suggestion", 512, 240): Result(errors=(0.01, None), budget=100),
    }
    assert not any(target.passed for target in TiltedBenchmark.targets(results))


def test_unknown_parts_are_refused(tmp_path: Path) -> None:
    with refused(UnknownNameError, "part", "'speed'", "times"):
        TiltedBenchmark(replace(SMALL, parts=("speed",)))
