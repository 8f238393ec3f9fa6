"""One HTML file that needs no network: interactive plots by Plotly, tables that sort, and the text behind the numbers.

A page is plain data: sections of plots and tables, and documents such as the config of a run. A cell or a curve names
the document that it comes from, which is then a link. Everything is escaped, because it comes from files.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Any

from skyformer.errors import MissingExtraError
from skyformer.report.colours import ATTENTION_COLOURS, attention_of, label_colours, shaded
from skyformer.report.figures import Figure, Mark, Panel, Series, finite_or_none
from skyformer.report.tables import Table, grouped_header, plain
from skyformer.report.ticks import Unit

_HOVER = "<b>%{y:.4g}</b> at %{x:,}<extra>%{fullData.name}</extra>"
_ROW_HOVER = "<b>%{x:.4g}</b><extra>%{fullData.name}</extra>"
_DURATION = re.compile(r"(?:(?P<hours>\d+) h )?(?P<minutes>\d+) min(?: (?P<seconds>\d+) s)?")
_NUMBER = re.compile(r"[-+]?\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?")


@dataclass(frozen=True)
class Document:
    """A text that numbers link to, such as the config of a run; `links` are further documents."""

    title: str
    text: str
    links: Sequence[Document] = ()


@dataclass(frozen=True)
class Cell:
    """A cell of a table; with a document it is a link."""

    text: str
    document: Document | None = None

    @property
    def value(self) -> float | None:
        """What the cell is sorted by; None for text."""
        return sort_value(self.text)


@dataclass(frozen=True)
class Row:
    """A row of a table; hidden with its attention."""

    cells: Sequence[Cell]
    attention: str = ""


@dataclass(frozen=True)
class SortableTable:
    """A table whose rows can be sorted by any column."""

    title: str
    header: Sequence[str]
    rows: Sequence[Row]
    note: str = ""
    folded: bool = False


@dataclass(frozen=True)
class Curve:
    """A series of a plot, its attention and the document it comes from.

    Without a colour of its own, it shares the colour and the entry in the legend of all curves of its attention.
    """

    series: Series
    attention: str = ""
    document: Document | None = None
    colour: str = ""

    @property
    def name(self) -> str:
        """What its colour and its entry in the legend stand for."""
        return self.series.label if self.colour else self.attention or self.series.label


@dataclass(frozen=True)
class View:
    """One choice of what a plot shows."""

    panel: Panel
    curves: Sequence[Curve]


@dataclass(frozen=True)
class Plot:
    """A pair of axes with one or more views to choose from, such as accuracy or loss."""

    title: str
    views: Sequence[View]
    note: str = ""


@dataclass(frozen=True)
class Section:
    """A heading with plots and tables; `facts` are short paragraphs below the heading."""

    title: str
    plots: Sequence[Plot] = ()
    tables: Sequence[SortableTable] = ()
    documents: Sequence[Document] = ()
    facts: Sequence[str] = ()


@dataclass(frozen=True)
class Page:
    """A whole report."""

    title: str
    sections: Sequence[Section]
    facts: Sequence[str] = field(default=())


def plots_of(figure: Figure, document: Document | None = None) -> list[Plot]:
    """A plot for each panel of a figure, with the colours of the whole figure."""
    plots, colours = [], label_colours([series.label for panel in figure.panels for series in panel.series])
    for panel in figure.panels:
        title = ": ".join(dict.fromkeys(part for part in (figure.title, panel.title) if part))
        curves = [
            Curve(series, attention_of(series.label) or "", document, colours[series.label]) for series in panel.series
        ]
        plots.append(Plot(title, [View(panel, curves)], figure.note))
    return plots


def table_of(table: Table, document: Document | None = None) -> SortableTable:
    """A text table whose numbers link to a document; the attention of a row is the first one that a cell names."""
    rows = []
    for cells in table.rows:
        attention = next(filter(None, (attention_of(cell) for cell in cells)), "")
        linked = [Cell(plain(text), document if sort_value(text) is not None else None) for text in cells]
        rows.append(Row(linked, attention))
    return SortableTable(table.title, grouped_header(table), rows, table.note)


def sort_value(text: str) -> float | None:
    """The number that a cell begins with, or the seconds of a duration; None if it begins with neither."""
    text = plain(text).strip()
    if found := _DURATION.match(text):
        hours, minutes, seconds = (int(found[name] or 0) for name in ("hours", "minutes", "seconds"))
        return float(3600 * hours + 60 * minutes + seconds)
    number = _NUMBER.match(text)
    return float(number[0].replace(",", "")) if number else None


def render(page: Page) -> str:
    """The page as HTML, with Plotly inside."""
    try:
        from jinja2 import Environment
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "plotly") from error
    numbering = _Numbering()
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        resources.files("skyformer.report").joinpath("page.html").read_text()
    )
    sections = list(page.sections)
    plots = [[_plot_json(plot, numbering) for plot in section.plots] for section in sections]
    attentions = _attentions(sections)
    return template.render(
        page=page,
        plots=plots,
        all_plots=[plot for group in plots for plot in group],
        numbering=numbering,
        attentions=[{"name": name, "colour": ATTENTION_COLOURS.get(name, "#888888")} for name in attentions],
        plotly=get_plotlyjs(),
    )


class _Numbering:
    """Gives every document an id in the page, without any text from files in it."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def __call__(self, document: Document | None) -> str:
        return "" if document is None else f"document-{self._numbers.setdefault(id(document), len(self._numbers))}"


