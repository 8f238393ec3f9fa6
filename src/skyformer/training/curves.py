"""Accuracy and loss on the dev set against training time, as in Figures 2 and 4 of the paper: one panel per task."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from skyformer.report.figures import Figure, Mark, Panel, Series, draw_figure
from skyformer.report.paper import ACCURACY, TASK_TITLES
from skyformer.training.collect import RunRow, Summary, validation_curve
from skyformer.training.metrics import MetricRow


@dataclass(frozen=True)
class Measure:
    """A quantity on the vertical axis."""

    name: str
    label: str
    value: Callable[[MetricRow], float]


MEASURES = (
    Measure("accuracy", "dev accuracy (%)", lambda point: 100 * point.accuracy),
    Measure("loss", "dev loss", lambda point: point.loss),
)


@dataclass(frozen=True)
class Curve:
    """One line of a panel: the mean over finished seeds, or one unfinished run."""

    attention: str
    details: tuple[str, ...]
    runs: tuple[tuple[MetricRow, ...], ...]
    finished: bool = True

    @property
    def label(self) -> str:
        return f"{self.attention} ({', '.join(self.details)})" if self.details else self.attention

    def points(self) -> list[tuple[MetricRow, ...]]:
        """The evaluations at each step that all seeds have; others are left out, so that the mean has no jumps."""
        by_step = [{point.step: point for point in run} for run in self.runs]
        steps = sorted(set.intersection(*map(set, by_step)))
        return [tuple(points[step] for points in by_step) for step in steps]

    def series(self, measure: Measure) -> Series:
        points = self.points()
        values = [[measure.value(point) for point in group] for group in points]
        several = len(self.runs) > 1
        return Series(
            self.label,
            [statistics.fmean(point.seconds for point in group) for group in points],
            [statistics.fmean(group) for group in values],
            [min(group) for group in values] if several else (),
            [max(group) for group in values] if several else (),
            Mark.LINE if self.finished else Mark.POINTS if len(points) == 1 else Mark.DASHED,
        )


def curves_of(summary: Summary, task: str) -> list[Curve]:
    """The lines of a task's panel, in the order of the paper."""
    finished = [
        Curve(mean.attention, mean.options, _evaluations(mean.rows)) for mean in summary.means if mean.task == task
    ]
    unfinished = [
        Curve(row.attention or row.name, (*row.options, f"seed {row.seed}, {row.state}"), _evaluations([row]), False)
        for row in summary.left_out
        if row.task == task and row.test_accuracy is None
    ]
    order = list(ACCURACY)
    found = [curve for curve in finished + unfinished if curve.runs]
    return sorted(found, key=lambda curve: order.index(curve.attention) if curve.attention in order else len(order))


def _evaluations(rows: Sequence[RunRow]) -> tuple[tuple[MetricRow, ...], ...]:
    curves = (tuple(validation_curve(row)) for row in rows)
    return tuple(curve for curve in curves if curve)


def draw_curves(summaries: Sequence[Summary], folder: Path) -> list[Path]:
    """Two figures per setting, accuracy and loss; returns the files."""
    figures = [figure for summary in summaries for figure in _figures(summary)]
    return [file for figure in figures for file in draw_figure(figure, folder)]


def _figures(summary: Summary) -> list[Figure]:
    curves = {
        task: found
        for task in (*TASK_TITLES, *sorted(summary.tasks - set(TASK_TITLES)))
        if (found := curves_of(summary, task))
    }
    if not curves:
        return []
    return [
        Figure(f"{measure.name}-{_file_stem(summary)}", str(summary), _panels(curves, measure), note=_note(summary))
        for measure in MEASURES
    ]


def _panels(curves: dict[str, list[Curve]], measure: Measure) -> list[Panel]:
    return [
        Panel(
            TASK_TITLES.get(task, task), "training time (s)", measure.label, [curve.series(measure) for curve in lines]
        )
        for task, lines in curves.items()
    ]


def _note(summary: Summary) -> str:
    most = max((mean.count for mean in summary.means), default=1)
    seeds = [f"Mean of up to {most} seeds, with a band from the lowest to the highest."] if most > 1 else []
    return " ".join(seeds + [f"{task} is {note}." for task, note in summary.notes])


def _file_stem(summary: Summary) -> str:
    """The preset, and a digest of changed settings; the title has them in full."""
    if not summary.changes:
        return summary.preset
    return f"{summary.preset}-{hashlib.sha256(repr(summary.changes).encode()).hexdigest()[:8]}"
