"""All runs of a folder as typed rows, and the mean over seeds.

Only runs that differ in nothing but the seed are averaged. To tell the others apart, each config is compared with its
preset: settings that were changed, and options of the attention.

Plain dataclasses, not pandas: grouping takes a few lines here, while a data frame turns whole numbers with gaps into
floats and doubles the start-up time of `skyformer runs`.
"""

from __future__ import annotations

import csv
import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from skyformer.errors import SkyformerError
from skyformer.report.paper import ACCURACY
from skyformer.training.config import RunConfig, flatten
from skyformer.training.metrics import MetricRow
from skyformer.training.presets import DEFAULT_PRESET, load_preset, usual_options
from skyformer.training.runs import Run, RunResult, UnreadableRun, scan_runs

_NAME = re.compile(
    r"(?P<task>[a-z0-9_]+)-(?P<attention>[a-z0-9_]+)-(?P<preset>[a-z0-9_]+)-seed(?P<seed>\d+)-[0-9a-f]{8}"
)
_OPTIONS = "model.attention_options."
_RESULT_FIELDS = (
    *("best_step", "dev_accuracy", "dev_loss", "test_accuracy", "test_loss", "test_examples"),
    *("seconds", "steps_per_second", "peak_memory_bytes", "parameters", "finished", "data_digest"),
)


@dataclass(frozen=True)
class RunRow:
    """What is known about one run; for a damaged run, perhaps only its name.

    `preset_note` says how the preset differs from the paper; `note` also says how the run differs from its preset.
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
    data_digest: str | None = None
    own: bool = False
    """Whether it is a run on own data, whose presets fit the data; `changes` then identify all settings."""

    @property
    def shown_changes(self) -> tuple[str, ...]:
        """The changed settings in words."""
        return tuple(filter(None, [self.note.removeprefix("changed: ")])) if self.own else self.changes


def collect_runs(
    runs_dir: Path | str | None = None,
    *,
    tasks: Collection[str] = (),
    attentions: Collection[str] = (),
    presets: Collection[str] = (),
) -> list[RunRow]:
    """The runs in a folder, sorted; restricted to the given tasks, attentions and presets."""
    wanted = (("task", tasks), ("attention", attentions), ("preset", presets))
    rows = [row_of(run) for run in scan_runs(runs_dir)]
    kept = [row for row in rows if all(not names or getattr(row, field) in names for field, names in wanted)]
    return sorted(
        kept, key=lambda row: (row.task or "", row.attention or "", row.preset or "", row.seed or 0, row.name)
    )


def row_of(run: Run | UnreadableRun) -> RunRow:
    """What is known about a run."""
    if isinstance(run, UnreadableRun):
        return RunRow(run.folder.name, str(run.folder), "damaged", run.reason, **_from_name(run.folder.name))
    try:
        return _readable_row(run)
    except (SkyformerError, OSError) as error:
        # The folder may also disappear or change while it is being read.
        return RunRow(run.name, str(run.folder), "damaged", str(error), **_from_name(run.name))


def _from_name(name: str) -> dict[str, Any]:
    """What the folder name says about an unreadable run, so that it is still listed under its task."""
    found = _NAME.fullmatch(name)
    return {} if found is None else {**found.groupdict(), "seed": int(found["seed"])}


def _readable_row(run: Run) -> RunRow:
    config, state = run.config, run.state
    result = run.result if state.state == "finished" else None
    changes = changes_to_preset(config)
    named = _preset(config.task.name, config.preset, config.model.attention) if config.task.own is None else None
    preset = named or config
    known: dict[str, Any] = {
        "task": config.task.name,
        "attention": config.model.attention,
        "preset": config.preset,
        "note": config.note,
        "preset_note": "" if config.task.own is not None else preset.note,
        "changes": tuple(change for change in changes if not change.startswith(_OPTIONS)),
        "options": tuple(change.removeprefix(_OPTIONS) for change in changes if change.startswith(_OPTIONS)),
        "seed": config.seed,
        "digest": config.digest(),
        "own": config.task.own is not None,
    }
    if result is not None and result.config_digest != config.digest():
        reason = f"its result belongs to another config: {result.config_digest}, not {config.digest()}"
        return RunRow(run.name, str(run.folder), "damaged", reason, **known)
    known |= {
        "step": None if state.state == "damaged" else state.step,
        "steps": config.loop.last_step,
        "best_step": state.best_step,
        "dev_accuracy": state.best_accuracy,
        "seconds": state.seconds,
        "started": state.started,
    }
    return RunRow(run.name, str(run.folder), state.state, state.reason, **known | _from_result(result))


def _from_result(result: RunResult | None) -> dict[str, Any]:
    if result is None:
        return {}
    return {"step": result.steps, **{name: getattr(result, name) for name in _RESULT_FIELDS}}


def changes_to_preset(config: RunConfig) -> list[str]:
    """The settings that affect the result and differ from the preset, as written after `--set`.

    Two configs with the same task, attention and preset have the same changes only if all their settings are the same.
    """
    plain = config.replace(seed=0)
    if config.task.own is not None:
        return _changes_of_own(plain)
    preset = _preset(config.task.name, config.preset, config.model.attention)
    if preset is None:
        # A preset of another version is unknown here, so the digest of the settings identifies them.
        return [f"settings {plain.digest()}"]
    ours, theirs = (flatten(each.deciding_settings()) for each in (plain, preset))
    names = [name for name in ours | theirs if name not in ours or name not in theirs or ours[name] != theirs[name]]
    return [f"{name}={json.dumps(ours[name]) if name in ours else 'default'}" for name in names]


def _changes_of_own(config: RunConfig) -> list[str]:
    """The data, a digest of all settings but the attention and its options, and options that are not the preset's."""
    model = config.model.replace(attention="softmax", attention_options={}, attention_dropout=0.0)
    usual, options = usual_options(config), config.model.attention_options
    changed = [name for name in usual | options if usual.get(name) != options.get(name)]
    shown = [f"{_OPTIONS}{name}={json.dumps(options[name]) if name in options else 'default'}" for name in changed]
    return [f"data {config.task.variant().name}", f"settings {config.replace(model=model).digest()}", *shown]


