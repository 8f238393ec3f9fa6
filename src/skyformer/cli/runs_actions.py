"""What `skyformer runs` does; apart from its declaration, because this needs an extra."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from skyformer.attention import list_attentions
from skyformer.cli.runs import Chosen, Format
from skyformer.errors import InputError, UnknownNameError
from skyformer.lra.tasks import TASKS
from skyformer.training.collect import RunRow, Summary, collect_runs, summarise
from skyformer.training.curves import draw_curves
from skyformer.training.formats import as_json, as_latex, means_csv, runs_csv
from skyformer.training.presets import list_presets
from skyformer.training.runs import runs_dir_or_default
from skyformer.training.tables import PaperLayout, run_remarks, runs_table, summary_table

_WIDE = 160


def show_runs(runs_dir: Path | None, chosen: Chosen, summary: bool | None, format_: Format, plot: Path | None) -> None:
    """Print the runs in a folder, or their means; draw their curves if asked."""
    _check_names(chosen, runs_dir)
    rows = collect_runs(runs_dir, tasks=chosen.tasks, attentions=chosen.attentions, presets=chosen.presets)
    averaged = (bool(chosen.tasks) or format_ is Format.LATEX) if summary is None else summary
    if format_ is Format.LATEX and not averaged:
        raise InputError("--format latex is the layout of the paper's Table 1: leave out --list")
    summaries = summarise(rows)
    if not rows and format_ in (Format.TABLE, Format.LATEX):
        typer.echo(
            f"no such runs in {runs_dir_or_default(runs_dir)}; train one with: skyformer train listops", err=True
        )
    else:
        _print(rows, summaries, chosen, format_, averaged)
    if plot is not None:
        _plot(summaries, plot)


def _check_names(chosen: Chosen, runs_dir: Path | None) -> None:
    """A misspelt name must not look like a lack of runs; a run may have a preset of another version."""
    presets = {*list_presets(), *(row.preset for row in collect_runs(runs_dir) if row.preset)} if chosen.presets else ()
    known = (("task", chosen.tasks, TASKS), ("attention", chosen.attentions, list_attentions()))
    for what, names, allowed in (*known, ("preset", chosen.presets, presets)):
        for name in names:
            if name not in allowed:
                raise UnknownNameError(what, name, allowed)


def _print(
    rows: Sequence[RunRow], summaries: Sequence[Summary], chosen: Chosen, format_: Format, averaged: bool
) -> None:
    layouts = [PaperLayout(summary, chosen.tasks, chosen.attentions) for summary in summaries]
    if format_ is Format.JSON:
        typer.echo(as_json(rows, summaries))
    elif format_ is Format.CSV:
        typer.echo(means_csv(summaries) if averaged else runs_csv(rows), nl=False)
    elif format_ is Format.LATEX:
        typer.echo("\n\n".join(map(as_latex, layouts)))
    elif averaged:
        for layout in layouts:
            typer.echo(layout.title)
            print_table(summary_table(layout), ["in brackets: the paper's", *layout.remarks()])
    else:
        print_table(runs_table(rows), run_remarks(rows))


def print_table(table: Table, remarks: Sequence[str]) -> None:
    """A table as wide as the terminal, or as it needs in a file, and whole lines below it."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDE)
    console.print(table)
    for remark in remarks:
        typer.echo(remark)


def _plot(summaries: Sequence[Summary], folder: Path) -> None:
    files = draw_curves(summaries, folder)
    for file in files:
        typer.echo(f"wrote {file}", err=True)
    if not files:
        typer.echo("nothing to draw: no run was evaluated yet", err=True)
