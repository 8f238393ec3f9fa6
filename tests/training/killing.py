"""Processes that train a run and are killed on the way, forked from one that has imported everything already."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["skyformer.training.fit", "datasets", "torch.utils.tensorboard", "safetensors.torch"])
TIMEOUT_SECONDS = 600
COUNTS: Counter[str] = Counter()
"""Kills, signals and runs of the campaigns so far."""


@dataclass(frozen=True)
class Kill:
    """SIGKILL at a call of `module:Class.attribute`, before or after its work.

    `call` counts the calls whose first argument, as text, contains `argument`.
    """

    place: str
    call: int = 1
    after: bool = False
    argument: str = ""

    def prepare(self) -> None:
        module, _, path = self.place.partition(":")
        *owners, name = path.split(".")
        owner: Any = importlib.import_module(f"skyformer.training.{module}")
        for part in owners:
            owner = getattr(owner, part)
        original, calls = getattr(owner, name), []

        def killed(*arguments: Any, **options: Any) -> Any:
            if self.argument in str(arguments[:1]):
                calls.append(None)
            if len(calls) == self.call and not self.after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = original(*arguments, **options)
            if len(calls) == self.call:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(owner, name, killed)


@dataclass(frozen=True)
class Rank:
    """The place of a process among those that train one run together, as torchrun would set it; it may be killed."""

    rank: int
    world_size: int
    port: int
    kill: Kill | None = None

    def prepare(self) -> None:
        from lightning.pytorch.utilities import rank_zero_only

        os.environ |= {
            "TORCHELASTIC_RUN_ID": "test",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.rank),
            "GROUP_RANK": "0",
            "WORLD_SIZE": str(self.world_size),
        }
        # Lightning reads it from the environment when it is imported, which is done already.
        rank_zero_only.rank = self.rank
        if self.kill is not None:
            self.kill.prepare()


def _train(config: str, runs_dir: Path, data_dir: Path, change: Kill | Rank | None) -> None:
    import torch

    from skyformer.training.config import from_yaml
    from skyformer.training.fit import train_or_resume

    torch.set_num_threads(1)
    # The children of a process from a fork server would come from another one, which imports everything again.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    if change is not None:
        change.prepare()
    train_or_resume(from_yaml(config), runs_dir=runs_dir, data_dir=data_dir, progress=False)


def start(config: str, runs_dir: Path, data_dir: Path, change: Kill | Rank | None = None) -> BaseProcess:
    """Train or resume the config's run in a process of its own."""
    process = _SERVER.Process(target=_train, args=(config, runs_dir, data_dir, change))
    process.start()
    return process


def end(process: BaseProcess) -> int:
    """The exit code: 0, or minus the number of the signal that killed the process."""
    process.join(TIMEOUT_SECONDS)
    if process.exitcode is None:
        process.kill()
        raise TimeoutError(f"a training process was still running after {TIMEOUT_SECONDS} seconds")
    return process.exitcode


def wait_for(file: Path, text: str) -> None:
    """Wait until `file` has a line that begins with `text`."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        if file.exists() and any(line.startswith(text) for line in file.read_text().splitlines()):
            return
        time.sleep(0.002)
    raise TimeoutError(f"no line {text!r} in {file} after {TIMEOUT_SECONDS} seconds")
