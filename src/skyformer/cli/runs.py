"""`skyformer runs`: what it takes, and how it is explained."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from skyformer.cli.train import RunsDir
from skyformer.lra.tasks import TASKS

_EXAMPLES = """
Examples:

skyformer runs  # all of them, one a line

skyformer runs --summary  # seeds averaged, beside the paper's Table 1

skyformer runs --task text --format latex

skyformer runs --format json > runs.json

skyformer runs --plot plots  # accuracy and loss against time
"""


class Format(StrEnum):
    """How results are printed."""

    TABLE = "table"
    CSV = "csv"
    JSON = "json"
    LATEX = "latex"


@dataclass(frozen=True)
class Chosen:
    """Which runs; an empty choice stands for all."""

    tasks: tuple[str, ...]
    attentions: tuple[str, ...]
    presets: tuple[str, ...]


def add_commands(app: typer.Typer) -> None:
    """Make the command of this module a command of `app`."""
    app.command("runs", epilog=_EXAMPLES)(runs)


def runs(
    task: Annotated[str, typer.Option("--task", help=f"Only these of {', '.join(TASKS)}, separated by commas.")] = "",
    attention: Annotated[str, typer.Option("--attention", help="Only these attentions.")] = "",
    preset: Annotated[str, typer.Option("--preset", help="Only these presets.")] = "",
    summary: Annotated[
        bool | None,
        typer.Option(
            "--summary/--list",
            help="Average seeds, in the layout of the paper's Table 1, or list every run "
            "(default: a summary with --task or LaTeX, otherwise a list).",
        ),
    ] = None,
    format_: Annotated[Format, typer.Option("--format", help="How to print; JSON has both.")] = Format.TABLE,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="DIR", help="Draw accuracy and loss against time into DIR.")
    ] = None,
    runs_dir: RunsDir = None,
) -> None:
    """Show all runs with state, step, accuracy and time, or their means over seeds beside the paper's."""
    from skyformer.cli.runs_actions import show_runs

    chosen = Chosen(*(tuple(filter(None, map(str.strip, text.split(",")))) for text in (task, attention, preset)))
    show_runs(runs_dir, chosen, summary, format_, plot)
