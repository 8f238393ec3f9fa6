"""Sweeps on Ray: nodes are checked before anything starts, and runs survive the death of a worker."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from skyformer.environment import installed_version
from skyformer.errors import InputError, MissingExtraError, install_command
from skyformer.registry import IMPORT_VARIABLE
from skyformer.training.ray_sweeps import Resources, check_node, ray_sweep, train_here
from skyformer.training.runs import Run, list_runs
from skyformer.training.sweeps import Ending, check_data
from tests.helpers import refused
from tests.training.tiny import rows, tiny_config

PATIENCE = 120
STEPS = 300


def test_without_ray_the_extra_is_named(data_dir: Path, runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with refused(MissingExtraError, "'ray' is not installed", install_command("ray")):
        ray_sweep([tiny_config()], runs_dir=runs_dir, data_dir=data_dir)


def test_an_address_without_a_cluster(data_dir: Path, runs_dir: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        free = listener.getsockname()[1]
    with refused(InputError, f"no Ray cluster answers at 127.0.0.1:{free}", "ray start --head"):
        ray_sweep([tiny_config()], runs_dir=runs_dir, data_dir=data_dir, address=f"127.0.0.1:{free}")
    assert not runs_dir.exists()


@pytest.mark.parametrize("address", ["head", ":6379", "head:", "ray://head", "head:port", "127.0.0.1:99999"])
def test_an_address_has_a_host_and_a_port(data_dir: Path, runs_dir: Path, address: str) -> None:
    with refused(InputError, address):
        ray_sweep([tiny_config()], runs_dir=runs_dir, data_dir=data_dir, address=address)


def test_resources_of_a_run() -> None:
    wanted = Resources(cpus=2, memory_bytes=4_000_000_000)
    assert wanted.fit({"CPU": 2.0, "memory": 5e9})
    assert not wanted.fit({"CPU": 1.0, "memory": 5e9})
    assert not wanted.fit({"CPU": 8.0, "memory": 1e9})
    assert not Resources(gpus=1).fit({"CPU": 8.0})
    assert str(wanted) == "2 CPUs, 0 GPUs, 4 GB of memory"
    for nonsense in ({"cpus": 0}, {"gpus": -1}, {"memory_bytes": 0}):
        with refused(InputError, "got"):
            Resources(**nonsense)


def test_a_node_is_checked(data_dir: Path, runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = runs_dir / ".sweep" / "mark"
    mark.parent.mkdir(parents=True)
    tasks, version = check_data([tiny_config()], data_dir), installed_version("skyformer")
    assert "must be on storage that all nodes share" in str(check_node(str(mark), tasks, str(data_dir), version))
    mark.touch()
    assert check_node(str(mark), tasks, str(data_dir), version) is None
    assert "install the same version" in str(check_node(str(mark), tasks, str(data_dir), "0.0.0"))
    other = dict.fromkeys(tasks, "0" * 16)
    assert "other data of listops-length64-limit64" in str(check_node(str(mark), other, str(data_dir), version))
    assert "skyformer data prepare listops" in str(check_node(str(mark), tasks, str(runs_dir), version))
    monkeypatch.setenv(IMPORT_VARIABLE, "not_on_this_node")
    assert "not_on_this_node: there is no such module" in str(check_node(str(mark), tasks, str(data_dir), version))


def test_a_worker_returns_the_outcome_of_a_run(data_dir: Path, runs_dir: Path) -> None:
    config = tiny_config(steps=4, eval_every=4)
    outcome = train_here(config, str(runs_dir), str(data_dir))
    assert outcome.ending is Ending.FINISHED
    assert outcome.result is not None
    assert train_here(config, str(runs_dir), str(data_dir)).result == outcome.result
    failed = train_here(tiny_config(seed=1), str(runs_dir), str(runs_dir))
    assert failed.ending is Ending.FAILED
    assert "is not prepared" in failed.reason


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the extra [ray]")
def test_a_worker_that_dies_costs_no_run(data_dir: Path, runs_dir: Path) -> None:
    """Two runs on two workers of a local Ray; one is killed on the way, and both runs finish."""
    with (runs_dir.parent / "output.txt").open("w+") as output:
        process = subprocess.Popen(command(runs_dir, data_dir), stdout=output, stderr=subprocess.STDOUT)
        try:
            victim = first_run_at(runs_dir, step=20)
            os.kill(victim.stored_state().pid or 0, signal.SIGKILL)
            code = process.wait(PATIENCE)
        finally:
            process.kill()
            process.wait()
        output.seek(0)
        said = output.read()
    assert code == 0, said
    runs = list_runs(runs_dir)
    assert [run.config.model.attention for run in runs if run.finished] == ["skyformer", "softmax"]
    assert f"listops {victim.config.model.attention} seed 0: starting again, because its worker died" in said
    assert "[2/2] listops" in said
    for run in runs:
        steps = [row[0] for row in rows(run) if row[1] == "train"]
        assert steps == [str(step) for step in range(10, STEPS + 1, 10)]


def command(runs_dir: Path, data_dir: Path) -> list[str]:
    settings = [
        "task.limit=64",
        "task.max_length=64",
        "model.dim=8",
        "model.features=4",
        "loop.batch_size=2",
        "loop.eval_batch_size=64",
        "loop.checkpoint_every=10",
        "loop.log_every=10",
        "loop.eval_every=100",
        "optim.warmup_steps=5",
    ]
    options = {
        "task": "listops",
        "attention": "skyformer,softmax",
        "seeds": "0",
        "preset": "cpu",
        "steps": STEPS,
        "engine": "ray",
        # Two at a time also on one core.
        "cpus": 0.5,
        "jobs": 2,
        "memory": "200MB",
        "runs-dir": runs_dir,
        "data-dir": data_dir,
    }
    words = [f"--{name}={value}" for name, value in options.items()] + [f"--set={setting}" for setting in settings]
    return [sys.executable, "-m", "skyformer", "sweep", *words]


def first_run_at(runs_dir: Path, step: int) -> Run:
    """The run that is the first to have come that far, while it is still trained."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        for run in list_runs(runs_dir):
            if any(row[0] == str(step) for row in rows(run)) if run.metrics_file.exists() else False:
                return run
        time.sleep(0.02)
    raise TimeoutError(f"no run came to step {step} in {PATIENCE} seconds")
