"""A study's figures as PNG, SVG and PDF."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from skyformer.errors import MissingExtraError
from skyformer.studies.show import Figure, Mark, Panel, Series

FORMATS = ("png", "svg", "pdf")

Colour = tuple[float, float, float, float]

_TITLE_CHARACTERS = 46
"""What a title has room for above one column of panels."""


def draw_figure(figure: Figure, folder: Path) -> list[Path]:
    """Writes the figure in every format, and returns the files."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise MissingExtraError(str(error.name), "cli") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(figure.columns, len(figure.panels))
    rows = -(-len(figure.panels) // columns)
    size = (4.2 * columns, 3.4 * rows + 0.9)
    # Fixed ids make the SVG of the same figures the same file.
    with pyplot.rc_context({"svg.hashsalt": figure.name, "font.size": 9}):
        canvas, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, constrained_layout=True)
        colours = _colours(figure.panels)
        for axis, panel in zip(axes.flat, figure.panels, strict=False):
            _draw_panel(axis, panel, colours)
        for axis in list(axes.flat)[len(figure.panels) :]:
            axis.set_axis_off()
        canvas.suptitle(textwrap.fill(figure.title, _TITLE_CHARACTERS * columns), fontsize=11)
        _add_legend(canvas, axes.flat, columns)
        folder.mkdir(parents=True, exist_ok=True)
        files = [folder / f"{figure.name}.{suffix}" for suffix in FORMATS]
        # The layout is found once; left on, it would be found again for every format, which takes most of the time.
        canvas.draw_without_rendering()
        canvas.set_layout_engine("none")
        for file in files:
            canvas.savefig(file, dpi=100, metadata=_without_date(file.suffix))
        pyplot.close(canvas)
    return files


def _colours(panels: Sequence[Panel]) -> Mapping[str, Colour]:
    labels = dict.fromkeys(series.label for panel in panels for series in panel.series)
    from matplotlib import colormaps

    palette = colormaps["tab10" if len(labels) <= 10 else "tab20"]
    return {label: palette(index % palette.N) for index, label in enumerate(labels)}


def _draw_panel(axis: Any, panel: Panel, colours: Mapping[str, Colour]) -> None:
    for series in panel.series:
        _draw_series(axis, series, colours[series.label])
    if panel.x_log:
        axis.set_xscale("log", base=2)
        _label_every_x(axis, panel)
    if panel.y_log:
        axis.set_yscale("log")
        _label_plainly_within_a_decade(axis)
    axis.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
    axis.grid(alpha=0.3)


def _label_plainly_within_a_decade(axis: Any) -> None:
    """Where a log axis has no power of ten to label, it labels what lies between, as 2.2 x 10^0."""
    low, high = axis.get_ylim()
    if high < 10 * low:
        axis.yaxis.set_minor_formatter("{x:g}")


def _label_every_x(axis: Any, panel: Panel) -> None:
    from matplotlib import ticker

    ticks = sorted({x for series in panel.series for x in series.x})
    if len(ticks) <= 8:
        axis.set_xticks(ticks, [f"{x:,g}" for x in ticks])
        axis.xaxis.set_minor_locator(ticker.NullLocator())


def _draw_series(axis: Any, series: Series, colour: Colour) -> None:
    missing = float("nan")
    y = [missing if value is None else value for value in series.y]
    style = {Mark.LINE: "-o", Mark.DASHED: "--", Mark.POINTS: "o"}[series.mark]
    axis.plot(series.x, y, style, color=colour, label=series.label, markersize=3.5, linewidth=1.4)
    if series.low and series.high:
        low, high = ([missing if v is None else v for v in bound] for bound in (series.low, series.high))
        axis.fill_between(series.x, low, high, color=colour, alpha=0.15, linewidth=0)


def _add_legend(canvas: Any, axes: Any, columns: int) -> None:
    """One legend for all panels, each label once, no wider than the panels."""
    handles: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if len(handles) > 1:
        canvas.legend(
            list(handles.values()),
            list(handles),
            loc="outside lower center",
            ncols=min(2 * columns - 1, len(handles)),
            frameon=False,
        )


def _without_date(suffix: str) -> dict[str, None]:
    """No date in the file: the same figures give the same file."""
    return {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(suffix, {})
