"""Figures as plain data, drawn in one style as PNG, SVG and PDF, with one colour per attention everywhere.

Every figure is as wide as a page of text, so that its letters have the same size wherever it is shown, and has a white
background, so that it can be read on dark pages too.
"""

from __future__ import annotations

import enum
import io
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from skyformer.errors import MissingExtraError
from skyformer.files import write_atomic
from skyformer.report.colours import Style, label_styles, shaded
from skyformer.report.tables import number
from skyformer.report.ticks import Unit, log_ticks, measured_ticks, that_fit, tick_texts

FORMATS = ("png", "svg", "pdf")
COVERED = "A line that is not seen is covered by another."
"""A note for figures whose lines may coincide."""

_WIDTH = 8.3
"""Inches; shown 830 pixels wide, a point is 1.4 pixels."""
_PANEL_HEIGHTS = {1: 3.4, 2: 2.9, 3: 2.3, 4: 2.0, 5: 2.3}
_DPI = 160
_TITLE_CHARACTERS, _NOTE_CHARACTERS = 92, 128
"""Characters of a title and of a note that fit on one line."""
_LINE_HEIGHT = 0.19
_MOST_DIRECT_COLUMNS = 2


class Mark(enum.Enum):
    """How a series is drawn. With bounds, lines have a band and points have whiskers. `ROWS` are horizontal bars that
    end at x, `PALE_ROWS` the same in a light colour, and `VALUES` are points; all three are followed by the number."""

    LINE = "line"
    DASHED = "dashed"
    POINTS = "points"
    HOLLOW = "hollow"
    BARS = "bars"
    ROWS = "rows"
    PALE_ROWS = "pale rows"
    VALUES = "values"


@dataclass(frozen=True)
class Series:
    """y over x, with bounds from `low` to `high` if both are given.

    Series with the same label share a colour and a legend entry in all panels. A label that names an attention gets
    that attention's colour; further labels with the same attention get other shades of it.
    """

    label: str
    x: Sequence[float | None]
    y: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    mark: Mark = Mark.LINE


def finite_or_none(values: Iterable[float | None]) -> list[float | None]:
    """The values for a figure, which leaves out None; infinite values are failures."""
    return [None if value is None or not math.isfinite(value) else value for value in values]


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
    x_unit: Unit = Unit.NUMBER
    y_unit: Unit = Unit.NUMBER


@dataclass(frozen=True)
class Figure:
    """Panels in rows of `columns`; `name` becomes the file name, `note` stands below the panels.

    Lines are named at their ends if there are at most two columns, and otherwise in a legend; `direct` overrides this.
    With `same_y`, the panels of a row have the same limits; with `same_x`, all panels have the same x limits.
    """

    name: str
    title: str
    panels: Sequence[Panel]
    columns: int = 3
    note: str = ""
    direct: bool | None = None
    same_x: bool = False
    same_y: bool = False

    @property
    def used_columns(self) -> int:
        return max(1, min(self.columns, len(self.panels)))

    @property
    def names_lines(self) -> bool:
        """Whether lines are named at their ends."""
        lines = all(series.mark in (Mark.LINE, Mark.DASHED) for panel in self.panels for series in panel.series)
        return self.direct if self.direct is not None else lines and self.used_columns <= _MOST_DIRECT_COLUMNS


