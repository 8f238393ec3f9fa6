"""`skyformer sweep`: train many runs with one command."""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skyformer.cli import completion
from skyformer.cli.completion import ALL
from skyformer.cli.options import (
    DataDir,
    DataOptions,
    DataSeed,
    DevSource,
    LabelColumn,
    LevelName,
    Limit,
    Loggers,
    MaxLength,
    Overrides,
    OwnSource,
    RunsDir,
    SecondColumn,
    Steps,
    TestSource,
    TextColumn,
    TokenizerName,
    refuse_given,
    split_names,
)
from skyformer.cli.output import say
from skyformer.errors import InputError
from skyformer.lra.tasks import TASKS

if TYPE_CHECKING:
    from skyformer.training.config import RunConfig
    from skyformer.training.sweeps import Outcome

_EXAMPLES = """
Examples:

skyformer sweep --task listops,image --attention all --seeds 0,1,2

skyformer sweep --task text --attention softmax,skyformer --preset cpu --jobs 2

skyformer sweep --data reviews.jsonl --attention skyformer,softmax --seeds 0,1

skyformer sweep --task all --attention all --dry-run  # show what would be trained

skyformer sweep --task all --attention all --engine ray --address HEAD:6379 --gpus 1

skyformer runs --summary  # show the results
"""


class Engine(StrEnum):
    """Where the runs are trained."""

    LOCAL = "local"
    RAY = "ray"


def add_commands(app: typer.Typer) -> None:
    """Add the command of this module to `app`."""
    app.command("sweep", epilog=_EXAMPLES)(sweep)


def sweep(
    task: Annotated[
        str | None,
        typer.Option(
            "--task",
            help=f"Tasks, comma-separated, or {ALL}: {', '.join(TASKS)}.",
            autocompletion=completion.tasks_or_all,
        ),
    ] = None,
    data: OwnSource = None,
    dev: DevSource = None,
    test: TestSource = None,
    text: TextColumn = None,
    label: LabelColumn = None,
    text_b: SecondColumn = None,
    tokenizer: TokenizerName = None,
    attention: Annotated[
        str,
        typer.Option(
            "--attention", help=f"Attentions, comma-separated, or {ALL}.", autocompletion=completion.attentions_or_all
        ),
    ] = "skyformer",
    seeds: Annotated[str, typer.Option("--seeds", help="Seeds, comma-separated.")] = "0,1,2",
    preset: Annotated[
        str | None,
        typer.Option(
            "--preset",
            help="paper, cpu, ... (default: paper); for own data: quick, standard or long (default: standard).",
            autocompletion=completion.preset,
        ),
    ] = None,
    overrides: Overrides = None,
    steps: Steps = None,
    limit: Limit = None,
    max_length: MaxLength = None,
    level: LevelName = None,
    data_seed: DataSeed = None,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", min=1, help="Runs at the same time, sharing the cores (default: 1; Ray: all that fit)."),
    ] = None,
    engine: Annotated[Engine, typer.Option("--engine", help="This machine, or a Ray cluster.")] = Engine.LOCAL,
    address: Annotated[
        str | None,
        typer.Option("--address", help="Ray: HOST:PORT of the cluster (default: start one on this machine)."),
    ] = None,
    cpus: Annotated[float | None, typer.Option("--cpus", help="Ray: CPUs per run (default: 1).")] = None,
    gpus: Annotated[float | None, typer.Option("--gpus", help="Ray: GPUs per run (default: 0).")] = None,
    memory: Annotated[str | None, typer.Option("--memory", help="Ray: memory per run, such as 4GB.")] = None,
    retries: Annotated[
        int | None,
        typer.Option("--retries", min=0, help="How often a run whose process died is started again (default: 2)."),
    ] = None,
    runs_dir: RunsDir = None,
    data_dir: DataDir = None,
    loggers: Loggers = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything and print what would be done.")] = False,
) -> None:
    """Train many runs: every task with every attention and every seed.

    Run the same command again to resume: finished runs are skipped, others continue from their last checkpoint.
    A run that fails does not stop the others.
    """
    from skyformer.attention import list_attentions
    from skyformer.files import runs_dir_or_default
    from skyformer.report.progress import display
    from skyformer.training.ray_sweeps import Resources, parse_memory, ray_sweep
    from skyformer.training.sweeps import DEFAULT_RETRIES, check_data, plan
    from skyformer.training.sweeps import sweep as local_sweep

    source = DataOptions(data, dev, test, text, text_b, label, tokenizer, limit, level, data_seed, max_length)
    source.check(task)
    if task is None and data is None:
        raise InputError(f"name tasks with --task ({', '.join(TASKS)}, or {ALL}), or give your own data with --data")
    tasks, attentions = _names_or_all(task or "", list(TASKS)), _names_or_all(attention, list_attentions())
    settings = [*(overrides or ()), *source.settings()] + [f"loop.loggers={json.dumps(loggers)}"] * bool(loggers)
    own = [source.prepare(data_dir)] if data is not None else []
    configs = plan([*tasks, *own], attentions, _seeds(seeds), preset, settings, steps)
    if engine is Engine.LOCAL:
        of_ray = {"--address": address, "--cpus": cpus, "--gpus": gpus, "--memory": memory}
        refuse_given(of_ray, "with --engine ray; on this machine use --jobs N")
    resources = Resources(1.0 if cpus is None else cpus, gpus or 0.0, None if memory is None else parse_memory(memory))
    check_data(configs, data_dir, runs_dir_or_default(runs_dir))
    if dry_run:
        for config in configs:
            say(f"{config.run_name()}: {_intention(config, runs_dir_or_default(runs_dir))}")
        return
    train: Callable[..., list[Outcome]] = partial(local_sweep, jobs=jobs or 1)
    if engine is Engine.RAY:
        train = partial(ray_sweep, jobs=jobs, address=address, resources=resources)
    retries = DEFAULT_RETRIES if retries is None else retries
    with display() as progress:
        outcomes = train(configs, runs_dir=runs_dir, data_dir=data_dir, retries=retries, progress=progress)
    _print_outcomes(outcomes, runs_dir)


