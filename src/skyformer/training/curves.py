"""Accuracy and loss on the dev set against wall time (Figures 2 and 4 of the paper): panels of tasks."""

from __future__ import annotations

import hashlib
import statistics
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyformer.report.paper import ACCURACY, TASK_TITLES
from skyformer.training.collect import CurvePoint, RunRow, Summary, validation_curve
from skyformer.training.tables import describe

# The same figures must give the same file: element names without it are random.
_SALT = "skyformer"
_FORMATS = ("png", "svg")


@dataclass(frozen=True)
class Measure:
    """What stands on the vertical axis."""

    name: str
    label: str
    value: Callable[[CurvePoint], float]


MEASURES = (
    Measure("accuracy", "validation accuracy (%)", lambda point: 100 * point.accuracy),
    Measure("loss", "validation loss", lambda point: point.loss),
)


@dataclass(frozen=True)
class Curve:
    """One line of a panel: finished seeds averaged, or one run that is not finished, drawn for itself."""

    attention: str
    options: tuple[str, ...]
    runs: tuple[tuple[CurvePoint, ...], ...]
    remark: str = ""

    @property
    def label(self) -> str:
        details = [*self.options, self.remark] if self.remark else list(self.options)
        return f"{self.attention} ({', '.join(details)})" if details else self.attention

    def points(self) -> Iterator[tuple[CurvePoint, ...]]:
        """What every seed measured at a step; a step that one of them has not is left out, so the mean cannot jump."""
        by_step = [{point.step: point for point in run} for run in self.runs]
        for step in sorted(set.intersection(*map(set, by_step))):
            yield tuple(points[step] for points in by_step)


def curves_of(summary: Summary, task: str) -> list[Curve]:
    """The lines of a task's panel, in the order of the paper."""
    finished = [
        Curve(cell.attention, cell.options, _measured(cell.rows)) for cell in summary.cells if cell.task == task
    ]
    others = [
        Curve(row.attention or row.name, row.options, _measured([row]), f"seed {row.seed}, {row.state}")
        for row in summary.left_out
        if row.task == task and row.test_accuracy is None
    ]
    order = list(ACCURACY)
    found = [curve for curve in finished + others if curve.runs]
    return sorted(found, key=lambda curve: order.index(curve.attention) if curve.attention in order else len(order))


def _measured(rows: Sequence[RunRow]) -> tuple[tuple[CurvePoint, ...], ...]:
    curves = (tuple(validation_curve(row)) for row in rows)
    return tuple(curve for curve in curves if curve)


def draw_curves(summaries: Sequence[Summary], folder: Path) -> list[Path]:
    """Two figures a setting, each as PNG and SVG; returns the files."""
    files: list[Path] = []
    for summary in summaries:
        panels = {task: curves for task in TASK_TITLES if (curves := curves_of(summary, task))}
        if panels:
            folder.mkdir(parents=True, exist_ok=True)
            for measure in MEASURES:
                files += _draw(summary, panels, measure, folder)
    return files


def _draw(summary: Summary, panels: dict[str, list[Curve]], measure: Measure, folder: Path) -> list[Path]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with matplotlib.rc_context({"svg.hashsalt": _SALT}):
        figure, axes = pyplot.subplots(
            1, len(panels), figsize=(2.5 + 4 * len(panels), 4.4), squeeze=False, layout="constrained"
        )
        for axis, (task, curves) in zip(axes[0], panels.items(), strict=True):
            _draw_panel(axis, TASK_TITLES[task], curves, measure)
        _draw_legend(figure, axes[0])
        figure.suptitle(_wrapped(describe(summary), 60 * len(panels)), fontsize=9)
        figure.supxlabel(_wrapped(_remarks(summary), 90 * len(panels)), fontsize=7)
        files = [folder / f"{measure.name}-{_file_stem(summary)}.{ending}" for ending in _FORMATS]
        for file in files:
            figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else {"Software": None})
        pyplot.close(figure)
    return files


def _draw_panel(axis: Any, title: str, curves: Sequence[Curve], measure: Measure) -> None:
    for curve in curves:
        points = list(curve.points())
        seconds = [statistics.fmean(point.seconds for point in group) for group in points]
        values = [[measure.value(point) for point in group] for group in points]
        style = {"color": _colour(curve.attention), "linestyle": "--" if curve.remark else "-"}
        marker = "o" if len(points) == 1 else None
        axis.plot(seconds, [statistics.fmean(group) for group in values], label=curve.label, marker=marker, **style)
        if len(curve.runs) > 1:
            band = ([min(group) for group in values], [max(group) for group in values])
            axis.fill_between(seconds, *band, color=style["color"], alpha=0.15, linewidth=0)
    axis.set(title=title, xlabel="training time (s)", ylabel=measure.label)
    axis.grid(alpha=0.3)


def _draw_legend(figure: Any, axes: Sequence[Any]) -> None:
    """One for all panels: an attention has the same colour in each."""
    handles = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside center right", frameon=False, fontsize=8)


def _colour(attention: str) -> str:
    order = list(ACCURACY)
    return f"C{order.index(attention)}" if attention in order else "black"


def _remarks(summary: Summary) -> str:
    most = max((len(cell.rows) for cell in summary.cells), default=1)
    seeds = [f"mean of up to {most} seeds, band from the lowest to the highest"] if most > 1 else []
    return "\n".join(seeds + [f"{task} is {note}" for task, note in summary.notes])


def _wrapped(text: str, width: int) -> str:
    return "\n".join(part for line in text.splitlines() for part in textwrap.wrap(line, width))


def _file_stem(summary: Summary) -> str:
    """The preset, and where settings were changed a mark of the change: it is too long for a name, but in the title."""
    if not summary.changes:
        return summary.preset
    return f"{summary.preset}-{hashlib.sha256(repr(summary.changes).encode()).hexdigest()[:8]}"