def draw_figure(figure: Figure, folder: Path, formats: Sequence[str] = ()) -> list[Path]:
    """Write the figure into `folder` in the given formats, or in all; returns the files."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise MissingExtraError("matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    files = [folder / f"{figure.name}.{suffix}" for suffix in formats or FORMATS]
    # With a fixed salt for element ids, the same data give the same SVG file.
    with pyplot.rc_context(_STYLE | {"svg.hashsalt": figure.name}):  # type: ignore[arg-type]
        canvas = _draw_canvas(figure, pyplot)
        try:
            # Computing the layout takes most of the time, so it is computed once, not for every format.
            canvas.draw_without_rendering()
            canvas.set_layout_engine("none")
            for file in files:
                content, suffix = io.BytesIO(), file.suffix.removeprefix(".")
                metadata = _without_date(file.suffix)
                canvas.savefig(content, format=suffix, dpi=_DPI, facecolor="white", metadata=metadata)
                write_atomic(file, content.getvalue())
        finally:
            pyplot.close(canvas)
    return files


_STYLE: dict[str, Any] = {
    "font.size": 8.5,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#666666",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "xtick.color": "#444444",
    "ytick.color": "#444444",
}


def _draw_canvas(figure: Figure, pyplot: Any) -> Any:
    """Title, legend, panels and note from the top down; the height is the sum of theirs."""
    columns = figure.used_columns
    rows = max(1, -(-len(figure.panels) // columns))
    labels = list(dict.fromkeys(series.label for panel in figure.panels for series in panel.series))
    styles = label_styles(labels)
    title = textwrap.wrap(figure.title, _TITLE_CHARACTERS)
    note = textwrap.wrap(figure.note, _NOTE_CHARACTERS)
    free_cell = len(figure.panels) < rows * columns
    explained = [panel for panel in figure.panels if panel.legend] if not figure.names_lines else []
    entries = list(dict.fromkeys(series.label for panel in explained for series in panel.series))
    entries = entries if len(entries) > 1 else []
    legend_columns, legend_lines = _legend_shape(entries)
    top = 0.1 + 1.15 * _LINE_HEIGHT * len(title) + (0 if free_cell else _LINE_HEIGHT * legend_lines)
    bottom = 0.04 + 0.8 * _LINE_HEIGHT * len(note)
    height = top + _panel_height(figure) * rows + bottom
    canvas, grid = pyplot.subplots(rows, columns, figsize=(_WIDTH, height), squeeze=False)
    axes = list(grid.flat)
    for place, (axis, panel) in enumerate(zip(axes, figure.panels, strict=False)):
        _draw_panel(axis, panel, styles, _panel_width(figure))
        _leave_out_repetition(axis, figure, place)
    _share_limits(figure, axes)
    for axis, panel in zip(axes, figure.panels, strict=False):
        if figure.names_lines:
            _name_lines(axis, panel, styles, _LINE_HEIGHT * 0.8 / (_panel_height(figure) - 0.8))
    for axis in axes[len(figure.panels) :]:
        axis.set_axis_off()
    canvas.text(0.1 / _WIDTH, 1 - 0.08 / height, "\n".join(title), fontsize=11, weight="bold", va="top")
    canvas.text(0.1 / _WIDTH, 0.06 / height, "\n".join(note), fontsize=7.5, color="#444444", va="bottom")
    if entries:
        handles = _legend_handles(axes, entries)
        if free_cell:
            axes[-1].legend(handles, entries, loc="center", ncols=1 if len(entries) <= _TALLEST_LEGEND else 2)
        else:
            corner = (0.04 / _WIDTH, 1 - (0.04 + 1.15 * _LINE_HEIGHT * len(title)) / height)
            canvas.legend(handles, entries, loc="upper left", bbox_to_anchor=corner, ncols=legend_columns)
    for legend in [*canvas.legends, *(axis.get_legend() for axis in axes if axis.get_legend())]:
        legend.set_frame_on(False)
    canvas.set_layout_engine("constrained", rect=(0, bottom / height, 1, 1 - (top + bottom) / height))
    return canvas


_TALLEST_LEGEND = 10


def _panel_height(figure: Figure) -> float:
    rows_of_names = max((len(panel.y_names) for panel in figure.panels), default=0)
    return max(_PANEL_HEIGHTS[min(figure.used_columns, max(_PANEL_HEIGHTS))], 0.6 + 0.25 * rows_of_names)


def _panel_width(figure: Figure) -> float:
    """The inches between the ends of an x axis, estimated before the layout is known."""
    beside = 1.7 if figure.names_lines else 0.2 if figure.same_y else 0.5
    return _WIDTH / figure.used_columns - beside


def _legend_shape(entries: Sequence[str]) -> tuple[int, int]:
    """Columns and lines of a legend across the whole width."""
    if not entries:
        return 1, 0
    widest = 0.55 + 0.068 * max(map(len, entries))
    columns = max(1, min(len(entries), int(_WIDTH / widest)))
    lines = -(-len(entries) // columns)
    return -(-len(entries) // lines), lines


def _legend_handles(axes: Sequence[Any], entries: Sequence[str]) -> list[Any]:
    handles: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    return [handles[label] for label in entries]


def _leave_out_repetition(axis: Any, figure: Figure, place: int) -> None:
    """An axis label, or names, that the panel to the left or below has too are shown there only."""
    columns = figure.used_columns
    panel = figure.panels[place]
    left = figure.panels[place - 1] if place % columns else None
    below = figure.panels[place + columns] if place + columns < len(figure.panels) else None
    if left is not None and left.y_label == panel.y_label:
        axis.set_ylabel("")
    if left is not None and (figure.same_y or (panel.y_names and left.y_names == panel.y_names)):
        axis.tick_params(labelleft=False)
    if below is not None and below.x_label == panel.x_label:
        axis.set_xlabel("")


def _share_limits(figure: Figure, axes: Sequence[Any]) -> None:
    used, columns = list(axes)[: len(figure.panels)], figure.used_columns
    if figure.same_x:
        limits = [axis.get_xlim() for axis in used]
        for axis, panel in zip(used, figure.panels, strict=True):
            axis.set_xlim(min(low for low, _ in limits), max(high for _, high in limits))
            _tick_x(axis, panel, _panel_width(figure))
    if figure.same_y:
        for start in range(0, len(used), columns):
            row = used[start : start + columns]
            limits = [axis.get_ylim() for axis in row]
            for axis, panel in zip(row, figure.panels[start:], strict=False):
                axis.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
                _tick_y(axis, panel)


def _draw_panel(axis: Any, panel: Panel, styles: Mapping[str, Style], width: float) -> None:
    for series in panel.series:
        _draw_series(axis, series, styles[series.label])
    if panel.x_log and _any_positive(series.x for series in panel.series):
        axis.set_xscale("log")
    if panel.y_log and _any_positive(series.y for series in panel.series):
        axis.set_yscale("log")
    if panel.x_names:
        axis.set_xticks(range(len(panel.x_names)), panel.x_names)
        axis.grid(visible=False, axis="x")
    if panel.y_names:
        axis.set_yticks(range(len(panel.y_names)), panel.y_names)
        axis.set_ylim(len(panel.y_names) - 0.5, -0.5)
        axis.tick_params(axis="y", length=0)
        axis.grid(visible=False, axis="y")
    if any(series.mark in _NUMBERED for series in panel.series):
        _leave_room_for_numbers(axis, panel, width)
    axis.set(xlabel=panel.x_label, ylabel=panel.y_label)
    axis.set_title(panel.title, fontsize=9.5 if width > _NARROW else 8.5)
    _tick_x(axis, panel, width)
    _tick_y(axis, panel)


def _any_positive(values: Iterable[Sequence[float | None]]) -> bool:
    """Whether a logarithmic axis can show anything."""
    return any(value is not None and value > 0 for each in values for value in each)


_NARROW = 1.4


def _tick_x(axis: Any, panel: Panel, width: float) -> None:
    if panel.x_names or any(series.mark is Mark.BARS for series in panel.series):
        return
    low, high = axis.get_xlim()
    measured = sorted({x for series in panel.series for x in series.x if x is not None and math.isfinite(x)})
    if axis.get_xscale() == "log":
        ticks = [] if panel.y_names else measured_ticks([x for x in measured if x > 0])
        ticks = ticks or log_ticks(low, high)

        def place(x: float) -> float:
            return math.log(x / low) / math.log(high / low) * width

        texts = dict(zip(ticks, tick_texts(ticks, panel.x_unit), strict=True))
        _set_ticks(axis.xaxis, that_fit(texts, place), panel.x_unit)
    else:
        whole = bool(measured) and all(float(x).is_integer() for x in measured)
        axis.locator_params("x", integer=whole, nbins=max(3, int(width / 0.5)))
        axis.xaxis.set_major_formatter("{x:,g}")


def _tick_y(axis: Any, panel: Panel) -> None:
    if axis.get_yscale() == "log":
        _set_ticks(axis.yaxis, log_ticks(*axis.get_ylim()), panel.y_unit)
    elif not panel.y_names:
        axis.yaxis.set_major_formatter("{x:,g}")


def _set_ticks(axis: Any, ticks: Sequence[float], unit: Unit) -> None:
    from matplotlib import ticker

    axis.set_ticks(ticks, tick_texts(ticks, unit))
    axis.set_minor_locator(ticker.NullLocator())


_NUMBERED = (Mark.ROWS, Mark.PALE_ROWS, Mark.VALUES)


def _leave_room_for_numbers(axis: Any, panel: Panel, width: float) -> None:
    """Move the right end of the x axis so that the number behind the longest bar fits."""
    low, high = axis.get_xlim()
    most = max(x for series in panel.series for x in series.x if x is not None)
    share = 1 - 0.32 / width
    if panel.x_log:
        low = low / (high / low) ** 0.05
        axis.set_xlim(low, low * (most / low) ** (1 / share))
    else:
        axis.set_xlim(0, max(high, most / share))


def _draw_series(axis: Any, series: Series, style: Style) -> None:
    missing = float("nan")
    x = [missing if value is None else value for value in series.x]
    y = [missing if value is None else value for value in series.y]
    colour = style.colour
    if series.mark is Mark.BARS:
        bars = axis.bar(x, y, color=colour, label=series.label)
        axis.bar_label(bars, [number(value) for value in series.y], fontsize=8)
        axis.set_xticks([])
        return
    if series.mark in _NUMBERED:
        _draw_rows(axis, series, colour)
        return
    bounds = [[missing if v is None else v for v in bound] for bound in (series.low, series.high)]
    lines = series.mark in (Mark.LINE, Mark.DASHED)
    pattern = {Mark.LINE: "-", Mark.DASHED: "--"}.get(series.mark, "none")
    marker = "" if lines and (series.mark is Mark.DASHED or len(x) > _MOST_MARKED) else style.marker
    drawn = {
        "color": colour,
        "label": series.label,
        "linewidth": 2.0 if style.emphasised else 1.4,
        "marker": marker,
        "markersize": 3.5 if lines else 5,
        "markerfacecolor": "none" if series.mark is Mark.HOLLOW else colour,
        "zorder": 3.2 if style.emphasised else 3,
    }
    axis.plot(x, y, linestyle=pattern, **drawn)
    if not all(bounds):
        return
    if lines:
        axis.fill_between(x, *bounds, color=colour, alpha=0.1, linewidth=0)
    else:
        axis.vlines(x, *bounds, color=colour, linewidth=1.2)


_MOST_MARKED = 15
"""Lines with more points have no markers."""


def _draw_rows(axis: Any, series: Series, colour: str) -> None:
    """Bars or points with their numbers behind them."""
    known = [(x, y) for x, y in zip(series.x, series.y, strict=True) if x is not None and y is not None]
    if not known:
        return
    x, y = zip(*known, strict=True)
    pale = series.mark is Mark.PALE_ROWS
    if series.mark is Mark.VALUES:
        axis.plot(x, y, "o", color=colour, markersize=5, label=series.label)
    else:
        axis.barh(y, x, 0.36, color=shaded(colour, 0.6) if pale else colour, label=series.label)
    text = {"va": "center", "fontsize": 7, "color": "#777777" if pale else "#222222", "path_effects": [_halo()]}
    for point in known:
        axis.annotate(short_number(point[0]), point, xytext=(4, 0), textcoords="offset points", zorder=4, **text)


def short_number(value: float) -> str:
    """Two significant digits, as in 0.045, 1.2 and 63; more only before the decimal point."""
    return f"{value:,.0f}" if value >= _WHOLE_FROM else f"{value:#.2g}".rstrip(".")


_WHOLE_FROM = 10


def side_by_side(count: int) -> list[float]:
    """Shifts by which `count` points at the same place are drawn beside each other."""
    return [0.12 * (nth - (count - 1) / 2) for nth in range(count)]


def _name_lines(axis: Any, panel: Panel, styles: Mapping[str, Style], gap: float) -> None:
    """Name each line at its end in its colour: beside the panel, where names that would overlap are moved apart and
    tied to their lines, or inside it if the line ends early."""
    lines = _lines_in_panel(axis, panel)
    ends = {name: parts[0][-1] for name, parts in lines.items()}
    for name, end in ends.items():
        if end[0] < _EARLY:
            _name_inside(axis, name, end, styles[name].colour, [part for parts in lines.values() for part in parts])
    late = sorted((end[1], name) for name, end in ends.items() if end[0] >= _EARLY)
    places = spread_apart([height for height, _ in late], gap)
    for (height, name), place in zip(late, places, strict=True):
        colour = styles[name].colour
        tie = {"transform": axis.transAxes, "color": colour, "linewidth": 0.7, "clip_on": False}
        axis.plot([ends[name][0] + 0.01, 1.01], [height, height], linestyle=":", **tie)
        axis.plot([1.01, 1.035], [height, place], **tie)
        axis.annotate(name, (1.045, place), xycoords="axes fraction", color=colour, **_NAME)


_NAME: dict[str, Any] = {"fontsize": 7.8, "va": "center", "ha": "left", "annotation_clip": False}

Point = tuple[float, float]


def _lines_in_panel(axis: Any, panel: Panel) -> dict[str, list[list[Point]]]:
    """The points of all series of a label, as shares of the panel's width and height."""
    to_panel = axis.transData + axis.transAxes.inverted()
    lines: dict[str, list[list[Point]]] = {}
    for series in panel.series:
        known = [(x, y) for x, y in zip(series.x, series.y, strict=True) if x is not None and y is not None]
        if known:
            lines.setdefault(series.label, []).append([(float(x), float(y)) for x, y in to_panel.transform(known)])
    return lines


