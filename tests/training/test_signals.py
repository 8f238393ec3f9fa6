"""Ctrl-C and SIGTERM: the current step is finished and saved, a second signal stops immediately."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import Callback

from skyformer.errors import InterruptedRunError
from skyformer.training.fit import resume, train
from skyformer.training.module import ClassifierModule
from skyformer.training.runs import Run
from skyformer.training.signals import StopSignals
from tests.training.conftest import Finished
from tests.training.tiny import assert_same_run, tiny_config


class Send(Callback):
    """Sends signals to this process in the middle of a step."""

    def __init__(self, batch: int, *numbers: signal.Signals) -> None:
        self.batch, self.numbers = batch, numbers

    def on_before_backward(self, trainer: object, module: object, loss: object) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == self.batch:
            for number in self.numbers:
                os.kill(os.getpid(), number)


@pytest.mark.parametrize(("number", "code", "accumulate"), [(signal.SIGTERM, 143, 1), (signal.SIGINT, 130, 3)])
def test_a_signal_saves_and_the_run_can_be_resumed(
    number: signal.Signals, code: int, accumulate: int, finished: Finished, runs_dir: Path, data_dir: Path
) -> None:
    config = tiny_config(accumulate=accumulate)
    run = Run(runs_dir / config.run_name())
    # The first of the batches of step 8, at which no checkpoint is due.
    send = Send(7 * accumulate + 1, number)
    with pytest.raises(InterruptedRunError) as caught:
        train(config, runs_dir=runs_dir, data_dir=data_dir, progress=False, callbacks=[send])
    assert caught.value.exit_code == code
    assert f"stopped at step 8 of 14 by {number.name}" in str(caught.value)
    assert f"skyformer train --resume {run.folder}" in str(caught.value)
    assert (run.state.state, run.state.step) == ("interrupted", 8)
    assert (run.checkpoints / "step-000008.json").exists()
    resume(run, data_dir=data_dir, progress=False)
    assert_same_run(run, finished(config))


@pytest.mark.parametrize("call", [2, 8, 11], ids=["between steps", "after the last step", "test"])
def test_a_signal_ends_an_evaluation(
    call: int, whole: Run, runs_dir: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    original = ClassifierModule.test_step

    def interrupted(module: ClassifierModule, batch: object, batch_idx: int) -> None:
        calls.append(batch_idx)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGTERM)
        original(module, batch, batch_idx)

    monkeypatch.setattr(ClassifierModule, "test_step", interrupted)
    with pytest.raises(InterruptedRunError, match="stopped while evaluating by SIGTERM"):
        train(tiny_config(), runs_dir=runs_dir, data_dir=data_dir, progress=False)
    assert len(calls) == call
    run = Run(runs_dir / whole.name)
    resume(run, data_dir=data_dir, progress=False)
    assert_same_run(run, whole)


def test_the_second_signal_stops_immediately(runs_dir: Path, data_dir: Path) -> None:
    config = tiny_config()
    send = Send(8, signal.SIGINT, signal.SIGINT)
    with pytest.raises(InterruptedRunError, match="stopped immediately by SIGINT") as caught:
        train(config, runs_dir=runs_dir, data_dir=data_dir, progress=False, callbacks=[send])
    assert caught.value.exit_code == 130
    run = Run(runs_dir / config.run_name())
    assert run.state.state == "interrupted"
    assert not (run.checkpoints / "step-000008.ckpt").exists()


def test_handlers_are_put_back(runs_dir: Path, data_dir: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with StopSignals("resume it") as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received == signal.SIGTERM
    train(tiny_config(steps=4, eval_every=4), runs_dir=runs_dir, data_dir=data_dir, progress=False)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
