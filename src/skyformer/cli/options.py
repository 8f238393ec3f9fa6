"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from skyformer.cli import completion

DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", help="Data folder (default: SKYFORMER_DATA, or the user's data folder)."),
]
RunsDir = Annotated[
    Path | None, typer.Option("--runs-dir", help="Folder of the runs (default: SKYFORMER_RUNS, or ./runs).")
]
RunName = Annotated[
    str,
    typer.Argument(metavar="RUN", help="A run: its name, its folder or its digest.", autocompletion=completion.run),
]
Limit = Annotated[
    int | None, typer.Option("--limit", help="A small version of the data: at most N examples per split.")
]
LevelName = Annotated[
    str | None, typer.Option("--level", help="Pathfinder only: easy, intermediate or hard (default: hard).")
]
DataSeed = Annotated[int | None, typer.Option("--data-seed", help="The seed that the data was prepared with.")]
MaxLength = Annotated[
    int | None, typer.Option("--max-length", help="Cut texts, shrink images, or limit ListOps to N tokens.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Change a setting, such as optim.lr=3e-4; repeatable."),
]
Steps = Annotated[
    int | None,
    typer.Option("--steps", help="Number of training steps; a warm-up that would not fit becomes a tenth of them."),
]
THREADS = "Number of CPU threads (default: torch's, one per core)."
"""The same default in every command that computes."""


def split_names(text: str) -> list[str]:
    """The names of a comma-separated list, each once."""
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def data_settings(
    limit: int | None, level: str | None, data_seed: int | None, max_length: int | None
) -> tuple[str, ...]:
    """The options of a command about its data, as settings for --set."""
    given = {"limit": limit, "level": level, "data_seed": data_seed, "max_length": max_length}
    return tuple(f"task.{name}={value}" for name, value in given.items() if value is not None)
