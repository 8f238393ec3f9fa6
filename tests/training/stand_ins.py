"""Small runs that were never trained, for tests of everything around training."""

from __future__ import annotations

from pathlib import Path

import torch

from skyformer.lra.tasks import task_spec
from skyformer.model import PairClassifier, SequenceClassifier
from skyformer.training.config import RunConfig
from skyformer.training.presets import load_preset
from skyformer.training.runs import Run, RunResult, create_run

SMALL = ("model.dim=8", "model.hidden_dim=8", "model.num_layers=1", "model.features=4", "optim.warmup_steps=2")


def small_config(task: str = "text", *overrides: str, seed: int = 0, attention: str | None = None) -> RunConfig:
    """A config that is quick to build a model from."""
    return load_preset(task, overrides=[*SMALL, *overrides], steps=10, seed=seed, attention=attention)


def result_of(run: Run, test_accuracy: float = 0.5) -> RunResult:
    """A result such as the run could have had."""
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
    """An untrained model where the best one would be."""
    torch.manual_seed(0)
    spec = task_spec(run.config.task.name)
    (PairClassifier if spec.paired else SequenceClassifier)(run.config.build_model_config(spec)).save_pretrained(
        run.model_folder
    )


def finished_run(runs_dir: Path, config: RunConfig | None = None) -> Run:
    """A run with a model and a result."""
    run = create_run(config or small_config(), runs_dir)
    save_model(run)
    run.write_result(result_of(run))
    return run
