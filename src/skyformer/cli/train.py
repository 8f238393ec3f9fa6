"""`skyformer train`, `evaluate` and `predict`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from skyformer.cli import completion
from skyformer.cli.options import (
    THREADS,
    DataDir,
    DataOptions,
    DataSeed,
    DevSource,
    LabelColumn,
    LevelName,
    Limit,
    Loggers,
    MaxLength,
    Overrides,
    OwnSource,
    RunName,
    RunsDir,
    SecondColumn,
    Steps,
    TestSource,
    TextColumn,
    TokenizerName,
    refuse_given,
)
from skyformer.cli.output import say
from skyformer.errors import InputError
from skyformer.files import read_document
from skyformer.lra.tasks import TASKS, Split
from skyformer.report.progress import display
from skyformer.report.tables import duration

if TYPE_CHECKING:
    from skyformer.training.config import RunConfig
    from skyformer.training.prediction import Input, Prediction
    from skyformer.training.runs import Run, RunResult

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

_TRAIN_EXAMPLES = """
Examples:

skyformer train listops  # the paper's preset

skyformer train text --attention kernelized --preset cpu  # for two cores

skyformer train text --set optim.lr=3e-4 --steps 5000 --seed 1

skyformer train image --show-config  # print the settings only

skyformer train --data reviews.jsonl  # own data with the columns text and label

skyformer train --data train.csv --test test.csv --text review --label stars --attention softmax

skyformer train --config runs/RUN/config.yaml --seed 1  # as another run, with another seed

skyformer train text --sequence-parallel 2  # two processes share each sequence

skyformer train --resume RUN  # after a crash or Ctrl-C
"""
_EVALUATE_EXAMPLES = """
Examples:

skyformer evaluate RUN

skyformer evaluate RUN --split dev --json

skyformer evaluate RUN --data other.jsonl  # any file with texts and labels
"""
_PREDICT_EXAMPLES = """
Examples:

skyformer predict RUN "A film to remember."  # text

skyformer predict RUN "\\[MAX 2 9 \\[MIN 4 7 ] 0 ]"  # listops

skyformer predict RUN one.txt other.txt --file  # retrieval

skyformer predict RUN drawing.png  # image, pathfinder

skyformer predict RUN - < review.txt  # standard input

