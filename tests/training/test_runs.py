"""Runs on disk: created in one step, never overwritten, listed in every state."""

from __future__ import annotations

import errno
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

import skyformer
from skyformer import files
from skyformer.environment import describe_environment
from skyformer.errors import DataError, InputError
from skyformer.files import runs_dir_or_default
from skyformer.training import runs
from skyformer.training.metrics import MetricRow
from skyformer.training.runs import (
    Run,
    UnreadableRun,
    check_free,
    create_run,
    list_runs,
    open_run,
    scan_runs,
)
from tests.helpers import refused
from tests.training.fakes import finished_run, result_of, small_config

HOLD_THE_LOCK = """
import sys, time, filelock
lock = filelock.FileLock(sys.argv[1])
lock.acquire()
print("held", flush=True)
time.sleep(60)
"""


@contextmanager
def another_process_with_the_lock(run: Run) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLD_THE_LOCK, str(run.folder / runs.LOCK_FILE)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def dead_process() -> int:
    """The number of a process that is gone."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


class TestNew:
    def test_has_config_environment_and_state(self, tmp_path: Path) -> None:
        config = small_config()
        run = create_run(config, tmp_path)
        assert run.folder == tmp_path / config.run_name()
        assert sorted(file.name for file in run.folder.iterdir()) == ["config.yaml", "environment.json", "state.json"]
        assert Run(run.folder).config == config
        stored = run.stored_state()
        assert (stored.state, stored.step, stored.steps, stored.pid) == ("running", 0, 10, os.getpid())
        assert run.result is None

    def test_leaves_nothing_behind_when_the_disk_is_full(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(_: object) -> str:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(runs, "dump_json", full)
        with pytest.raises(OSError, match="No space left"):
            create_run(small_config(), tmp_path)
        assert list(tmp_path.iterdir()) == []

    def test_where_runs_are(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SKYFORMER_RUNS", str(tmp_path))
        assert create_run(small_config()).folder.parent == tmp_path
        monkeypatch.delenv("SKYFORMER_RUNS")
        assert runs_dir_or_default() == Path("runs")

    def test_opens_by_its_digest_and_keeps_when_it_started(self, tmp_path: Path) -> None:
        run = finished_run(tmp_path)
        assert open_run(run.config.digest(), tmp_path).folder == run.folder
        assert run.state.started == run.stored_state().started != ""
        with refused(InputError, "there is no run '0123abcd'"):
            open_run("0123abcd", tmp_path)

    @pytest.mark.parametrize("finished", [False, True])
    def test_an_existing_one_is_left_alone(self, tmp_path: Path, finished: bool) -> None:
        run = finished_run(tmp_path) if finished else create_run(small_config(), tmp_path)
        if not finished:
            run.write_state(run.stored_state().replace(state="failed", step=4))
        before = {file: file.read_bytes() for file in run.folder.iterdir() if file.is_file()}
        unfinished = ["failed at step 4 of 10", f"skyformer train --resume {run.folder}"]
        words = ["test accuracy 0.5000", "--seed", f"skyformer evaluate {run.folder}"] if finished else unfinished
        with refused(InputError, str(run.folder), *words):
            create_run(small_config(), tmp_path)
        assert {file: file.read_bytes() for file in run.folder.iterdir() if file.is_file()} == before
        assert create_run(small_config(seed=1), tmp_path).folder != run.folder

    def test_something_else_is_in_the_way(self, tmp_path: Path) -> None:
        config = small_config()
        (tmp_path / config.run_name()).mkdir()
        with refused(DataError, "exists but is not a run", "config.yaml"):
            check_free(config, tmp_path)

    def test_two_at_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Both found the place free; the second to finish its draft must not replace the first."""
        first = create_run(small_config(), tmp_path)
        monkeypatch.setattr(runs, "check_free", lambda config, runs_dir: Run(first.folder))
        with refused(InputError, "exists already"):
            create_run(small_config(), tmp_path)
        assert [folder.name for folder in tmp_path.iterdir()] == [first.name]


class TestOpen:
    def test_by_name_and_by_folder(self, tmp_path: Path) -> None:
        run = create_run(small_config(), tmp_path)
        assert open_run(run.name, tmp_path).folder == run.folder
        assert open_run(run.folder, "elsewhere").folder == run.folder
        with refused(InputError, f"there is no run '{run.name[:-1]}'", str(tmp_path), f"Did you mean '{run.name}'?"):
            open_run(run.name[:-1], tmp_path)
        with refused(DataError, str(tmp_path), "is not a run: it has no config.yaml"):
            open_run(tmp_path)
        file = run.folder / "state.json"
        with refused(DataError, str(file), "is a file; a run is a folder"):
            open_run(file)

    @pytest.mark.parametrize("name", ["state.json", "result.json"])
    def test_a_newer_version(self, tmp_path: Path, name: str) -> None:
        run = finished_run(tmp_path)
        (run.folder / name).write_text('{"format": 2, "new": true}')
        (run.folder / "config.yaml").write_text("new: settings")
        with refused(DataError, name, "has format 2", "newer version", "upgrade skyformer"):
            open_run(run.folder)

    @pytest.mark.parametrize("content", ["", "[1, 2", "preset: paper", "\udc80".encode("utf-8", "surrogateescape")])
    def test_a_damaged_config(self, tmp_path: Path, content: str | bytes) -> None:
        run = create_run(small_config(), tmp_path)
        file = run.folder / "config.yaml"
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        with refused(DataError, str(file)):
            open_run(run.folder)


