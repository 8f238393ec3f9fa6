"""Runs as typed rows: every run of a folder, whatever state it is in, and seeds gathered into mean and spread.

Only runs that differ in nothing but their seed are averaged. What distinguishes the others is worked out by comparing
each config with its preset: settings that were changed, and options that the attention was given.
"""

from __future__ import annotations

import csv
import json
import math
import re
import statistics
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from skyformer.errors import SkyformerError
from skyformer.training.config import RunConfig, flatten
from skyformer.training.metrics import MetricRow
from skyformer.training.presets import DEFAULT_PRESET, load_preset
from skyformer.training.runs import Run, RunResult, UnreadableRun, scan_runs

_NAME = re.compile(r"(?P<task>[a-z]+)-(?P<attention>[a-z0-9_]+)-(?P<preset>[a-z0-9_]+)-seed(?P<seed>\d+)-[0-9a-f]{8}")
_OPTIONS = "model.attention_options."


@dataclass(frozen=True)
class RunRow:
    """What is known of one run; of a damaged one that may be its name alone.

    `preset_note` says how the preset departs from the paper, `note` also how the run departs from its preset.
    """

    name: str
    folder: str
    state: str
    reason: str | None = None
    task: str | None = None
    attention: str | None = None
    preset: str | None = None
    note: str = ""
    preset_note: str = ""
    changes: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    seed: int | None = None
    digest: str | None = None
    step: int | None = None
    steps: int | None = None
    best_step: int | None = None
    dev_accuracy: float | None = None
    dev_loss: float | None = None
    test_accuracy: float | None = None
    test_loss: float | None = None
    test_examples: int | None = None
    seconds: float | None = None
    steps_per_second: float | None = None
    peak_memory_bytes: int | None = None
    parameters: int | None = None
    started: str | None = None
    finished: str | None = None


def collect_runs(
    runs_dir: Path | str | None = None,
    *,
    tasks: Collection[str] = (),
    attentions: Collection[str] = (),
    presets: Collection[str] = (),
) -> list[RunRow]:
    """The runs in a folder, those of some tasks, attentions and presets if any are named."""
    wanted = (("task", tasks), ("attention", attentions), ("preset", presets))
    rows = [_row(run) for run in scan_runs(runs_dir)]
    kept = [row for row in rows if all(not names or getattr(row, field) in names for field, names in wanted)]
    return sorted(
        kept, key=lambda row: (row.task or "", row.attention or "", row.preset or "", row.seed or 0, row.name)
    )


def _row(run: Run | UnreadableRun) -> RunRow:
    if isinstance(run, UnreadableRun):
        return RunRow(run.folder.name, str(run.folder), "damaged", run.reason, **_told_by_name(run.folder.name))
    try:
        return _readable_row(run)
    except (SkyformerError, OSError) as error:
        # It can also vanish or change while it is read.
        return RunRow(run.name, str(run.folder), "damaged", str(error), **_told_by_name(run.name))


def _told_by_name(name: str) -> dict[str, Any]:
    """What the folder's name says of a run that cannot be read, so that it is still found under its task."""
    told = _NAME.fullmatch(name)
    return {} if told is None else {**told.groupdict(), "seed": int(told["seed"])}


def _readable_row(run: Run) -> RunRow:
    config, state = run.config, run.state
    result = run.result if state.state == "finished" else None
    changes = changes_to_preset(config)
    preset = _preset(config.task.name, config.preset, config.model.attention) or config
    known: dict[str, Any] = {
        "task": config.task.name,
        "attention": config.model.attention,
        "preset": config.preset,
        "note": config.note,
        "preset_note": preset.note,
        "changes": tuple(change for change in changes if not change.startswith(_OPTIONS)),
        "options": tuple(change.removeprefix(_OPTIONS) for change in changes if change.startswith(_OPTIONS)),
        "seed": config.seed,
        "digest": config.digest(),
    }
    if result is not None and result.config_digest != config.digest():
        reason = f"its result is of another config: {result.config_digest}, not {config.digest()}"
        return RunRow(run.name, str(run.folder), "damaged", reason, **known)
    known |= {
        "step": None if state.state == "damaged" else state.step,
        "steps": config.loop.steps,
        "best_step": state.best_step,
        "dev_accuracy": state.best_accuracy,
        "seconds": state.seconds,
        "started": state.started,
    }
    return RunRow(run.name, str(run.folder), state.state, state.reason, **known | _known_at_the_end(result))