def _names_or_all(text: str, everything: list[str]) -> list[str]:
    names = split_names(text)
    return everything if ALL in names else names


def _seeds(text: str) -> list[int]:
    try:
        return [int(name) for name in split_names(text)]
    except ValueError:
        raise InputError(f"--seeds must be whole numbers separated by commas; got {text!r}") from None


def _intention(config: RunConfig, runs_dir: Path) -> str:
    from skyformer.training.sweeps import existing_outcome, run_of, stored_state

    outcome = existing_outcome(config, runs_dir)
    if outcome is not None and outcome.result is not None:
        return f"finished, test accuracy {outcome.result.test_accuracy:.2%}: skip"
    if outcome is not None:
        return str(outcome)
    if not run_of(config, runs_dir).folder.exists():
        return f"train {config.loop.last_step:,} steps"
    state = stored_state(config, runs_dir)
    return f"resume from about step {state.step if state else 0:,} of {config.loop.last_step:,}"


def _print_outcomes(outcomes: list[Outcome], runs_dir: Path | None) -> None:
    """Print a table of the runs; failures go to standard error, with exit code 1."""
    from skyformer.report.tables import print_table
    from skyformer.training.collect import collect_runs
    from skyformer.training.tables import runs_table

    names = {outcome.config.run_name() for outcome in outcomes}
    print_table(runs_table([row for row in collect_runs(runs_dir) if row.name in names]))
    bad = [outcome for outcome in outcomes if not outcome.good]
    for outcome in bad:
        say(f"error: {outcome.config.run_name()} {outcome}", err=True)
    if bad:
        raise typer.Exit(1)
