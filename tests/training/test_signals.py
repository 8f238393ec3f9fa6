"""Ctrl-C and SIGTERM: the current step is finished and saved, a second signal stops immediately."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from skyformer.errors import InterruptedRunError
from skyformer.training.fit import resume, train
from skyformer.training.module import ClassifierModule
from skyformer.training.runs import Run, create_run
from tests.training.conftest import Finished
from tests.training.tiny import Send, assert_same_run, tiny_config


def test_a_signal_saves_and_the_run_can_be_resumed(finished: Finished, runs_dir: Path, data_dir: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    config = tiny_config(accumulate=3)
    run = Run(runs_dir / config.run_name())
    # The first of the three batches of step 8, at which no checkpoint is due.
    send = Send(7 * 3 + 1, signal.SIGTERM)
    with pytest.raises(InterruptedRunError) as caught:
        train(config, runs_dir=runs_dir, data_dir=data_dir, progress=False, callbacks=[send])
    assert caught.value.exit_code == 143
    assert "stopped at step 8 of 14 by SIGTERM" in str(caught.value)
    assert f"skyformer train --resume {run.folder}" in str(caught.value)
    assert (run.state.state, run.state.step) == ("interrupted", 8)
    assert (run.checkpoints / "step-000008.json").exists()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    resume(run, data_dir=data_dir, progress=False)
    assert_same_run(run, finished(config))
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_signal_ends_an_evaluation(
    whole: Run, runs_dir: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First between steps, then after the last step, then in the test; each evaluation has three batches."""
    calls: list[int] = []
    original = ClassifierModule.test_step

    def interrupted(module: ClassifierModule, batch: object, batch_idx: int) -> None:
        calls.append(batch_idx)
        if len(calls) in (2, 2 + 8, 2 + 8 + 5):
            os.kill(os.getpid(), signal.SIGTERM)
        original(module, batch, batch_idx)

    monkeypatch.setattr(ClassifierModule, "test_step", interrupted)
    run = create_run(tiny_config(), runs_dir)
    for ended_at, step in ((2, 5), (2 + 8, 14), (2 + 8 + 5, 14)):
        with pytest.raises(InterruptedRunError, match="stopped while evaluating by SIGTERM"):
            resume(run, data_dir=data_dir, progress=False)
        assert len(calls) == ended_at
        assert run.state.step == step
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
