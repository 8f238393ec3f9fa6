"""Printing of lines that contain names, notes or reasons from files."""

from __future__ import annotations

import typer

from skyformer.report.tables import visible


def say(text: str, *, err: bool = False) -> None:
    """Print text to standard output or error; characters that would control the terminal are shown as escapes."""
    typer.echo(visible(text, lines=True), err=err)
