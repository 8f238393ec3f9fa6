"""Run folders in any state, with curves, as training would leave them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from skyformer.training.config import RunConfig
from skyformer.training.presets import load_preset
from skyformer.training.runs import Run, create_run
from tests.training.stand_ins import result_of

COLUMNS = "step,split,loss,accuracy,lr,seconds"


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
    """A run that has come as far as `step`."""
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
    lines = [COLUMNS]
    for number, (accuracy, loss, seconds) in enumerate(evaluations, start=1):
        lines.append(f"{number * 100},train,{loss},{accuracy},0.0001,{seconds}")
        lines.append(f"{number * 100},dev,{loss},{accuracy},,{seconds}")
    run.metrics_file.write_text("\n".join(lines) + "\n")
