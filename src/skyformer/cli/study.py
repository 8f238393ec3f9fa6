"""`skyformer study NAME`: rerun one of the paper's studies on this machine."""

from __future__ import annotations

import inspect
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from skyformer.errors import DataError, InputError, InterruptedRunError, MissingExtraError, TrainingError
from skyformer.report.tables import as_markdown
from skyformer.studies.base import OptionField, Study, make_options, option_fields
from skyformer.studies.files import write_report
from skyformer.studies.record import Record, read_record, record_path
from skyformer.studies.registry import list_studies, study_class
from skyformer.studies.run import Report, run_study

AnyStudy = type[Study[Any, Any, Any]]

SECONDS_BETWEEN_LINES = 30
"""Of progress, where it is no bar."""

NOTHING_YET = "nothing was measured yet; the same command begins again, and goes on with a run that was in training"

Small = Annotated[bool, typer.Option("--small", help="A version of a minute or two.")]
Threads = Annotated[int, typer.Option("--threads", min=1, help="CPU threads.")]
Jobs = Annotated[int, typer.Option("--jobs", min=1, help="Processes that measure side by side, --threads each.")]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Forget the stored record, and begin anew; trained runs are kept, and read.")
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output", help="Folder of the record, tables and figures (default: studies/NAME, or studies/small/NAME)."
    ),
]
Render = Annotated[bool, typer.Option("--render", help="Measure nothing: tables and figures from the stored record.")]

app = typer.Typer(
    no_args_is_help=True,
    help="Rerun the paper's studies. Each keeps its raw figures in a JSON file as it goes; run it again to go on.",
)


@app.command("all")
def _all(small: Small = False, threads: Threads = 1, fresh: Fresh = False, output: Output = None) -> None:
    """Every study with its defaults, one after the other; what one lacks does not keep the others from running."""
    failed = []
    for name in list_studies():
        study = study_class(name)
        folder = (output or _default_folder(small)) / name
        try:
            _run_and_show(study(make_options(study, small, {})), folder, threads, jobs=1, fresh=fresh)
        except (DataError, InputError, MissingExtraError, TrainingError) as error:
            failed.append(f"{name}: {error}")
    if failed:
        raise DataError(f"{len(failed)} of {len(list_studies())} studies could not run. " + "; ".join(failed))


def _default_folder(small: bool) -> Path:
    """Not results, where the figures of the documentation lie: a rerun measures for itself."""
    return Path("studies/small") if small else Path("studies")


def _add_command(study: AnyStudy) -> None:
    """A command with the study's own options between the common ones."""

    def command(
        small: bool, threads: int, jobs: int, fresh: bool, render: bool, output: Path | None, **texts: str | None
    ) -> None:
        given = {name: text for name, text in texts.items() if text is not None}
        folder = output or _default_folder(small) / study.name
        if render:
            _show(study, _stored(study, folder), folder)
            return
        _run_and_show(study(make_options(study, small, given)), folder, threads, jobs, fresh)

    common = (
        ("small", Small, False),
        ("output", Output, None),
        ("threads", Threads, 1),
        ("jobs", Jobs, 1),
        ("fresh", Fresh, False),
        ("render", Render, False),
    )
    own = [(each.name, _annotation(each), None) for each in option_fields(study.options_type)]
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, annotation, default in (*common, *own)
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app.command(study.name, help=f"{study.title}.")(command)


def _annotation(each: OptionField) -> Any:
    metavar = each.kind.__name__.upper() + (",..." if each.many else "")
    return Annotated[str | None, typer.Option(each.flag, help=each.help(), metavar=metavar, show_default=False)]


def _run_and_show(study: Study[Any, Any, Any], folder: Path, threads: int, jobs: int, fresh: bool) -> None:
    path = record_path(study.name, folder)
    before = _written(path)
    try:
        if before is not None and not fresh:
            typer.echo(f"going on from {path}")
        with _progress(study.name) as report:
            record = run_study(study, folder, threads=threads, jobs=jobs, fresh=fresh, report=report)
        _show(type(study), record, folder)
    except ModuleNotFoundError as error:
        raise MissingExtraError(str(error.name), "train") from error
    except (KeyboardInterrupt, InterruptedRunError) as stop:
        number = stop.signal_number if isinstance(stop, InterruptedRunError) else signal.SIGINT
        now = _written(path)
        kept = now is not None and not (fresh and now == before)
        advice = _how_to_go_on(path, fresh) if kept else NOTHING_YET
        raise InterruptedRunError(f"stopped by {signal.Signals(number).name}; {advice}", number) from None


def _written(path: Path) -> int | None:
    """When the record was last written; None if there is none."""
    return path.stat().st_mtime_ns if path.exists() else None


def _how_to_go_on(path: Path, fresh: bool) -> str:
    """The same command with --fresh would forget what this one has measured."""
    return f"the same command{' without --fresh' if fresh else ''} goes on from {path}"


@contextmanager
def _progress(name: str) -> Iterator[Report]:
    """A bar on a terminal, and a line now and then in a log."""
    if not sys.stdout.isatty():
        yield _Lines(name)
        return
    columns = (
        TextColumn(name),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        # What is measured now has the rest of the line, and is cut there.
        TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
    )
    with Progress(*columns, transient=True, expand=True) as progress:
        task = progress.add_task("starting", total=None)
        yield lambda done, total, text: progress.update(task, completed=done, total=total, description=text)


class _Lines:
    def __init__(self, name: str) -> None:
        self._name, self._last = name, time.monotonic()

    def __call__(self, done: int, total: int, text: str) -> None:
        if time.monotonic() - self._last >= SECONDS_BETWEEN_LINES:
            self._last = time.monotonic()
            typer.echo(f"{self._name}: {done} of {total}, now {text}", err=True)


def _stored(study: AnyStudy, folder: Path) -> Record[Any, Any]:
    path = record_path(study.name, folder)
    if not path.exists():
        raise DataError(f"there is no record at {path}; run the study without --render first")
    return read_record(study, path)


def _show(study: AnyStudy, record: Record[Any, Any], folder: Path) -> None:
    console = Console()
    files = write_report(study, record, folder)
    console.print(Markdown(as_markdown(study.tables(record.results()))))
    for file in (record_path(study.name, folder), *files):
        console.print(f"wrote {file}" if file in files else f"figures in {file}")


for _name in list_studies():
    _add_command(study_class(_name))