skyformer predict RUN --input new.jsonl --output predicted.jsonl  # a file of texts
"""


@dataclass(frozen=True)
class _Chosen:
    """The settings given to `skyformer train`; None stands for the preset's or the run's own."""

    task: str | None
    preset: str | None
    attention: str | None
    overrides: tuple[str, ...]
    steps: int | None
    seed: int | None


def add_commands(app: typer.Typer) -> None:
    """Add the commands of this module to `app`."""
    app.command("train", epilog=_TRAIN_EXAMPLES)(train)
    app.command("evaluate", epilog=_EVALUATE_EXAMPLES)(evaluate)
    app.command("predict", epilog=_PREDICT_EXAMPLES)(predict)


def train(
    task: Annotated[
        str | None,
        typer.Argument(metavar="TASK", help=f"{', '.join(TASKS)}; or --data.", autocompletion=completion.task),
    ] = None,
    data: OwnSource = None,
    dev: DevSource = None,
    test: TestSource = None,
    text: TextColumn = None,
    label: LabelColumn = None,
    text_b: SecondColumn = None,
    tokenizer: TokenizerName = None,
    attention: Annotated[
        str | None,
        typer.Option(
            "--attention",
            help="softmax, kernelized, skyformer, performer, ... (default: skyformer).",
            autocompletion=completion.attention,
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            "--preset",
            help="paper, cpu, ... (default: paper); for own data: quick, standard or long (default: standard).",
            autocompletion=completion.preset,
        ),
    ] = None,
    overrides: Overrides = None,
    steps: Steps = None,
    limit: Limit = None,
    max_length: MaxLength = None,
    level: LevelName = None,
    data_seed: DataSeed = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Seed for weights, batches and dropout.")] = None,
    resume: Annotated[
        str | None,
        typer.Option("--resume", metavar="RUN", help="Resume an unfinished run.", autocompletion=completion.run),
    ] = None,
    show_config: Annotated[bool, typer.Option("--show-config", help="Print the settings without training.")] = False,
    devices: Annotated[
        str | None, typer.Option("--devices", help="Number of devices (default: 1, or --sequence-parallel).")
    ] = None,
    strategy: Annotated[str | None, typer.Option("--strategy", help="auto, ddp or fsdp.")] = None,
    precision: Annotated[str | None, typer.Option("--precision", help="32-true, bf16-mixed, 16-mixed, ...")] = None,
    accelerator: Annotated[str | None, typer.Option("--accelerator", help="auto, cpu, gpu, mps, ...")] = None,
    threads: Annotated[int | None, typer.Option("--threads", min=1, help=THREADS)] = None,
    sequence_parallel: Annotated[
        int | None,
        typer.Option("--sequence-parallel", metavar="N", help="Let N processes share each sequence (default: 1)."),
    ] = None,
    runs_dir: RunsDir = None,
    data_dir: DataDir = None,
    no_progress: Annotated[bool, typer.Option("--no-progress", help="Show no progress.")] = False,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="A whole configuration in YAML, as --show-config prints it or a run has it.",
        ),
    ] = None,
    loggers: Loggers = None,
) -> None:
    """Train a model on a task of Long Range Arena or on own data, or resume an unfinished run.

    A run is a folder. If its process is killed, --resume continues the run, which ends with the same numbers.
    """
    from skyformer.files import runs_dir_or_default
    from skyformer.training.config import to_yaml

    hardware = {
        "devices": devices,
        "strategy": strategy,
        "precision": precision,
        "accelerator": accelerator,
        "threads": threads,
        "sequence_parallel": sequence_parallel,
    }
    short = [f"hardware.{name}={value}" for name, value in hardware.items() if value is not None]
    if loggers:
        short.append(f"loop.loggers={json.dumps(loggers)}")
    source = DataOptions(data, dev, test, text, text_b, label, tokenizer, limit, level, data_seed, max_length)
    source.check(task)
    chosen = _Chosen(task, preset, attention, (*(overrides or ()), *source.settings(), *short), steps, seed)
    if data is not None and (resume or config):
        raise InputError(f"{'--resume' if resume else '--config'} has its data already; leave out --data")
    run = None if resume is None else _run_to_resume(resume, runs_dir, chosen, config)
    settings = _settings(chosen, config, source, data_dir, no_progress) if run is None else run.config
    if show_config:
        typer.echo(to_yaml(settings), nl=False)
        return

    from skyformer.training import fit

    if run is None:
        result = fit.train(settings, runs_dir=runs_dir, data_dir=data_dir, progress=not no_progress)
        folder = runs_dir_or_default(runs_dir) / result.run
    else:
        result, folder = fit.resume(run, data_dir=data_dir, progress=not no_progress), run.folder
    if fit.is_main_process():
        say(_result_line(result, folder))


def _settings(
    chosen: _Chosen, config: Path | None, source: DataOptions, data_dir: Path | None, quiet: bool
) -> RunConfig:
    """The settings of a new run."""
    from skyformer.training.config import from_yaml
    from skyformer.training.presets import change_config, load_preset

    if config is not None:
        refused = {"a task": chosen.task, "--preset": chosen.preset, "--attention": chosen.attention}
        named = [name for name, value in refused.items() if value is not None]
        if named:
            raise InputError(f"--config has them already: leave out {', '.join(named)}, or change it with --set")
        whole = from_yaml(read_document(config), str(config))
        return change_config(whole, chosen.overrides, steps=chosen.steps, seed=chosen.seed)
    if chosen.task is None and source.data is None:
        raise InputError(
            f"name a task to train on: {', '.join(TASKS)}; or give your own data: --data FILE; or resume a run: "
            "--resume RUN"
        )
    return load_preset(
        chosen.task or source.prepare(data_dir, quiet=quiet),
        chosen.preset,
        attention=chosen.attention,
        overrides=chosen.overrides,
        steps=chosen.steps,
        seed=chosen.seed,
    )


def _run_to_resume(name: str, runs_dir: Path | None, chosen: _Chosen, config: Path | None) -> Run:
    """The run, if the settings on the command line are the same as its own."""
    from skyformer.training.presets import differing, parse_overrides
    from skyformer.training.runs import open_run

    if config is not None:
        raise InputError("--config starts a new run and --resume continues one; use only one of them")
    run = open_run(name, runs_dir)
    given = {
        "task.name": chosen.task,
        "preset": chosen.preset,
        "model.attention": chosen.attention,
        "loop.steps": chosen.steps,
        "seed": chosen.seed,
    }
    stated = {setting: value for setting, value in given.items() if value is not None}
    differences = differing(run.config, parse_overrides(chosen.overrides) | stated)
    if differences:
        raise InputError(
            f"{run.folder} can only be resumed with its own settings: {'; '.join(differences)}. "
            "Leave these options out, or start a new run without --resume"
        )
    return run


def _result_line(result: RunResult, folder: Path) -> str:
    return (
        f"{result.task} with {result.attention} attention, preset {result.preset}, seed {result.seed}: "
        f"test accuracy {result.test_accuracy:.2%} on {result.test_examples:,} examples (best dev accuracy "
        f"{result.dev_accuracy:.2%} at step {result.best_step:,} of {result.steps:,}), "
        f"{duration(result.seconds)}{_in_brackets(result.note)} -> {folder}"
    )


def _in_brackets(note: str) -> str:
    return f" [{note}]" if note else ""


def evaluate(
    run: RunName,
    split: Annotated[
        Split | None, typer.Option("--split", help="Part of the data to evaluate on (default: test).")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", min=1, help="Examples per batch (default: the run's own).")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option("--data", metavar="PATH", help="Evaluate on the rows of this file or `datasets` folder instead."),
    ] = None,
    text: TextColumn = None,
    label: LabelColumn = None,
    text_b: SecondColumn = None,
    sequence_parallel: Annotated[
        int, typer.Option("--sequence-parallel", metavar="N", min=1, help="Let N processes share each sequence.")
    ] = 1,
    as_json: AsJson = False,
    runs_dir: RunsDir = None,
    data_dir: DataDir = None,
) -> None:
    """Evaluate the best model of a run on every example of a split, or of a file with labels."""
    from skyformer.training.runs import open_run

    opened = open_run(run, runs_dir)
    from skyformer.training import fit

    if data is None:
        refuse_given({"--text": text, "--text-b": text_b, "--label": label}, "with --data FILE")
        found = fit.evaluate(
            opened,
            split=(split or Split.TEST).value,
            data_dir=data_dir,
            batch_size=batch_size,
            progress=True,
            sequence_parallel=sequence_parallel,
        )
        if not fit.is_main_process():
            return
    else:
        from skyformer.training.own_files import evaluate_file

        of_split = {"--split": split, "--batch-size": batch_size, "--data-dir": data_dir}
        refuse_given(of_split | {"--sequence-parallel": sequence_parallel > 1}, "without --data")
        with display() as progress:
            found = evaluate_file(opened, data, text=text, text_b=text_b, label=label, progress=progress)
    note, what = opened.config.note, (split or Split.TEST).value if data is None else data
    if as_json:
        _print_json({"run": opened.name, "split": what, "note": note, **asdict(found)})
        return
    say(
        f"{opened.name}: {what} accuracy {found.accuracy:.2%}, loss {found.loss:.4f}, "
        f"{found.examples:,} examples{_in_brackets(note)}"
    )


def predict(
    run: RunName,
    inputs: Annotated[
        list[str] | None,
        typer.Argument(metavar="INPUT", help="A text, an expression or an image file; - reads standard input."),
    ] = None,
    input_file: Annotated[
        str | None,
        typer.Option("--input", metavar="PATH", help="Classify every row of this file or `datasets` folder."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="With --input: write the rows and predictions to this file."),
    ] = None,
    text: TextColumn = None,
    text_b: SecondColumn = None,
    file: Annotated[bool, typer.Option("--file", help="The inputs are names of files to read.")] = False,
    cut: Annotated[
        bool, typer.Option("--cut", help="Cut texts that are too long, as the training data was cut.")
    ] = False,
    as_json: AsJson = False,
    runs_dir: RunsDir = None,
) -> None:
    """Classify new inputs with the best model of a run: label, name and probabilities."""
    from skyformer.training.prediction import Predictor
    from skyformer.training.runs import open_run

    if (input_file is None) != (output is None) or bool(inputs) == (input_file is not None):
        raise InputError("give inputs, or both --input FILE and --output FILE")
    opened = open_run(run, runs_dir)
    if input_file is not None and output is not None:
        refuse_given({"--file": file, "--cut": cut, "--json": as_json}, "without --input")
        from skyformer.training.own_files import predict_file

        with display() as progress:
            count = predict_file(opened, input_file, output, text=text, text_b=text_b, progress=progress)
        say(f"{count:,} predictions of {opened.name} -> {output}")
        return
    refuse_given({"--text": text, "--text-b": text_b}, "with --input FILE")
    inputs = inputs or []
    predictor = Predictor(opened)
    spec, size = predictor.spec, predictor.inputs_per_example
    if len(inputs) % size:
        raise InputError(f"{spec.name} needs {size} texts per prediction; got {len(inputs)} inputs")
    from_files = file or spec.image_side is not None
    examples = [inputs[start : start + size] for start in range(0, len(inputs), size)]
    predictions = [predictor(*(_input(text, from_files) for text in example), cut=cut) for example in examples]
    if as_json:
        _print_json([_with_names(prediction, spec.label_names) for prediction in predictions])
        return
    for prediction in predictions:
        typer.echo(_prediction_line(prediction, spec.label_names))


def _input(text: str, from_file: bool) -> Input:
    if text == "-":
        return sys.stdin.buffer.read()
    return Path(text) if from_file else text


def _prediction_line(prediction: Prediction, names: Sequence[str]) -> str:
    pairs = zip(names, prediction.probabilities, strict=True)
    everything = ", ".join(f"{name} {probability:.4f}" for name, probability in pairs)
    return f"{prediction.label} ({prediction.name}): {everything}"


def _with_names(prediction: Prediction, names: Sequence[str]) -> dict[str, Any]:
    probabilities = dict(zip(names, prediction.probabilities, strict=True))
    return {"label": prediction.label, "name": prediction.name, "probabilities": probabilities}


def _print_json(content: Any) -> None:
    typer.echo(json.dumps(content, indent=2))
