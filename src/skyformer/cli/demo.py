"""`skyformer demo`: what it takes, and how it is explained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_EXAMPLES = """
Examples:

skyformer demo

skyformer demo --attention skyformer,performer,softmax --output results/three

skyformer demo --steps 100 --set task.limit=1000  # a quick look, not enough to learn much
"""


def add_commands(app: typer.Typer) -> None:
    """Make the command of this module a command of `app`."""
    app.command("demo", epilog=_EXAMPLES)(demo)


def demo(
    output: Annotated[
        Path, typer.Option("--output", help="Folder for data, runs, figures and plot.", metavar="FOLDER")
    ] = Path("results/run"),
    attentions: Annotated[
        str, typer.Option("--attention", help="Attentions to compare, separated by commas.")
    ] = "skyformer,softmax",
    steps: Annotated[int | None, typer.Option("--steps", help="Fewer or more steps than the preset's.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of weights and batches.")] = 0,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Change a setting, as in `skyformer train`.", metavar="NAME=VALUE")
    ] = None,
) -> None:
    """Train attentions side by side on short ListOps, generated here, and compare accuracy, time and memory.

    Each run has a process of its own. Stopped and started again, it goes on; what is finished is not trained again.
    """
    from skyformer.cli.demo_actions import run_demo

    run_demo(output, [name.strip() for name in attentions.split(",") if name.strip()], steps, seed, overrides or [])
