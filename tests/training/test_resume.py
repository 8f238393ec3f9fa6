"""A run that is killed at any moment resumes and ends as if nothing had happened."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from skyformer.training.config import RunConfig, to_yaml
from skyformer.training.fit import resume
from skyformer.training.runs import Run
from tests.training.conftest import Finished
from tests.training.killing import Kill, end, start, wait_for
from tests.training.tiny import STEPS, assert_same_run, tiny_config

STEP = "module:ClassifierModule.training_step"
SCORED = "module:ClassifierModule.test_step"
SAVED = "checkpoints:CheckpointStore.save_checkpoint"
RECORDED = "checkpoints:CheckpointStore._write_record"


def kill_and_resume(config: RunConfig, runs_dir: Path, data_dir: Path, *kills: Kill) -> Run:
    """Each kill in a process of its own, and then to the end in this one."""
    for kill in kills:
        assert end(start(to_yaml(config), runs_dir, data_dir, kill)) == -signal.SIGKILL
    run = Run(runs_dir / config.run_name())
    assert run.state.state == "interrupted"
    resume(run, data_dir=data_dir, progress=False)
    return run


def test_killed_in_a_step_then_in_an_evaluation_then_in_the_test(whole: Run, runs_dir: Path, data_dir: Path) -> None:
    run, config = Run(runs_dir / whole.name), tiny_config()
    process = start(to_yaml(config), runs_dir, data_dir)
    # Early, so that a busy machine does not let the run end before it is killed.
    wait_for(run.metrics_file, "4,train")
    process.kill()
    assert end(process) == -signal.SIGKILL
    kill_and_resume(config, runs_dir, data_dir, Kill(SCORED, 2), Kill(SCORED, 2, after=True))
    assert_same_run(run, whole)


def test_a_performer_draws_features_when_it_would_have(finished: Finished, runs_dir: Path, data_dir: Path) -> None:
    config = tiny_config(attention="performer", options={"num_features": 8, "redraw_interval": 5})
    assert_same_run(kill_and_resume(config, runs_dir, data_dir, Kill(STEP, 8)), finished(config))


MOMENTS = {
    "before any checkpoint": [Kill(STEP, 2)],
    "in a step after a checkpoint": [Kill(STEP, 8)],
    "right after a checkpoint": [Kill(SAVED, 2, after=True)],
    "right after the checkpoint of an evaluation": [Kill(RECORDED, 2, after=True)],
    "in an evaluation": [Kill(SCORED, 2)],
    "in the second evaluation": [Kill(SCORED, 5)],
    "between a checkpoint and its record": [Kill(RECORDED, 5)],
    "between the first checkpoint and its record": [Kill(RECORDED, 1)],
    "before a checkpoint is moved into place": [Kill("checkpoints:Path.replace", argument="step-000006.ckpt")],
    "before the model is written": [Kill("callbacks:export_model", 1)],
    "after the model is written": [Kill("callbacks:export_model", 1, after=True)],
    "before old checkpoints are removed": [Kill("checkpoints:CheckpointStore.remove_checkpoint", 1)],
    "before the last checkpoint": [Kill(STEP, STEPS)],
    "before the last evaluation": [Kill("fit:_finish", 1)],
    "in the last evaluation": [Kill(SCORED, 8)],
    "in the test": [Kill(SCORED, 11)],
    "before the result": [Kill("runs:Run.write_result", 1)],
    "as the state is written": [Kill("runs:Run.write_state", 4)],
    "as metrics are logged": [Kill("metrics:MetricsFile.append", 5, after=True)],
    "three times": [Kill(STEP, 5), Kill(STEP, 5), Kill(SCORED, 1)],
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_killed_at_every_kind_of_moment(
    moment: str, accumulate: int, finished: Finished, runs_dir: Path, data_dir: Path
) -> None:
    config = tiny_config(accumulate=accumulate)
    kills = [replace(kill, call=kill.call * (accumulate if kill.place == STEP else 1)) for kill in MOMENTS[moment]]
    assert_same_run(kill_and_resume(config, runs_dir, data_dir, *kills), finished(config))
