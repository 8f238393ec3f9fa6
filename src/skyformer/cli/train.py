"""`skyformer train`, `evaluate` and `predict`: what they take, and how they are explained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from skyformer.cli.data import DataDir
from skyformer.errors import MissingExtraError
from skyformer.lra.tasks import TASKS, Split

RunsDir = Annotated[
    Path | None, typer.Option("--runs-dir", help="Where runs are kept (default: SKYFORMER_RUNS, or ./runs).")
]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="A run: its name, or its folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

_TRAIN_EXAMPLES = """
Examples:

skyformer train listops  # the paper's preset

skyformer train text --attention kernelized --preset cpu  # for two cores

skyformer train text --set optim.lr=3e-4 --steps 5000 --seed 1

skyformer train image --show-config  # print the settings only

skyformer train --resume RUN  # after a crash or Ctrl-C
"""
_EVALUATE_EXAMPLES = """
Examples:

skyformer evaluate RUN

skyformer evaluate RUN --split dev --json
"""
_PREDICT_EXAMPLES = """
Examples:

skyformer predict RUN "A film to remember."  # text

skyformer predict RUN "\\[MAX 2 9 \\[MIN 4 7 ] 0 ]"  # listops

skyformer predict RUN one.txt other.txt --file  # retrieval

skyformer predict RUN drawing.png  # image, pathfinder

skyformer predict RUN - < review.txt  # standard input
"""


@dataclass(frozen=True)
class Wanted:
    """What `skyformer train` was asked for; nothing stands for the preset's or the run's own setting."""

    task: str | None
    attention: str | None
    preset: str | None
    overrides: tuple[str, ...]
    steps: int | None
    seed: int | None
    config: Path | None


@dataclass(frozen=True)
class Places:
    """Where runs and data are, and whether progress is shown."""

    runs_dir: Path | None
    data_dir: Path | None
    progress: bool = True


@contextmanager
def train_extra() -> Iterator[None]:
    """The command line works without the libraries of training; only its own commands need them."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingExtraError(str(error.name), "train") from error


def add_commands(app: typer.Typer) -> None:
    """Make the commands of this module commands of `app`."""
    app.command("train", epilog=_TRAIN_EXAMPLES)(train)
    app.command("evaluate", epilog=_EVALUATE_EXAMPLES)(evaluate)
    app.command("predict", epilog=_PREDICT_EXAMPLES)(predict)


def train(
    task: Annotated[str | None, typer.Argument(metavar="TASK", help=f"{', '.join(TASKS)}.")] = None,
    attention: Annotated[
        str | None,
        typer.Option("--attention", help="softmax, kernelized, skyformer, performer, ... (default: skyformer)."),
    ] = None,
    preset: Annotated[str | None, typer.Option("--preset", help="paper, cpu, ... (default: paper).")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Change a setting, such as optim.lr=3e-4; repeatable."),
    ] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="Training steps, as --set loop.steps=N.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Seed of everything random in the run.")] = None,
    resume: Annotated[
        str | None, typer.Option("--resume", metavar="RUN", help="Go on with a run that was not finished.")
    ] = None,
    show_config: Annotated[bool, typer.Option("--show-config", help="Print the settings and stop.")] = False,
    devices: Annotated[str | None, typer.Option("--devices", help="How many devices, or auto.")] = None,
    strategy: Annotated[str | None, typer.Option("--strategy", help="auto, ddp or fsdp.")] = None,
    precision: Annotated[str | None, typer.Option("--precision", help="32-true, bf16-mixed, 16-mixed, ...")] = None,
    accelerator: Annotated[str | None, typer.Option("--accelerator", help="auto, cpu, gpu, mps, ...")] = None,
    threads: Annotated[int | None, typer.Option("--threads", help="CPU threads (default: torch's own).")] = None,
    runs_dir: RunsDir = None,
    data_dir: DataDir = None,
    no_progress: Annotated[bool, typer.Option("--no-progress", help="Show no progress bar.")] = False,
    config: Annotated[Path | None, typer.Option("--config", hidden=True, help="A whole config as YAML.")] = None,
) -> None:
    """Train a model on a task of Long Range Arena, or go on with a run.

    A run is a folder; killed at any moment, it goes on with --resume and ends with the same numbers.
    """
    with train_extra():
        from skyformer.cli.train_actions import resume_run, show, start_run
    hardware = {
        "devices": devices,
        "strategy": strategy,
        "precision": precision,
        "accelerator": accelerator,
        "threads": threads,
    }
    chosen = [f"hardware.{name}={value}" for name, value in hardware.items() if value is not None]
    wanted = Wanted(task, attention, preset, (*(overrides or ()), *chosen), steps, seed, config)
    places = Places(runs_dir, data_dir, not no_progress)
    if show_config:
        show(wanted, resume, places)
    elif resume is not None:
        resume_run(wanted, resume, places)
    else:
        start_run(wanted, places)


def evaluate(
    run: RunName,
    split: Annotated[Split, typer.Option("--split", help="Which part of the data.")] = Split.TEST,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", help="Examples a batch (default: the run's own).")
    ] = None,
    as_json: AsJson = False,
    runs_dir: RunsDir = None,
    data_dir: DataDir = None,
) -> None:
    """Evaluate the best model of a run on every example of a part of its data."""
    with train_extra():
        from skyformer.cli.train_actions import evaluate_run
    evaluate_run(run, split, batch_size, as_json, Places(runs_dir, data_dir))


def predict(
    run: RunName,
    inputs: Annotated[
        list[str],
        typer.Argument(metavar="INPUT", help="A text, an expression, a picture's file; - is standard input."),
    ],
    file: Annotated[bool, typer.Option("--file", help="The inputs are names of files to read.")] = False,
    cut: Annotated[bool, typer.Option("--cut", help="Cut a text that is too long, as the training data was.")] = False,
    as_json: AsJson = False,
    runs_dir: RunsDir = None,
) -> None:
    """Say what the best model of a run makes of new input: label, name and probabilities."""
    with train_extra():
        from skyformer.cli.train_actions import predict_inputs
    predict_inputs(run, inputs, file, cut, as_json, Places(runs_dir, None))
