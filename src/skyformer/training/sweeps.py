"""Many runs: tasks, attentions and seeds, each run in a process of its own, one after the other or some at a time.

A sweep keeps nothing of its own: what is finished, what can go on and what is taken is read from the runs' folders when
their turn comes. So a sweep that was stopped goes on when it is started again, and two sweeps of the same runs share
the work.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from skyformer.attention import attention_class
from skyformer.errors import DataError, InputError, SkyformerError
from skyformer.files import write_atomic
from skyformer.lra.dataset import load_task
from skyformer.training.config import RunConfig, TaskConfig, to_yaml
from skyformer.training.presets import DEFAULT_PRESET, load_preset
from skyformer.training.runs import Run, RunResult, open_run, runs_dir_or_default
from skyformer.training.signals import StopSignals

BACKSTAGE = ".sweep"
"""Where a sweep keeps the configs and the output of its runs' processes, inside the folder of runs."""

SKYFORMER = (sys.executable, "-m", "skyformer.cli.main")
STOPPED = "told to stop; what it has saved is kept"
ADVICE = "the same command goes on"
DEFAULT_RETRIES = 2
PROGRESS_SECONDS = 2.0
_GATHER_SECONDS = 0.1
_TAIL_BYTES = 20_000
_STOPPED_CODES = (128 + signal.SIGINT, 128 + signal.SIGTERM)


class Ending(StrEnum):
    """How it ended with one run of a sweep."""

    FINISHED = "finished"
    WAS_FINISHED = "was finished"
    ELSEWHERE = "trained elsewhere"
    INTERRUPTED = "interrupted"
    FAILED = "failed"


@dataclass(frozen=True)
class Outcome:
    """What came of one run."""

    config: RunConfig
    ending: Ending
    result: RunResult | None = None
    reason: str = ""

    @property
    def good(self) -> bool:
        """Nothing is left to do for this run, at least not for us."""
        return self.ending in (Ending.FINISHED, Ending.WAS_FINISHED, Ending.ELSEWHERE)


class Watcher(Protocol):
    """Told what happens, as it happens."""

    def started(self, config: RunConfig, step: int) -> None: ...

    def progressed(self, config: RunConfig, step: int) -> None: ...

    def restarted(self, config: RunConfig, reason: str) -> None: ...

    def ended(self, outcome: Outcome) -> None: ...


class Silent:
    """Nobody watches."""

    def started(self, config: RunConfig, step: int) -> None: ...

    def progressed(self, config: RunConfig, step: int) -> None: ...

    def restarted(self, config: RunConfig, reason: str) -> None: ...

    def ended(self, outcome: Outcome) -> None: ...


def plan(
    tasks: Sequence[str],
    attentions: Sequence[str],
    seeds: Sequence[int],
    preset: str = DEFAULT_PRESET,
    overrides: Sequence[str] = (),
    steps: int | None = None,
) -> list[RunConfig]:
    """The configs of a sweep, each checked; whole tables come first, one seed after the other."""
    for what, names in (("task", tasks), ("attention", attentions), ("seed", seeds)):
        if not names:
            raise InputError(f"a sweep needs at least one {what}; got none")
    for attention in attentions:
        attention_class(attention)
    first = [
        load_preset(task, preset, attention=attention, overrides=overrides, steps=steps, seed=seeds[0])
        for task in tasks
        for attention in attentions
    ]
    return [config.replace(seed=seed) for seed in seeds for config in first]


def check_data(configs: Iterable[RunConfig], data_dir: Path | str | None = None) -> None:
    """Every task is prepared; if some are not, one error has the commands for all of them."""
    problems = data_problems(dict.fromkeys(config.task for config in configs), data_dir)
    if problems:
        raise DataError("\n".join(problems))


def data_problems(tasks: Iterable[TaskConfig], data_dir: Path | str | None) -> list[str]:
    """What is missing, and how to prepare it."""
    problems = []
    for task in tasks:
        try:
            load_task(
                task.name,
                data_dir,
                seed=task.data_seed,
                limit=task.limit,
                level=task.level,
                max_length=task.max_length,
            )
        except DataError as error:
            problems.append(str(error))
    return problems


