"""Campaigns of kills and signals at random moments: no run is lost, and every run ends as if nothing had happened.

`make test-durability` runs them and prints how many there were. SKYFORMER_DURABILITY is the number of runs per kind.
"""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from skyformer.processes import STOP_SIGNALS
from skyformer.training.config import to_yaml
from skyformer.training.runs import Run
from tests.training.conftest import Finished
from tests.training.killing import COUNTS, end, start
from tests.training.tiny import assert_same_run, tiny_config

RUNS = range(int(os.environ.get("SKYFORMER_DURABILITY", "20")))
LONGEST_WAIT = 4.0
"""Seconds until a signal at most: about as long as an undisturbed run."""


@pytest.mark.durability
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("number", RUNS)
@pytest.mark.parametrize("kind", ["kill", "signal"])
def test_campaign(kind: str, number: int, runs_dir: Path, data_dir: Path, finished: Finished) -> None:
    rng = random.Random(f"{kind} {number}")
    config = tiny_config(workers=2 * (number % 2))
    run = Run(runs_dir / config.run_name())
    for _ in range(rng.randint(1, 4)):
        process = start(to_yaml(config), runs_dir, data_dir)
        process.join(rng.uniform(0.0, LONGEST_WAIT))
        for chosen in [signal.SIGKILL] if kind == "kill" else rng.choices(STOP_SIGNALS, k=rng.randint(1, 2)):
            if process.exitcode is None and process.pid is not None:
                os.kill(process.pid, chosen)
                COUNTS[kind] += 1
        end(process)
        assert not run.folder.exists() or run.state.state in ("interrupted", "finished")
    assert end(start(to_yaml(config), runs_dir, data_dir)) == 0
    assert_same_run(run, finished(tiny_config()))
    COUNTS["run"] += 1
