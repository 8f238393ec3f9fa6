"""Figures as plain data, drawn in one style as PNG, SVG and PDF, with one colour per attention everywhere."""

from __future__ import annotations

import enum
import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyformer.errors import MissingExtraError
from skyformer.report.tables import number

FORMATS = ("png", "svg", "pdf")

ATTENTION_COLOURS = {
    "softmax": "#4d4d4d",
    "kernelized": "#1f77b4",
    "skyformer": "#d62728",
    "nystromformer": "#2ca02c",
    "linformer": "#9467bd",
    "informer": "#8c564b",
    "performer": "#ff7f0e",
    "reformer": "#e377c2",
    "bigbird": "#17becf",
    "tilted": "#bcbd22",
}

OTHER_COLOURS = ("#003f5c", "#bc5090", "#58a500", "#ffa600", "#7a5195", "#00a6a6", "#a05d00", "#888888")
"""For labels without the name of an attention, or if another label of the figure has the colour of the attention."""

_TITLE_CHARACTERS = 46
"""Characters of a title that fit above one column of panels."""
_NOTE_CHARACTERS = 78


class Mark(enum.Enum):
    """How a series is drawn."""

    LINE = "line"
    DASHED = "dashed"
    POINTS = "points"
    HOLLOW = "hollow"
    BARS = "bars"


@dataclass(frozen=True)
class Series:
    """y over x, with a band from `low` to `high` if both are given.

    Series with the same label share a colour and a legend entry in all panels. A label that begins with the name of an
    attention gets that attention's colour.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    mark: Mark = Mark.LINE


@dataclass(frozen=True)
class Panel:
    """One pair of axes. With `x_names`, x = 0, 1, ... are labelled with these names; with `y_names` y is, from the top
    down. `legend` is off where those names say everything."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    x_log: bool = False
    y_log: bool = False
    x_names: Sequence[str] = ()
    y_names: Sequence[str] = ()
    legend: bool = True


@dataclass(frozen=True)
class Figure:
    """Panels in rows of `columns`; `name` becomes the file name, `note` stands below the panels. With `direct`,
    lines are named at their right ends instead of in a legend."""

    name: str
    title: str
    panels: Sequence[Panel]
    columns: int = 3
    note: str = ""
    direct: bool = False


def draw_figure(figure: Figure, folder: Path) -> list[Path]:
    """Write the figure into `folder` in every format; returns the files."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise MissingExtraError("matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(figure.columns, len(figure.panels))
    rows = -(-len(figure.panels) // columns)
    size = ((5.0 if figure.direct else 4.2) * columns, 3.4 * rows + 0.9)
    # With a fixed salt for element ids, the same data give the same SVG file.
    with pyplot.rc_context({"svg.hashsalt": figure.name, "font.size": 9}):
        canvas, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, constrained_layout=True)
        colours = label_colours([series.label for panel in figure.panels for series in panel.series])
        for axis, panel in zip(axes.flat, figure.panels, strict=False):
            _draw_panel(axis, panel, colours)
            if figure.direct:
                _name_lines(axis, panel, colours)
        for axis in list(axes.flat)[len(figure.panels) :]:
            axis.set_axis_off()
        canvas.suptitle(textwrap.fill(figure.title, _TITLE_CHARACTERS * columns), fontsize=11)
        if figure.note:
            canvas.supxlabel(textwrap.fill(figure.note, _NOTE_CHARACTERS * columns), fontsize=7)
        if not figure.direct:
            explained = [axis for axis, panel in zip(axes.flat, figure.panels, strict=False) if panel.legend]
            _add_legend(canvas, explained, columns, beside=bool(figure.note))
        folder.mkdir(parents=True, exist_ok=True)
        files = [folder / f"{figure.name}.{suffix}" for suffix in FORMATS]
        # Computing the layout takes most of the time, so it is computed once, not for every format.
        canvas.draw_without_rendering()
        canvas.set_layout_engine("none")
        for file in files:
            canvas.savefig(file, dpi=100, metadata=_without_date(file.suffix))
        pyplot.close(canvas)
    return files


def label_colours(labels: Sequence[str]) -> dict[str, str]:
    """A colour for each label: the attention's own for the first label that begins with its name, else another."""
    colours: dict[str, str] = {}
    free = _other_colours()
    for label in dict.fromkeys(labels):
        own = ATTENTION_COLOURS.get(attention_of(label) or "")
        colours[label] = own if own and own not in colours.values() else next(free)
    return colours


def attention_of(label: str) -> str | None:
    """The attention that a label such as "Skyformer (128 landmarks)" begins with; None if it begins with no name."""
    word = re.match(r"\w*", label.strip().lower())
    return word[0] if word and word[0] in ATTENTION_COLOURS else None


def _other_colours() -> Iterator[str]:
    while True:
        yield from OTHER_COLOURS