def run_of(config: RunConfig, runs_dir: Path) -> Run:
    return Run(runs_dir / config.run_name())


def settled(config: RunConfig, runs_dir: Path) -> Outcome | None:
    """The outcome of a run that is not to be trained here and now; nothing for one that is."""
    run = run_of(config, runs_dir)
    if not run.folder.exists():
        return None
    try:
        result = open_run(run.folder).result
    except SkyformerError as error:
        return Outcome(config, Ending.FAILED, reason=str(error))
    if result is not None:
        return Outcome(config, Ending.WAS_FINISHED, result)
    state = run.state
    if state.state == "running":
        reason = f"process {state.pid} on {state.host} trains it; if not: skyformer train --resume {run.folder}"
        return Outcome(config, Ending.ELSEWHERE, reason=reason)
    return None


def step_of(config: RunConfig, runs_dir: Path) -> int:
    """How far a run has come, as far as its folder tells."""
    with suppress(SkyformerError, OSError):
        return run_of(config, runs_dir).stored_state().step
    return 0


def is_running(config: RunConfig, runs_dir: Path) -> bool:
    """Whether a run's folder says that it is being trained, be it true or not."""
    with suppress(SkyformerError, OSError):
        return run_of(config, runs_dir).stored_state().state == "running"
    return False


def stopped(outcomes: Sequence[Outcome], total: int) -> str:
    """What to say of a sweep that was told to stop."""
    return f"{sum(outcome.good for outcome in outcomes)} of {total} runs are done; stopped"


def with_threads(config: RunConfig, threads: int) -> RunConfig:
    """The config with this many threads, unless it says itself how many."""
    if config.hardware.threads is not None:
        return config
    return config.replace(hardware=config.hardware.replace(threads=threads))


def available_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def sweep(
    configs: Sequence[RunConfig],
    *,
    runs_dir: Path | str | None = None,
    data_dir: Path | str | None = None,
    jobs: int = 1,
    retries: int = DEFAULT_RETRIES,
    watcher: Watcher | None = None,
) -> list[Outcome]:
    """Train what is not finished, `jobs` runs at a time, each in a process of its own.

    Args:
        configs: from `plan`. runs_dir, data_dir: as for `train`.
        jobs: runs at a time; the cores are divided among them.
        retries: how often a run whose process died is started again, from its last checkpoint.
        watcher: is told what happens.

    A run that fails does not stop the others. Ctrl-C or SIGTERM is passed on to the runs, which save and end; then it
    is an `InterruptedRunError` here.
    """
    if jobs < 1 or retries < 0:
        raise InputError(f"jobs must be at least 1 and retries at least 0; got {jobs} and {retries}")
    check_data(configs, data_dir)
    root = runs_dir_or_default(runs_dir)
    return _LocalSweep(root, data_dir, jobs, retries, watcher or Silent()).run(configs)


