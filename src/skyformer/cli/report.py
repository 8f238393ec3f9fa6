"""`skyformer report`: runs and studies as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from skyformer.cli.output import say

_EXAMPLES = """
Examples:

skyformer report runs -o report.html  # all runs in a folder

skyformer report runs/text-skyformer-paper-seed0-58f094b7 results/efficiency

skyformer report results  # all records of studies in a folder
"""


def add_commands(app: typer.Typer) -> None:
    """Add the command of this module to `app`."""
    app.command("report", epilog=_EXAMPLES)(report)


def report(
    paths: Annotated[
        list[Path],
        typer.Argument(
            help="Runs, records of studies or benchmarks, or folders that contain them.", metavar="RUNS_OR_STUDIES"
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.", metavar="FILE")] = Path(
        "report.html"
    ),
) -> None:
    """Write one HTML file with interactive curves, sortable tables, and the config behind every number.

    It needs no network: open it in any browser, or send it to a colleague.
    """
    from skyformer.studies.overview import write_overview

    found = write_overview(paths, output)
    say(f"wrote {output}: {len(found.runs)} runs, {len(found.records)} records of studies")