def _draw_panel(axis: Any, panel: Panel, colours: Mapping[str, str]) -> None:
    for series in panel.series:
        _draw_series(axis, series, colours[series.label])
    if panel.x_log:
        axis.set_xscale("log")
        ticks = sorted({x for series in panel.series for x in series.x})
        if len(ticks) <= _MOST_TICKS:
            _set_ticks(axis.xaxis, ticks)
        else:
            _label_plainly(axis.xaxis, axis.get_xlim())
    elif _counts_steps(panel):
        axis.locator_params("x", integer=True)
        axis.xaxis.set_major_formatter("{x:,g}")
    if panel.y_log:
        axis.set_yscale("log")
        _label_plainly(axis.yaxis, axis.get_ylim())
    if panel.x_names:
        axis.set_xticks(range(len(panel.x_names)), panel.x_names)
    if panel.y_names:
        axis.set_yticks(range(len(panel.y_names)), panel.y_names)
        axis.set_ylim(len(panel.y_names) - 0.5, -0.5)
    axis.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
    axis.grid(alpha=0.3)


def _counts_steps(panel: Panel) -> bool:
    """Whether x is a whole number everywhere; bars have no ticks."""
    return all(s.mark is not Mark.BARS and all(float(x).is_integer() for x in s.x) for s in panel.series)


_MOST_TICKS = 8
_SUBDIVIDED_DECADES = 2.5
"""Up to this many decades, a log axis also labels 2 and 5 times the powers of ten."""


def _set_ticks(axis: Any, ticks: Sequence[float]) -> None:
    from matplotlib import ticker

    axis.set_ticks(ticks, [f"{x:,g}" for x in ticks])
    axis.set_minor_locator(ticker.NullLocator())


def _label_plainly(axis: Any, limits: tuple[float, float]) -> None:
    """Ticks of a log axis as plain numbers, 0.05 and 20,000 instead of powers of ten; beyond that, matplotlib's own."""
    from matplotlib import ticker

    low, high = limits
    decades = math.log10(high / low) if low > 0 else math.inf
    if low >= _PLAIN_FROM and high <= _PLAIN_TO:
        within = decades < 1
        multiples = (1, 1.5, 2, 3, 5, 7) if within else (1, 2, 5) if decades <= _SUBDIVIDED_DECADES else (1,)
        axis.set_major_locator(ticker.LogLocator(subs=multiples))
        axis.set_major_formatter("{x:,g}")
        axis.set_minor_formatter(ticker.NullFormatter())


_PLAIN_FROM, _PLAIN_TO = 1e-3, 1e6


def _draw_series(axis: Any, series: Series, colour: str) -> None:
    missing = float("nan")
    y = [missing if value is None else value for value in series.y]
    if series.mark is Mark.BARS:
        bars = axis.bar(series.x, y, color=colour, label=series.label)
        axis.bar_label(bars, [number(value) for value in series.y], fontsize=8)
        axis.set_xticks([])
        return
    style = {Mark.LINE: "-o", Mark.DASHED: "--", Mark.POINTS: "o", Mark.HOLLOW: "o"}[series.mark]
    face = "none" if series.mark is Mark.HOLLOW else colour
    size = 3.5 if series.mark is Mark.LINE else 5
    drawn = {"color": colour, "label": series.label, "linewidth": 1.4, "markersize": size, "markerfacecolor": face}
    axis.plot(series.x, y, style, **drawn)
    if series.low and series.high:
        low, high = ([missing if v is None else v for v in bound] for bound in (series.low, series.high))
        axis.fill_between(series.x, low, high, color=colour, alpha=0.15, linewidth=0)


_NAME_HEIGHT = 0.062
"""Of a name at the end of a line, as a share of the height of a panel."""


def _name_lines(axis: Any, panel: Panel, colours: Mapping[str, str]) -> None:
    """Name each line at its right end, in its colour; names that would overlap are moved apart."""
    to_panel = axis.transData + axis.transAxes.inverted()
    heights: dict[str, float] = {}
    for series in panel.series:
        points = [(x, y) for x, y in zip(series.x, series.y, strict=True) if y is not None]
        if points:
            heights.setdefault(series.label, float(to_panel.transform(points[-1])[1]))
    names = sorted(heights, key=lambda name: heights[name])
    places = _apart([heights[name] for name in names], _NAME_HEIGHT)
    for name, place in zip(names, places, strict=True):
        axis.annotate(
            name, (1.02, place), xycoords="axes fraction", color=colours[name], fontsize=7.5, va="center", ha="left"
        )


def _apart(places: Sequence[float], gap: float) -> list[float]:
    """Ascending places moved up as little as needed to be `gap` apart, then all down if the last is above 1."""
    moved: list[float] = []
    for place in places:
        moved.append(max(place, moved[-1] + gap) if moved else place)
    limit = 1.0
    for i in reversed(range(len(moved))):
        moved[i] = min(moved[i], limit)
        limit = moved[i] - gap
    return moved


def _add_legend(canvas: Any, axes: Any, columns: int, *, beside: bool) -> None:
    """Add one legend for all panels, with each label once: below them, or beside them to leave room for a note."""
    handles: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if len(handles) > 1:
        canvas.legend(
            list(handles.values()),
            list(handles),
            loc="outside center right" if beside else "outside lower center",
            ncols=1 if beside else min(2 * columns - 1, len(handles)),
            frameon=False,
        )


def _without_date(suffix: str) -> dict[str, None]:
    """Leave the date out of the file, so that the same data give the same file."""
    return {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(suffix, {})
