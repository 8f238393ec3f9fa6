"""A sweep trains all runs that are not finished, each in its own process, also when some of them fail."""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from skyformer.errors import DataError, InputError, InterruptedRunError, UnknownNameError
from skyformer.lra import prepare
from skyformer.training import sweeps
from skyformer.training.config import RunConfig
from skyformer.training.runs import Run, create_run
from skyformer.training.sweeps import (
    Ending,
    Outcome,
    check_data,
    plan,
    settings_kept,
    sweep,
    sweep_file,
    with_threads,
)
from tests.helpers import refused
from tests.training.fakes import finish, start
from tests.training.tiny import assert_same_run, tiny_config

FAKE_TRAIN = Path(__file__).parent / "fake_train.py"


@dataclass
class Recorder:
    """A progress display that remembers what it was told; `on_update` is called whenever steps are shown."""

    on_update: Callable[[], None] = lambda: None
    begun: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def begin(self, task: str, total: int | None = None, done: int = 0) -> None:
        self.begun.append(task)

    def update(self, task: str, *, done: int | None = None, advance: int = 0, text: str | None = None) -> None:
        self.on_update()

    def end(self, task: str) -> None: ...

    def note(self, message: str) -> None:
        self.notes.append(message)


class FakeTraining:
    """A folder of runs for `fake_train.py`, which does to each run what it is ordered to."""

    def __init__(self, runs_dir: Path, data_dir: Path) -> None:
        self.runs_dir, self.data_dir = runs_dir, data_dir
        runs_dir.mkdir()
        (runs_dir / "orders.json").write_text("{}")

    def configs(self, *orders: str) -> list[RunConfig]:
        """A config for each order, which says how the run's first, second, ... process ends."""
        configs = [tiny_config(seed=seed) for seed in range(len(orders))]
        for config in configs:
            finish(config, self.runs_dir / "library", accuracy=0.5)
        words = {config.run_name(): order.split() for config, order in zip(configs, orders, strict=True)}
        (self.runs_dir / "orders.json").write_text(json.dumps(words))
        return configs

    def sweep(self, configs: list[RunConfig], progress: Recorder | None = None, *, jobs: int = 1) -> list[Outcome]:
        return sweep(configs, runs_dir=self.runs_dir, data_dir=self.data_dir, jobs=jobs, progress=progress)

    @property
    def calls(self) -> list[list[str]]:
        """For every process that was started: its option, and the threads in its config and its environment."""
        file = self.runs_dir / "calls.txt"
        return [line.split(" ")[1:] for line in file.read_text().splitlines()] if file.exists() else []

    @property
    def sweep_files(self) -> list[str]:
        return sorted(file.suffix for file in (self.runs_dir / sweeps.SWEEP_FOLDER).iterdir())

    def pids(self, configs: list[RunConfig]) -> list[int]:
        """The processes that have begun to train."""
        files = [self.runs_dir / config.run_name() / "state.json" for config in configs]
        states = [json.loads(file.read_text()) for file in files if file.exists()]
        return [state["pid"] for state in states if state["state"] == "running"]