@dataclass(frozen=True)
class _Child:
    """A process that trains one run."""

    config: RunConfig
    process: subprocess.Popen[bytes]
    retries: int

    def send(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            # Beyond the process itself there may be some that load its data.
            os.killpg(self.process.pid, number) if number == signal.SIGKILL else self.process.send_signal(number)


class _LocalSweep:
    """Runs on this machine."""

    def __init__(self, runs_dir: Path, data_dir: Path | str | None, jobs: int, retries: int, watcher: Watcher) -> None:
        self._runs_dir, self._data_dir, self._jobs, self._retries = runs_dir, data_dir, jobs, retries
        self._watcher = watcher
        self._threads = max(1, available_cores() // jobs)
        self._children: list[_Child] = []
        self._outcomes: list[Outcome] = []

    def run(self, configs: Sequence[RunConfig]) -> list[Outcome]:
        waiting = deque(configs)
        told = looked = 0.0
        with StopSignals(ADVICE) as signals:
            try:
                while self._children or (waiting and signals.received is None):
                    if signals.received is None:
                        self._fill(waiting)
                    elif not told:
                        told = time.monotonic()
                        self._tell(signals.received)
                    self._gather(stopping=signals.received is not None)
                    if time.monotonic() - looked > PROGRESS_SECONDS:
                        looked = time.monotonic()
                        self._look()
                    time.sleep(_GATHER_SECONDS if self._children else 0)
            finally:
                self._kill()
        if signals.received is not None:
            raise signals.error(stopped(self._outcomes, len(configs)))
        return self._outcomes

    def _fill(self, waiting: deque[RunConfig]) -> None:
        while waiting and len(self._children) < self._jobs:
            config = waiting.popleft()
            outcome = settled(config, self._runs_dir)
            if outcome is not None:
                self._end(outcome)
                continue
            self._watcher.started(config, step_of(config, self._runs_dir))
            self._start(config, self._retries)

    def _start(self, config: RunConfig, retries: int) -> None:
        log = self._backstage(config, "log")
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            # In a session of its own a run gets Ctrl-C from here alone, and once.
            process = subprocess.Popen(
                self._command(config),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._environment(),
                start_new_session=True,
            )
        self._children.append(_Child(config, process, retries))

    def _command(self, config: RunConfig) -> list[str]:
        run = run_of(config, self._runs_dir)
        if run.folder.exists():
            what = ["--resume", str(run.folder)]
        else:
            file = self._backstage(config, "yaml")
            write_atomic(file, to_yaml(with_threads(config, self._threads) if self._jobs > 1 else config))
            what = ["--config", str(file), "--runs-dir", str(self._runs_dir)]
        data = [] if self._data_dir is None else ["--data-dir", str(self._data_dir)]
        return [*SKYFORMER, "train", *what, *data, "--no-progress"]

    def _environment(self) -> dict[str, str]:
        """Divides the cores also for a run that was begun when it had them all."""
        threads = {} if self._jobs == 1 else {"OMP_NUM_THREADS": str(self._threads)}
        return threads | dict(os.environ)

    def _backstage(self, config: RunConfig, ending: str) -> Path:
        return self._runs_dir / BACKSTAGE / f"{config.run_name()}.{ending}"

    def _gather(self, *, stopping: bool) -> None:
        for child in list(self._children):
            code = child.process.poll()
            if code is None:
                continue
            self._children.remove(child)
            outcome = self._outcome(child, code, stopping)
            if outcome.ending is Ending.FAILED and code < 0 and child.retries:
                self._watcher.restarted(child.config, outcome.reason)
                self._start(child.config, child.retries - 1)
            else:
                self._end(outcome)

    def _outcome(self, child: _Child, code: int, stopping: bool) -> Outcome:
        found = settled(child.config, self._runs_dir)
        if found is not None and found.result is not None:
            return Outcome(child.config, Ending.FINISHED, found.result)
        if stopping or code in _STOPPED_CODES:
            return Outcome(child.config, Ending.INTERRUPTED, reason=STOPPED)
        if found is not None and found.ending is Ending.ELSEWHERE:
            return found
        return Outcome(child.config, Ending.FAILED, reason=self._reason(child, code))

    def _reason(self, child: _Child, code: int) -> str:
        log = self._backstage(child.config, "log")
        if code < 0:
            return f"its process was ended by {_signal_name(-code)}; its output is in {log}"
        return f"{_last_line(log) or f'exit code {code}'}; its output is in {log}"

    def _end(self, outcome: Outcome) -> None:
        if outcome.good:
            for ending in ("log", "yaml"):
                self._backstage(outcome.config, ending).unlink(missing_ok=True)
        self._outcomes.append(outcome)
        self._watcher.ended(outcome)

    def _look(self) -> None:
        for child in self._children:
            self._watcher.progressed(child.config, step_of(child.config, self._runs_dir))

    def _tell(self, number: signal.Signals) -> None:
        for child in self._children:
            child.send(number)

    def _kill(self) -> None:
        """There are children left only after a second signal, or an error here; a run survives that."""
        for child in self._children:
            child.send(signal.SIGKILL)
            child.process.wait()


def _signal_name(number: int) -> str:
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def _last_line(log: Path) -> str:
    """What a process said last, which is its error."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").split("\n")
    said = [line.strip() for line in lines if line.strip()]
    return said[-1].removeprefix("error: ") if said else ""
