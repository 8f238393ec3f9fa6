"""A sweep trains what is not finished, each run in a process of its own, whatever becomes of the others."""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from skyformer.errors import DataError, InputError, InterruptedRunError, UnknownNameError
from skyformer.lra import prepare
from skyformer.training import sweeps
from skyformer.training.config import RunConfig
from skyformer.training.fit import train
from skyformer.training.runs import Run, create_run
from skyformer.training.sweeps import Ending, Outcome, check_data, plan, sweep, with_threads
from tests.helpers import refused
from tests.training.fakes import finish, start
from tests.training.test_signals import Send
from tests.training.tiny import assert_same_run, tiny_config

PRETENDER = Path(__file__).parent / "pretend.py"


@dataclass
class Witness:
    """Remembers what a sweep tells; `then` is called whenever runs are looked at."""

    then: Callable[[], None] = lambda: None
    begun: list[int] = field(default_factory=list)
    again: list[str] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)

    def started(self, config: RunConfig, step: int) -> None:
        self.begun.append(config.seed)

    def progressed(self, config: RunConfig, step: int) -> None:
        self.then()

    def restarted(self, config: RunConfig, reason: str) -> None:
        self.again.append(reason)

    def ended(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)


class Stage:
    """A folder of runs that a pretender trains, as it is ordered."""

    def __init__(self, runs_dir: Path, data_dir: Path) -> None:
        self.runs_dir, self.data_dir = runs_dir, data_dir
        runs_dir.mkdir()
        (runs_dir / "orders.json").write_text("{}")

    def configs(self, *orders: str) -> list[RunConfig]:
        """A config for each order: what becomes of the run's processes, one after the other."""
        configs = [tiny_config(seed=seed) for seed in range(len(orders))]
        for config in configs:
            finish(config, self.runs_dir / "library", accuracy=0.5)
        words = {config.run_name(): order.split() for config, order in zip(configs, orders, strict=True)}
        (self.runs_dir / "orders.json").write_text(json.dumps(words))
        return configs

    def sweep(self, configs: list[RunConfig], watcher: Witness | None = None, *, jobs: int = 1) -> list[Outcome]:
        return sweep(configs, runs_dir=self.runs_dir, data_dir=self.data_dir, jobs=jobs, watcher=watcher)

    @property
    def calls(self) -> list[list[str]]:
        """Of every process that was started: how, with which threads in its config, and in its environment."""
        file = self.runs_dir / "calls.txt"
        return [line.split(" ")[1:] for line in file.read_text().splitlines()] if file.exists() else []

    @property
    def backstage(self) -> list[str]:
        return sorted(file.suffix for file in (self.runs_dir / sweeps.BACKSTAGE).iterdir())

    def pids(self, configs: list[RunConfig]) -> list[int]:
        """Of the processes that have begun."""
        files = [self.runs_dir / config.run_name() / "state.json" for config in configs]
        states = [json.loads(file.read_text()) for file in files if file.exists()]
        return [state["pid"] for state in states if state["state"] == "running"]


