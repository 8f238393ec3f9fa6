"""Train many runs: tasks x attentions x seeds, each run in its own process.

A sweep stores no state of its own. Whether a run is finished, can be resumed or is being trained elsewhere is read from
its folder just before it would start. So a sweep that was stopped resumes when it is started again, and two sweeps of
the same runs share the work.

`Sweep` is the loop; an `Executor` starts the processes: `LocalExecutor` here, `RayExecutor` in `ray_sweeps`.
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
from skyformer.checks import check_at_least
from skyformer.errors import DataError, InputError, SkyformerError
from skyformer.files import runs_dir_or_default, write_atomic
from skyformer.lra.folders import Manifest
from skyformer.lra.preparation import Prepared
from skyformer.processes import STOP_SIGNALS, available_cores
from skyformer.report.progress import Progress, Silent
from skyformer.report.tables import duration
from skyformer.training.config import EXCLUDED_FROM_DIGEST, RunConfig, TaskConfig, flatten, to_yaml
from skyformer.training.presets import differing, load_preset
from skyformer.training.runs import LOCK_FILE, DataRecord, Run, RunResult, RunState, open_run
from skyformer.training.signals import StopSignals

SWEEP_FOLDER = ".sweep"
"""Folder inside the folder of runs for the configs and the output of the processes."""

SKYFORMER = (sys.executable, "-m", "skyformer")
STOPPED = "stopped; its checkpoints are saved"
DEFAULT_RETRIES = 2
PROGRESS_SECONDS = 2.0
_POLL_SECONDS = 0.1
_TAIL_BYTES = 20_000
_STOPPED_CODES = tuple(128 + number for number in STOP_SIGNALS)
_RUNS = "runs"
_MAY_DIFFER = {f"{section}.{name}" for section in ("hardware", "loop") for name in EXCLUDED_FROM_DIGEST[section]}
"""Settings that are not part of the name of a run."""


class Ending(StrEnum):
    """How one run of a sweep ended."""

    FINISHED = "finished"
    WAS_FINISHED = "was finished"
    ELSEWHERE = "trained elsewhere"
    INTERRUPTED = "interrupted"
    FAILED = "failed"


@dataclass(frozen=True)
class Outcome:
    """How one run ended; `died` says that its process was killed, so that another attempt may succeed."""

    config: RunConfig
    ending: Ending
    result: RunResult | None = None
    reason: str = ""
    died: bool = False

    @property
    def good(self) -> bool:
        """Whether this sweep has nothing left to do for the run."""
        return self.ending in (Ending.FINISHED, Ending.WAS_FINISHED, Ending.ELSEWHERE)

    def __str__(self) -> str:
        if self.result is None:
            return f"{self.ending}: {self.reason}"
        before = " before" if self.ending is Ending.WAS_FINISHED else ""
        unlike_paper = self.result.note and self.config.task.own is None
        note = f" [preset {self.result.preset}, not the paper's setting]" if unlike_paper else ""
        accuracy, seconds = self.result.test_accuracy, self.result.seconds
        return f"finished{before}, test accuracy {accuracy:.2%} in {duration(seconds)}{note}"


class Executor(Protocol):
    """Starts runs in other processes."""

    queues: bool
    """Whether a run may wait for resources after `start`."""
    save_seconds: float
    """Time to save after `interrupt`, before the processes are killed."""

    def start(self, config: RunConfig) -> None:
        """Train a run, or resume it if its folder exists."""

    def collect(self) -> Iterable[Outcome]:
        """Outcomes of processes that ended; waits a moment if there are none."""

    def interrupt(self, number: signal.Signals) -> None:
        """Ask all processes to save and exit."""

    def kill(self) -> None:
        """End all processes that are left."""


def plan(
    tasks: Sequence[str | Prepared],
    attentions: Sequence[str],
    seeds: Sequence[int],
    preset: str | None = None,
    overrides: Sequence[str] = (),
    steps: int | None = None,
) -> list[RunConfig]:
    """The checked configs of all tasks x attentions x seeds; all runs of the first seed come first.

    Args:
        tasks, attentions, seeds: at least one of each; a task may be own data from `skyformer.own.own_data`.
        preset, overrides, steps: for every run, as in `load_preset`.
    """
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


def check_data(
    configs: Sequence[RunConfig], data_dir: Path | str | None = None, runs_dir: Path | None = None
) -> dict[TaskConfig, str]:
    """Check that every task is prepared, and that existing runs in `runs_dir` were trained on the same data.

    Returns:
        The digest of the data of each task. One error lists all problems, with the commands that solve them.
    """
    tasks = dict.fromkeys(config.task for config in configs)
    problems, found = data_problems(tasks, data_dir)
    if runs_dir is not None and not problems:
        others = (_other_data(run_of(config, runs_dir), found[config.task]) for config in configs)
        problems = [problem for problem in others if problem]
    if problems:
        raise DataError("\n".join(problems))
    return {task: DataRecord.of(manifest).digest() for task, manifest in found.items()}


def data_problems(
    tasks: Iterable[TaskConfig], data_dir: Path | str | None
) -> tuple[list[str], dict[TaskConfig, Manifest]]:
    """A message for each task that is not prepared, with the command that prepares it; and the others' manifests."""
    problems, found = [], {}
    for task in tasks:
        try:
            found[task] = task.load(data_dir).manifest
        except DataError as error:
            problems.append(str(error))
    return problems, found


