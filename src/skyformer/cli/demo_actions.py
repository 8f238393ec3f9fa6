"""What `skyformer demo` does; apart from its declaration, because this needs an extra."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import typer

from skyformer.cli.runs_actions import print_table
from skyformer.cli.sweep_actions import sweep_display
from skyformer.errors import TrainingError
from skyformer.lra.dataset import Task, load_task
from skyformer.lra.preparation import prepare
from skyformer.studies.demo import Comparison, Side, chance_of, comparison_table, write_comparison
from skyformer.training.config import RunConfig
from skyformer.training.sweeps import plan, run_of, sweep

TASK, PRESET = "listops", "short"
PAYS_FROM = 1024
"""Tokens; the README's figures begin there."""


def run_demo(output: Path, attentions: Sequence[str], steps: int | None, seed: int, overrides: Sequence[str]) -> None:
    """Data, runs, a table and a plot, all in one folder."""
    configs = plan([TASK], attentions, [seed], PRESET, [*_shorter_warmup(steps), *overrides], steps)
    data_dir, runs_dir = output / "data", output / "runs"
    task = _prepared(configs[0], data_dir)
    names = " and ".join(config.model.attention for config in configs)
    typer.echo(f"training {names}, {configs[0].loop.steps:,} steps each, in {runs_dir}")
    with sweep_display(configs) as display:
        outcomes = sweep(configs, runs_dir=runs_dir, data_dir=data_dir, watcher=display)
    for outcome in outcomes:
        if outcome.result is None:
            raise TrainingError(f"{outcome.config.run_name()} {outcome.ending}: {outcome.reason}")
    runs = [run_of(config, runs_dir) for config in configs]
    comparison = Comparison(tuple(map(Side.of, runs)), chance_of(task))
    command = " ".join(["skyformer", *sys.argv[1:]])
    files = write_comparison(comparison, command, asdict(runs[0].environment), output)
    print_table(comparison_table(comparison), [comparison.verdict(), *_at_this_length(configs), comparison.note])
    typer.echo(f"figures and plot: {', '.join(map(str, files))}")
    again = shlex.join(["skyformer", "evaluate", str(runs[0].folder), "--data-dir", str(data_dir)])
    typer.echo(f"the runs are there to go on with: {again}")


def _at_this_length(configs: Sequence[RunConfig]) -> list[str]:
    """Whoever sees Skyformer lose here should know where it wins."""
    length = configs[0].task.longest
    if length >= PAYS_FROM or "skyformer" not in {config.model.attention for config in configs}:
        return []
    return [
        f"sequences of up to {length} tokens are short: softmax attention is cheap there, and Skyformer pays from "
        f"about {PAYS_FROM:,} tokens on; skyformer bench attention shows it on this machine"
    ]


def _shorter_warmup(steps: int | None) -> list[str]:
    """A tenth of the steps, as in the preset."""
    return [] if steps is None else [f"optim.warmup_steps={max(1, steps // 10)}"]


def _prepared(config: RunConfig, data_dir: Path) -> Task:
    name, seed, limit, length = config.task.name, config.task.data_seed, config.task.limit, config.task.max_length
    typer.echo(f"generating {name} in {data_dir}")
    prepare(name, data_dir=data_dir, seed=seed, limit=limit, max_length=length)
    return load_task(name, data_dir, seed=seed, limit=limit, max_length=length)
