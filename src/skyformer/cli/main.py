"""The `skyformer` command: gathers the sub-commands and turns our errors into one line and exit code 2."""

from __future__ import annotations

import sys

from skyformer.errors import MissingExtraError, SkyformerError


def build_app():  # type: ignore[no-untyped-def]
    import typer

    from skyformer.cli import bench, data

    app = typer.Typer(
        name="skyformer",
        help="Kernelized Attention, Skyformer, and the efficient attentions they are compared with.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.add_typer(bench.app, name="bench")
    app.add_typer(data.app, name="data")
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
