"""`skyformer data`: prepare, list, show and verify the tasks of Long Range Arena."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skyformer.cli import completion
from skyformer.cli.completion import ALL
from skyformer.cli.options import DataDir, LevelName, Limit, refuse_given
from skyformer.cli.output import say
from skyformer.errors import DataError, InputError, UnknownNameError
from skyformer.lra.tasks import TASKS, Split
from skyformer.report.progress import display
from skyformer.report.tables import visible

if TYPE_CHECKING:
    from skyformer.lra.dataset import Task, TaskDataset
    from skyformer.lra.folders import Manifest
    from skyformer.lra.inspection import FolderStatus
    from skyformer.lra.preparation import Prepared

_LONGEST_EXCERPT = 600

app = typer.Typer(help="Prepare the five tasks of Long Range Arena, and inspect them.", no_args_is_help=True)

Seed = Annotated[
    int,
    typer.Option("--seed", "--data-seed", help="Seed of the generated examples, or of the choice of dev examples."),
]
MaxLength = Annotated[
    int | None, typer.Option("--max-length", help="ListOps only: expressions shorter than N tokens (default: 2000).")
]


@app.command("prepare")
def prepare(
    task: Annotated[
        str,
        typer.Argument(help=f"{', '.join(TASKS)}, or {ALL}.", metavar="TASK", autocompletion=completion.task_or_all),
    ],
    source: Annotated[
        Path | None,
        typer.Option("--from", help="Read the official archive, or a folder with its files.", metavar="PATH"),
    ] = None,
    limit: Limit = None,
    seed: Seed = 0,
    level: LevelName = None,
    max_length: MaxLength = None,
    data_dir: DataDir = None,
    workers: Annotated[
        int | None, typer.Option("--workers", help="Processes that draw Pathfinder images (default: all cores).")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Prepare again, even if the data is there.")] = False,
) -> None:
    """Prepare a task: generate it, download it, or read local files with --from."""
    from skyformer.lra.preparation import prepare as prepare_task

    names = _task_names(task, source)
    failed = []
    for name in names:
        # With `all`, --level and --max-length are meant for the one task that has them.
        own_level = level if task != ALL or name == "pathfinder" else None
        own_length = max_length if task != ALL or name == "listops" else None
        _check_length(name, own_length)
        try:
            with display() as progress:
                prepared = prepare_task(
                    name,
                    data_dir=data_dir,
                    source=source,
                    seed=seed,
                    limit=limit,
                    level=own_level,
                    max_length=own_length,
                    workers=(os.cpu_count() or 1) if workers is None else workers,
                    force=force,
                    progress=progress,
                )
            say(_ready_line(prepared))
        except DataError as error:
            if task != ALL:
                raise
            failed.append(name)
            say(f"{name} failed: {error}", err=True)
    if failed:
        raise DataError(f"{len(failed)} of {len(names)} tasks could not be prepared: {', '.join(failed)}")


def _task_names(task: str, source: Path | None) -> list[str]:
    if task == ALL and source is not None:
        raise InputError(f"--from contains the files of one task; prepare each task separately instead of {ALL!r}")
    if task != ALL and task not in TASKS:
        raise UnknownNameError("task", task, [*TASKS, ALL])
    return list(TASKS) if task == ALL else [task]


def _check_length(task: str, max_length: int | None) -> None:
    if max_length is not None and task in TASKS and task != "listops":
        raise InputError(
            f"--max-length must be left out for {task}, whose examples are stored complete and shortened when they are "
            f"loaded; got {max_length}"
        )


def _ready_line(prepared: Prepared) -> str:
    state = "is prepared" if prepared.fresh else "was already prepared"
    return f"{prepared.manifest.variant.name} {state}: {prepared.folder} ({_summary(prepared.manifest)})"


def _summary(manifest: Manifest) -> str:
    counts = ", ".join(f"{record.examples:,} {split}" for split, record in manifest.splits.items())
    return f"{counts}; {_megabytes(manifest.bytes)}"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


@app.command("list")
def list_(data_dir: DataDir = None) -> None:
    """List prepared tasks with their size and source, and the tasks that are not prepared."""
    from skyformer.lra.folders import Variant, data_dir_or_default, prepare_command
    from skyformer.lra.inspection import inspect_folders
    from skyformer.lra.preparation import DOWNLOADS

    root = data_dir_or_default(data_dir)
    say(f"data folder: {root}")
    lines = {folder.name: _describe(folder) for folder in inspect_folders(data_dir)}
    for name in [name for name in TASKS if name not in lines]:
        lines[name] = f"not prepared ({TASKS[name].summary}); run: {prepare_command(Variant.of(name), data_dir)}"
    for archive in sorted(path for path in (root / DOWNLOADS).glob("*gz") if path.is_file()):
        size = _megabytes(archive.stat().st_size)
        lines[f"{DOWNLOADS}/{archive.name}"] = f"{size}; not needed after preparation"
    width = max(map(len, lines))
    for name, description in lines.items():
        say(f"  {name:<{width}}  {description}")


def _describe(folder: FolderStatus) -> str:
    if folder.problems or folder.manifest is None:
        return f"damaged: {folder.problems[0]}"
    return f"{_summary(folder.manifest)}; source: {folder.manifest.source}"


@app.command("verify")
def verify(
    tasks: Annotated[
        list[str] | None, typer.Argument(help="Folders to check, as `data list` prints them (default: all).")
    ] = None,
    data_dir: DataDir = None,
) -> None:
    """Check that all files of prepared tasks are there and have the SHA-256 sum of their manifest."""
    from skyformer.lra.folders import data_dir_or_default
    from skyformer.lra.inspection import inspect_folders

    folders = inspect_folders(data_dir, tasks or (), check_hashes=True)
    for folder in folders:
        say(f"{folder.name}: {'; '.join(folder.problems) or 'ok'}")
    if not folders:
        say(f"nothing is prepared in {data_dir_or_default(data_dir)}")
    damaged = [folder.name for folder in folders if folder.problems]
    if damaged:
        advice = "prepare tasks again with --force, and own data by training on it again"
        raise DataError(f"damaged: {', '.join(damaged)}; {advice}")


@app.command("show")
def show(
    task: Annotated[
        str,
        typer.Argument(
            help=f"{', '.join(TASKS)}, or a folder of own data as `data list` prints it.",
            metavar="TASK",
            autocompletion=completion.task,
        ),
    ],
    number: Annotated[int, typer.Option("-n", "--number", help="Number of examples, spread over the split.")] = 3,
    split: Annotated[Split, typer.Option("--split", help="The split to take examples from.")] = Split.TRAIN,
    png: Annotated[Path | None, typer.Option("--png", help="Write the images to this PNG file instead.")] = None,
    limit: Limit = None,
    seed: Seed = 0,
    level: LevelName = None,
    max_length: MaxLength = None,
    data_dir: DataDir = None,
) -> None:
    """Print examples; images are drawn in the terminal, or written to a PNG file."""
    from skyformer.checks import check_at_least
    from skyformer.lra.dataset import load_task, load_variant
    from skyformer.lra.folders import data_dir_or_default, read_manifest
    from skyformer.lra.inspection import save_images

    check_at_least("-n", number, 1)
    _check_length(task, max_length)
    manifest = None if task in TASKS else read_manifest(data_dir_or_default(data_dir) / task)
    if manifest is not None and manifest.variant.own is not None:
        of_task = {"--limit": limit, "--seed": seed or None, "--level": level, "--max-length": max_length}
        refuse_given(of_task, "with the name of a task")
        loaded = load_variant(manifest.variant, data_dir)
    else:
        loaded = load_task(task, data_dir, seed=seed, limit=limit, level=level, max_length=max_length)
    dataset, side = loaded[split], loaded.spec.image_side
    count = min(number, len(dataset))
    rows = [place * len(dataset) // count for place in range(count)]
    if png is None:
        for row in rows:
            say(_heading(dataset, row, split))
            typer.echo(_own_body(loaded, dataset, row) if manifest is not None else _body(dataset, row))
    elif side is None:
        raise InputError(f"--png needs a task with images, and {task} has none; leave it out")
    else:
        save_images([dataset.stored.tokens[row].reshape(side, side) for row in rows], png)
        say(f"{count} examples of {task} -> {png}")


def _heading(dataset: TaskDataset, row: int, split: Split) -> str:
    label = int(dataset.stored.labels[row])
    lengths = " + ".join(f"{len(symbols):,}" for symbols in dataset.stored.texts(row))
    name = dataset.spec.label_names[label]
    return f"{split} {row}: label {label} ({name}), {lengths} tokens, from {dataset.stored.source(row)}"


def _own_body(task: Task, dataset: TaskDataset, row: int) -> str:
    from skyformer.lra.own import TOKENIZER_FOLDER
    from skyformer.own.encoding import make_encoder

    own = task.manifest.variant.own
    has_tokenizer = own is not None and own.tokenizer is not None
    encoder = make_encoder(task.folder / TOKENIZER_FOLDER if has_tokenizer else None)
    return _excerpts(encoder.decode(symbols) for symbols in dataset.stored.texts(row))


def _body(dataset: TaskDataset, row: int) -> str:
    from skyformer.lra.inspection import as_half_blocks, as_letters, as_text

    side = dataset.spec.image_side
    if side is not None:
        draw = as_half_blocks if sys.stdout.isatty() and "NO_COLOR" not in os.environ else as_letters
        return draw(dataset.stored.tokens[row].reshape(side, side)) + "\n"
    return _excerpts(as_text(symbols, dataset.spec) for symbols in dataset.stored.texts(row))


def _excerpts(texts: Iterable[str]) -> str:
    return "\n".join(
        visible(text if len(text) <= _LONGEST_EXCERPT else f"{text[:_LONGEST_EXCERPT]} ...", lines=True) + "\n"
        for text in texts
    )
