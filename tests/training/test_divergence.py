"""Divergence: one error with step, examples and checkpoint, and never a best model that is not finite."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from skyformer.errors import DivergedError, SolveError, TrainingError
from skyformer.training.fit import evaluate, train
from skyformer.training.module import ClassifierModule
from skyformer.training.runs import Run
from tests.helpers import refused
from tests.training.tiny import STEPS, tiny_config


class Diverge(Callback):
    """Sets the weights of the first attention to NaN before a step, so that its linear system has no solution."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: object, module: ClassifierModule, batch: object, batch_idx: int) -> None:
        if batch_idx + 1 == self.step:
            for parameter in module.model.encoder.parameters():
                parameter.data.fill_(float("nan"))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_unsolvable_system_in_training_is_divergence(accumulate: int, runs_dir: Path, data_dir: Path) -> None:
    config = tiny_config(accumulate=accumulate)
    diverge = Diverge(8 * accumulate)
    with pytest.raises(DivergedError, match=r"at step 8, on training examples \d+") as caught:
        train(config, runs_dir=runs_dir, data_dir=data_dir, progress=False, callbacks=[diverge])
    for words in ("loss is nan", "positive definite", "step-000006.ckpt", "optim.lr"):
        assert words in str(caught.value)
    assert Run(runs_dir / config.run_name()).state.state == "failed"


def fail_at(monkeypatch: pytest.MonkeyPatch, evaluations: set[int]) -> None:
    """In these evaluations, counted from 1, every batch is unsolvable; each has three batches of 24 examples."""
    calls: list[int] = []
    original = ClassifierModule.test_step

    def test_step(module: ClassifierModule, batch: object, batch_idx: int) -> None:
        calls.append(batch_idx)
        if calls.count(0) in evaluations:
            monkeypatch.setattr(ClassifierModule, "forward", unsolvable)
        original(module, batch, batch_idx)
        monkeypatch.setattr(ClassifierModule, "forward", solvable)

    solvable = ClassifierModule.forward
    monkeypatch.setattr(ClassifierModule, "test_step", test_step)


def unsolvable(module: ClassifierModule, batch: object) -> None:
    raise SolveError("no solution")


def test_an_evaluation_that_is_not_finite_is_never_the_best(
    runs_dir: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at(monkeypatch, {1, 3})
    result = train(tiny_config(), runs_dir=runs_dir, data_dir=data_dir, progress=False)
    assert result.best_step == 10
    rows = [row for row in Run(runs_dir / result.run).metrics() if row.split == "dev"]
    assert [(row.step, math.isnan(row.loss)) for row in rows] == [(5, True), (10, False), (STEPS, True)]


@pytest.mark.parametrize(("failing", "split"), [({1, 2, 3}, "dev"), ({4}, "test")])
def test_without_a_finite_evaluation_there_is_no_result(
    failing: set[int], split: str, runs_dir: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at(monkeypatch, failing)
    with pytest.raises(DivergedError, match=rf"{split} set is not finite .*no solution.*step-0000{STEPS}.ckpt"):
        train(tiny_config(), runs_dir=runs_dir, data_dir=data_dir, progress=False)
    assert Run(runs_dir / tiny_config().run_name()).result is None


def test_evaluate_says_that_the_loss_is_not_finite(whole: Run, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClassifierModule, "forward", unsolvable)
    with pytest.raises(DivergedError, match="on the test set is not finite"):
        evaluate(whole, data_dir=data_dir)


class InfiniteGradient(Callback):
    def on_train_start(self, trainer: object, module: ClassifierModule) -> None:
        module.model.head[0].weight.register_hook(lambda grad: grad * float("inf"))


@pytest.mark.filterwarnings("ignore:.*16-mixed.*")
def test_16_mixed_on_a_cpu_is_guarded(runs_dir: Path, data_dir: Path) -> None:
    """Lightning trains in bf16-mixed then, without a loss scaler that skips such steps."""
    config = tiny_config()
    config = config.replace(hardware=config.hardware.replace(precision="16-mixed"))
    with pytest.raises(DivergedError, match="a gradient is not, at step 1"):
        train(config, runs_dir=runs_dir, data_dir=data_dir, progress=False, callbacks=[InfiniteGradient()])


class AllocateTooMuch(Callback):
    def on_before_backward(self, trainer: object, module: object, loss: object) -> None:
        torch.empty(2**50, dtype=torch.float64)


def test_a_lack_of_memory_is_one_line(runs_dir: Path, data_dir: Path) -> None:
    with refused(TrainingError, "out of memory", "allocate", "last checkpoint: none yet", "loop.batch_size"):
        train(tiny_config(), runs_dir=runs_dir, data_dir=data_dir, progress=False, callbacks=[AllocateTooMuch()])
    assert Run(runs_dir / tiny_config().run_name()).state.state == "failed"
