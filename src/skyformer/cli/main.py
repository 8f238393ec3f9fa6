"""The `skyformer` command: gathers the sub-commands and turns our errors into one line and exit code 2."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from skyformer.errors import MissingExtraError, SkyformerError

if TYPE_CHECKING:
    import typer


def build_app() -> typer.Typer:
    import typer

    from skyformer.cli.bench import app as bench
    from skyformer.cli.data import app as data
    from skyformer.cli.study import app as study

    app = typer.Typer(
        name="skyformer",
        help="Kernelized Attention, Skyformer, and the efficient attentions they are compared with.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.add_typer(bench, name="bench")
    app.add_typer(data, name="data")
    app.add_typer(study, name="study")
    return app


def main() -> None:
    """Entry point of the console script."""
    try:
        try:
            app = build_app()
        except ModuleNotFoundError as error:
            raise MissingExtraError(str(error.name), "cli") from error
        app()
    except SkyformerError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
