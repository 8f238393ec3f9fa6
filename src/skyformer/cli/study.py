"""`skyformer study NAME` and `skyformer bench NAME`: measure, save every result, and show tables and figures."""

from __future__ import annotations

import inspect
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from skyformer.cli.index import StudyCommand, StudyOption, read_index
from skyformer.cli.options import THREADS
from skyformer.cli.output import say
from skyformer.errors import (
    DataError,
    InterruptedRunError,
    MissedTargetError,
    MissingExtraError,
    SkyformerError,
    missing_extra,
)
from skyformer.report.progress import display

if TYPE_CHECKING:
    from skyformer.studies.base import Study, StudyClass
    from skyformer.studies.record import Record

NOTHING_YET = "nothing was measured yet; run the same command again, which also resumes a run that was training"

Small = Annotated[bool, typer.Option("--small", help="A version that takes a minute or two.")]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help=f"{THREADS[:-2]}; shared by --jobs).")]
Jobs = Annotated[int, typer.Option("--jobs", min=1, help="Number of parallel processes, with --threads threads each.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Discard saved results; reuse trained runs.")]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        help="Folder for results, tables and figures (default: studies/NAME or benchmarks/NAME; with --small: "
        "studies/small/NAME or benchmarks/small/NAME).",
    ),
]
Render = Annotated[bool, typer.Option("--render", help="Measure nothing; make tables and figures from saved results.")]


def build_app(
    commands: Sequence[StudyCommand], find: Callable[[str], StudyClass], folder: Path, help: str
) -> typer.Typer:
    """A command per study, and one for all of them.

    Args:
        commands: the studies' names and options; `find` imports the study of a name when it is run.
        folder: the default for --output; not `results`, which holds the results that the documentation quotes.
    """
    app = typer.Typer(
        no_args_is_help=True, help=f"{help} Every result is saved at once; run a command again to resume."
    )
    _add_all(app, [command.name for command in commands], find, folder)
    for command in commands:
        _add_command(app, command, find, folder)
    return app


def _add_all(app: typer.Typer, names: Sequence[str], find: Callable[[str], StudyClass], default_folder: Path) -> None:
    @app.command("all", help="Run all of them with their defaults; one that fails does not stop the others.")
    def _all(small: Small = False, threads: Threads = None, fresh: Fresh = False, output: Output = None) -> None:
        from skyformer.studies.base import make_options

        failed = []
        for name in names:
            folder = _output_folder(output or default_folder, small and output is None, name)
            try:
                study = find(name)
                _run_and_show(study(make_options(study, small, {})), folder, threads, jobs=1, fresh=fresh)
            except InterruptedRunError:
                raise
            except (SkyformerError, ModuleNotFoundError) as error:
                missing = missing_extra(error) if isinstance(error, ModuleNotFoundError) else None
                failed.append(f"{name}: {missing or error}")
        if failed:
            raise DataError(f"{len(failed)} of {len(names)} failed. " + "; ".join(failed))


def _output_folder(folder: Path, small: bool, name: str) -> Path:
    return folder / "small" / name if small else folder / name


def _add_command(
    app: typer.Typer, described: StudyCommand, find: Callable[[str], StudyClass], default_folder: Path
) -> None:
    """Add a command with the common options and the study's own."""

    def command(
        small: bool, threads: int | None, jobs: int, fresh: bool, render: bool, output: Path | None, **own: Any
    ) -> None:
        from skyformer.studies.base import make_options

        study, folder = find(described.name), output or _output_folder(default_folder, small, described.name)
        if render:
            _show(study, _stored(study, folder), folder)
        else:
            _run_and_show(study(make_options(study, small, own)), folder, threads, jobs, fresh)

    common = (
        ("small", Small, False),
        ("output", Output, None),
        ("threads", Threads, None),
        ("jobs", Jobs, 1),
        ("fresh", Fresh, False),
        ("render", Render, False),
    )
    own = [(each.name, _annotation(each), None) for each in described.options]
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, annotation, default in (*common, *own)
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app.command(described.name, help=f"{described.title}.")(command)


def _annotation(each: StudyOption) -> Any:
    if each.metavar is None:
        flags = f"{each.flag}/--no-{each.flag.removeprefix('--')}"
        return Annotated[bool | None, typer.Option(flags, help=each.help, show_default=False)]
    return Annotated[str | None, typer.Option(each.flag, help=each.help, metavar=each.metavar, show_default=False)]


def _run_and_show(study: Study[Any, Any, Any], folder: Path, threads: int | None, jobs: int, fresh: bool) -> None:
    import torch

    from skyformer.studies.record import record_path
    from skyformer.studies.run import run_study

    if find_spec("matplotlib") is None:
        raise MissingExtraError("matplotlib")  # now, not after hours of measuring
    path = record_path(study.name, folder)
    threads = threads or max(1, torch.get_num_threads() // jobs)
    if path.exists() and not fresh:
        typer.echo(f"resuming from {path}")
    with _explain_interrupts(path, fresh):
        with display() as progress:
            record = run_study(study, folder, threads=threads, jobs=jobs, fresh=fresh, progress=progress)
        _show(type(study), record, folder)
    targets = study.targets(record.results())
    missed = [target.what for target in targets if not target.passed]
    if missed:
        raise MissedTargetError(f"{study.name} missed {len(missed)} of {len(targets)} targets: {'; '.join(missed)}")


@contextmanager
def _explain_interrupts(path: Path, fresh: bool) -> Iterator[None]:
    """Say after Ctrl-C or SIGTERM what is saved and how to resume."""
    before = _written(path)
    try:
        yield
    except (KeyboardInterrupt, InterruptedRunError) as stop:
        number = stop.signal_number if isinstance(stop, InterruptedRunError) else signal.SIGINT
        now = _written(path)
        saved = now is not None and not (fresh and now == before)
        again = f"run the same command again{' without --fresh' if fresh else ''} to resume from {path}"
        message = f"stopped by {signal.Signals(number).name}; {again if saved else NOTHING_YET}"
        raise InterruptedRunError(message, number) from None


def _written(path: Path) -> int | None:
    """When the record was last written; None if there is none."""
    return path.stat().st_mtime_ns if path.exists() else None


def _stored(study: StudyClass, folder: Path) -> Record[Any, Any]:
    from skyformer.studies.record import read_record, record_path

    path = record_path(study.name, folder)
    if not path.exists():
        raise DataError(f"there are no saved results at {path}; run the command without --render first")
    return read_record(study, path)


def _show(study: StudyClass, record: Record[Any, Any], folder: Path) -> None:
    """Write the tables and figures, and print the tables and the names of all files."""
    from skyformer.report.tables import print_table
    from skyformer.studies.files import report_tables, write_report
    from skyformer.studies.record import record_path

    files = write_report(study, record, folder)
    for table in report_tables(study, record):
        print_table(table)
    say(f"results: {record_path(study.name, folder)}")
    for file in files:
        say(f"wrote {file}")


def _study(name: str) -> StudyClass:
    from skyformer.studies.registry import STUDIES

    return STUDIES.get(name)


def _benchmark(name: str) -> StudyClass:
    from skyformer.studies.registry import BENCHMARKS

    return BENCHMARKS.get(name)


study_app = build_app(read_index().studies, _study, Path("studies"), "Rerun the paper's experiments.")
bench_app = build_app(
    read_index().benchmarks, _benchmark, Path("benchmarks"), "Measure speed, memory and error on this machine."
)
