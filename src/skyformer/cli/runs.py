"""`skyformer runs`: list runs, or compare their means over seeds with the paper."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skyformer.cli import completion
from skyformer.cli.options import RunsDir, split_names
from skyformer.cli.output import say
from skyformer.errors import InputError, UnknownNameError
from skyformer.lra.tasks import TASKS

if TYPE_CHECKING:
    from skyformer.training.collect import RunRow, Summary

_EXAMPLES = """
Examples:

skyformer runs  # one line per run

skyformer runs --summary  # means over seeds, next to the paper's Table 1

skyformer runs --task text --format latex

skyformer runs --format json > runs.json

skyformer runs --plot plots  # accuracy and loss against time
"""


class Format(StrEnum):
    """Output formats."""

    TABLE = "table"
    CSV = "csv"
    JSON = "json"
    LATEX = "latex"


def add_commands(app: typer.Typer) -> None:
    """Add the command of this module to `app`."""
    app.command("runs", epilog=_EXAMPLES)(runs)


def runs(
    task: Annotated[
        str,
        typer.Option(
            "--task", help=f"Only these tasks, comma-separated: {', '.join(TASKS)}.", autocompletion=completion.tasks
        ),
    ] = "",
    attention: Annotated[
        str,
        typer.Option(
            "--attention", help="Only these attentions, comma-separated.", autocompletion=completion.attentions
        ),
    ] = "",
    preset: Annotated[
        str, typer.Option("--preset", help="Only these presets, comma-separated.", autocompletion=completion.preset)
    ] = "",
    summary: Annotated[
        bool | None,
        typer.Option(
            "--summary/--list",
            help="Average over seeds, in the layout of the paper's Table 1, or list every run "
            "(default: --summary with --task or LaTeX, otherwise --list).",
        ),
    ] = None,
    format_: Annotated[
        Format, typer.Option("--format", help="Output format; JSON has both runs and means, LaTeX needs booktabs.")
    ] = Format.TABLE,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="DIR", help="Also draw accuracy and loss against time into this folder."),
    ] = None,
    runs_dir: RunsDir = None,
) -> None:
    """List all runs with state, step, accuracy and time, or compare their means over seeds with the paper."""
    from skyformer.files import runs_dir_or_default
    from skyformer.training.collect import collect_runs, summarise

    tasks, attentions, presets = split_names(task), split_names(attention), split_names(preset)
    averaged = (bool(tasks) or format_ is Format.LATEX) if summary is None else summary
    if format_ is Format.LATEX and not averaged:
        raise InputError("--format latex prints means in the layout of the paper's Table 1; remove --list")
    _check_names(tasks, attentions, presets, runs_dir)
    rows = collect_runs(runs_dir, tasks=tasks, attentions=attentions, presets=presets)
    summaries = summarise(rows)
    if not rows and format_ in (Format.TABLE, Format.LATEX):
        where = runs_dir_or_default(runs_dir)
        say(f"no such runs in {where}; train one with: skyformer train listops", err=True)
    elif averaged and format_ is not Format.JSON:
        _print_means(summaries, tasks, attentions, format_)
    else:
        _print_runs(rows, summaries, format_)
    if plot is not None:
        _plot(summaries, plot)


def _check_names(tasks: list[str], attentions: list[str], presets: list[str], runs_dir: Path | None) -> None:
    """Report a misspelt name instead of showing no runs. Runs of other versions may have presets unknown here."""
    from skyformer.attention import list_attentions
    from skyformer.training.collect import collect_runs
    from skyformer.training.presets import list_presets

    rows = collect_runs(runs_dir) if presets or not set(tasks) <= set(TASKS) else []
    known_presets = {*list_presets(), *(row.preset for row in rows if row.preset)}
    known_tasks = {*TASKS, *(row.task for row in rows if row.task)}
    known = (
        ("task", tasks, known_tasks),
        ("attention", attentions, list_attentions()),
        ("preset", presets, known_presets),
    )
    for what, names, allowed in known:
        for name in names:
            if name not in allowed:
                raise UnknownNameError(what, name, allowed)


def _print_runs(rows: list[RunRow], summaries: list[Summary], format_: Format) -> None:
    from skyformer.report.tables import print_table
    from skyformer.training.tables import as_json, runs_csv, runs_table

    if format_ is Format.JSON:
        typer.echo(as_json(rows, summaries))
    elif format_ is Format.CSV:
        typer.echo(runs_csv(rows), nl=False)
    else:
        print_table(runs_table(rows))


def _print_means(summaries: list[Summary], tasks: list[str], attentions: list[str], format_: Format) -> None:
    from skyformer.report.tables import as_latex, print_table
    from skyformer.training.tables import means_csv, summary_table

    if format_ is Format.CSV:
        typer.echo(means_csv(summaries), nl=False)
    elif format_ is Format.LATEX:
        say(as_latex([summary_table(each, tasks, attentions, paper_columns=True) for each in summaries]))
    else:
        for each in summaries:
            print_table(summary_table(each, tasks, attentions))


def _plot(summaries: list[Summary], folder: Path) -> None:
    from skyformer.training.curves import draw_curves

    files = draw_curves(summaries, folder)
    for file in files:
        say(f"wrote {file}", err=True)
    if not files:
        typer.echo("nothing to draw: no run has been evaluated yet", err=True)
