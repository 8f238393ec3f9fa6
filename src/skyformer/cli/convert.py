"""`skyformer convert`: between this package's own models and the Hugging Face classes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from skyformer.cli.options import RunsDir
from skyformer.cli.output import say
from skyformer.errors import DataError, InputError

_EXAMPLES = """
Examples:

skyformer convert RUN my-model  # the best model of a run, for transformers

skyformer convert my-model own-model  # and back
"""


def add_commands(app: typer.Typer) -> None:
    """Add the command of this module to `app`."""
    app.command("convert", epilog=_EXAMPLES)(convert)


def convert(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A run, or the folder of a model of either kind.")],
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="A new or empty folder for the converted model.")],
    runs_dir: RunsDir = None,
) -> None:
    """Convert a model to the Hugging Face class of the same outputs, or one of those back."""
    from skyformer.hf.conversion import from_huggingface, is_own_folder, to_huggingface
    from skyformer.model.storage import CONFIG_FILE
    from skyformer.training.runs import open_run

    if output.exists() and any(output.iterdir() if output.is_dir() else [output]):
        raise InputError(f"OUTPUT must be a new or empty folder; {output} has content")
    folder, labels = Path(source), None
    if not (folder / CONFIG_FILE).is_file():
        run = open_run(source, runs_dir)
        folder, labels = run.model_folder, list(run.config.task.spec.label_names)
    if not (folder / CONFIG_FILE).is_file():
        raise DataError(f"{folder} has no {CONFIG_FILE}, so it is no folder of a model")
    if is_own_folder(folder):
        theirs = to_huggingface(folder, labels)
        theirs.save_pretrained(output)
        say(f"{folder} -> {output}: {type(theirs).__name__} of transformers")
    else:
        own = from_huggingface(folder)
        own.save_pretrained(output)
        say(f"{folder} -> {output}: {type(own).__name__} of skyformer")
