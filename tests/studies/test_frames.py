"""Data frames of results, and tables made from data frames."""

from __future__ import annotations

import math

from skyformer.report.tables import from_frame
from skyformer.studies.frames import in_order, median_and_quartiles, quantile, to_frame, with_paper
from tests.studies.toy import Cell, Result

RESULTS = {Cell(1, 0): Result(2.0), Cell(4, 0): Result(None), Cell(1, 1): Result(6.0)}


def test_a_frame_has_one_row_per_cell_and_is_shown_as_a_table() -> None:
    frame = to_frame(Cell, RESULTS, y=lambda result: result.y)
    assert frame.loc[2].to_dict() == {"x": 1, "seed": 1, "y": 6.0}
    assert list(to_frame(Cell, {}, y=lambda result: result.y).columns) == ["x", "seed", "y"]
    texts = frame.assign(text=frame["y"].map("{:.0f}".format, na_action="ignore"))
    table = from_frame("y", texts.pivot(index="x", columns="seed", values="text"), "A note.")
    assert (table.title, table.header, table.note) == ("y", ["x", "0", "1"], "A note.")
    assert table.rows == [["1", "2", "6"], ["4", "-", "-"]]


def test_two_levels_of_columns_become_groups() -> None:
    frame = to_frame(Cell, RESULTS, y=lambda result: f"{result.y}").pivot(index="x", columns="seed", values=["y", "y"])
    assert from_frame("y", frame).groups == [("", 1), ("y", 4)]


def test_the_papers_numbers_stand_in_brackets_where_there_are_any() -> None:
    ours = to_frame(Cell, RESULTS, y=lambda result: result.y).pivot(index="x", columns="seed", values="y")
    papers = ours.loc[[1], [0]] / 4
    assert with_paper(ours.map(str, na_action="ignore"), papers).to_numpy().tolist() == [
        ["2.0 (0.5)", "6.0"],
        ["-", "-"],
    ]


def test_known_names_come_first() -> None:
    assert in_order(["x", "b", "y", "a"], ["a", "b", "c"]) == ["a", "b", "x", "y"]


def test_quantiles_may_be_infinite() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([0.0, 1.0], 0.25) == 0.25
    assert quantile([1.0, math.inf, math.inf], 0.5) == math.inf
    assert quantile([1.0, 2.0, math.inf], 0.5) == 2.0
    assert quantile([None, 1.0, 2.0], 1.0) == math.inf
    assert median_and_quartiles((0.1, 0.25, math.inf)) == "0.25 [0.1, fails]"
