"""What killed processes leave behind is removed, and damaged small files of a run are written anew."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from skyformer.errors import CheckpointWarning, DataError, InterruptedRunError
from skyformer.training import runs
from skyformer.training.fit import resume, train
from skyformer.training.runs import ENVIRONMENT_FILE, STATE_FILE, Run, create_run
from skyformer.training.signals import StopSignals
from skyformer.training.sweeps import _STOPPED_CODES
from tests.helpers import refused
from tests.training.fakes import small_config
from tests.training.test_signals import Send
from tests.training.tiny import assert_same_run, tiny_config


def stopped(runs_dir: Path, data_dir: Path, number: signal.Signals = signal.SIGTERM) -> Run:
    with pytest.raises(InterruptedRunError, match=f"stopped at step 8 of 14 by {number.name}") as caught:
        train(tiny_config(), runs_dir=runs_dir, data_dir=data_dir, progress=False, callbacks=[Send(8, number)])
    assert caught.value.exit_code == 128 + number
    return Run(runs_dir / tiny_config().run_name())


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_hang_up_and_preemption_save_a_checkpoint(
    number: signal.Signals, runs_dir: Path, data_dir: Path, whole: Run
) -> None:
    # The tests themselves may run under nohup.
    before = signal.signal(number, signal.SIG_DFL)
    try:
        run = stopped(runs_dir, data_dir, number)
    finally:
        signal.signal(number, before)
    assert (run.checkpoints / "step-000008.json").exists()
    assert 128 + number in _STOPPED_CODES
    resume(run, data_dir=data_dir, progress=False)
    assert_same_run(run, whole)


def test_nohup_still_ignores_the_hang_up() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals("resume it") as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.received is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_signal_while_a_checkpoint_is_loaded(
    runs_dir: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stopped(runs_dir, data_dir)

    def load(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(InterruptedRunError, match="stopped immediately by SIGINT"):
        resume(run, data_dir=data_dir, progress=False)
    assert run.state.state == "interrupted"


class FailAfterSignal(Send):
    """As Lightning may do when it is interrupted in the middle of its own work."""

    def on_exception(self, trainer: object, module: object, error: BaseException) -> None:
        raise RuntimeError("the loader is not ready")


def test_an_error_after_a_second_signal_is_an_interruption(runs_dir: Path, data_dir: Path) -> None:
    fail = FailAfterSignal(8, signal.SIGTERM, signal.SIGTERM)
    with pytest.raises(InterruptedRunError, match="stopped immediately by SIGTERM"):
        train(tiny_config(), runs_dir=runs_dir, data_dir=data_dir, progress=False, callbacks=[fail])
    assert Run(runs_dir / tiny_config().run_name()).state.state == "interrupted"


def test_partial_files_are_removed_under_the_lock(runs_dir: Path, data_dir: Path) -> None:
    run = stopped(runs_dir, data_dir)
    litter = [run.folder / ".state.json.99.partial", run.model_folder / ".config.json.99.partial"]
    litter.append(run.checkpoints / ".step-000009.ckpt.99.partial")
    for file in litter:
        file.write_text("{")
    resume(run, data_dir=data_dir, progress=False)
    assert not [file for file in litter if file.exists()]


def test_old_drafts_are_removed_by_the_next_run(tmp_path: Path) -> None:
    old, fresh = tmp_path / ".new-old", tmp_path / ".new-fresh"
    for draft in (old, fresh):
        draft.mkdir()
        (draft / STATE_FILE).write_text("{}")
    os.utime(old, (time.time() - 7200,) * 2)
    create_run(small_config(), tmp_path)
    assert not old.exists()
    assert fresh.exists()


def test_the_rename_of_a_new_run_is_brought_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(runs, "sync_folder", synced.append)
    assert create_run(small_config(), tmp_path / "runs").folder.parent in synced


@pytest.mark.parametrize("content", [None, "{", '{"state": "running"}'], ids=["missing", "cut", "incomplete"])
def test_a_damaged_state_is_rebuilt(content: str | None, runs_dir: Path, data_dir: Path, whole: Run) -> None:
    run = stopped(runs_dir, data_dir)
    file = run.folder / STATE_FILE
    file.unlink() if content is None else file.write_text(content)
    with (
        pytest.warns(CheckpointWarning, match="state.json .*rebuilt from the checkpoints"),
        pytest.raises(InterruptedRunError),
    ):
        resume(run, data_dir=data_dir, progress=False, callbacks=[Send(9, signal.SIGTERM)])
    assert (run.state.state, run.state.step, run.state.best_step) == ("interrupted", 9, 5)
    resume(run, data_dir=data_dir, progress=False)
    assert_same_run(run, whole)


def test_the_state_of_a_newer_version_is_not_replaced(runs_dir: Path, data_dir: Path) -> None:
    run = stopped(runs_dir, data_dir)
    (run.folder / STATE_FILE).write_text('{"format": 99}')
    with refused(DataError, "newer version"):
        resume(run, data_dir=data_dir, progress=False)
    assert (run.folder / STATE_FILE).read_text() == '{"format": 99}'


def test_a_missing_environment_does_not_cost_the_result(runs_dir: Path, data_dir: Path) -> None:
    run = stopped(runs_dir, data_dir)
    (run.folder / ENVIRONMENT_FILE).unlink()
    with pytest.warns(CheckpointWarning, match="current environment"):
        result = resume(run, data_dir=data_dir, progress=False)
    assert result.environment_digest == run.environment.digest()


def test_ctrl_c_during_imports_has_no_traceback() -> None:
    code = "import os, signal, skyformer, sys; sys.argv = ['skyformer', '--help']; import skyformer.cli.main as m; "
    # Background jobs have it ignored.
    code += "signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += "m.build_app = lambda: os.kill(os.getpid(), signal.SIGINT); m.main()"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (130, "stopped by SIGINT\n")


def test_the_command_starts_without_torch() -> None:
    """So that Ctrl-C is handled before the packages that take seconds to import."""
    code = "import sys, skyformer.cli.main; print('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "False\n"