def _known_at_the_end(result: RunResult | None) -> dict[str, Any]:
    if result is None:
        return {}
    return {
        "step": result.steps,
        "best_step": result.best_step,
        "dev_accuracy": result.dev_accuracy,
        "dev_loss": result.dev_loss,
        "test_accuracy": result.test_accuracy,
        "test_loss": result.test_loss,
        "test_examples": result.test_examples,
        "seconds": result.seconds,
        "steps_per_second": result.steps_per_second,
        "peak_memory_bytes": result.peak_memory_bytes,
        "parameters": result.parameters,
        "finished": result.finished,
    }


def changes_to_preset(config: RunConfig) -> list[str]:
    """The settings that decide the result and differ from the preset's, as they are written after `--set`.

    Two configs of a task, an attention and a preset have the same changes only if they have the same settings.
    """
    plain = config.replace(seed=0)
    preset = _preset(config.task.name, config.preset, config.model.attention)
    if preset is None:
        # A preset of another version: its name says nothing here, so the settings speak for themselves.
        return [f"settings {plain.digest()}"]
    ours, theirs = (flatten(each.deciding_settings()) for each in (plain, preset))
    names = [name for name in ours | theirs if name not in ours or name not in theirs or ours[name] != theirs[name]]
    return [f"{name}={json.dumps(ours[name]) if name in ours else 'default'}" for name in names]


@cache
def _preset(task: str, preset: str, attention: str) -> RunConfig | None:
    try:
        return load_preset(task, preset, attention=attention, seed=0)
    except SkyformerError:
        return None


@dataclass(frozen=True)
class Cell:
    """Finished runs of one attention on one task that differ in their seed alone."""

    task: str
    attention: str
    options: tuple[str, ...]
    rows: tuple[RunRow, ...]

    @property
    def seeds(self) -> list[int]:
        return [row.seed for row in self.rows if row.seed is not None]

    @property
    def accuracies(self) -> list[float]:
        """On the test set, in the order of the seeds."""
        return [row.test_accuracy for row in self.rows if row.test_accuracy is not None]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.accuracies)

    @property
    def spread(self) -> float | None:
        """The sample standard deviation; one seed has none."""
        return statistics.stdev(self.accuracies) if len(self.rows) > 1 else None


@dataclass(frozen=True)
class Summary:
    """All that was run under one preset with the same changes to it."""

    preset: str
    changes: tuple[str, ...]
    notes: tuple[tuple[str, str], ...]
    """How the preset departs from the paper, task by task."""
    cells: tuple[Cell, ...]
    left_out: tuple[RunRow, ...]
    """Runs that are not finished, and second copies of a run."""

    @property
    def as_in_paper(self) -> bool:
        return self.preset == DEFAULT_PRESET and not self.changes and not self.notes

    @property
    def rows(self) -> list[RunRow]:
        return [row for cell in self.cells for row in cell.rows] + list(self.left_out)


def summarise(rows: Iterable[RunRow]) -> list[Summary]:
    """Rows with seeds averaged: one summary a setting, the paper's first."""
    settings: dict[tuple[str, tuple[str, ...]], list[RunRow]] = {}
    for row in rows:
        if row.preset is not None:
            settings.setdefault((row.preset, row.changes), []).append(row)
    order = sorted(settings, key=lambda setting: (setting[0] != DEFAULT_PRESET, setting))
    return [_summary(preset, changes, settings[preset, changes]) for preset, changes in order]


def _summary(preset: str, changes: tuple[str, ...], rows: list[RunRow]) -> Summary:
    cells: dict[tuple[str, str, tuple[str, ...]], dict[int, RunRow]] = {}
    left_out = []
    for row in rows:
        if row.test_accuracy is None or row.task is None or row.attention is None or row.seed is None:
            left_out.append(row)
            continue
        seeds = cells.setdefault((row.task, row.attention, row.options), {})
        if seeds.setdefault(row.seed, row) is not row:
            left_out.append(row)
    notes = sorted({(row.task, row.preset_note) for row in rows if row.task is not None and row.preset_note})
    gathered = tuple(Cell(*key, tuple(seeds[seed] for seed in sorted(seeds))) for key, seeds in sorted(cells.items()))
    return Summary(preset, changes, tuple(notes), gathered, tuple(left_out))


@dataclass(frozen=True)
class CurvePoint:
    """One evaluation on the dev set."""

    step: int
    seconds: float
    accuracy: float
    loss: float


def validation_curve(row: RunRow) -> list[CurvePoint]:
    """How a run went on the dev set; nothing when its metrics are missing or cannot be read."""
    try:
        metrics = Run(Path(row.folder)).metrics()
    except (OSError, ValueError, csv.Error):
        return []
    points = {row.step: CurvePoint(row.step, row.seconds, row.accuracy, row.loss) for row in metrics if _on_dev(row)}
    return [points[step] for step in sorted(points)]


def _on_dev(row: MetricRow) -> bool:
    return row.split == "dev" and all(map(math.isfinite, (row.seconds, row.accuracy, row.loss)))
