"""Two processes train the run that one process trains with the doubled batch."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import skyformer
from skyformer.training.config import RunConfig, to_yaml
from skyformer.training.fit import train
from skyformer.training.runs import Run
from tests.training.killing import Rank, end, start, wait_for
from tests.training.tiny import assert_same_run, tiny_config

TIMEOUT_SECONDS = 200
LAUNCHERS = {
    "lightning": [sys.executable, "-m", "skyformer.cli.main"],
    "torchrun": [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        *("-m", "skyformer.cli.main"),
    ],
}


def plain_config(batch_size: int, devices: int, **loop: int) -> RunConfig:
    """Without dropout or random landmarks, which two processes draw from seeds of their own."""
    config = tiny_config(attention="softmax", options={}, batch_size=batch_size, **loop)
    hardware = config.hardware.replace(devices=devices, strategy="ddp" if devices > 1 else "auto")
    return config.replace(model=config.model.replace(dropout=0.0), hardware=hardware)


def launch(launcher: str, arguments: list[str], runs_dir: Path, data_dir: Path) -> subprocess.Popen[str]:
    source = str(Path(skyformer.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", "SKYFORMER_RUNS": str(runs_dir)}
    command = [*LAUNCHERS[launcher], "train", *arguments, "--no-progress", "--data-dir", str(data_dir)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def launch_new(launcher: str, config: RunConfig, runs_dir: Path, data_dir: Path) -> subprocess.Popen[str]:
    file = runs_dir.parent / "config.yaml"
    file.write_text(to_yaml(config))
    return launch(launcher, ["--config", str(file)], runs_dir, data_dir)


def assert_like_one_process(config: RunConfig, runs_dir: Path, data_dir: Path) -> None:
    """The run is the same as that of one process with the doubled batch, up to rounding."""
    doubled = config.replace(loop=config.loop.replace(batch_size=8), hardware=plain_config(8, devices=1).hardware)
    single = train(doubled, runs_dir=runs_dir, data_dir=data_dir, progress=False)
    double = Run(runs_dir / config.run_name())
    ours, theirs = double.metrics(), Run(runs_dir / single.run).metrics()
    assert [(row.step, row.split) for row in ours] == [(row.step, row.split) for row in theirs]
    assert [row.loss for row in ours] == pytest.approx([row.loss for row in theirs], rel=1e-5)
    assert [row.accuracy for row in ours] == pytest.approx([row.accuracy for row in theirs], abs=1 / 64)
    assert double.result is not None
    assert (double.result.dev_examples, double.result.test_examples) == (64, 64)
    assert double.result.test_loss == pytest.approx(single.test_loss, rel=1e-5)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_two_processes_and_one_with_the_doubled_batch(runs_dir: Path, data_dir: Path) -> None:
    config, port = plain_config(batch_size=4, devices=2, steps=6, eval_every=3), free_port()
    processes = [start(to_yaml(config), runs_dir, data_dir, Rank(rank, 2, port)) for rank in range(2)]
    assert [end(process) for process in processes] == [0, 0]
    assert_like_one_process(config, runs_dir, data_dir)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launchers_of_two_processes(launcher: str, runs_dir: Path, data_dir: Path) -> None:
    config = plain_config(batch_size=4, devices=2)
    process = launch_new(launcher, config, runs_dir, data_dir)
    out, err = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 0, err
    # One of them printed.
    assert out.count("test accuracy") == 1
    assert_like_one_process(config, runs_dir, data_dir)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_two_processes_resume(number: signal.Signals, tmp_path: Path, data_dir: Path) -> None:
    config = plain_config(batch_size=4, devices=2, steps=100, eval_every=20, checkpoint_every=10)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    process = launch_new("lightning", config, whole, data_dir)
    assert process.communicate(timeout=TIMEOUT_SECONDS)[1] == ""
    process = launch_new("lightning", config, broken, data_dir)
    run = Run(broken / config.run_name())
    wait_for(run.metrics_file, "50,train")
    process.send_signal(number)
    _, err = process.communicate(timeout=TIMEOUT_SECONDS)
    if number == signal.SIGTERM:
        assert process.returncode == 143
        assert "by SIGTERM; resume with: skyformer train --resume" in err
        assert err.count("resume with") == 1
    time.sleep(1)
    assert run.state.state == "interrupted"
    process = launch("lightning", ["--resume", run.name], broken, data_dir)
    assert process.communicate(timeout=TIMEOUT_SECONDS)[1] == ""
    assert_same_run(run, Run(whole / config.run_name()))
