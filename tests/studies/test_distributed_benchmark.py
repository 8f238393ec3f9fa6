"""The benchmark of sequences in pieces: one process for real, ranks with made-up numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from skyformer.errors import UnknownNameError
from skyformer.report.tables import as_markdown
from skyformer.studies import run_study
from skyformer.studies.base import make_options
from skyformer.studies.benchmarks import distributed
from skyformer.studies.benchmarks.distributed import (
    PARTS,
    Cell,
    DistributedBenchmark,
    Options,
    Result,
    attend_on_rank,
    expected_bytes,
)
from skyformer.studies.record import read_record
from tests.helpers import refused

SMALL = make_options(DistributedBenchmark, True, {})


def fake_ranks(ranks: int, **arguments: Any) -> list[dict[str, Any]]:
    """Ranks that send what is expected, and need memory in proportion to their tokens."""
    cell = Cell("traffic", arguments["attention"], arguments["tokens"], ranks)
    memory = 1000 * arguments["tokens"] // ranks
    measured = {
        "forward_bytes": expected_bytes(cell, SMALL) // 2,
        "backward_bytes": expected_bytes(cell, SMALL) // 2,
        "peak_bytes": 10**8 + memory,
        "added_bytes": memory,
        "input_bytes": memory // 10,
        "seconds": [0.5 / ranks],
    }
    return [{**measured, "seconds": [0.5 / ranks + 0.1 * rank]} for rank in range(ranks)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[Cell, Result]:
    folder = tmp_path_factory.mktemp("distributed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "run_ranks", fake_ranks)
        run_study(DistributedBenchmark(SMALL), folder)
    return read_record(DistributedBenchmark, folder / "distributed.json").results()


def test_every_part_has_a_table(results: dict[Cell, Result]) -> None:
    assert {cell.part for cell in results} == set(PARTS)
    text = as_markdown(DistributedBenchmark.tables(results))
    # As slow as its slowest rank.
    assert "| skyformer | 1,024 | 2 | 350 | 0.70 |" in text
    assert "| kernelized | 1,024 | 2 | 262,144 | 262,144 | 1.000 |" in text
    [figure] = DistributedBenchmark.figures(results)
    assert [series.label for series in figure.panels[0].series] == ["skyformer", "kernelized (ring)"]
    assert (DistributedBenchmark.tables({}), DistributedBenchmark.figures({})) == ([], [])


def test_targets(results: dict[Cell, Result]) -> None:
    assert [target.passed for target in DistributedBenchmark.targets(results)] == [True] * 3
    growing = {Cell("traffic", "skyformer", n, 2): Result(n, n, n, 0, 0, 0, (1.0,)) for n in (1000, 2000)}
    large = {
        Cell("memory", "skyformer", 2**20, ranks): Result(0, 0, 1, 9 * 10**9, 9 * 10**8, 1, (1.0,)) for ranks in (1, 2)
    }
    long = {Cell("long", "skyformer", 2**21, 2): Result(0, 0, 1, 9 * 10**9, 9 * 10**8, 1, (1.0,))}
    assert [target.passed for target in DistributedBenchmark.targets({**growing, **large, **long})] == [False] * 3


@pytest.mark.parametrize("attention", ["skyformer", "kernelized"])
def test_one_process(attention: str, tmp_path: Path) -> None:
    found = attend_on_rank(
        rank=0,
        ranks=1,
        store=str(tmp_path / "store"),
        attention=attention,
        tokens=300,
        heads=1,
        head_dim=8,
        landmarks=8,
        queries=300,
        threads=1,
        repeats=2,
    )
    assert found["input_bytes"] == 3 * 300 * 8 * 4
    assert found["forward_bytes"] == found["backward_bytes"] == 0
    assert len(found["seconds"]) == 2


def test_unknown_parts_are_refused() -> None:
    with refused(UnknownNameError, "part", "'speed'", "time"):
        DistributedBenchmark(Options(parts=("speed",)))
