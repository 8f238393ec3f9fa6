"""A run that is killed, at any moment, goes on and ends as if nothing had happened."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import numpy as np
import pytest

from skyformer.training.config import RunConfig, to_yaml
from skyformer.training.fit import resume
from skyformer.training.runs import Run
from tests.training.conftest import Finished
from tests.training.deaths import Death, end, start, wait_for
from tests.training.tiny import STEPS, assert_same_run, tiny_config

STEP = "module:ClassifierModule.training_step"
SCORED = "module:ClassifierModule.test_step"
SAVED = "checkpoints:CheckpointStore.save_checkpoint"
RECORDED = "checkpoints:CheckpointStore._write_record"


def kill_and_resume(config: RunConfig, runs_dir: Path, data_dir: Path, *deaths: Death) -> Run:
    """Each death in a process of its own, and then to the end in this one."""
    for death in deaths:
        assert end(start(to_yaml(config), runs_dir, data_dir, death)) == -signal.SIGKILL
    run = Run(runs_dir / config.run_name())
    assert run.state.state == "interrupted"
    resume(run, data_dir=data_dir, progress=False)
    return run


def test_killed_at_a_random_moment_then_in_an_evaluation_then_in_the_test(
    whole: Run, runs_dir: Path, data_dir: Path
) -> None:
    seed = time.time_ns() % 2**32
    rng = np.random.default_rng(seed)
    # In the first half, so that a busy machine does not let the run end before it is killed.
    step, delay = 2 * int(rng.integers(1, STEPS // 4 + 1)), float(rng.random() * 0.1)
    print(f"seed {seed}: killed {delay:.3f} s after step {step} was logged")
    run, config = Run(runs_dir / whole.name), tiny_config()
    process = start(to_yaml(config), runs_dir, data_dir)
    wait_for(run.metrics_file, f"{step},train")
    time.sleep(delay)
    process.kill()
    assert end(process) == -signal.SIGKILL
    kill_and_resume(config, runs_dir, data_dir, Death(SCORED, 2), Death(SCORED, 2, after=True))
    assert_same_run(run, whole)


MOMENTS = {
    "before any checkpoint": [Death(STEP, 2)],
    "in a step after a checkpoint": [Death(STEP, 8)],
    "right after a checkpoint": [Death(SAVED, 2, after=True)],
    "right after the checkpoint of an evaluation": [Death(RECORDED, 2, after=True)],
    "in an evaluation": [Death(SCORED, 2)],
    "in the second evaluation": [Death(SCORED, 5)],
    "between a checkpoint and its record": [Death(RECORDED, 5)],
    "between the first checkpoint and its record": [Death(RECORDED, 1)],
    "before a checkpoint is moved into place": [Death("checkpoints:os.fsync", 7)],
    "before the model is written": [Death("callbacks:export_model", 1)],
    "after the model is written": [Death("callbacks:export_model", 1, after=True)],
    "before old checkpoints are removed": [Death("checkpoints:CheckpointStore.remove_checkpoint", 1)],
    "before the last checkpoint": [Death(STEP, STEPS)],
    "before the last evaluation": [Death("fit:_finish", 1)],
    "in the last evaluation": [Death(SCORED, 8)],
    "in the test": [Death(SCORED, 11)],
    "before the result": [Death("runs:Run.write_result", 1)],
    "as the state is written": [Death("runs:Run.write_state", 4)],
    "as metrics are logged": [Death("metrics_log:MetricsLog._append", 5, after=True)],
    "three times": [Death(STEP, 5), Death(STEP, 5), Death(SCORED, 1)],
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_killed_at_every_kind_of_moment(
    moment: str, accumulate: int, finished: Finished, runs_dir: Path, data_dir: Path
) -> None:
    config = tiny_config(accumulate=accumulate)
    deaths = [
        Death(death.place, death.call * (accumulate if death.place == STEP else 1), death.after)
        for death in MOMENTS[moment]
    ]
    assert_same_run(kill_and_resume(config, runs_dir, data_dir, *deaths), finished(config))
