"""The frame of the studies: nothing finished is lost, a rerun goes on, and what does not fit is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from skyformer.errors import DataError, InputError, TrainingError, UnknownNameError
from skyformer.report.tables import number
from skyformer.studies import list_studies, register_study, run_study, study_class
from skyformer.studies.base import make_options, option_fields, quantile
from skyformer.studies.record import read_record, record_path, significant
from tests.helpers import refused
from tests.studies.toy import Cell, Options, Result, Squares


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    Squares.fails_at = None
    Squares.measured.clear()
    yield
    Squares.fails_at = None


def test_every_cell_is_measured_once_and_kept(tmp_path: Path) -> None:
    record = run_study(Squares(Options()), tmp_path)
    assert record.results()[Cell(4, 1)] == Result(17.0, (4.0, 0.5))
    again = run_study(Squares(Options()), tmp_path)
    assert len(Squares.measured) == 6
    assert again.results() == record.results()
    assert len(again.runs) == 1


def test_an_interrupted_study_goes_on(tmp_path: Path) -> None:
    Squares.fails_at = Cell(1, 1)
    with pytest.raises(KeyboardInterrupt):
        run_study(Squares(Options()), tmp_path)
    stored = read_record(Squares, record_path("squares", tmp_path))
    assert list(stored.cells) == [Cell(1, 0), Cell(2, 0), Cell(4, 0)]
    Squares.fails_at = None
    record = run_study(Squares(Options()), tmp_path)
    assert len(Squares.measured) == 6
    assert [measured.run for measured in record.cells.values()] == [0, 0, 0, 1, 1, 1]


def test_want_of_memory_is_told_and_other_errors_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Squares, cell: Cell) -> Result:
        raise RuntimeError(f"{message} you tried to allocate 12800000000 bytes")

    monkeypatch.setattr(Squares, "measure", fail)
    message = "DefaultCPUAllocator: can't allocate memory:"
    with refused(TrainingError, "not enough memory", "squares (1 0)", "kept"):
        run_study(Squares(Options()), tmp_path)
    message = "shapes do not match:"
    with refused(RuntimeError, "shapes do not match"):
        run_study(Squares(Options()), tmp_path)


def test_cells_side_by_side_are_those_of_one_process(tmp_path: Path) -> None:
    alone = run_study(Squares(Options()), tmp_path / "alone").results()
    together = run_study(Squares(Options()), tmp_path / "together", jobs=2).results()
    assert together == alone
    assert len(Squares.measured) == 6, "the second time, other processes measured"


def test_a_cell_that_fails_in_company_loses_no_other_that_was_begun(tmp_path: Path) -> None:
    """Seed 9 makes the first of its cells fail, with an error whose arguments are not its message."""
    with refused(UnknownNameError, "unknown square 'x'"):
        run_study(Squares(Options(seeds=(0, 9))), tmp_path, jobs=2)
    kept = read_record(Squares, record_path("squares", tmp_path)).results()
    assert {Cell(x, 0) for x in (1, 2, 4)} <= kept.keys()
    assert Cell(1, 9) not in kept


def test_an_empty_plan_is_refused(tmp_path: Path) -> None:
    with refused(InputError, "squares", "nothing to measure"):
        run_study(Squares(Options(seeds=())), tmp_path)


def test_a_study_that_takes_times_refuses_company(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Squares, "times_things", True)
    with refused(InputError, "--jobs must be 1", "squares"):
        run_study(Squares(Options()), tmp_path, jobs=2)


def test_the_record_says_where_it_comes_from(tmp_path: Path) -> None:
    run_study(Squares(Options(note="x")), tmp_path, threads=1)
    content = json.loads((tmp_path / "squares.json").read_text())
    assert content["options"] == {"seeds": [0, 1], "power": 2.0, "note": "x"}
    assert content["facts"] == {"power": 2.0}
    (run,) = content["runs"]
    assert run["command"].split()[0] == "skyformer"
    assert run["threads"] == 1
    assert {"processor", "cores", "system"} == set(run["machine"])
    assert {"python", "torch"} <= set(run["versions"])
    assert content["cells"][0].keys() == {"cell", "run", "seconds", "result"}
    assert not list(tmp_path.glob("*.partial"))


def test_the_record_tells_nothing_of_the_users_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["--text", "/home/ann/my texts/wiki.txt", "--data-dir=/data/lra/", "--model", "../models/bert", "--seeds"]
    monkeypatch.setattr("sys.argv", ["/usr/bin/skyformer", "study", "squares", *given, "0,1", "--output", "out/a"])
    run_study(Squares(Options(note="/home/ann/my texts/wiki.txt")), tmp_path)
    content = json.loads((tmp_path / "squares.json").read_text())
    assert content["runs"][0]["command"] == (
        "skyformer study squares --text wiki.txt --data-dir=lra --model bert --seeds 0,1 --output out/a"
    )
    assert content["options"]["note"] == "wiki.txt"


def test_a_longer_plan_keeps_what_is_there_and_a_shorter_is_refused(tmp_path: Path) -> None:
    run_study(Squares(Options(seeds=(0,))), tmp_path)
    assert len(run_study(Squares(Options(seeds=(0, 1))), tmp_path).cells) == 6
    assert len(Squares.measured) == 6
    with refused(InputError, "squares.json", "Cell(x=1, seed=1)", "--output", "--fresh"):
        run_study(Squares(Options(seeds=(0,))), tmp_path)
    assert len(run_study(Squares(Options(seeds=(0,))), tmp_path, fresh=True).cells) == 3


def test_other_facts_are_refused(tmp_path: Path) -> None:
    run_study(Squares(Options()), tmp_path)
    with refused(InputError, "power 2.0", "3.0", "--output"):
        run_study(Squares(Options(power=3.0)), tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", ("no record of a study", "--fresh")),
        ("[]", ("no record of a study",)),
        ('{"format": 99}', ("format 99", "upgrade skyformer")),
        ('{"format": 1, "study": "other"}', ("'other'", "'squares'")),
        ('{"format": 1, "study": "squares", "options": {}}', ("does not fit this version",)),
        (
            '{"format": 1, "study": "squares", "options": {}, "facts": {}, "runs": [], '
            '"cells": [{"cell": {"z": 1}, "run": 0, "seconds": 0, "result": {}}]}',
            ("does not fit this version",),
        ),
    ],
)
def test_a_damaged_record_is_not_overwritten(tmp_path: Path, content: str, words: tuple[str, ...]) -> None:
    path = record_path("squares", tmp_path)
    path.write_text(content)
    with refused(DataError, "squares.json", *words):
        run_study(Squares(Options()), tmp_path)
    assert path.read_text() == content


def test_numbers_that_are_not_finite_do_not_enter_the_record() -> None:
    assert significant(float("nan")) is None
    assert significant(float("inf")) is None
    assert significant(0.123456) == 0.1235


def test_progress_counts_what_was_there_before(tmp_path: Path) -> None:
    run_study(Squares(Options(seeds=(0,))), tmp_path)
    seen: list[tuple[int, int, str]] = []
    run_study(Squares(Options(seeds=(0, 1))), tmp_path, report=lambda *progress: seen.append(progress))
    assert seen == [(3, 6, "1 1"), (4, 6, "2 1"), (5, 6, "4 1"), (6, 6, "done")]


def test_options_have_a_small_version_and_are_read_from_text() -> None:
    assert make_options(Squares, small=True, given={}) == Options(seeds=(0,))
    assert make_options(Squares, small=False, given={"seeds": "3, 4", "power": "0.5", "note": "n"}) == Options(
        (3, 4), 0.5, "n"
    )
    for text in (" ", "none"):
        assert make_options(Squares, small=False, given={"seeds": text}).seeds == ()
    assert make_options(Squares, small=False, given={"note": "none"}).note is None
    with refused(InputError, "--power", "a number", "'none'"):
        make_options(Squares, small=False, given={"power": "none"})
    with refused(InputError, "--seeds", "whole number", "'1,b'"):
        make_options(Squares, small=False, given={"seeds": "1,b"})
    with refused(InputError, "--power", "finite", "'nan'"):
        make_options(Squares, small=False, given={"power": "nan"})
    assert [each.help() for each in option_fields(Options)] == [
        "Seeds, separated by commas. (default: 0,1; small: 0)",
        "The exponent. (default: 2.0)",
        "A remark. (default: none)",
    ]


def test_studies_go_by_their_names() -> None:
    assert list_studies() == ["accuracy", "approximation", "dimension", "efficiency", "spectrum", "stability"]
    with refused(UnknownNameError, "unknown study 'approximations'", "Did you mean 'approximation'?"):
        study_class("approximations")
    with refused(InputError, "the name 'approximation' belongs to"):
        register_study(type("Another", (Squares,), {"name": "approximation"}))


def test_a_cell_counts_once_however_often_it_is_planned(tmp_path: Path) -> None:
    assert len(run_study(Squares(replace(Options(), seeds=(0, 0))), tmp_path).cells) == 3


def test_quantiles_and_numbers() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([0.0, 1.0], 0.25) == 0.25
    assert quantile([1.0, float("inf"), float("inf")], 0.75) == float("inf")
    shown = [number(x) for x in (None, 0, 0.0312, 1.049, 31.24, 1234.5, 2.13e7, 2.1e-5)]
    assert shown == ["-", "0", "0.0312", "1.05", "31.2", "1,234", "2.1e+07", "2.1e-05"]