@cache
def _preset(task: str, preset: str, attention: str) -> RunConfig | None:
    try:
        return load_preset(task, preset, attention=attention, seed=0)
    except SkyformerError:
        return None


@dataclass(frozen=True)
class SeedMean:
    """Finished runs of one attention on one task that differ only in the seed, and the mean of their accuracies.

    Accuracies are on the test set, between 0 and 1. `note` says how the preset differs from the paper, `spread` is the
    sample standard deviation (None for one seed), `paper` the paper's accuracy. `rows` are sorted by seed.
    """

    preset: str
    changes: tuple[str, ...]
    note: str
    as_in_paper: bool
    task: str
    attention: str
    options: tuple[str, ...]
    count: int
    mean: float
    spread: float | None
    paper: float | None
    seeds: tuple[int, ...]
    accuracies: tuple[float, ...]
    runs: tuple[str, ...]
    rows: tuple[RunRow, ...] = field(repr=False)


def _seed_mean(rows: Sequence[RunRow]) -> SeedMean:
    first, rows = rows[0], sorted(rows, key=lambda row: row.seed or 0)
    task, attention, preset = str(first.task), str(first.attention), str(first.preset)
    accuracies = tuple(row.test_accuracy for row in rows if row.test_accuracy is not None)
    paper = ACCURACY[attention].on(task) / 100 if attention in ACCURACY and not first.own else None
    return SeedMean(
        preset=preset,
        changes=first.changes,
        note=first.preset_note,
        as_in_paper=preset == DEFAULT_PRESET and not (first.changes or first.options or first.preset_note),
        task=task,
        attention=attention,
        options=first.options,
        count=len(rows),
        mean=statistics.fmean(accuracies),
        spread=statistics.stdev(accuracies) if len(rows) > 1 else None,
        paper=None if paper is None else round(paper, 4),
        seeds=tuple(row.seed for row in rows if row.seed is not None),
        accuracies=accuracies,
        runs=tuple(row.name for row in rows),
        rows=tuple(rows),
    )


