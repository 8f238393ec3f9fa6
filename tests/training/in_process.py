"""Sweeps that train in this process, which is quicker than starting one for each run."""

from __future__ import annotations

import signal
from pathlib import Path

from skyformer.training.config import RunConfig
from skyformer.training.ray_sweeps import train_here
from skyformer.training.sweeps import Outcome


class InProcess:
    """Trains in this process, which is quicker than starting one for each run."""

    queues, save_seconds = False, 0.0

    def __init__(self, runs_dir: Path, data_dir: Path | None, jobs: int) -> None:
        self._folders = str(runs_dir), None if data_dir is None else str(data_dir)
        self._outcomes: list[Outcome] = []

    def start(self, config: RunConfig) -> None:
        self._outcomes.append(train_here(config, *self._folders))

    def collect(self) -> list[Outcome]:
        ended, self._outcomes = self._outcomes, []
        return ended

    def interrupt(self, number: signal.Signals) -> None: ...

    def kill(self) -> None: ...