def _name_inside(axis: Any, name: str, end: Point, colour: str, lines: Sequence[Sequence[Point]]) -> None:
    """Write a name to the right of a line's end, as high as fewest lines run through it."""

    def crossings(height: float) -> int:
        middle, width = end[1] + height, 0.025 * len(name)
        steps = [end[0] + 0.02 + width * i / 12 for i in range(13)]
        crossed = (y for line in lines for x in steps if (y := _height_at(line, x)) is not None)
        return sum(abs(y - middle) < _NAME_CLEARANCE for y in crossed)

    height = min((0, 0.05, -0.05, 0.1, -0.1, 0.15, -0.15), key=crossings)
    place = (end[0] + 0.02, end[1] + height)
    axis.annotate(name, place, xycoords="axes fraction", color=colour, path_effects=[_halo()], zorder=5, **_NAME)


_NAME_CLEARANCE = 0.045


def _halo() -> Any:
    """White around letters, so that they can be read on a line."""
    from matplotlib.patheffects import withStroke

    return withStroke(linewidth=2.5, foreground="white")


def _height_at(line: Sequence[Point], x: float) -> float | None:
    """Of a line at x, by interpolation; None beyond its ends."""
    for (x0, y0), (x1, y1) in pairwise(line):
        if x0 <= x <= x1:
            return y0 if x1 == x0 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return None


_EARLY = 0.6
"""A line that ends before this share of the width is named where it ends."""


def spread_apart(places: Sequence[float], gap: float, top: float = 1.0) -> list[float]:
    """Ascending places moved as little as needed to be `gap` apart: each group that collides keeps its centre, unless
    its last would be above `top`."""
    groups: list[list[float]] = []
    for place in places:
        groups.append([place])
        while len(groups) > 1 and _bottom(groups[-1], gap) < _bottom(groups[-2], gap) + gap * len(groups[-2]):
            last = groups.pop()
            groups[-1] += last
    moved = [_bottom(group, gap) + gap * nth for group in groups for nth in range(len(group))]
    for nth in reversed(range(len(moved))):
        moved[nth] = min(moved[nth], top)
        top = moved[nth] - gap
    return moved


def _bottom(group: Sequence[float], gap: float) -> float:
    return sum(group) / len(group) - gap * (len(group) - 1) / 2


def _without_date(suffix: str) -> dict[str, None]:
    """Leave the date out of the file, so that the same data give the same file."""
    return {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(suffix, {})
