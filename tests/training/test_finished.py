"""A finished run stays as it is, also if another process finished it while this one waited for the lock."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from skyformer.errors import InputError
from skyformer.training import fit
from skyformer.training.runs import RESULT_FILE, Run
from tests.helpers import refused
from tests.training.tiny import tiny_config


@pytest.fixture
def finished_under_the_lock(whole: Run, runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run that has its result only once the lock is taken."""
    run = Run(runs_dir / whole.name)
    shutil.copytree(whole.folder, run.folder)
    (run.folder / RESULT_FILE).unlink()
    original = Run.lock

    @contextmanager
    def lock(self: Run) -> Iterator[None]:
        with original(self):
            shutil.copy(whole.folder / RESULT_FILE, run.folder)
            yield

    monkeypatch.setattr(Run, "lock", lock)
    monkeypatch.setattr(fit, "_fit_and_test", lambda *_: pytest.fail("the finished run is trained again"))
    return run


def test_the_result_is_looked_for_under_the_lock(finished_under_the_lock: Run, data_dir: Path) -> None:
    run = finished_under_the_lock
    before = {file: file.stat().st_mtime_ns for file in run.folder.rglob("*") if file.is_file()}
    with refused(InputError, "is finished already", str(run.folder)):
        fit.resume(run, data_dir=data_dir, progress=False)
    assert {file: file.stat().st_mtime_ns for file in before} == before


def test_train_or_resume_returns_its_result(finished_under_the_lock: Run, data_dir: Path, whole: Run) -> None:
    run = finished_under_the_lock
    result = fit.train_or_resume(tiny_config(), runs_dir=run.folder.parent, data_dir=data_dir, progress=False)
    assert result == whole.result
