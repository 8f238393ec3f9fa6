"""`skyformer study NAME` and `skyformer bench NAME`: measure, save every result, and show tables and figures."""

from __future__ import annotations

import inspect
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markdown import Markdown

from skyformer.errors import DataError, InterruptedRunError, MissedTargetError, SkyformerError, missing_extra
from skyformer.registry import Registry
from skyformer.report.progress import display
from skyformer.report.tables import as_markdown
from skyformer.studies.base import Option, Study, StudyClass, make_options, option_fields
from skyformer.studies.files import report_tables, write_report
from skyformer.studies.record import Record, read_record, record_path
from skyformer.studies.registry import BENCHMARKS, STUDIES
from skyformer.studies.run import run_study

NOTHING_YET = "nothing was measured yet; run the same command again, which also resumes a run that was training"

Small = Annotated[bool, typer.Option("--small", help="A version that takes a minute or two.")]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads.")]
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


def build_app(registry: Registry[StudyClass], folder: Path, help: str) -> typer.Typer:
    """A command per study of the registry, and one for all of them; `folder` is the default for --output.

    The default is not `results`, which holds the results that the documentation quotes.
    """
    app = typer.Typer(
        no_args_is_help=True, help=f"{help} Every result is saved at once; run a command again to resume."
    )
    _add_all(app, registry, folder)
    for name in registry.names():
        _add_command(app, registry.get(name), folder)
    return app


def _add_all(app: typer.Typer, registry: Registry[StudyClass], default_folder: Path) -> None:
    @app.command("all", help="Run all of them with their defaults; one that fails does not stop the others.")
    def _all(small: Small = False, threads: Threads = None, fresh: Fresh = False, output: Output = None) -> None:
        failed = []
        for name in registry.names():
            study = registry.get(name)
            folder = _output_folder(output or default_folder, small and output is None, name)
            try:
                _run_and_show(study(make_options(study, small, {})), folder, threads, jobs=1, fresh=fresh)
            except InterruptedRunError:
                raise
            except (SkyformerError, ModuleNotFoundError) as error:
                missing = missing_extra(error) if isinstance(error, ModuleNotFoundError) else None
                failed.append(f"{name}: {missing or error}")
        if failed:
            raise DataError(f"{len(failed)} of {len(registry.names())} failed. " + "; ".join(failed))


def _output_folder(folder: Path, small: bool, name: str) -> Path:
    return folder / "small" / name if small else folder / name


def _add_command(app: typer.Typer, study: StudyClass, default_folder: Path) -> None:
    """Add a command with the common options and the study's own."""

    def command(
        small: bool, threads: int | None, jobs: int, fresh: bool, render: bool, output: Path | None, **own: Any
    ) -> None:
        folder = output or _output_folder(default_folder, small, study.name)
        if render:
            _show(study, _stored(study, folder), folder)
        else:
            _run_and_show(study(make_options(study, small, own)), folder, threads, jobs, fresh)

    common = (
        ("small", Small, False),
        ("output", Output, None),
        ("threads", Threads, study.default_threads),
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


def _annotation(each: Option) -> Any:
    if each.kind is bool:
        flags = f"{each.flag}/--no-{each.flag.removeprefix('--')}"
        return Annotated[bool | None, typer.Option(flags, help=each.help(), show_default=False)]
    metavar = each.kind.__name__.upper() + (",..." if each.many else "")
    return Annotated[str | None, typer.Option(each.flag, help=each.help(), metavar=metavar, show_default=False)]


def _run_and_show(study: Study[Any, Any, Any], folder: Path, threads: int | None, jobs: int, fresh: bool) -> None:
    path = record_path(study.name, folder)
    if path.exists() and not fresh:
        typer.echo(f"resuming from {path}")
    with _explain_interrupts(path, fresh):
        with display() as progress:
            record = run_study(
                study, folder, threads=threads or study.default_threads, jobs=jobs, fresh=fresh, progress=progress
            )
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
    path = record_path(study.name, folder)
    if not path.exists():
        raise DataError(f"there are no saved results at {path}; run the command without --render first")
    return read_record(study, path)


def _show(study: StudyClass, record: Record[Any, Any], folder: Path) -> None:
    """Write the tables and figures, and print the tables and the names of all files."""
    console = Console()
    files = write_report(study, record, folder)
    console.print(Markdown(as_markdown(report_tables(study, record))))
    console.print(f"results: {record_path(study.name, folder)}")
    for file in files:
        console.print(f"wrote {file}")


study_app = build_app(STUDIES, Path("studies"), "Rerun the paper's experiments.")
bench_app = build_app(BENCHMARKS, Path("benchmarks"), "Measure speed, memory and error on this machine.")
