"""What `skyformer train`, `evaluate` and `predict` do; apart from their declaration, because this needs an extra."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from skyformer.cli.train import Places, Wanted
from skyformer.errors import InputError
from skyformer.files import read_document
from skyformer.lra.tasks import TASKS, Split
from skyformer.report.tables import duration
from skyformer.training.config import RunConfig, from_yaml, to_yaml
from skyformer.training.prediction import Input, Prediction, Predictor
from skyformer.training.presets import DEFAULT_PRESET, differing, load_preset, parse_overrides
from skyformer.training.runs import Run, RunResult, open_run, runs_dir_or_default


def show(wanted: Wanted, resume: str | None, places: Places) -> None:
    """Print the settings of what would be trained."""
    config = _config(wanted) if resume is None else _run_to_resume(wanted, resume, places).config
    typer.echo(to_yaml(config), nl=False)


def start_run(wanted: Wanted, places: Places) -> None:
    """Train a new run and print what came out."""
    config = _config(wanted)
    from skyformer.training import fit

    result = fit.train(config, runs_dir=places.runs_dir, data_dir=places.data_dir, progress=places.progress)
    if fit.is_main_process():
        typer.echo(result_line(result, runs_dir_or_default(places.runs_dir) / result.run))


def resume_run(wanted: Wanted, name: str, places: Places) -> None:
    """Go on with a run and print what came out."""
    run = _run_to_resume(wanted, name, places)
    from skyformer.training import fit

    result = fit.resume(run, data_dir=places.data_dir, progress=places.progress)
    if fit.is_main_process():
        typer.echo(result_line(result, run.folder))


def _config(wanted: Wanted) -> RunConfig:
    if wanted.config is not None:
        _refuse_beside_config(wanted)
        return from_yaml(read_document(wanted.config), str(wanted.config))
    if wanted.task is None:
        raise InputError(f"name a task to train on: {', '.join(TASKS)}; or go on with a run: --resume RUN")
    return load_preset(
        wanted.task,
        wanted.preset or DEFAULT_PRESET,
        attention=wanted.attention,
        overrides=wanted.overrides,
        steps=wanted.steps,
        seed=wanted.seed,
    )


def _refuse_beside_config(wanted: Wanted) -> None:
    given = {**asdict(wanted), "config": None}
    named = [name for name, value in given.items() if value not in (None, ())]
    if named:
        raise InputError(f"--config has every setting; leave out {', '.join(named)}")


def _run_to_resume(wanted: Wanted, name: str, places: Places) -> Run:
    """The run, whose own settings no setting on the command line may contradict."""
    if wanted.config is not None:
        raise InputError("--config starts a run and --resume goes on with one; give one of them")
    run = open_run(name, places.runs_dir)
    given = {
        "task.name": wanted.task,
        "preset": wanted.preset,
        "model.attention": wanted.attention,
        "loop.steps": wanted.steps,
        "seed": wanted.seed,
    }
    stated = {setting: value for setting, value in given.items() if value is not None}
    differences = differing(run.config, parse_overrides(wanted.overrides) | stated)
    if differences:
        raise InputError(
            f"{run.folder} cannot go on with other settings than it was started with: {'; '.join(differences)}. "
            "Leave them out, or start a new run without --resume"
        )
    return run


def result_line(result: RunResult, folder: Path) -> str:
    """A finished run in one line."""
    note = f" [{result.note}]" if result.note else ""
    return (
        f"{result.task} with {result.attention} attention, preset {result.preset}, seed {result.seed}: "
        f"test accuracy {result.test_accuracy:.2%} on {result.test_examples:,} examples (best dev accuracy "
        f"{result.dev_accuracy:.2%} at step {result.best_step:,} of {result.steps:,}), "
        f"{duration(result.seconds)}{note} -> {folder}"
    )


def evaluate_run(name: str, split: Split, batch_size: int | None, as_json: bool, places: Places) -> None:
    """Print loss and accuracy of a run's best model on one part of its data."""
    run = open_run(name, places.runs_dir)
    from skyformer.training import fit

    found = fit.evaluate(run, split=split.value, data_dir=places.data_dir, batch_size=batch_size)
    if as_json:
        _print_json({"run": run.name, "split": split.value, "note": run.config.note, **asdict(found)})
        return
    note = f" [{run.config.note}]" if run.config.note else ""
    typer.echo(
        f"{run.name}: {split.value} accuracy {found.accuracy:.2%}, loss {found.loss:.4f}, "
        f"{found.examples:,} examples{note}"
    )


def predict_inputs(name: str, inputs: list[str], file: bool, cut: bool, as_json: bool, places: Places) -> None:
    """Print a prediction for each input, or for each two of a paired task."""
    predictor = Predictor(open_run(name, places.runs_dir))
    size = predictor.inputs_an_example
    if len(inputs) % size:
        raise InputError(f"{predictor.spec.name} compares two texts a prediction; got {len(inputs)} inputs")
    from_files = file or predictor.spec.image_side is not None
    examples = [inputs[start : start + size] for start in range(0, len(inputs), size)]
    predictions = [predictor(*(_input(text, from_files) for text in example), cut=cut) for example in examples]
    if as_json:
        _print_json([_with_names(prediction, predictor.spec.label_names) for prediction in predictions])
        return
    for prediction in predictions:
        typer.echo(_prediction_line(prediction, predictor.spec.label_names))


def _input(text: str, from_file: bool) -> Input:
    if text == "-":
        return sys.stdin.buffer.read()
    return Path(text) if from_file else text


def _prediction_line(prediction: Prediction, names: tuple[str, ...]) -> str:
    pairs = zip(names, prediction.probabilities, strict=True)
    everything = ", ".join(f"{name} {probability:.4f}" for name, probability in pairs)
    return f"{prediction.label} ({prediction.name}): {everything}"


def _with_names(prediction: Prediction, names: tuple[str, ...]) -> dict[str, Any]:
    probabilities = dict(zip(names, prediction.probabilities, strict=True))
    return {"label": prediction.label, "name": prediction.name, "probabilities": probabilities}


def _print_json(content: Any) -> None:
    typer.echo(json.dumps(content, indent=2))