def _other_data(run: Run, manifest: Manifest) -> str | None:
    """The message about a run of other data; a damaged folder is reported later, when the run would start."""
    with suppress(DataError):
        if run.data is not None:
            try:
                run.check_data(manifest)
            except DataError as error:
                return str(error)
    return None


def run_of(config: RunConfig, runs_dir: Path) -> Run:
    return Run(runs_dir / config.run_name())


def existing_outcome(config: RunConfig, runs_dir: Path) -> Outcome | None:
    """The outcome of a run that is finished, damaged or trained elsewhere; None for a run to train now."""
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
        reason = f"process {state.pid} on {state.host} is training it, because it holds {run.folder / LOCK_FILE}"
        return Outcome(config, Ending.ELSEWHERE, reason=reason)
    return None


def stored_state(config: RunConfig, runs_dir: Path) -> RunState | None:
    """What the run's folder says about its progress, without checking that its process exists."""
    with suppress(SkyformerError, OSError):
        return run_of(config, runs_dir).stored_state()
    return None


def settings_kept(config: RunConfig, runs_dir: Path) -> list[str]:
    """The settings of an unfinished run that differ from `config`: those that do not decide its result."""
    run = run_of(config, runs_dir)
    if not run.folder.exists():
        return []
    given = {name: value for name, value in flatten(config.model_dump(mode="json")).items() if name in _MAY_DIFFER}
    # Without a number of threads, the sweep divides the cores.
    return differing(run.config, {name: value for name, value in given.items() if value is not None})


def with_threads(config: RunConfig, threads: int) -> RunConfig:
    """The config with this number of threads, unless it sets one itself."""
    if config.hardware.threads is not None:
        return config
    return config.replace(hardware=config.hardware.replace(threads=threads))


def sweep(
    configs: Sequence[RunConfig],
    *,
    runs_dir: Path | str | None = None,
    data_dir: Path | str | None = None,
    jobs: int = 1,
    retries: int = DEFAULT_RETRIES,
    progress: Progress | None = None,
) -> list[Outcome]:
    """Train all runs that are not finished, `jobs` at a time, each in its own process on this machine.

    A run that fails does not stop the others. Ctrl-C, SIGTERM, SIGHUP or SIGUSR1 is passed on to the runs, which
    save and exit; then `InterruptedRunError` is raised.

    Args:
        configs: from `plan`.
        runs_dir, data_dir: as in `train`.
        jobs: runs at the same time; they share the cores.
        retries: how often a run whose process died is started again from its last checkpoint.
        progress: where to show progress.

    Returns:
        One outcome per run, in the order in which they ended.
    """
    loop = Sweep(runs_dir_or_default(runs_dir), jobs, retries, progress)
    check_data(configs, data_dir, loop.runs_dir)
    return loop.run(configs, LocalExecutor(loop.runs_dir, data_dir, jobs))


