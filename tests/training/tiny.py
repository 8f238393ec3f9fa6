"""Configs of runs that take about a second, signals in the middle of a step, and a comparison of two runs."""

from __future__ import annotations

import csv
import os
import signal
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from skyformer.training.config import RunConfig
from skyformer.training.runs import Run

STEPS = 14


def tiny_config(
    *, seed: int = 0, attention: str = "skyformer", options: dict[str, Any] | None = None, **loop: Any
) -> RunConfig:
    """Fourteen steps of ListOps with evaluations at 5, 10 and the end, and additional checkpoints at 3, 6, ..."""
    settings = {
        "steps": STEPS,
        "batch_size": 4,
        "eval_every": 5,
        "eval_batch_size": 24,
        "checkpoint_every": 3,
        "log_every": 2,
        **loop,
    }
    return RunConfig(
        preset="tiny",
        seed=seed,
        task={"name": "listops", "limit": 64, "max_length": 64},
        model={
            "attention": attention,
            "attention_options": {"num_landmarks": 8} if options is None else options,
            "dim": 16,
            "hidden_dim": 16,
        },
        optim={"lr": 3e-3, "warmup_steps": 3},
        loop=settings,
        hardware={"accelerator": "cpu"},
    )


def rows(run: Run) -> list[list[str]]:
    """metrics.csv without its last column, the seconds."""
    with run.metrics_file.open(newline="") as file:
        return [row[:-1] for row in csv.reader(file)]


def checkpoint(run: Run, step: int) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(run.checkpoints / f"step-{step:06d}.ckpt", weights_only=True)
    return content


def model_file(run: Run) -> Path:
    [file] = run.model_folder.glob("*.safetensors")
    return file


def assert_same_run(actual: Run, expected: Run) -> None:
    """Every logged number, the last weights with their optimiser, the best model, and the result: bit for bit."""
    assert rows(actual) == rows(expected)
    steps = expected.config.loop.last_step
    ours, theirs = checkpoint(actual, steps), checkpoint(expected, steps)
    assert ours["state_dict"].keys() == theirs["state_dict"].keys()
    assert all(torch.equal(tensor, theirs["state_dict"][name]) for name, tensor in ours["state_dict"].items())
    assert_equal_trees(ours["optimizer_states"], theirs["optimizer_states"])
    assert_equal_trees(ours["lr_schedulers"], theirs["lr_schedulers"])
    assert model_file(actual).name == model_file(expected).name
    assert model_file(actual).read_bytes() == model_file(expected).read_bytes()
    assert timeless(actual) == timeless(expected)


def assert_equal_trees(actual: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert torch.equal(actual, expected)
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for key in expected:
            assert_equal_trees(actual[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_equal_trees(one, other)
    else:
        assert actual == expected


def timeless(run: Run) -> dict[str, Any]:
    """A result without times and memory."""
    assert run.result is not None
    return run.result.model_dump(exclude={"steps_per_second", "seconds", "peak_memory_bytes", "finished"})


class Send(Callback):
    """Sends signals to this process in the middle of a step."""

    def __init__(self, batch: int, *numbers: signal.Signals) -> None:
        self.batch, self.numbers = batch, numbers

    def on_before_backward(self, trainer: object, module: object, loss: object) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == self.batch:
            for number in self.numbers:
                os.kill(os.getpid(), number)
