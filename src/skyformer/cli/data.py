"""`skyformer data`: prepare, list, show and verify the tasks of Long Range Arena."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from skyformer.errors import MissingExtraError
from skyformer.lra.tasks import TASKS, Split

ALL = "all"

app = typer.Typer(help="Make the five Long Range Arena tasks ready, and look at them.", no_args_is_help=True)

DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", help="Where data is kept (default: SKYFORMER_DATA, or the platform's data folder)."),
]
Seed = Annotated[int, typer.Option("--seed", help="Another seed makes another version.")]
Limit = Annotated[int | None, typer.Option("--limit", help="A small version: at most N examples a split.")]
LevelName = Annotated[
    str | None, typer.Option("--level", help="Pathfinder only: easy, intermediate or hard (default: hard).")
]
MaxLength = Annotated[
    int | None, typer.Option("--max-length", help="ListOps only: expressions shorter than N tokens (default: 2000).")
]


@dataclass(frozen=True)
class Wanted:
    """Which version of which task, and where."""

    task: str
    seed: int
    limit: int | None
    level: str | None
    max_length: int | None
    data_dir: Path | None


@contextmanager
def _lra_extra() -> Iterator[None]:
    """The command line works without the libraries of the data; only its own commands need them."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingExtraError(str(error.name), "lra") from error


@app.command("prepare")
def prepare(
    task: Annotated[str, typer.Argument(help=f"{', '.join(TASKS)}, or {ALL}.", metavar="TASK")],
    source: Annotated[
        Path | None,
        typer.Option("--from", help="Files you have: the official archive, or its folder.", metavar="PATH"),
    ] = None,
    limit: Limit = None,
    seed: Seed = 0,
    level: LevelName = None,
    max_length: MaxLength = None,
    data_dir: DataDir = None,
    workers: Annotated[
        int | None, typer.Option("--workers", help="Processes that draw Pathfinder (default: all cores).")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Make it again, even if it is there.")] = False,
) -> None:
    """Make a task ready: generate it, download it, or read files you have with --from."""
    with _lra_extra():
        from skyformer.cli.data_actions import prepare_tasks
    prepare_tasks(Wanted(task, seed, limit, level, max_length, data_dir), source, workers, force)


@app.command("list")
def list_(data_dir: DataDir = None) -> None:
    """Show what is there, how large it is and where it came from, and what is not there yet."""
    with _lra_extra():
        from skyformer.cli.data_actions import list_tasks
    list_tasks(data_dir)


@app.command("verify")
def verify(
    tasks: Annotated[
        list[str] | None, typer.Argument(help="Folders to recheck, as `data list` names them (default: all).")
    ] = None,
    data_dir: DataDir = None,
) -> None:
    """Recheck prepared tasks: every file is there and has the SHA-256 its manifest says."""
    with _lra_extra():
        from skyformer.cli.data_actions import verify_tasks
    verify_tasks(tasks or [], data_dir)


@app.command("show")
def show(
    task: Annotated[str, typer.Argument(help=f"{', '.join(TASKS)}.", metavar="TASK")],
    number: Annotated[int, typer.Option("-n", "--number", help="How many, spread over the part.")] = 3,
    split: Annotated[Split, typer.Option("--split", help="Which part.")] = Split.TRAIN,
    png: Annotated[Path | None, typer.Option("--png", help="Write images to this file instead.")] = None,
    limit: Limit = None,
    seed: Seed = 0,
    level: LevelName = None,
    max_length: MaxLength = None,
    data_dir: DataDir = None,
) -> None:
    """Print examples; an image or path as a picture, in the terminal or to a PNG file."""
    with _lra_extra():
        from skyformer.cli.data_actions import show_examples
    show_examples(Wanted(task, seed, limit, level, max_length, data_dir), number, split, png)
