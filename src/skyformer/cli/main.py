"""The `skyformer` command: collects the sub-commands, and prints errors as one line with an exit code."""

from __future__ import annotations

import errno
import signal
import sys
import traceback
from importlib import import_module
from typing import TYPE_CHECKING

from skyformer.errors import (
    EXTRA_OF_MODULE,
    InputError,
    InterruptedRunError,
    MissingExtraError,
    SkyformerError,
    missing_extra,
)
from skyformer.registry import choose_modules
from skyformer.report.tables import visible

if TYPE_CHECKING:
    import typer

DEBUG, IMPORT = "--debug", "--import"
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_EXTRA_OF_COMMAND = {
    **dict.fromkeys(("train", "evaluate", "predict", "sweep", "runs"), "train"),
    "data": "lra",
    "convert": "hf,train",
    "demo": "cli,model",
    "report": "report",
    "study": "hf,train",
    **dict.fromkeys(("bench conversion", "bench huggingface"), "hf,train"),
    **dict.fromkeys(("bench data", "bench steps", "bench training"), "train"),
}
_PARTS = {
    "cli,model": {"cli", "model"},
    "lra": {"cli", "model"},
    "train": {"cli", "lra", "model"},
    "report": {"cli", "lra", "model", "train"},
    "hf,train": {"cli", "hf", "lra", "model", "train"},
}
"""The extras that an extra includes."""


def build_app() -> typer.Typer:
    import typer

    from skyformer.cli.convert import add_commands as add_convert
    from skyformer.cli.data import app as data
    from skyformer.cli.demo import add_commands as add_demo
    from skyformer.cli.report import add_commands as add_report
    from skyformer.cli.runs import add_commands as add_runs
    from skyformer.cli.study import bench_app, study_app
    from skyformer.cli.sweep import add_commands as add_sweep
    from skyformer.cli.train import add_commands as add_training

    app = typer.Typer(
        name="skyformer",
        help="Kernelized Attention, Skyformer, and the efficient attentions they are compared with.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def _global_options(
        version: bool = typer.Option(
            False, "--version", help="Print the version.", is_eager=True, callback=_print_version
        ),
        debug: bool = typer.Option(
            False, DEBUG, help="Print the full traceback of an error; accepted anywhere on the command line."
        ),
        modules: list[str] | None = typer.Option(
            None,
            IMPORT,
            metavar="MODULE",
            help="Import a module that registers attentions, kernels or samplers of your own; repeatable, and accepted "
            "anywhere on the command line.",
        ),
    ) -> None:
        """Kernelized Attention, Skyformer, and the efficient attentions they are compared with."""

    add_demo(app)
    add_training(app)
    add_sweep(app)
    add_runs(app)
    add_report(app)
    add_convert(app)
    app.add_typer(bench_app, name="bench")
    app.add_typer(data, name="data")
    app.add_typer(study_app, name="study")
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"skyformer {import_module('skyformer').__version__}")
        sys.exit()


def main() -> None:
    """Entry point of the console script."""
    arguments, debug = _without_debug(sys.argv[1:])
    try:
        arguments, modules = _without_imports(arguments)
        if modules:
            choose_modules(modules)
        _run(arguments)
    except KeyboardInterrupt:
        # Before or between commands, for example while packages are imported.
        print("stopped by SIGINT", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except UnicodeError as error:
        if debug:
            traceback.print_exc()
        print(f"error: a name or text is not valid UTF-8: {visible(str(error))}", file=sys.stderr)
        sys.exit(2)
    except (SkyformerError, OSError) as error:
        if debug:
            traceback.print_exc()
        print(visible(_one_line(error), lines=True), file=sys.stderr)
        sys.exit(error.exit_code if isinstance(error, SkyformerError) else 2)


def _run(arguments: list[str]) -> None:
    """Run a command; a missing optional package is reported with the extra that installs all that the command needs."""
    try:
        build_app()(arguments)
    except (ModuleNotFoundError, MissingExtraError) as error:
        missing = error if isinstance(error, MissingExtraError) else missing_extra(error)
        if missing is None:
            raise
        words = [argument for argument in arguments if not argument.startswith("-")]
        names = (" ".join(words[:count]) for count in (2, 1))
        extra = next((_EXTRA_OF_COMMAND[name] for name in names if name in _EXTRA_OF_COMMAND), "")
        if EXTRA_OF_MODULE.get(missing.package) in _PARTS.get(extra, ()):
            missing = MissingExtraError(missing.package, extra)
        raise missing from error


def _without_debug(arguments: list[str]) -> tuple[list[str], bool]:
    """The arguments without `--debug`, and whether it was among them, before or after the sub-command."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options, rest = arguments[:end], arguments[end:]
    return [argument for argument in options if argument != DEBUG] + rest, DEBUG in options


def _without_imports(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The arguments without `--import MODULE`, and the modules."""
    rest: list[str] = []
    modules: list[str] = []
    waiting = iter(arguments)
    for argument in waiting:
        if argument == "--":
            return [*rest, argument, *waiting], modules
        if argument == IMPORT:
            module = next(waiting, None)
            if module is None:
                raise InputError(f"{IMPORT} must be followed by the name of a module")
            modules.append(module)
        elif argument.startswith(f"{IMPORT}="):
            modules.append(argument.removeprefix(f"{IMPORT}="))
        else:
            rest.append(argument)
    return rest, modules


def _one_line(error: SkyformerError | OSError) -> str:
    if isinstance(error, InterruptedRunError):
        return str(error)
    if isinstance(error, SkyformerError):
        return f"error: {error}"
    where = f": {error.filename}" if error.filename else ""
    if error.errno in _DISK_FULL:
        return (
            f"error: no space left on the disk{where}; free some space, then run the same command again or use --resume"
        )
    return f"error: {error.strerror or error}{where}"


if __name__ == "__main__":
    main()
