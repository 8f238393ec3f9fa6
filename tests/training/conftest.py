"""A tiny prepared task, and uninterrupted runs that others are compared with."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from skyformer.errors import InterruptedRunError
from skyformer.lra import prepare
from skyformer.training.config import RunConfig
from skyformer.training.runs import Run
from tests.training.killing import COUNTS
from tests.training.tiny import Send, tiny_config


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short ListOps with 64 examples per split."""
    folder = tmp_path_factory.mktemp("data")
    prepare("listops", limit=64, max_length=64, data_dir=folder)
    return folder


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    return tmp_path / "runs"


Finished = Callable[[RunConfig], Run]


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> Finished:
    """Uninterrupted runs, each trained once per session."""
    from skyformer.training.fit import train

    root = tmp_path_factory.mktemp("finished")

    def run_of(config: RunConfig) -> Run:
        run = Run(root / config.run_name())
        if not run.folder.exists():
            train(config, runs_dir=root, data_dir=data_dir, progress=False)
        return run

    return run_of


@pytest.fixture(scope="session")
def whole(finished: Finished) -> Run:
    """The tiny run from its first step to its last."""
    return finished(tiny_config())


@pytest.fixture(scope="session")
def stopped_once(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> Run:
    """The tiny run, stopped by SIGTERM at step 11."""
    from skyformer.training.fit import train

    root, config = tmp_path_factory.mktemp("stopped"), tiny_config()
    with pytest.raises(InterruptedRunError):
        train(config, runs_dir=root, data_dir=data_dir, progress=False, callbacks=[Send(11, signal.SIGTERM)])
    return Run(root / config.run_name())


@pytest.fixture
def stopped(stopped_once: Run, runs_dir: Path) -> Run:
    """A copy of the stopped run that a test may change."""
    return Run(shutil.copytree(stopped_once.folder, runs_dir / stopped_once.name))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The count of the campaigns, at their end."""
    if COUNTS:
        terminalreporter.write_line(
            f"durability: {COUNTS['kill']} kills and {COUNTS['signal']} signals; {COUNTS['run']} runs resumed, all "
            "bit-identical"
        )
