"""What a study shows, as plain data: tables and figures that `skyformer.report` turns into files."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Rows of text under a header. `**text**` is bold, in Markdown and in LaTeX alike.

    groups: a line above the header, each text over so many columns, as in the paper's Table 2.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    groups: Sequence[tuple[str, int]] = ()


class Mark(enum.Enum):
    """How a series is drawn."""

    LINE = "line"
    DASHED = "dashed"
    POINTS = "points"


@dataclass(frozen=True)
class Series:
    """y over x, with a band from low to high if both are given. Series of one label share a colour and an entry in
    the legend, in whatever panel they are."""

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    mark: Mark = Mark.LINE


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    x_log: bool = False
    y_log: bool = False


@dataclass(frozen=True)
class Figure:
    """Panels in rows of `columns`. The figure named "figure" is the study's first; others get files of their own."""

    name: str
    title: str
    panels: Sequence[Panel]
    columns: int = 3


def quantile(values: Sequence[float], q: float) -> float:
    """The q-th quantile, linear between neighbours."""
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    if ordered[low] == ordered[high]:  # both may be infinite
        return ordered[low]
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def yes_or_no(holds: bool) -> str:
    return "yes" if holds else "no"


def number(x: float | None) -> str:
    """Three significant digits, in a form that stays short: 0.0312, 1.05, 31.2, 1,230, 2.1e-05."""
    if x is None:
        return "-"
    if x == 0:
        return "0"
    if abs(x) >= 1000:
        return f"{x:,.0f}" if abs(x) < 1e6 else f"{x:.1e}"
    return f"{x:.1e}" if abs(x) < 1e-3 else f"{x:.3g}"