@pytest.fixture
def fake(tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> FakeTraining:
    monkeypatch.setattr(sweeps, "SKYFORMER", (sys.executable, "-S", str(FAKE_TRAIN)))
    monkeypatch.setattr(sweeps, "PROGRESS_SECONDS", 0.0)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return FakeTraining(tmp_path / "runs", data_dir)


def stop_at_two(fake: FakeTraining, configs: list[RunConfig], number: signal.Signals) -> Recorder:
    """A display that raises the signal once, when two runs are in training."""

    def stop() -> None:
        if len(fake.pids(configs)) == 2:
            recorder.on_update = lambda: None
            signal.raise_signal(number)

    recorder = Recorder(stop)
    return recorder


def endings(outcomes: list[Outcome]) -> list[str]:
    return [outcome.ending.value for outcome in outcomes]


def test_a_plan_has_all_runs_of_a_seed_before_the_next_seed() -> None:
    configs = plan(["listops", "text"], ["softmax", "skyformer"], [3, 1], "cpu")
    assert [(config.seed, config.task.name, config.model.attention) for config in configs] == [
        (seed, task, attention)
        for seed in (3, 1)
        for task in ("listops", "text")
        for attention in ("softmax", "skyformer")
    ]
    assert len({config.run_name() for config in configs}) == 8


def test_a_plan_is_checked(data_dir: Path) -> None:
    with refused(UnknownNameError, "unknown attention 'skyfromer'", "Did you mean 'skyformer'?"):
        plan(["listops"], ["softmax", "skyfromer"], [0])
    with refused(UnknownNameError, "Did you mean 'optim.lr'?"):
        plan(["listops"], ["softmax"], [0], overrides=["optim.lrr=1"])
    with refused(InputError, "at least one seed"):
        plan(["listops"], ["softmax"], [])
    for jobs, retries, got in ((0, 0, "0"), (1, -1, "-1")):
        with refused(InputError, "at least", got):
            sweep([tiny_config()], data_dir=data_dir, jobs=jobs, retries=retries)


def test_missing_data_is_one_error_with_all_commands(tmp_path: Path) -> None:
    configs = plan(["listops", "text", "image"], ["softmax", "skyformer"], [0])
    prepare("listops", data_dir=tmp_path, limit=5, max_length=64)
    with pytest.raises(DataError) as caught:
        check_data(configs, tmp_path)
    lines = str(caught.value).splitlines()
    assert [line.partition(" is not prepared")[0] for line in lines] == ["listops", "text", "image"]
    assert ["run: skyformer data prepare" in line for line in lines] == [True] * 3


def test_nothing_starts_before_everything_is_checked(fake: FakeTraining) -> None:
    configs = fake.configs("finish")
    with pytest.raises(DataError):
        fake.sweep([*configs, *plan(["text"], ["softmax"], [0])])
    assert fake.calls == []


def test_all_runs_are_trained_in_order(fake: FakeTraining) -> None:
    progress = Recorder()
    outcomes = fake.sweep(fake.configs("finish", "finish"), progress)
    assert endings(outcomes) == ["finished", "finished"]
    assert [outcome.result.test_accuracy for outcome in outcomes if outcome.result] == [0.5, 0.5]
    assert progress.begun == ["runs", "listops skyformer seed 0", "listops skyformer seed 1"]
    assert [note.partition(",")[0] for note in progress.notes] == [
        "[1/2] listops skyformer seed 0: finished",
        "[2/2] listops skyformer seed 1: finished",
    ]
    assert fake.calls == [["--config", "null", "None"]] * 2
    assert fake.sweep_files == []


def test_jobs_divide_the_cores(fake: FakeTraining, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeps, "available_cores", lambda: 9)
    configs = fake.configs("finish", "finish", "finish")
    fake.sweep([*configs, configs[0]], jobs=2)
    assert fake.calls == [["--config", "4", "4"]] * 3, "a run that is listed twice is trained once"
    chosen = configs[0].replace(hardware=configs[0].hardware.replace(threads=3))
    assert with_threads(chosen, 1) is chosen


def test_finished_runs_are_skipped_and_others_resumed(fake: FakeTraining) -> None:
    done, begun, new = fake.configs("fail", "finish", "finish")
    finish(done, fake.runs_dir, accuracy=0.75)
    start(begun, fake.runs_dir)
    outcomes = fake.sweep([done, begun, new])
    assert endings(outcomes) == ["was finished", "finished", "finished"]
    assert outcomes[0].result is not None
    assert outcomes[0].result.test_accuracy == 0.75
    assert [call[0] for call in fake.calls] == ["--resume", "--config"]


def test_settings_that_a_resumed_run_keeps_are_named(fake: FakeTraining) -> None:
    [config] = fake.configs("finish")
    start(config, fake.runs_dir)
    recorder = Recorder()
    changed = config.replace(
        hardware=config.hardware.replace(threads=3), loop=config.loop.replace(loggers=("csv",), checkpoint_every=7)
    )
    assert changed.run_name() == config.run_name()
    fake.sweep([changed], recorder)
    (note,) = (note for note in recorder.notes if "resumes with" in note)
    assert f"hardware.threads is {config.hardware.threads}, not 3" in note
    assert f"loop.checkpoint_every is {config.loop.checkpoint_every}, not 7" in note
    assert "loop.loggers is [], not ['csv']" in note
    assert settings_kept(config, fake.runs_dir) == []


def test_a_run_that_another_process_trains_is_left_alone(fake: FakeTraining) -> None:
    taken, free = fake.configs("fail", "finish")
    run = create_run(taken, fake.runs_dir)
    log = sweep_file(taken, fake.runs_dir, "log")
    log.parent.mkdir(parents=True)
    log.write_text("of another sweep")
    with run.lock():
        outcomes = fake.sweep([taken, free])
    assert log.read_text() == "of another sweep"
    assert endings(outcomes) == ["trained elsewhere", "finished"]
    assert f"process {os.getpid()} on {platform.node()}" in outcomes[0].reason
    assert outcomes[0].good
    assert len(fake.calls) == 1


def test_a_run_of_a_dead_host_is_resumed(fake: FakeTraining) -> None:
    [config] = fake.configs("finish")
    run = create_run(config, fake.runs_dir)
    run.write_state(run.stored_state().replace(host="pod-a", pid=os.getpid()))
    assert endings(fake.sweep([config])) == ["finished"]
    assert [call[0] for call in fake.calls] == ["--resume"]


def test_a_failure_stops_no_other_run(fake: FakeTraining) -> None:
    outcomes = fake.sweep(fake.configs("fail", "finish"))
    assert endings(outcomes) == ["failed", "finished"]
    assert outcomes[0].reason.startswith("the loss is nan at step 8; its output is in ")
    assert not outcomes[0].good
    assert len(fake.calls) == 2, "an error is not tried again"
    assert fake.sweep_files == [".log", ".yaml"]


def test_a_damaged_folder_is_a_failure_that_is_not_touched(fake: FakeTraining) -> None:
    broken, whole = fake.configs("finish", "finish")
    folder = fake.runs_dir / broken.run_name()
    folder.mkdir()
    outcomes = fake.sweep([broken, whole])
    assert endings(outcomes) == ["failed", "finished"]
    assert "it has no config.yaml" in outcomes[0].reason
    assert list(folder.iterdir()) == []


def test_a_run_whose_process_died_is_started_again(fake: FakeTraining) -> None:
    recorder = Recorder()
    assert endings(fake.sweep(fake.configs("die die finish"), recorder)) == ["finished"]
    assert [call[0] for call in fake.calls] == ["--config", "--resume", "--resume"]
    assert ["killed by SIGKILL" in note for note in recorder.notes] == [True, True, False]


def test_the_number_of_attempts_is_limited(fake: FakeTraining) -> None:
    (outcome,) = fake.sweep(fake.configs("die"))
    assert outcome.ending is Ending.FAILED
    assert "SIGKILL" in outcome.reason
    assert len(fake.calls) == 1 + sweeps.DEFAULT_RETRIES


@pytest.fixture
def not_ignored() -> Iterator[None]:
    """The tests themselves may run under nohup, which ignores the first of them."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGHUP, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("not_ignored")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_is_passed_on_and_the_message_says_how_to_resume(fake: FakeTraining, number: signal.Signals) -> None:
    configs = fake.configs("finish", "obey finish", "obey finish", "finish")
    recorder = stop_at_two(fake, configs, number)
    with pytest.raises(InterruptedRunError) as caught:
        fake.sweep(configs, recorder, jobs=2)
    assert str(caught.value) == f"1 of 4 runs are done; stopped by {number.name}; run the same command again to resume"
    assert caught.value.exit_code == 128 + number
    assert ["interrupted" in note for note in recorder.notes] == [False, True, True]
    # At most two at the same time, so the fourth was not started.
    assert recorder.begun[1:] == [f"listops skyformer seed {seed}" for seed in range(3)]
    assert endings(fake.sweep(configs)) == ["was finished", "finished", "finished", "finished"]


def test_a_second_signal_kills_runs_that_ignore_the_first(fake: FakeTraining) -> None:
    (config,) = fake.configs("defy")

    def interrupt() -> None:
        if fake.pids([config]):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(InterruptedRunError, match="stopped immediately by SIGINT"):
        fake.sweep([config], Recorder(interrupt))
    (pid,) = fake.pids([config])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_with_a_real_process(whole: Run, stopped: Run, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A half-trained run finishes in a process of its own, with the same bits as without the interruption."""
    # As many threads as `whole` had, so that every bit is the same.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (outcome,) = sweep([stopped.config], runs_dir=stopped.folder.parent, data_dir=data_dir)
    assert outcome.ending is Ending.FINISHED, outcome.reason
    assert_same_run(stopped, whole)
    assert outcome.result is not None
    assert outcome.result.peak_memory_bytes