@dataclass
class _Active:
    """A run in training or in the executor's queue."""

    config: RunConfig
    retries: int
    shown: bool = False


class Sweep:
    """The loop of every sweep: start runs, retry those whose process died, stop on a signal, report progress."""

    def __init__(self, runs_dir: Path, jobs: int | None, retries: int, progress: Progress | None) -> None:
        check_at_least("jobs", 1 if jobs is None else jobs, 1)
        check_at_least("retries", retries, 0)
        self.runs_dir = runs_dir
        self._jobs, self._retries = jobs, retries
        self._progress = progress or Silent()
        self._outcomes: list[Outcome] = []
        self._active: dict[str, _Active] = {}

    def run(self, configs: Sequence[RunConfig], executor: Executor) -> list[Outcome]:
        waiting = deque({config.run_name(): config for config in configs}.values())
        self._total = len(waiting)
        self._progress.begin(_RUNS, total=self._total)
        stopped_at = shown_at = 0.0
        with StopSignals("run the same command again to resume") as signals:
            try:
                while self._active or (waiting and signals.received is None):
                    if signals.received is None:
                        self._fill(waiting, executor)
                    elif not stopped_at:
                        stopped_at = time.monotonic()
                        executor.interrupt(signals.received)
                    elif time.monotonic() - stopped_at > executor.save_seconds:
                        break
                    for outcome in list(executor.collect()):
                        self._take(outcome, executor, stopping=signals.received is not None)
                    if time.monotonic() - shown_at > PROGRESS_SECONDS:
                        shown_at = time.monotonic()
                        self._show_steps()
            finally:
                executor.kill()
        if signals.received is not None:
            done = sum(outcome.good for outcome in self._outcomes)
            raise signals.error(f"{done} of {self._total} runs are done; stopped")
        return self._outcomes

    def _fill(self, waiting: deque[RunConfig], executor: Executor) -> None:
        while waiting and (self._jobs is None or len(self._active) < self._jobs):
            config = waiting.popleft()
            outcome = existing_outcome(config, self.runs_dir)
            if outcome is not None:
                self._end(outcome)
                continue
            if kept := settings_kept(config, self.runs_dir):
                self._progress.note(f"{_describe(config)} resumes with the settings that it has: {', '.join(kept)}")
            run = self._active[config.run_name()] = _Active(config, self._retries)
            if not executor.queues:
                self._show(run, stored_state(config, self.runs_dir))
            executor.start(config)

    def _take(self, outcome: Outcome, executor: Executor, *, stopping: bool) -> None:
        config = outcome.config
        run = self._active[config.run_name()]
        # A process may die after it has written its result.
        found = existing_outcome(config, self.runs_dir) if outcome.result is None else None
        if found is not None and found.result is not None:
            outcome = Outcome(config, Ending.FINISHED, found.result)
        elif stopping and outcome.result is None:
            outcome = Outcome(config, Ending.INTERRUPTED, reason=STOPPED)
        if outcome.died and run.retries:
            run.retries -= 1
            self._progress.note(f"{_describe(config)}: starting again, because {outcome.reason}")
            executor.start(config)
        else:
            del self._active[config.run_name()]
            self._end(outcome)

    def _end(self, outcome: Outcome) -> None:
        if outcome.good and outcome.ending is not Ending.ELSEWHERE:  # Those files are of the other process.
            for suffix in ("log", "yaml"):
                sweep_file(outcome.config, self.runs_dir, suffix).unlink(missing_ok=True)
        self._outcomes.append(outcome)
        self._progress.end(_describe(outcome.config))
        self._progress.update(_RUNS, done=len(self._outcomes))
        self._progress.note(f"[{len(self._outcomes)}/{self._total}] {_describe(outcome.config)}: {outcome}")

    def _show_steps(self) -> None:
        for run in self._active.values():
            state = stored_state(run.config, self.runs_dir)
            if not run.shown and state is not None and state.state == "running":
                self._show(run, state)
            if run.shown and state is not None:
                self._progress.update(_describe(run.config), done=state.step)

    def _show(self, run: _Active, state: RunState | None) -> None:
        run.shown = True
        self._progress.begin(_describe(run.config), total=run.config.loop.last_step, done=state.step if state else 0)