@dataclass(frozen=True)
class Summary:
    """All runs with the same preset and the same changes to it."""

    preset: str
    changes: tuple[str, ...]
    notes: tuple[tuple[str, str], ...]
    """How the preset differs from the paper, for each task."""
    means: tuple[SeedMean, ...]
    left_out: tuple[RunRow, ...]
    """Runs that are not finished, and second copies of a run."""

    @property
    def as_in_paper(self) -> bool:
        return self.preset == DEFAULT_PRESET and not self.changes and not self.notes

    @property
    def _rows(self) -> list[RunRow]:
        return [row for mean in self.means for row in mean.rows] + list(self.left_out)

    @property
    def tasks(self) -> set[str]:
        return {row.task for row in self._rows if row.task is not None}

    @property
    def own(self) -> bool:
        """Whether the runs are on own data, which the paper knows nothing of."""
        return any(row.own for row in self._rows)

    def __str__(self) -> str:
        """The setting in a few words, with a warning if it is not the paper's."""
        if self.own:
            changed = sorted({change for row in self._rows for change in row.shown_changes})
            return " with ".join([f"preset {self.preset}, {self.changes[0]}", *changed])
        reduced = " (reduced)" if self.notes else ""
        changes = f" with {', '.join(self.changes)}" if self.changes else ""
        warning = "" if self.as_in_paper else "; NOT THE PAPER'S SETTING"
        return f"preset {self.preset}{reduced}{changes}{warning}"


def summarise(rows: Iterable[RunRow]) -> list[Summary]:
    """Average over seeds: one summary per setting, the paper's first."""
    settings: dict[tuple[str, tuple[str, ...]], list[RunRow]] = {}
    for row in rows:
        if row.preset is not None:
            settings.setdefault((row.preset, row.changes), []).append(row)
    order = sorted(settings, key=lambda setting: (setting[0] != DEFAULT_PRESET, setting))
    return [_summary(preset, changes, settings[preset, changes]) for preset, changes in order]


def _summary(preset: str, changes: tuple[str, ...], rows: list[RunRow]) -> Summary:
    groups: dict[tuple[str, str, tuple[str, ...]], dict[int, RunRow]] = {}
    left_out = []
    for row in _with_other_data_marked(rows):
        if row.test_accuracy is None or row.task is None or row.attention is None or row.seed is None:
            left_out.append(row)
            continue
        seeds = groups.setdefault((row.task, row.attention, row.options), {})
        if seeds.setdefault(row.seed, row) is not row:
            left_out.append(row)
    notes = sorted({(row.task, row.preset_note) for row in rows if row.task is not None and row.preset_note})
    means = tuple(_seed_mean(list(seeds.values())) for _, seeds in sorted(groups.items()))
    return Summary(preset, changes, tuple(notes), means, tuple(left_out))


def _with_other_data_marked(rows: Sequence[RunRow]) -> list[RunRow]:
    """Rows on other data than most rows of their task get its digest as an option, so that they are not averaged."""
    counts: dict[str | None, Counter[str]] = {}
    for row in rows:
        if row.data_digest is not None:
            counts.setdefault(row.task, Counter())[row.data_digest] += 1
    usual = {task: {None, found.most_common(1)[0][0]} for task, found in counts.items()}
    return [
        row
        if row.data_digest in usual.get(row.task, {None})
        else replace(row, options=(*row.options, f"data={row.data_digest}"))
        for row in rows
    ]


def validation_curve(row: RunRow) -> list[MetricRow]:
    """The evaluations on the dev set in order of step; empty if the metrics are missing or unreadable."""
    points = {point.step: point for point in finite_metrics(row) if point.split == "dev"}
    return [points[step] for step in sorted(points)]


def finite_metrics(row: RunRow) -> list[MetricRow]:
    """The logged points whose numbers are finite; empty if the metrics are missing or unreadable."""
    try:
        metrics = Run(Path(row.folder)).metrics()
    except (OSError, ValueError, csv.Error):
        return []
    return [point for point in metrics if all(map(math.isfinite, (point.seconds, point.accuracy, point.loss)))]