def _attentions(sections: Sequence[Section]) -> list[str]:
    """The attentions of all rows and curves, those of the palette first."""
    curves = [curve for section in sections for plot in section.plots for view in plot.views for curve in view.curves]
    rows = [row for section in sections for table in section.tables for row in table.rows]
    found = {*(curve.attention for curve in curves), *(row.attention for row in rows)} - {""}
    return [name for name in ATTENTION_COLOURS if name in found] + sorted(found - set(ATTENTION_COLOURS))


def _plot_json(plot: Plot, numbering: _Numbering) -> dict[str, Any]:
    return {"title": plot.title, "note": plot.note, "views": [_view_json(view, numbering) for view in plot.views]}


def _view_json(view: View, numbering: _Numbering) -> dict[str, Any]:
    panel = view.panel
    shared = label_colours([curve.name for curve in view.curves])
    traces: list[dict[str, Any]] = []
    named: set[str] = set()
    for curve in view.curves:
        colour = curve.colour or shared[curve.name]
        traces += _traces(curve, colour, numbering(curve.document), first=curve.name not in named)
        named.add(curve.name)
    layout = {
        "xaxis": _axis(panel.x_label, panel.x_log, panel.x_names, panel.x_unit),
        "yaxis": _axis(panel.y_label, panel.y_log, panel.y_names, panel.y_unit),
    }
    if panel.y_names:
        layout["yaxis"]["autorange"] = "reversed"
    return {"label": f"{panel.y_label} against {panel.x_label}", "traces": traces, "layout": layout}


def _axis(label: str, log: bool, names: Sequence[str], unit: Unit) -> dict[str, Any]:
    """Numbers as 0.05 and 4,096; zooming may need any of them, so Plotly chooses where they stand."""
    suffix = {Unit.SECONDS: " s", Unit.BYTES: "B"}.get(unit, "")
    axis: dict[str, Any] = {
        "title": {"text": html.escape(label)},
        "type": "log" if log else "linear",
        "separatethousands": True,
        "exponentformat": "SI" if suffix else "power",
        "ticksuffix": suffix,
    }
    if names:
        axis |= {"tickvals": list(range(len(names))), "ticktext": [html.escape(name) for name in names]}
    return axis


def _traces(curve: Curve, colour: str, anchor: str, *, first: bool) -> list[dict[str, Any]]:
    """The line, points or bar of a curve, after its band if it has one."""
    series = _finite(curve.series)
    common: dict[str, Any] = {
        "x": list(series.x),
        "name": html.escape(series.label),
        "legendgroup": html.escape(curve.name),
        "meta": {"attention": curve.attention, "anchor": anchor},
    }
    named = {**common, "showlegend": first, "hovertemplate": _ROW_HOVER if series.mark in _ROWS else _HOVER}
    if series.mark in _BARS:
        return [{**named, **_bar(series, colour)}]
    lines = series.mark in (Mark.LINE, Mark.DASHED)
    drawn = {
        "type": "scatter",
        "y": list(series.y),
        "mode": "lines+markers" if lines else "markers",
        "line": {"color": colour, "width": 1.8, "dash": "dash" if series.mark is Mark.DASHED else "solid"},
        "marker": {"color": colour, "size": 5, "symbol": "circle-open" if series.mark is Mark.HOLLOW else "circle"},
    }
    if not (series.low and series.high):
        return [{**named, **drawn}]
    if not lines:
        return [{**named, **drawn, "error_y": _whiskers(series)}]
    return [{**common, **_band(series, colour)}, {**named, **drawn}]


def _finite(series: Series) -> Series:
    """Without infinite numbers, which JSON cannot contain."""
    x, y, low, high = map(finite_or_none, (series.x, series.y, series.low, series.high))
    return replace(series, x=x, y=y, low=low, high=high)


_BARS = (Mark.BARS, Mark.ROWS, Mark.PALE_ROWS)
_ROWS = (Mark.ROWS, Mark.PALE_ROWS, Mark.VALUES)


def _bar(series: Series, colour: str) -> dict[str, Any]:
    lying = {"orientation": "h", "width": 0.36} if series.mark in _ROWS else {}
    fill = shaded(colour, 0.6) if series.mark is Mark.PALE_ROWS else colour
    return {"type": "bar", "y": list(series.y), "marker": {"color": fill}, **lying}


def _whiskers(series: Series) -> dict[str, Any]:
    up, down = (
        [None if b is None or y is None else abs(b - y) for b, y in zip(bound, series.y, strict=True)]
        for bound in (series.high, series.low)
    )
    return {"type": "data", "array": up, "arrayminus": down, "width": 0}


def _band(series: Series, colour: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "x": [*series.x, *reversed(series.x)],
        "y": [*series.high, *reversed(series.low)],
        "fill": "toself",
        "fillcolor": f"{colour}26",
        "line": {"width": 0},
        "showlegend": False,
        "hoverinfo": "skip",
    }
