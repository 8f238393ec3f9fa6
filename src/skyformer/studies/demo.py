"""The demonstration: runs of one task side by side, as a table, as JSON and as a picture."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from skyformer.files import dump_json, write_atomic
from skyformer.lra.dataset import Task
from skyformer.lra.tasks import Split
from skyformer.report.tables import duration, percent
from skyformer.training.metrics import MetricRow
from skyformer.training.runs import Run, RunResult

_SALT = "skyformer"
_FORMATS = ("png", "svg")


@dataclass(frozen=True)
class Side:
    """One finished run: its accuracy on the dev set as it went, and what a step took."""

    result: RunResult
    curve: tuple[MetricRow, ...]
    milliseconds_a_step: float

    @classmethod
    def of(cls, run: Run) -> Side:
        """What a finished run left behind."""
        assert run.result is not None
        rows = run.metrics()
        seconds = typical_step(rows) or 1 / run.result.steps_per_second
        return cls(run.result, tuple(row for row in rows if row.split == Split.DEV), 1000 * seconds)

    @property
    def megabytes(self) -> float:
        return (self.result.peak_memory_bytes or 0) / 1e6


@dataclass(frozen=True)
class Comparison:
    """Runs that differ in their attention alone; `chance` is the share of the commonest label in the test set."""

    sides: tuple[Side, ...]
    chance: float

    @property
    def note(self) -> str:
        return self.sides[0].result.note

    def verdict(self) -> str:
        """The first run against the last, in one line."""
        ours, theirs = self.sides[0], self.sides[-1]
        return (
            f"{ours.result.attention} took {ours.milliseconds_a_step / theirs.milliseconds_a_step:.2f} times the time "
            f"a step and {ours.megabytes / theirs.megabytes:.2f} times the memory of {theirs.result.attention}"
        )


def typical_step(rows: Sequence[MetricRow]) -> float | None:
    """Seconds of a step: the median over the stretches between two rows, so that a stall of the machine does not count.
    Evaluations are rows too, and end before the stretch that follows them begins. None if no row is of training."""
    stretches, step, seconds = [], 0, 0.0
    for row in rows:
        if row.split == Split.TRAIN and row.step > step:
            stretches.append((row.seconds - seconds) / (row.step - step))
        step, seconds = row.step, row.seconds
    return statistics.median(stretches) if stretches else None


def chance_of(task: Task) -> float:
    """How often the commonest label of the test set is right."""
    counts = task.manifest.splits[Split.TEST].label_counts
    return max(counts) / sum(counts)


def comparison_table(comparison: Comparison) -> Table:
    """A line for each run, and one for chance."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("attention")
    for title in ("test accuracy %", "dev accuracy %", "ms a step", "peak memory MB", "time in all"):
        table.add_column(title, justify="right")
    for side in comparison.sides:
        result = side.result
        shares = (percent(result.test_accuracy), percent(result.dev_accuracy))
        costs = (f"{side.milliseconds_a_step:.1f}", f"{side.megabytes:,.0f}", duration(result.seconds))
        table.add_row(result.attention, *shares, *costs)
    table.add_row("(chance)", percent(comparison.chance), "", "", "", "")
    return table


def write_comparison(comparison: Comparison, command: str, environment: dict[str, Any], folder: Path) -> list[Path]:
    """demo.json, demo.png and demo.svg."""
    content = {
        "command": command,
        "environment": environment,
        "note": comparison.note,
        "chance": comparison.chance,
        "runs": [_as_record(side) for side in comparison.sides],
    }
    figures = folder / "demo.json"
    write_atomic(figures, dump_json(content))
    return [figures, *_draw(comparison, folder)]


def _as_record(side: Side) -> dict[str, Any]:
    curve = [asdict(row) for row in side.curve]
    return {**side.result.model_dump(mode="json"), "milliseconds_a_step": side.milliseconds_a_step, "dev_curve": curve}


def _draw(comparison: Comparison, folder: Path) -> list[Path]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [side.result.attention for side in comparison.sides]
    with matplotlib.rc_context({"svg.hashsalt": _SALT}):
        figure, (curves, time, memory) = pyplot.subplots(
            1, 3, figsize=(11, 3.8), layout="constrained", width_ratios=(2, 1, 1)
        )
        _draw_curves(curves, comparison)
        _draw_bars(time, "time a step (ms)", names, [side.milliseconds_a_step for side in comparison.sides])
        _draw_bars(memory, "peak memory (MB)", names, [side.megabytes for side in comparison.sides])
        figure.suptitle(f"short ListOps; {comparison.note}", fontsize=8)
        files = [folder / f"demo.{ending}" for ending in _FORMATS]
        for file in files:
            figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else {"Software": None})
        pyplot.close(figure)
    return files


def _draw_curves(axis: Any, comparison: Comparison) -> None:
    for number, side in enumerate(comparison.sides):
        seconds, accuracy = zip(*((row.seconds, 100 * row.accuracy) for row in side.curve), strict=True)
        axis.plot(seconds, accuracy, marker="o", color=f"C{number}", label=side.result.attention)
    axis.axhline(100 * comparison.chance, color="grey", linestyle=":", label="chance")
    axis.set(xlabel="wall time (s)", ylabel="accuracy on the dev set (%)", ylim=(0, None))
    axis.legend(frameon=False)
    axis.grid(alpha=0.3)


def _draw_bars(axis: Any, label: str, names: Sequence[str], values: Sequence[float]) -> None:
    bars = axis.bar(names, values, color=[f"C{number}" for number in range(len(names))])
    axis.bar_label(bars, fmt="%.0f")
    axis.set_ylabel(label)