def _describe(config: RunConfig) -> str:
    return f"{config.task.name} {config.model.attention} seed {config.seed}"


def sweep_file(config: RunConfig, runs_dir: Path, suffix: str) -> Path:
    """Where a sweep stores the config or the output of a run's process."""
    return runs_dir / SWEEP_FOLDER / f"{config.run_name()}.{suffix}"


class LocalExecutor:
    """Runs `skyformer train` in processes on this machine."""

    queues = False
    save_seconds = float("inf")

    def __init__(self, runs_dir: Path, data_dir: Path | str | None, jobs: int) -> None:
        self._runs_dir, self._data_dir = runs_dir, data_dir
        self._threads = max(1, available_cores() // jobs) if jobs > 1 else None
        self._processes: list[tuple[RunConfig, subprocess.Popen[bytes]]] = []

    def start(self, config: RunConfig) -> None:
        log = sweep_file(config, self._runs_dir, "log")
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            # In a session of its own, a run receives Ctrl-C only from `interrupt`, and only once.
            process = subprocess.Popen(
                self._command(config),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._environment(),
                start_new_session=True,
            )
        self._processes.append((config, process))

    def _command(self, config: RunConfig) -> list[str]:
        run = run_of(config, self._runs_dir)
        if run.folder.exists():
            what = ["--resume", str(run.folder)]
        else:
            file = sweep_file(config, self._runs_dir, "yaml")
            write_atomic(file, to_yaml(config if self._threads is None else with_threads(config, self._threads)))
            what = ["--config", str(file), "--runs-dir", str(self._runs_dir)]
        data = [] if self._data_dir is None else ["--data-dir", str(self._data_dir)]
        return [*SKYFORMER, "train", *what, *data, "--no-progress"]

    def _environment(self) -> dict[str, str]:
        """Limits the threads also of a resumed run, whose config may have been written for all cores."""
        threads = {} if self._threads is None else {"OMP_NUM_THREADS": str(self._threads)}
        return threads | dict(os.environ)

    def collect(self) -> list[Outcome]:
        ended = [(config, process) for config, process in self._processes if process.poll() is not None]
        self._processes = [each for each in self._processes if each not in ended]
        if self._processes and not ended:
            time.sleep(_POLL_SECONDS)
        return [self._outcome(config, process.returncode) for config, process in ended]

    def _outcome(self, config: RunConfig, code: int) -> Outcome:
        log = sweep_file(config, self._runs_dir, "log")
        if code < 0:
            reason = f"its process was killed by {_signal_name(-code)}; its output is in {log}"
            return Outcome(config, Ending.FAILED, reason=reason, died=True)
        if code in _STOPPED_CODES:
            return Outcome(config, Ending.INTERRUPTED, reason=STOPPED)
        found = existing_outcome(config, self._runs_dir)
        if found is not None and found.ending is Ending.ELSEWHERE:
            return found
        reason = f"{_last_line(log) or f'exit code {code}'}; its output is in {log}"
        return Outcome(config, Ending.FAILED, reason=reason)

    def interrupt(self, number: signal.Signals) -> None:
        for _, process in self._processes:
            with suppress(ProcessLookupError):
                process.send_signal(number)

    def kill(self) -> None:
        """Processes are left only after a second signal or an error; their runs can be resumed."""
        for _, process in self._processes:
            with suppress(ProcessLookupError):
                # The whole group: there may be processes that load the data.
                os.killpg(process.pid, signal.SIGKILL)
        # Not before all are killed, because another signal may end the waiting.
        for _, process in self._processes:
            process.wait()


def _signal_name(number: int) -> str:
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def _last_line(log: Path) -> str:
    """The last line that a process printed, which is its error; nothing if another sweep has removed the file."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
    except FileNotFoundError:
        return ""
    printed = [line.strip() for line in lines if line.strip()]
    return printed[-1].removeprefix("error: ") if printed else ""
