"""Run folders in any state that were never trained, for tests of everything around training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from skyformer.training.building import build_model
from skyformer.training.config import RunConfig
from skyformer.training.metrics import COLUMNS
from skyformer.training.presets import load_preset
from skyformer.training.runs import Run, RunResult, create_run

SMALL = ("model.dim=8", "model.hidden_dim=8", "model.num_layers=1", "model.features=4", "optim.warmup_steps=2")


def small_config(task: str = "text", *overrides: str, seed: int = 0, attention: str | None = None) -> RunConfig:
    """A config that is quick to build a model from."""
    return load_preset(task, overrides=[*SMALL, *overrides], steps=10, seed=seed, attention=attention)


def result_of(run: Run, test_accuracy: float = 0.5) -> RunResult:
    """A possible result of the run."""
    config = run.config
    return RunResult(
        run=run.name,
        preset=config.preset,
        note=config.note,
        task=config.task.name,
        attention=config.model.attention,
        seed=config.seed,
        steps=config.loop.steps,
        best_step=5,
        dev_accuracy=0.6,
        dev_loss=0.7,
        dev_examples=20,
        test_accuracy=test_accuracy,
        test_loss=0.8,
        test_examples=30,
        steps_per_second=4.0,
        seconds=2.5,
        peak_memory_bytes=None,
        parameters=100,
        config_digest=config.digest(),
        environment_digest=run.environment.digest(),
        finished="2030-01-01T00:00:00+00:00",
    )


def save_model(run: Run) -> None:
    """Save an untrained model as the run's best model."""
    build_model(run.config).save_pretrained(run.model_folder)


def finished_run(runs_dir: Path, config: RunConfig | None = None) -> Run:
    """A run with a model and a result."""
    run = create_run(config or small_config(), runs_dir)
    save_model(run)
    run.write_result(result_of(run))
    return run


def a_config(
    task: str = "listops",
    attention: str = "skyformer",
    *,
    seed: int = 0,
    preset: str = "cpu",
    overrides: Sequence[str] = (),
) -> RunConfig:
    return load_preset(task, preset, attention=attention, seed=seed, overrides=overrides)


def start(config: RunConfig, runs_dir: Path, *, state: str = "interrupted", step: int = 250) -> Run:
    """An unfinished run at `step`."""
    run = create_run(config, runs_dir)
    run.write_state(run.stored_state().replace(state=state, step=step, best_accuracy=0.25, seconds=10.0))
    return run


def finish(config: RunConfig, runs_dir: Path, *, accuracy: float = 0.4, seconds: float = 100.0) -> Run:
    """A run with a result and a curve of three evaluations."""
    run = start(config, runs_dir, state="finished", step=config.loop.steps)
    result = result_of(run, accuracy)
    numbers = {"dev_accuracy": accuracy + 0.01, "seconds": seconds, "peak_memory_bytes": 123_000_000}
    run.write_result(result.model_copy(update=numbers))
    write_curve(run, [(0.3, 2.0, seconds / 3), (0.35, 1.8, seconds * 2 / 3), (accuracy, 1.7, seconds)])
    return run


def write_curve(run: Run, evaluations: Sequence[tuple[float, float, float]]) -> None:
    """metrics.csv with these accuracies, losses and seconds on the dev set."""
    lines = [",".join(COLUMNS)]
    for number, (accuracy, loss, seconds) in enumerate(evaluations, start=1):
        lines.append(f"{number * 100},train,{loss},{accuracy},0.0001,{seconds}")
        lines.append(f"{number * 100},dev,{loss},{accuracy},,{seconds}")
    run.metrics_file.write_text("\n".join(lines) + "\n")
