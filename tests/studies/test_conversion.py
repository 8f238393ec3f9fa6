"""The conversion benchmark on a tiny model and a few made-up reviews."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyformer.errors import DataError, InputError
from skyformer.processes import FreshRun
from skyformer.report.tables import NOTHING, as_markdown
from skyformer.studies import run_study
from skyformer.studies.base import make_options
from skyformer.studies.benchmarks import conversion
from skyformer.studies.benchmarks.conversion import ATTENTIONS, DIFFERENT, MATERIALISED, Cell, Conversion, Result
from skyformer.studies.record import read_record
from tests.helpers import refused
from tests.lra.fake_files import review_files, write_folder

SMALL = replace(make_options(Conversion, True, {}), landmarks=(8, 128))


def call_here(function: Callable[..., Any], **arguments: Any) -> FreshRun:
    """Instead of a fresh process, which takes seconds; kernelized attention runs out of memory."""
    if arguments["attention"] == "kernelized":
        return FreshRun(1, None, "RuntimeError: can't allocate memory", killed_by_oom=False)
    return FreshRun(0, function(**arguments), "", killed_by_oom=False)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[Cell, Result]:
    """All results of the small version, read from its record."""
    folder = tmp_path_factory.mktemp("conversion")
    reviews = write_folder(folder, review_files(60)) / "aclImdb"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversion, "run_in_fresh_process", call_here)
        patch.setattr(conversion, "limit_added_memory", lambda _: None)
        run_study(Conversion(replace(SMALL, imdb=str(reviews))), folder)
    return read_record(Conversion, folder / "conversion.json").results()


def test_embeddings_are_exact_with_every_query_as_a_landmark(results: dict[Cell, Result]) -> None:
    for landmarks in ("queries", "queries, shared by the heads"):
        few, all_ = (results[Cell("embeddings", "softmax", landmarks, d)].cosines for d in (8, 128))
        assert len(few) == SMALL.passages
        assert min(few) < 0.99999 < min(all_)
    (between,) = results[Cell("embeddings", "softmax", DIFFERENT)].cosines
    assert -1 <= between < 1


def test_fine_tuning_records_losses_and_accuracy(results: dict[Cell, Result]) -> None:
    found = [results[Cell("fine-tuning", name)] for name in ATTENTIONS]
    assert all(len(each.losses) == SMALL.steps and 0 <= (each.accuracy or 0) <= 1 for each in found)
    assert len({each.losses for each in found}) == len(ATTENTIONS)
    times = results[Cell("times of fine-tuning")].times
    assert [each.attention for each in times] == list(ATTENTIONS)
    assert all(len(each.seconds) == SMALL.repeats and min(each.seconds) > 0 for each in times)


def test_memory_of_long_texts_is_measured_up_to_the_limit(results: dict[Cell, Result]) -> None:
    forward = {name: results[Cell("long texts", name, mode="forward")] for name in (MATERIALISED, *ATTENTIONS)}
    assert forward["softmax"].cosines == pytest.approx((1.0,), abs=1e-5)
    assert forward["kernelized"].added_bytes is None
    assert (forward["skyformer"].added_bytes or 0) >= 0
    assert results[Cell("long texts", "skyformer", mode="training")].cosines == ()
    times = {(each.attention, each.mode) for each in results[Cell("times of long texts")].times}
    assert len(times) == 9
    assert (MATERIALISED, "training") not in times


def test_tables_show_what_was_measured(results: dict[Cell, Result]) -> None:
    embeddings, fine_tuning, long = Conversion.tables(results)
    assert embeddings.header == ["kernel, landmarks", "d = 8", "d = 128"]
    assert [row[0] for row in embeddings.rows][-1] == "gaussian, stratified"
    assert embeddings.rows[-1][1] == NOTHING
    assert [row[0] for row in fine_tuning.rows] == list(ATTENTIONS)
    assert all("±" in row[1] and row[3].endswith(" s") for row in fine_tuning.rows)
    by_name = {row[0]: row for row in long.rows}
    assert by_name["kernelized"][1] == by_name["kernelized"][3] == "over the limit"
    assert by_name[MATERIALISED][4] == NOTHING
    partial = {cell: result for cell, result in results.items() if "times" not in cell.part}
    assert f"| {NOTHING} |" in as_markdown(Conversion.tables(partial)[1:2])
    assert Conversion.tables({}) == []


def test_without_reviews_only_embeddings_are_planned() -> None:
    study = Conversion(SMALL)
    assert {cell.part for cell in study.cells()} == {"embeddings"}
    assert "reviews" not in study.facts()


def test_texts_and_reviews_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with refused(InputError, "--length must be at most 512", "tiny", "600"):
        Conversion(replace(SMALL, length=600))
    text = tmp_path / "short.txt"
    text.write_text("too short")
    with refused(DataError, "short.txt", "passage 3"):
        Conversion(replace(SMALL, text=str(text))).facts()
    reviews = write_folder(tmp_path, review_files(4)) / "aclImdb"
    study = Conversion(replace(SMALL, imdb=str(reviews)))
    with refused(DataError, "aclImdb", "1 texts of 600 tokens", "--long-length"):
        study.measure(Cell("long texts", "softmax", mode="forward"))


def test_a_failure_in_the_fresh_process_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reviews = write_folder(tmp_path, review_files(60)) / "aclImdb"
    study = Conversion(replace(SMALL, imdb=str(reviews)))
    monkeypatch.setattr(conversion, "run_in_fresh_process", lambda *_, **__: FreshRun(1, None, "ValueError: x", False))
    with pytest.raises(Exception, match=r"softmax, forward failed.*ValueError: x"):
        study.measure(Cell("long texts", "softmax", mode="forward"))
