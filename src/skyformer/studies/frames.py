"""Results of a study as a pandas data frame, and what the tables of several studies share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from skyformer.report.paper import TASK_TITLES
from skyformer.report.tables import NOTHING, Table, from_frame, number

if TYPE_CHECKING:
    from pandas import DataFrame
    from pandas import Series as Column


def to_frame(cell_type: type, results: Mapping[Any, Any], **columns: Callable[[Any], Any]) -> DataFrame:
    """One row per cell: the fields of the cell, then one column per keyword, computed from its result."""
    import pandas

    rows = [
        {**vars(cell), **{name: compute(result) for name, compute in columns.items()}}
        for cell, result in results.items()
    ]
    return pandas.DataFrame(rows, columns=[*(field.name for field in fields(cell_type)), *columns])


def in_order(present: Iterable[str], order: Iterable[str]) -> list[str]:
    """The names that are present: first those in `order`, then the others as they come."""
    found = dict.fromkeys(present)
    known = [name for name in order if name in found]
    return known + [name for name in found if name not in known]


def task_table(title: str, by_task: DataFrame, note: str = "", rows: str = "attention") -> Table:
    """A table of a data frame with one column per task; `rows` is the header of the index."""
    return from_frame(title, by_task.rename(columns=TASK_TITLES).rename_axis(rows), note)


def with_paper(ours: DataFrame, papers: DataFrame, show: Callable[[float], str] = number) -> DataFrame:
    """Text, followed by the paper's number in brackets where it has one."""
    brackets = papers.reindex_like(ours).map(lambda x: "" if x != x else f" ({show(x)})")
    return ours.astype(object).where(ours.notna(), NOTHING) + brackets


def quantile(values: Sequence[float | None], q: float) -> float:
    """The q-th quantile, linear between neighbours. Unlike in pandas, values may be infinite; None, a failure, is."""
    ordered = sorted(math.inf if value is None else value for value in values)
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    if place == low or ordered[low] == ordered[high]:  # An infinite number times zero is not a number.
        return ordered[low]
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def median_and_quartiles(quartiles: Sequence[float]) -> str:
    """The 25, 50 and 75 % quantiles as text: 0.2 [0.1, 0.3]; an infinite error is a failure."""
    low, middle, high = (number(x) if x < math.inf else "fails" for x in quartiles)
    return f"{middle} [{low}, {high}]"


def missing_as_none(values: Column) -> list[float | None]:
    """The values for a figure, which leaves None out."""
    return [None if value != value else value for value in values.tolist()]
