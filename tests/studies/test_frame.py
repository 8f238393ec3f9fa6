"""The frame of the studies: no finished result is lost, a rerun resumes, and records that do not fit are refused."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from skyformer.errors import DataError, InputError, TrainingError, UnknownNameError
from skyformer.report.progress import Silent
from skyformer.studies import list_studies, register_study, run_study, study_class
from skyformer.studies.base import make_options, option_fields
from skyformer.studies.record import read_record, record_path, significant
from skyformer.studies.targets import at_least, at_most, close_to
from tests.helpers import refused
from tests.studies.toy import Cell, Options, Part, Result, Squares


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    Squares.fails_at = None
    Squares.measured.clear()
    yield
    Squares.fails_at = None


def test_every_cell_is_measured_once_and_saved(tmp_path: Path) -> None:
    record = run_study(Squares(Options()), tmp_path)
    assert record.results()[Cell(4, 1)] == Result(17.0, (4.0, 0.5), (Part("half", (2.0,)),))
    again = run_study(Squares(Options()), tmp_path)
    assert len(Squares.measured) == 6
    assert again.results() == record.results()
    assert len(again.invocations) == 1


def test_an_interrupted_study_resumes(tmp_path: Path) -> None:
    Squares.fails_at = Cell(1, 1)
    with pytest.raises(KeyboardInterrupt):
        run_study(Squares(Options()), tmp_path)
    stored = read_record(Squares, record_path("squares", tmp_path))
    assert list(stored.cells) == [Cell(1, 0), Cell(2, 0), Cell(4, 0)]
    Squares.fails_at = None
    record = run_study(Squares(Options()), tmp_path)
    assert len(Squares.measured) == 6
    assert [measured.invocation for measured in record.cells.values()] == [0, 0, 0, 1, 1, 1]


def test_out_of_memory_is_explained_and_other_errors_are_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Squares, cell: Cell) -> Result:
        raise RuntimeError(f"{message} you tried to allocate 12800000000 bytes")

    monkeypatch.setattr(Squares, "measure", fail)
    message = "DefaultCPUAllocator: can't allocate memory:"
    with refused(TrainingError, "squares ran out of memory at 1 0", "saved"):
        run_study(Squares(Options()), tmp_path)
    message = "shapes do not match:"
    with refused(RuntimeError, "shapes do not match"):
        run_study(Squares(Options()), tmp_path)


def test_parallel_workers_give_the_same_results_and_spare_other_children(tmp_path: Path) -> None:
    """Seed 9 makes the first of its cells fail, with an error whose arguments are not its message."""
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    child.start()
    before = multiprocessing.active_children()
    try:
        with refused(UnknownNameError, "unknown square 'x'"):
            run_study(Squares(Options(seeds=(0, 9))), tmp_path, jobs=2)
        assert child.is_alive(), "a process of the caller was ended"
        deadline = time.monotonic() + 30
        while not set(before).issuperset(multiprocessing.active_children()):
            assert time.monotonic() < deadline, "a worker outlives its study"
            time.sleep(0.05)
    finally:
        child.kill()
        child.join()
    saved = read_record(Squares, record_path("squares", tmp_path)).results()
    assert {Cell(x, 0) for x in (1, 2, 4)} <= saved.keys()
    assert Cell(1, 9) not in saved
    assert not Squares.measured, "other processes measured"
    alone = run_study(Squares(Options(seeds=(0,))), tmp_path / "alone").results()
    assert {cell: result for cell, result in saved.items() if cell.seed == 0} == alone


def test_an_empty_plan_is_refused(tmp_path: Path) -> None:
    with refused(InputError, "squares", "nothing to measure"):
        run_study(Squares(Options(seeds=())), tmp_path)


def test_a_timing_study_runs_alone_and_on_one_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Squares, "is_timing_study", True)
    with refused(InputError, "--jobs must be 1", "squares"):
        run_study(Squares(Options()), tmp_path, jobs=2)
    assert run_study(Squares(Options()), tmp_path, threads=1).facts.keys() >= {"processor", "cores", "threads"}
    monkeypatch.setattr("skyformer.studies.run.processor_name", lambda: "another processor")
    with refused(InputError, "processor", "'another processor'"):
        run_study(Squares(Options()), tmp_path, threads=1)


def test_the_record_has_the_environment_of_its_results(tmp_path: Path) -> None:
    run_study(Squares(Options(note="x")), tmp_path, threads=1)
    content = json.loads((tmp_path / "squares.json").read_text())
    assert content["options"] == {"seeds": [0, 1], "power": 2.0, "note": "x", "loud": False}
    assert content["facts"] == {"power": 2.0}
    (invocation,) = content["runs"]
    assert invocation["command"].split()[0] == "skyformer"
    assert invocation["threads"] == 1
    assert {"processor", "cores", "system"} == set(invocation["machine"])
    assert {"python", "torch"} <= set(invocation["versions"])
    assert content["cells"][0].keys() == {"cell", "run", "seconds", "result"}
    assert not list(tmp_path.glob("*.partial"))


def test_the_record_does_not_show_the_users_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["--text", "/home/ann/my texts/wiki.txt", "--data-dir=/data/lra/", "--model", "../models/bert", "--seeds"]
    monkeypatch.setattr("sys.argv", ["/usr/bin/skyformer", "study", "squares", *given, "0,1", "--output", "out/a"])
    run_study(Squares(Options(note="/home/ann/my texts/wiki.txt")), tmp_path)
    content = json.loads((tmp_path / "squares.json").read_text())
    assert content["runs"][0]["command"] == (
        "skyformer study squares --text wiki.txt --data-dir=lra --model bert --seeds 0,1 --output out/a"
    )
    assert content["options"]["note"] == "wiki.txt"


def test_a_longer_plan_keeps_saved_results_and_a_shorter_is_refused(tmp_path: Path) -> None:
    run_study(Squares(Options(seeds=(0,))), tmp_path)
    assert len(run_study(Squares(Options(seeds=(0, 1))), tmp_path).cells) == 6
    assert len(Squares.measured) == 6
    with refused(InputError, "squares.json", "Cell(x=1, seed=1)", "--output", "--fresh"):
        run_study(Squares(Options(seeds=(0,))), tmp_path)
    assert len(run_study(Squares(Options(seeds=(0,))), tmp_path, fresh=True).cells) == 3


def test_different_facts_are_refused(tmp_path: Path) -> None:
    run_study(Squares(Options()), tmp_path)
    with refused(InputError, "power 2.0", "3.0", "--output"):
        run_study(Squares(Options(power=3.0)), tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", ("not the record of a study", "--fresh")),
        ("[]", ("not the record of a study",)),
        ('{"format": 99}', ("format 99", "upgrade skyformer")),
        ('{"format": 1, "study": "other"}', ("'other'", "'squares'")),
        ('{"format": 1, "study": "squares", "options": {}}', ("does not fit this version",)),
        (
            '{"format": 1, "study": "squares", "options": {}, "facts": {}, "runs": [], '
            '"cells": [{"cell": {"z": 1}, "run": 0, "seconds": 0, "result": {}}]}',
            ("does not fit this version", "is missing in cells.0.cell"),
        ),
        (
            '{"format": 1, "study": "squares", "options": {}, "facts": {}, "runs": [], '
            '"cells": [{"cell": {"x": 1, "seed": 0}, "run": 0, "seconds": 0, "result": {"y": 1, "named": [2]}}]}',
            ("does not fit this version", "cells.0.result.named"),
        ),
        (
            '{"format": 1, "study": "squares", "options": {}, "facts": {}, "runs": [], '
            '"cells": [{"cell": {"x": "one", "seed": 0}, "run": 0, "seconds": 0, "result": {}}]}',
            ("does not fit this version", 'cells.0.cell.x must be int; got "one"'),
        ),
        ("[" * 100_000, ("not the record of a study",)),
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


def test_progress_counts_saved_results(tmp_path: Path) -> None:
    class Reports(Silent):
        seen: list[object] = []

        def begin(self, task: str, total: int | None = None, done: int = 0) -> None:
            self.seen.append((task, total, done))

        def update(self, task: str, *, done: int | None = None, advance: int = 0, text: str | None = None) -> None:
            self.seen.append(text or advance)

        def end(self, task: str) -> None:
            self.seen.append("end")

    run_study(Squares(Options(seeds=(0,))), tmp_path)
    run_study(Squares(Options(seeds=(0, 1))), tmp_path, progress=Reports())
    assert Reports.seen == [("squares", 6, 3), "1 1", 1, "2 1", 1, "4 1", 1, "end"]


def test_options_have_a_small_version_and_are_read_from_text() -> None:
    assert make_options(Squares, small=True, given={}) == Options(seeds=(0,))
    given = {"seeds": "3, 4", "power": "0.5", "note": "n", "loud": True}
    assert make_options(Squares, small=False, given=given) == Options((3, 4), 0.5, "n", True)
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
        "Seeds, separated by commas. (default: 0,1; with --small: 0)",
        "The exponent. (default: 2.0)",
        "A remark. (default: none)",
        "Print more. (default: no)",
    ]


def test_studies_are_found_by_name() -> None:
    assert {"accuracy", "approximation", "dimension", "efficiency", "spectrum", "stability"} <= set(list_studies())
    with refused(UnknownNameError, "unknown study 'approximations'", "Did you mean 'approximation'?"):
        study_class("approximations")
    with refused(InputError, "the study name 'approximation' is taken"):
        register_study(type("Another", (Squares,), {"name": "approximation"}))


def test_a_cell_that_is_planned_twice_is_measured_once(tmp_path: Path) -> None:
    assert len(run_study(Squares(replace(Options(), seeds=(0, 0))), tmp_path).cells) == 3


def test_targets_pass_up_to_their_limit() -> None:
    assert [at_most("time", value, 2).passed for value in (2, 2.1)] == [True, False]
    assert [at_least("time", value, 2).passed for value in (2, 1.9)] == [True, False]
    assert [close_to("mean", value, 2, 0.1).passed for value in (1.7, 1.9, 2.1, 2.3)] == [False, True, True, False]
