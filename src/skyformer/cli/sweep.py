"""`skyformer sweep`: what it takes, and how it is explained."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import typer

from skyformer.cli.data import DataDir
from skyformer.cli.train import Places, RunsDir
from skyformer.lra.tasks import TASKS

ALL = "all"

_EXAMPLES = """
Examples:

skyformer sweep --task listops,image --attention all --seeds 0,1,2

skyformer sweep --task text --attention softmax,skyformer --preset cpu --jobs 2

skyformer sweep --task all --attention all --dry-run  # what it would do

skyformer sweep --task all --attention all --engine ray --address HEAD:6379 --gpus 1

skyformer runs --summary  # what came out
"""


class Engine(StrEnum):
    """What starts the runs."""

    LOCAL = "local"
    RAY = "ray"


@dataclass(frozen=True)
class WantedRuns:
    """Which runs."""

    tasks: str
    attentions: str
    seeds: str
    preset: str | None
    overrides: tuple[str, ...]
    steps: int | None


@dataclass(frozen=True)
class WantedEngine:
    """Who trains them; nothing stands for the engine's own choice."""

    engine: Engine
    jobs: int | None
    retries: int | None
    address: str | None
    cpus: float | None
    gpus: float | None
    memory: str | None


def add_commands(app: typer.Typer) -> None:
    """Make the command of this module a command of `app`."""
    app.command("sweep", epilog=_EXAMPLES)(sweep)


def sweep(
    task: Annotated[str, typer.Option("--task", help=f"Of {', '.join(TASKS)}, separated by commas, or {ALL}.")],
    attention: Annotated[
        str, typer.Option("--attention", help=f"Attentions, separated by commas, or {ALL}.")
    ] = "skyformer",
    seeds: Annotated[str, typer.Option("--seeds", help="Seeds, separated by commas.")] = "0,1,2",
    preset: Annotated[str | None, typer.Option("--preset", help="paper, cpu, ... (default: paper).")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Change a setting of every run; repeatable."),
    ] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="Training steps, as --set loop.steps=N.")] = None,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", min=1, help="Runs at a time; they share the cores (default: 1; Ray: all that fit)."),
    ] = None,
    engine: Annotated[Engine, typer.Option("--engine", help="This machine, or Ray.")] = Engine.LOCAL,
    address: Annotated[
        str | None, typer.Option("--address", help="Ray: the cluster, HOST:PORT (default: one is started here).")
    ] = None,
    cpus: Annotated[float | None, typer.Option("--cpus", help="Ray: CPUs a run (default: 1).")] = None,
    gpus: Annotated[float | None, typer.Option("--gpus", help="Ray: GPUs a run (default: 0).")] = None,
    memory: Annotated[str | None, typer.Option("--memory", help="Ray: memory a run, such as 4GB.")] = None,
    retries: Annotated[
        int | None,
        typer.Option("--retries", min=0, help="How often a run whose process died starts again (default: 2)."),
    ] = None,
    runs_dir: RunsDir = None,
    data_dir: DataDir = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, say what would be done, stop.")] = False,
) -> None:
    """Train many runs: every task with every attention and every seed.

    Start it again to go on: what is finished is skipped, what is not goes on from its last checkpoint. A run that fails
    does not stop the others.
    """
    from skyformer.cli.sweep_actions import run_sweep

    runs = WantedRuns(task, attention, seeds, preset, tuple(overrides or ()), steps)
    chosen = WantedEngine(engine, jobs, retries, address, cpus, gpus, memory)
    run_sweep(runs, chosen, Places(runs_dir, data_dir), dry_run=dry_run)