class TestState:
    def test_running_while_the_lock_is_held(self, tmp_path: Path) -> None:
        run = create_run(small_config(), tmp_path)
        with run.lock():
            assert run.state.state == "running"
        run.write_state(run.stored_state().replace(updated="2000-01-01T00:00:00+00:00"))
        assert (run.state.state, run.state.updated) == ("interrupted", "2000-01-01T00:00:00+00:00")

    @pytest.mark.parametrize("host", [platform.node(), "another host"])
    @pytest.mark.parametrize("pid", [None, 1], ids=["process gone", "number of another process"])
    def test_the_lock_decides_not_the_host_name(self, tmp_path: Path, host: str, pid: int | None) -> None:
        """A container that was killed never comes back under its name; one that runs may have numbers unknown here."""
        run = create_run(small_config(), tmp_path)
        run.write_state(run.stored_state().replace(pid=pid or dead_process(), host=host, step=3))
        found = run.state
        assert (found.state, found.step, found.reason) == ("interrupted", 3, "its process has ended")
        with another_process_with_the_lock(run):
            assert run.state.state == "running"

    def test_a_result_counts_more(self, tmp_path: Path) -> None:
        """The process may be killed between writing the result and the state."""
        run = finished_run(tmp_path)
        assert run.stored_state().state == "running"
        state = run.state
        assert (state.state, state.step, state.best_step, state.best_accuracy) == ("finished", 10, 5, 0.6)
        assert run.finished
        (run.folder / "state.json").unlink()
        assert [run.state.state for run in list_runs(tmp_path)] == ["finished"]


class TestLock:
    def test_keeps_a_second_process_out(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(runs, "_LOCK_TIMEOUT_SECONDS", 0.01)
        run = create_run(small_config(), tmp_path)
        with another_process_with_the_lock(run) as process:
            run.write_state(run.stored_state().replace(pid=process.pid))
            assert run.state.state == "running"
            with refused(InputError, "is being trained by another process", str(process.pid)), run.lock():
                pass
        with run.lock():
            pass
        assert run.state.state == "interrupted"


class TestResult:
    def test_is_replaced_in_one_step(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        run = finished_run(tmp_path)

        def full(_: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(files.os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            run.write_result(result_of(run, 0.25))
        assert open_run(run.folder).result == result_of(run, 0.5)
        assert not [file for file in run.folder.iterdir() if "partial" in file.name]

    def test_has_no_nan(self, tmp_path: Path) -> None:
        run = create_run(small_config(), tmp_path)
        with pytest.raises(ValueError, match="finite"):
            result_of(run, float("nan"))


class TestMetrics:
    HEADER = "step,split,loss,accuracy,lr,seconds\n"

    ROWS = "1,train,0.7,0.5,0.001,1.5\n1,dev,0.6,0.55,,1.75\n"

    @pytest.mark.parametrize("torn", ["", "2,tra", "2,train,0.", "2,train,0.7,0.5,0.001,", "\x00\x00"])
    def test_rows_without_a_torn_one(self, tmp_path: Path, torn: str) -> None:
        run = create_run(small_config(), tmp_path)
        assert run.metrics() == []
        run.metrics_file.write_text(self.HEADER + self.ROWS + torn)
        assert run.metrics() == [
            MetricRow(1, "train", 0.7, 0.5, 0.001, 1.5),
            MetricRow(1, "dev", 0.6, 0.55, None, 1.75),
        ]


class TestList:
    def test_by_task(self, tmp_path: Path) -> None:
        text, image = finished_run(tmp_path), create_run(small_config("image"), tmp_path)
        assert [run.name for run in list_runs(tmp_path)] == [image.name, text.name]
        assert [run.name for run in list_runs(tmp_path, "text")] == [text.name]
        assert list_runs(tmp_path / "nowhere") == []

    @pytest.mark.parametrize(
        "content", [b"", b"{", b"[]", b'{"format": 1}', b"\xff\xfe", b'{"format": "x", "state": 3}']
    )
    def test_a_damaged_state(self, tmp_path: Path, content: bytes) -> None:
        run = create_run(small_config(), tmp_path)
        (run.folder / "state.json").write_bytes(content)
        listed = list_runs(tmp_path)
        assert [(run.name, run.state.state) for run in listed] == [(run.name, "damaged")]
        assert "state.json" in str(listed[0].state.reason)

    def test_what_is_not_a_run_breaks_nothing(self, tmp_path: Path) -> None:
        run = create_run(small_config(), tmp_path)
        (tmp_path / "empty").mkdir()
        (tmp_path / "notes.txt").touch()
        (tmp_path / ".new-half").mkdir()
        shutil.copy(run.folder / "config.yaml", tmp_path / ".new-half")
        (tmp_path / "damaged").mkdir()
        (tmp_path / "damaged" / "config.yaml").write_text("task: [")
        (tmp_path / "strange" / "config.yaml").mkdir(parents=True)
        newer = finished_run(tmp_path, small_config(seed=1))
        (newer.folder / "result.json").write_text(json.dumps({"format": 9}))
        assert [run.name for run in list_runs(tmp_path)] == [run.name]
        unreadable = {item.folder.name: item.reason for item in scan_runs(tmp_path) if isinstance(item, UnreadableRun)}
        assert sorted(unreadable) == sorted(["damaged", "strange", newer.name])
        assert "upgrade skyformer" in unreadable[newer.name]


class TestEnvironment:
    def test_says_what_a_result_may_depend_on(self, tmp_path: Path) -> None:
        environment = create_run(small_config("text", "hardware.threads=3"), tmp_path).environment
        assert environment.skyformer == skyformer.__version__
        assert environment.threads == 3
        assert environment.cores >= 1
        assert environment.cpu
        assert environment.command

    def test_digest_does_not_depend_on_the_command(self) -> None:
        here = describe_environment()
        assert here.threads == 1
        assert replace(here, command="x", started="y", host="z").digest() == here.digest()
        assert replace(here, torch="0.1").digest() != here.digest()
