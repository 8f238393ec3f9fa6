"""Processes that train a run and die on the way, forked from one that has imported everything already."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import time
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["skyformer.training.fit", "datasets", "torch.utils.tensorboard", "safetensors.torch"])
PATIENCE = 120


@dataclass(frozen=True)
class Death:
    """SIGKILL at the nth call of `module:Class.attribute`, before or after it has done its work."""

    place: str
    call: int = 1
    after: bool = False

    def prepare(self) -> None:
        module, _, path = self.place.partition(":")
        *owners, name = path.split(".")
        owner: Any = importlib.import_module(f"skyformer.training.{module}")
        for part in owners:
            owner = getattr(owner, part)
        original, calls = getattr(owner, name), []

        def dying(*arguments: Any, **options: Any) -> Any:
            calls.append(None)
            if len(calls) == self.call and not self.after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = original(*arguments, **options)
            if len(calls) == self.call:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(owner, name, dying)


def _train(config: str, runs_dir: Path, data_dir: Path, death: Death | None) -> None:
    import torch

    from skyformer.training.config import from_yaml
    from skyformer.training.fit import resume, train
    from skyformer.training.runs import Run

    torch.set_num_threads(1)
    if death is not None:
        death.prepare()
    run = Run(runs_dir / from_yaml(config).run_name())
    if run.folder.exists():
        resume(run, data_dir=data_dir, progress=False)
    else:
        train(from_yaml(config), runs_dir=runs_dir, data_dir=data_dir, progress=False)


def start(config: str, runs_dir: Path, data_dir: Path, death: Death | None = None) -> BaseProcess:
    """Train the config's run, or go on with it, in a process of its own."""
    process = _SERVER.Process(target=_train, args=(config, runs_dir, data_dir, death))
    process.start()
    return process


def end(process: BaseProcess) -> int:
    """How it ended: 0, or the negative of the signal that killed it."""
    process.join(PATIENCE)
    if process.exitcode is None:
        process.kill()
        raise TimeoutError(f"a training process was still running after {PATIENCE} seconds")
    return process.exitcode


def wait_for(file: Path, text: str) -> None:
    """Until `file` has a line that begins with `text`."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if file.exists() and any(line.startswith(text) for line in file.read_text().splitlines()):
            return
        time.sleep(0.002)
    raise TimeoutError(f"no line {text!r} in {file} after {PATIENCE} seconds")
