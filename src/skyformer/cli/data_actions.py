"""What the commands of `skyformer data` do; apart from their declaration, because this needs the `lra` extra."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from skyformer.cli.data import ALL, Wanted
from skyformer.errors import DataError, InputError, UnknownNameError
from skyformer.lra import pictures
from skyformer.lra.examples import Symbols
from skyformer.lra.listops import to_source
from skyformer.lra.places import data_dir_or_default, downloads_dir, find, prepare_command, prepared_dirs
from skyformer.lra.preparation import Prepared, prepare
from skyformer.lra.storage import Manifest, StoredSplit, Variant, damage, read_manifest
from skyformer.lra.tasks import TASKS, Split, TaskSpec

_EXCERPT = 600


class _Bar:
    """Shows progress as a bar on standard error, one line for each thing that begins."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._current: TaskID | None = None

    def begin(self, what: str, total: int | None) -> None:
        if self._current is not None:
            self._bars.remove_task(self._current)
        self._current = self._bars.add_task(what, total=total)

    def advance(self, count: int) -> None:
        if self._current is not None:
            self._bars.advance(self._current, count)

    def note(self, message: str) -> None:
        self._bars.console.print(f"note: {message}", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _progress_bar() -> Iterator[_Bar]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    hidden = not console.is_terminal
    with Bars(*columns, *times, console=console, transient=True, disable=hidden) as bars:
        yield _Bar(bars)


def prepare_tasks(wanted: Wanted, source: Path | None, workers: int | None, force: bool) -> None:
    """Prepare one task, or all of them; of all, one that fails does not keep the others from being tried."""
    names = _task_names(wanted.task, source)
    failures: list[str] = []
    for name in names:
        try:
            typer.echo(_ready_line(_prepare(name, wanted, source, workers, force)))
        except DataError as error:
            if wanted.task != ALL:
                raise
            failures.append(name)
            typer.echo(f"{name} failed: {error}", err=True)
    if failures:
        raise DataError(f"{len(failures)} of {len(names)} tasks could not be prepared: {', '.join(failures)}")


def _prepare(name: str, wanted: Wanted, source: Path | None, workers: int | None, force: bool) -> Prepared:
    # With `all`, a level is meant for the one task that has levels, and so is a length.
    level = wanted.level if wanted.task != ALL or name == "pathfinder" else None
    max_length = wanted.max_length if wanted.task != ALL or name == "listops" else None
    _check_length(name, max_length)
    with _progress_bar() as bar:
        return prepare(
            name,
            data_dir=wanted.data_dir,
            source=source,
            seed=wanted.seed,
            limit=wanted.limit,
            level=level,
            max_length=max_length,
            workers=(os.cpu_count() or 1) if workers is None else workers,
            force=force,
            progress=bar,
        )


def _check_length(task: str, max_length: int | None) -> None:
    if max_length is not None and task in TASKS and task != "listops":
        raise InputError(
            f"--max-length makes listops shorter; {task} is kept whole and shortened as it is loaded: leave it out"
        )


def _task_names(task: str, source: Path | None) -> list[str]:
    if task == ALL and source is not None:
        raise InputError("--from names the files of one task; prepare the tasks one by one, not all")
    if task != ALL and task not in TASKS:
        raise UnknownNameError("task", task, [*TASKS, ALL])
    return list(TASKS) if task == ALL else [task]


def _ready_line(result: Prepared) -> str:
    state = "is ready" if result.fresh else "was ready already"
    manifest = result.manifest
    return f"{manifest.variant.name} {state}: {result.folder} ({megabytes(manifest.bytes)}; {_counts(manifest)})"


def _counts(manifest: Manifest) -> str:
    return ", ".join(f"{record.examples:,} {split}" for split, record in manifest.splits.items())


def megabytes(size: int) -> str:
    """A size for people to read."""
    return f"{size / 1e6:,.1f} MB"


def list_tasks(data_dir: Path | None) -> None:
    """Print what is prepared, what is not yet, and what was downloaded."""
    root = data_dir_or_default(data_dir)
    typer.echo(f"data folder: {root}")
    present = set()
    for folder in prepared_dirs(root):
        present.add(folder.name)
        typer.echo(f"  {folder.name:<27} {_describe(folder)}")
    for name, spec in TASKS.items():
        if name not in present:
            command = prepare_command(Variant.of(name), data_dir)
            typer.echo(f"  {name:<28}not prepared ({spec.summary}) -> {command}")
    for archive in sorted(path for path in downloads_dir(root).glob("*gz") if path.is_file()):
        size = megabytes(archive.stat().st_size)
        typer.echo(f"  downloads/{archive.name:<18}{size}; not needed once prepared")


def _describe(folder: Path) -> str:
    try:
        manifest = read_manifest(folder)
    except DataError as error:
        return f"damaged: {error}"
    if manifest is None:
        return "not prepared"
    problems = damage(folder, manifest, thorough=False)
    if problems:
        return f"damaged: {problems[0]}"
    return f"{_counts(manifest)}; {megabytes(manifest.bytes)}; from {manifest.source}"


def verify_tasks(tasks: list[str], data_dir: Path | None) -> None:
    """Recheck the named folders, or all of them."""
    root = data_dir_or_default(data_dir)
    folders = {folder.name: folder for folder in prepared_dirs(root)}
    for name in tasks:
        if name not in folders:
            raise DataError(f"{name!r} is not prepared in {root}; there is: {', '.join(folders) or 'nothing'}")
    damaged = [name for name in tasks or folders if not _verified(folders[name])]
    if damaged:
        raise DataError(f"damaged: {', '.join(damaged)}; prepare again with --force")
    if not folders:
        typer.echo(f"nothing is prepared in {root}")


def _verified(folder: Path) -> bool:
    """Check one folder and print what was found."""
    try:
        manifest = read_manifest(folder)
        problems = ["it has no manifest"] if manifest is None else damage(folder, manifest, thorough=True)
    except DataError as error:
        problems = [str(error)]
    typer.echo(f"{folder.name}: {'; '.join(problems) if problems else 'ok'}")
    return not problems


def show_examples(wanted: Wanted, number: int, split: Split, png: Path | None) -> None:
    """Print examples, or write their pictures to a file."""
    if number < 1:
        raise InputError(f"-n must be at least 1, got {number}")
    _check_length(wanted.task, wanted.max_length)
    variant = Variant.of(
        wanted.task, seed=wanted.seed, limit=wanted.limit, level=wanted.level, max_length=wanted.max_length
    )
    folder, manifest = find(variant, wanted.data_dir)
    stored = StoredSplit(folder / manifest.splits[split].file)
    count = min(number, len(stored))
    chosen = [place * len(stored) // count for place in range(count)]
    if png is not None:
        _save_pictures(stored, variant.spec, chosen, png)
        return
    for index in chosen:
        typer.echo(_heading(stored, variant.spec, index, split))
        typer.echo(_body(stored, variant.spec, index))


def _save_pictures(stored: StoredSplit, spec: TaskSpec, chosen: list[int], png: Path) -> None:
    if spec.image_side is None:
        raise InputError(f"--png needs a task of images, {spec.name} is not one; leave it out")
    pictures.save(pictures.sheet([_image(stored, spec.image_side, index) for index in chosen]), png)
    typer.echo(f"{len(chosen)} examples of {spec.name} -> {png}")


def _image(stored: StoredSplit, side: int, index: int) -> Symbols:
    return stored.tokens[index].reshape(side, side)


def _heading(stored: StoredSplit, spec: TaskSpec, index: int, split: Split) -> str:
    label = int(stored.labels[index])
    lengths = " + ".join(f"{len(symbols):,}" for symbols in _sequences(stored, index))
    name = spec.label_names[label]
    return f"{split} {index}: label {label} ({name}), {lengths} tokens, from {stored.source(index)}"


def _sequences(stored: StoredSplit, index: int) -> list[Symbols]:
    second = [] if stored.second is None else [stored.second[index]]
    return [stored.tokens[index], *second]


def _body(stored: StoredSplit, spec: TaskSpec, index: int) -> str:
    if spec.image_side is not None:
        in_colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        draw = pictures.in_half_blocks if in_colour else pictures.in_letters
        return draw(_image(stored, spec.image_side, index)) + "\n"
    read = to_source if spec.name == "listops" else _readable
    return "\n".join(_shortened(read(symbols)) + "\n" for symbols in _sequences(stored, index))


def _readable(symbols: Symbols) -> str:
    """Bytes as text that cannot steer a terminal."""
    decoded = symbols.tobytes().decode("utf-8", errors="replace")
    return "".join(letter if letter.isprintable() else " " for letter in decoded)


def _shortened(text: str) -> str:
    return text if len(text) <= _EXCERPT else f"{text[:_EXCERPT]} ..."