@pytest.fixture
def stage(tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setattr(sweeps, "SKYFORMER", (sys.executable, "-S", str(PRETENDER)))
    monkeypatch.setattr(sweeps, "PROGRESS_SECONDS", 0.0)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return Stage(tmp_path / "runs", data_dir)


def endings(outcomes: list[Outcome]) -> list[str]:
    return [outcome.ending.value for outcome in outcomes]


def test_a_plan_has_a_whole_table_before_the_next_seed() -> None:
    configs = plan(["listops", "text"], ["softmax", "skyformer"], [3, 1], "cpu")
    assert [(config.seed, config.task.name, config.model.attention) for config in configs] == [
        (seed, task, attention)
        for seed in (3, 1)
        for task in ("listops", "text")
        for attention in ("softmax", "skyformer")
    ]
    assert len({config.run_name() for config in configs}) == 8


def test_a_plan_is_checked() -> None:
    with refused(UnknownNameError, "unknown task 'lstops'", "Did you mean 'listops'?"):
        plan(["lstops"], ["softmax"], [0])
    with refused(UnknownNameError, "unknown attention 'skyfromer'", "Did you mean 'skyformer'?"):
        plan(["listops"], ["softmax", "skyfromer"], [0])
    with refused(UnknownNameError, "Did you mean 'optim.lr'?"):
        plan(["listops"], ["softmax"], [0], overrides=["optim.lrr=1"])
    with refused(InputError, "at least one seed"):
        plan(["listops"], ["softmax"], [])


def test_missing_data_is_one_error_with_all_commands(tmp_path: Path) -> None:
    configs = plan(["listops", "text", "image"], ["softmax", "skyformer"], [0])
    prepare("listops", data_dir=tmp_path, limit=5)
    with pytest.raises(DataError) as caught:
        check_data(configs, tmp_path)
    lines = str(caught.value).splitlines()
    assert [line.partition(" is not prepared")[0] for line in lines] == ["listops", "text", "image"]
    assert ["run: skyformer data prepare" in line for line in lines] == [True] * 3


def test_nothing_starts_before_everything_is_checked(stage: Stage) -> None:
    configs = stage.configs("finish")
    with pytest.raises(DataError):
        stage.sweep([*configs, *plan(["text"], ["softmax"], [0])])
    assert stage.calls == []


def test_all_runs_are_trained_in_order(stage: Stage) -> None:
    watcher = Witness()
    outcomes = stage.sweep(stage.configs("finish", "finish"), watcher)
    assert endings(outcomes) == ["finished", "finished"]
    assert [outcome.result.test_accuracy for outcome in outcomes if outcome.result] == [0.5, 0.5]
    assert (watcher.begun, watcher.outcomes) == ([0, 1], outcomes)
    assert stage.calls == [["--config", "null", "None"]] * 2
    assert stage.backstage == []


def test_jobs_divide_the_cores(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeps, "available_cores", lambda: 9)
    stage.sweep(stage.configs("finish", "finish", "finish"), jobs=2)
    assert stage.calls == [["--config", "4", "4"]] * 3


def test_threads_that_were_chosen_stay() -> None:
    config = tiny_config()
    chosen = config.replace(hardware=config.hardware.replace(threads=3))
    assert with_threads(config, 1).hardware.threads == 1
    assert with_threads(chosen, 1) is chosen


def test_as_many_at_a_time_as_there_are_jobs(stage: Stage) -> None:
    configs = stage.configs("obey", "obey", "obey")

    def stop_when_two_are_there() -> None:
        if len(stage.pids(configs)) == 2:
            signal.raise_signal(signal.SIGTERM)
            witness.then = lambda: None

    witness = Witness(stop_when_two_are_there)
    with pytest.raises(InterruptedRunError):
        stage.sweep(configs, witness, jobs=2)
    assert witness.begun == [0, 1]


def test_what_is_finished_is_skipped_and_what_is_not_goes_on(stage: Stage) -> None:
    done, begun, new = stage.configs("fail", "finish", "finish")
    finish(done, stage.runs_dir, accuracy=0.75)
    start(begun, stage.runs_dir)
    outcomes = stage.sweep([done, begun, new])
    assert endings(outcomes) == ["was finished", "finished", "finished"]
    assert outcomes[0].result is not None
    assert outcomes[0].result.test_accuracy == 0.75
    assert [call[0] for call in stage.calls] == ["--resume", "--config"]


def test_a_second_sweep_has_nothing_to_do(stage: Stage) -> None:
    configs = stage.configs("finish", "finish")
    stage.sweep(configs)
    assert endings(stage.sweep(configs)) == ["was finished", "was finished"]
    assert len(stage.calls) == 2


def test_a_run_that_another_process_trains_is_left_alone(stage: Stage) -> None:
    taken, free = stage.configs("fail", "finish")
    run = create_run(taken, stage.runs_dir)
    with run.lock():
        outcomes = stage.sweep([taken, free])
    assert endings(outcomes) == ["trained elsewhere", "finished"]
    assert f"process {os.getpid()} on {platform.node()}" in outcomes[0].reason
    assert outcomes[0].good
    assert len(stage.calls) == 1


def test_a_failure_stops_no_other_run(stage: Stage) -> None:
    outcomes = stage.sweep(stage.configs("fail", "finish"))
    assert endings(outcomes) == ["failed", "finished"]
    assert outcomes[0].reason.startswith("the loss is nan at step 8; its output is in ")
    assert not outcomes[0].good
    assert stage.backstage == [".log", ".yaml"]


def test_a_damaged_folder_is_a_failure_that_is_not_touched(stage: Stage) -> None:
    broken, whole = stage.configs("finish", "finish")
    folder = stage.runs_dir / broken.run_name()
    folder.mkdir()
    outcomes = stage.sweep([broken, whole])
    assert endings(outcomes) == ["failed", "finished"]
    assert "it has no config.yaml" in outcomes[0].reason
    assert list(folder.iterdir()) == []


def test_a_run_whose_process_died_is_started_again(stage: Stage) -> None:
    watcher = Witness()
    assert endings(stage.sweep(stage.configs("die die finish"), watcher)) == ["finished"]
    assert [call[0] for call in stage.calls] == ["--config", "--resume", "--resume"]
    assert ["SIGKILL" in reason for reason in watcher.again] == [True, True]


def test_it_is_not_started_for_ever(stage: Stage) -> None:
    (outcome,) = stage.sweep(stage.configs("die"))
    assert outcome.ending is Ending.FAILED
    assert "SIGKILL" in outcome.reason
    assert len(stage.calls) == 1 + sweeps.DEFAULT_RETRIES


def test_an_error_is_not_tried_again(stage: Stage) -> None:
    stage.sweep(stage.configs("fail"))
    assert len(stage.calls) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_passed_on_and_says_how_to_go_on(stage: Stage, number: signal.Signals) -> None:
    configs = stage.configs("finish", "obey finish", "obey finish", "finish")

    def stop_when_both_are_there() -> None:
        if len(stage.pids(configs)) == 2:
            signal.raise_signal(number)
            witness.then = lambda: None

    witness = Witness(stop_when_both_are_there)
    with pytest.raises(InterruptedRunError) as caught:
        stage.sweep(configs, witness, jobs=2)
    assert str(caught.value) == f"1 of 4 runs are done; stopped by {number.name}; the same command goes on"
    assert caught.value.exit_code == 128 + number
    assert endings(witness.outcomes) == ["finished", "interrupted", "interrupted"]
    assert endings(stage.sweep(configs)) == ["was finished", "finished", "finished", "finished"]


def test_a_second_signal_ends_runs_that_do_not_listen(stage: Stage) -> None:
    (config,) = stage.configs("defy")

    def insist() -> None:
        if stage.pids([config]):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(InterruptedRunError, match="at once"):
        stage.sweep([config], Witness(insist))
    (pid,) = stage.pids([config])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(("jobs", "retries"), [(0, 0), (1, -1)])
def test_numbers_must_make_sense(data_dir: Path, jobs: int, retries: int) -> None:
    with refused(InputError, "at least", str(min(jobs, retries))):
        sweep([tiny_config()], data_dir=data_dir, jobs=jobs, retries=retries)


def test_with_real_processes(runs_dir: Path, data_dir: Path, whole: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run is there half-trained and one is new; both end as if nothing had happened."""
    # As many as `whole` had, so that every bit can be the same.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    half, new = whole.config, tiny_config(seed=1, attention="softmax", options={})
    with pytest.raises(InterruptedRunError):
        train(half, runs_dir=runs_dir, data_dir=data_dir, progress=False, callbacks=[Send(8, signal.SIGTERM)])
    outcomes = sweep([half, new], runs_dir=runs_dir, data_dir=data_dir, jobs=2)
    assert endings(outcomes) == ["finished", "finished"], [outcome.reason for outcome in outcomes]
    assert_same_run(Run(runs_dir / half.run_name()), whole)
    for outcome in outcomes:
        assert outcome.result is not None
        assert outcome.result.peak_memory_bytes
