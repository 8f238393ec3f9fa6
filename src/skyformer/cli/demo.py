"""`skyformer demo`: compare attentions on a small task in a few minutes."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from skyformer.cli import completion
from skyformer.cli.options import Overrides, split_names

_EXAMPLES = """
Examples:

skyformer demo

skyformer demo --attention skyformer,performer,softmax --output results/three

skyformer demo --steps 100 --set task.limit=1000  # a quick look, too short to learn much
"""


def add_commands(app: typer.Typer) -> None:
    """Add the command of this module to `app`."""
    app.command("demo", epilog=_EXAMPLES)(demo)


def demo(
    output: Annotated[
        Path, typer.Option("--output", help="Folder for data, runs, results and figure.", metavar="FOLDER")
    ] = Path("results/run"),
    attentions: Annotated[
        str,
        typer.Option(
            "--attention", help="Attentions to compare, comma-separated.", autocompletion=completion.attentions
        ),
    ] = "skyformer,softmax",
    steps: Annotated[int | None, typer.Option("--steps", help="Training steps (default: the preset's).")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed for weights and batches.")] = 0,
    overrides: Overrides = None,
) -> None:
    """Train attentions on short ListOps, which is generated here, and compare accuracy, time and memory.

    Each run has its own process. Run the same command again to resume; finished runs are not trained again.
    """
    from skyformer.report.progress import display
    from skyformer.report.tables import print_table
    from skyformer.studies.demo import plan_demo, run_demo

    configs = plan_demo(split_names(attentions), steps, seed, overrides or [])
    names = " and ".join(config.model.attention for config in configs)
    typer.echo(f"generating data and training {names}, {configs[0].loop.last_step:,} steps each, in {output}")
    with display() as progress:
        comparison = run_demo(configs, output, progress)
    files = comparison.write(" ".join(["skyformer", *sys.argv[1:]]), output)
    print_table(comparison.table())
    typer.echo(f"results: {', '.join(map(str, files))}")
    folder = comparison.runs[0].run.folder
    again = shlex.join(["skyformer", "evaluate", str(folder), "--data-dir", str(output / "data")])
    typer.echo(f"evaluate a trained model with: {again}")
