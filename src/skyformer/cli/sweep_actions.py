"""What `skyformer sweep` does; apart from its declaration, because this needs an extra."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from skyformer.attention import list_attentions
from skyformer.cli.runs_actions import print_table
from skyformer.cli.sweep import ALL, Engine, WantedEngine, WantedRuns
from skyformer.cli.train import Places
from skyformer.errors import InputError
from skyformer.lra.tasks import TASKS
from skyformer.report.tables import duration
from skyformer.training.collect import collect_runs
from skyformer.training.config import RunConfig
from skyformer.training.presets import DEFAULT_PRESET
from skyformer.training.ray_sweeps import Resources, ray_sweep
from skyformer.training.runs import runs_dir_or_default
from skyformer.training.sweeps import (
    DEFAULT_RETRIES,
    Ending,
    Outcome,
    check_data,
    plan,
    run_of,
    settled,
    step_of,
    sweep,
)
from skyformer.training.tables import run_remarks, runs_table

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def run_sweep(wanted: WantedRuns, engine: WantedEngine, places: Places, *, dry_run: bool) -> None:
    """Check everything, train what is to be trained, and print what came out; exit code 1 if not all of it is good."""
    configs = _configs(wanted)
    resources = _resources(engine)
    check_data(configs, places.data_dir)
    root = runs_dir_or_default(places.runs_dir)
    if dry_run:
        for config in configs:
            typer.echo(f"{config.run_name()}: {_intention(config, root)}")
        return
    with sweep_display(configs) as display:
        outcomes = _train(configs, engine, resources, places, display)
    _print_outcomes(outcomes, root)
    bad = [outcome for outcome in outcomes if not outcome.good]
    if bad:
        for outcome in bad:
            typer.echo(f"error: {outcome.config.run_name()} {outcome.ending}: {outcome.reason}", err=True)
        raise typer.Exit(1)


def _configs(wanted: WantedRuns) -> list[RunConfig]:
    return plan(
        _names(wanted.tasks, list(TASKS)),
        _names(wanted.attentions, list_attentions()),
        _seeds(wanted.seeds),
        wanted.preset or DEFAULT_PRESET,
        wanted.overrides,
        wanted.steps,
    )


def _names(text: str, everything: list[str]) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    return everything if ALL in names else list(dict.fromkeys(names))


def _seeds(text: str) -> list[int]:
    try:
        return list(dict.fromkeys(int(part) for part in text.split(",") if part.strip()))
    except ValueError:
        raise InputError(f"--seeds must be whole numbers separated by commas; got {text!r}") from None


def _resources(engine: WantedEngine) -> Resources:
    given = {"--address": engine.address, "--cpus": engine.cpus, "--gpus": engine.gpus, "--memory": engine.memory}
    named = [name for name, value in given.items() if value is not None]
    if engine.engine is not Engine.RAY and named:
        raise InputError(f"{', '.join(named)} need --engine ray; runs on this machine share it with --jobs N")
    memory = None if engine.memory is None else parse_memory(engine.memory)
    return Resources(1.0 if engine.cpus is None else engine.cpus, engine.gpus or 0.0, memory)


def parse_memory(text: str) -> int:
    """Bytes, from a number and a unit: 500MB, 4GB, 1.5GiB."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", text.upper())
    if found is None or found[2] not in _UNITS:
        raise InputError(f"--memory must be a number and a unit, such as 500MB or 4GB; got {text!r}")
    return int(float(found[1]) * _UNITS[found[2]])


def _intention(config: RunConfig, root: Path) -> str:
    outcome = settled(config, root)
    if outcome is not None and outcome.result is not None:
        return f"finished, test accuracy {outcome.result.test_accuracy:.2%}: skip"
    if outcome is not None:
        return f"{outcome.ending}: {outcome.reason}"
    if not run_of(config, root).folder.exists():
        return f"train {config.loop.steps:,} steps"
    return f"go on from about step {step_of(config, root):,} of {config.loop.steps:,}"


def _train(
    configs: Sequence[RunConfig], engine: WantedEngine, resources: Resources, places: Places, display: _Display
) -> list[Outcome]:
    retries = DEFAULT_RETRIES if engine.retries is None else engine.retries
    runs_dir, data_dir = places.runs_dir, places.data_dir
    if engine.engine is Engine.LOCAL:
        jobs = engine.jobs or 1
        return sweep(configs, runs_dir=runs_dir, data_dir=data_dir, jobs=jobs, retries=retries, watcher=display)
    return ray_sweep(
        configs,
        runs_dir=runs_dir,
        data_dir=data_dir,
        address=engine.address,
        resources=resources,
        jobs=engine.jobs,
        retries=retries,
        watcher=display,
    )


class _Display:
    """A line for each run that ends; on a terminal also a bar for each that is being trained."""

    def __init__(self, bars: Progress, total: int) -> None:
        self._bars, self._total, self._done = bars, total, 0
        self._all = bars.add_task("runs", total=total)
        self._tasks: dict[str, TaskID] = {}

    def started(self, config: RunConfig, step: int) -> None:
        task = self._bars.add_task(_describe(config), total=config.loop.steps, completed=step)
        self._tasks[config.run_name()] = task

    def progressed(self, config: RunConfig, step: int) -> None:
        if config.run_name() in self._tasks:
            self._bars.update(self._tasks[config.run_name()], completed=step)

    def restarted(self, config: RunConfig, reason: str) -> None:
        self._say(f"{_describe(config)}: started again, {reason}")

    def ended(self, outcome: Outcome) -> None:
        if outcome.config.run_name() in self._tasks:
            self._bars.remove_task(self._tasks.pop(outcome.config.run_name()))
        self._done += 1
        self._bars.update(self._all, completed=self._done)
        self._say(f"[{self._done}/{self._total}] {_describe(outcome.config)}: {_ending(outcome)}")

    def _say(self, line: str) -> None:
        self._bars.console.print(line, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def sweep_display(configs: Sequence[RunConfig]) -> Iterator[_Display]:
    """A watcher of a sweep that shows it in the terminal."""
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        yield _Display(bars, len(configs))


def _describe(config: RunConfig) -> str:
    return f"{config.task.name} {config.model.attention} seed {config.seed}"


def _ending(outcome: Outcome) -> str:
    result = outcome.result
    if result is None:
        return f"{outcome.ending}: {outcome.reason}"
    before = " before" if outcome.ending is Ending.WAS_FINISHED else ""
    note = f" [preset {result.preset}, not the paper's setting]" if result.note else ""
    return f"finished{before}, test accuracy {result.test_accuracy:.2%} in {duration(result.seconds)}{note}"


def _print_outcomes(outcomes: Sequence[Outcome], root: Path) -> None:
    names = {outcome.config.run_name() for outcome in outcomes}
    rows = [row for row in collect_runs(root) if row.name in names]
    print_table(runs_table(rows), run_remarks(rows))
