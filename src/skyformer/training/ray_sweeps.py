"""Many runs over a Ray cluster: a run is a task with the resources it asks for, alone in a worker process.

The runs' folder lies on storage that all nodes share, so a run whose worker dies is started again on any node, from its
last checkpoint. That is done from here rather than by Ray's own retries, so that it is seen, and has an end also when
memory is short.
"""

from __future__ import annotations

import logging
import os
import platform
import secrets
import socket
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyformer.environment import installed_version
from skyformer.errors import DataError, InputError, InterruptedRunError, MissingExtraError, SkyformerError
from skyformer.lra.folders import data_dir_or_default
from skyformer.training.config import RunConfig, TaskConfig, from_yaml, to_yaml
from skyformer.training.runs import RunResult, runs_dir_or_default
from skyformer.training.signals import StopSignals
from skyformer.training.sweeps import (
    ADVICE,
    BACKSTAGE,
    DEFAULT_RETRIES,
    PROGRESS_SECONDS,
    STOPPED,
    Ending,
    Outcome,
    Silent,
    Watcher,
    check_data,
    data_problems,
    is_running,
    run_of,
    settled,
    step_of,
    stopped,
    with_threads,
)

CONNECT_SECONDS = 5.0
_SAVE_SECONDS = 120.0
_CLIENT = "ray://"


@dataclass(frozen=True)
class Resources:
    """What a run asks of the node it goes to."""

    cpus: float = 1.0
    gpus: float = 0.0
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.cpus <= 0 or self.gpus < 0 or (self.memory_bytes is not None and self.memory_bytes <= 0):
            raise InputError(f"a run needs more than 0 CPUs, at least 0 GPUs and some memory; got {self}")

    def fit(self, node: dict[str, float]) -> bool:
        """Whether a node that offers this much can take the run when it is idle."""
        wanted = (("CPU", self.cpus), ("GPU", self.gpus), ("memory", self.memory_bytes or 0))
        return all(node.get(name, 0) >= amount for name, amount in wanted)

    def __str__(self) -> str:
        memory = f", {self.memory_bytes / 1e9:g} GB of memory" if self.memory_bytes else ""
        return f"{self.cpus:g} CPUs, {self.gpus:g} GPUs{memory}"


def ray_sweep(
    configs: Sequence[RunConfig],
    *,
    runs_dir: Path | str | None = None,
    data_dir: Path | str | None = None,
    address: str | None = None,
    resources: Resources = Resources(),
    jobs: int | None = None,
    retries: int = DEFAULT_RETRIES,
    watcher: Watcher | None = None,
) -> list[Outcome]:
    """As `sweep`, on a Ray cluster.

    Args:
        address: of the cluster, as `ray start` prints it; nothing = one is started here, and shut down at the end.
        resources: what each run asks for. jobs: how many runs at a time at most; nothing = as many as fit.
        runs_dir: on storage that all nodes share. data_dir: there, or prepared at the same place on every node.
    """
    if (jobs is not None and jobs < 1) or retries < 0:
        raise InputError(f"jobs must be at least 1 and retries at least 0; got {jobs} and {retries}")
    check_data(configs, data_dir)
    root, data = runs_dir_or_default(runs_dir).resolve(), data_dir_or_default(data_dir).resolve()
    with _cluster(address) as ray:
        _check_nodes(ray, configs, root, data, resources)
        return _RaySweep(ray, root, data, resources, jobs, retries, watcher or Silent()).run(configs)


@contextmanager
def _cluster(address: str | None) -> Iterator[Any]:
    """Ray, connected; what was started here is shut down, what was there goes on."""
    if address is not None:
        _check_reachable(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ModuleNotFoundError as error:
        raise MissingExtraError("ray", "ray") from error
    try:
        # A cluster has its dashboard or has not; that is not ours to say.
        dashboard = False if address is None else None
        ray.init(
            address=address or "local",
            include_dashboard=dashboard,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise InputError(f"no Ray cluster answers at {address or 'this machine'}: {_first_line(error)}") from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Ray itself takes more than a minute to say that nobody is there."""
    if address == "auto":
        return
    host, colon, port = address.removeprefix(_CLIENT).rpartition(":")
    if not colon or not host or not port.isdecimal():
        raise InputError(f"--address must be HOST:PORT, ray://HOST:PORT or auto; got {address!r}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise InputError(
            f"no Ray cluster answers at {address}: {error}; start one with: ray start --head --port {port}"
        ) from None


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _check_nodes(ray: Any, configs: Sequence[RunConfig], runs_dir: Path, data_dir: Path, resources: Resources) -> None:
    """Every node that may get a run can import this package, and sees the runs and the data."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    able = [node for node in nodes if resources.fit(node["Resources"])]
    if not able:
        offers = "; ".join(_offer(node) for node in nodes)
        raise InputError(f"no node has what a run asks for ({resources}); there is: {offers}")
    mark = runs_dir / BACKSTAGE / f"mark-{secrets.token_hex(8)}"
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.write_text("this file shows that a node sees the folder")
    try:
        tasks = list(dict.fromkeys(config.task for config in configs))
        problems = list(_problems(ray, able, str(mark), tasks, str(data_dir)))
    finally:
        mark.unlink(missing_ok=True)
    if problems:
        raise DataError("\n".join(problems))


def _offer(node: dict[str, Any]) -> str:
    offered = node["Resources"]
    memory = offered.get("memory", 0) / 1e9
    counts = f"{offered.get('CPU', 0):g} CPUs, {offered.get('GPU', 0):g} GPUs, {memory:.1f} GB of memory"
    return f"{node['NodeManagerHostname']} with {counts}"


def _problems(
    ray: Any, nodes: Iterable[dict[str, Any]], mark: str, tasks: list[TaskConfig], data_dir: str
) -> Iterator[str]:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    look = ray.remote(num_cpus=0, max_retries=0)(look_around)
    asked = []
    for node in nodes:
        place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        sight = look.options(scheduling_strategy=place).remote(mark, tasks, data_dir, installed_version("skyformer"))
        asked.append((node["NodeManagerHostname"], sight))
    for name, sight in asked:
        try:
            problem = ray.get(sight)
        except ray.exceptions.RayError as error:
            problem = f"skyformer does not run there: {_last_line(error)}"
        if problem:
            yield f"node {name}: {problem}"


def _last_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__


def look_around(mark: str, tasks: list[TaskConfig], data_dir: str, version: str | None) -> str | None:
    """What keeps the node that this is called on from training, if anything."""
    if installed_version("skyformer") != version:
        return f"has skyformer {installed_version('skyformer')}, not {version}; install the same version on all nodes"
    folder = Path(mark).parent.parent
    if not Path(mark).exists():
        return f"does not see {folder}; --runs-dir must be on storage that all nodes share"
    if not os.access(folder, os.W_OK):
        return f"may not write to {folder}"
    return "; ".join(data_problems(tasks, data_dir)) or None


@dataclass(frozen=True)
class Report:
    """How a run ended in its worker; errors do not travel well, their words do."""

    ending: Ending
    reason: str = ""
    result: RunResult | None = None


def train_here(config: str, runs_dir: str, data_dir: str) -> Report:
    """Train one run in this process, or go on with it."""
    from skyformer.training import fit

    settings = from_yaml(config)
    run = run_of(settings, Path(runs_dir))
    try:
        result = run.result if run.folder.exists() else None
        if not run.folder.exists():
            result = fit.train(settings, runs_dir=runs_dir, data_dir=data_dir, progress=False)
        elif result is None:
            # It may still be called running, by a process on a node that is gone; its lock knows better.
            result = fit.resume(run, data_dir=data_dir, progress=False)
    except (InterruptedRunError, KeyboardInterrupt):
        return Report(Ending.INTERRUPTED, STOPPED)
    except (SkyformerError, OSError) as error:
        return Report(Ending.FAILED, f"{error} (on node {platform.node()})")
    return Report(Ending.FINISHED, result=result)


@dataclass(frozen=True)
class _Task:
    """A run on its way: waiting for a node, or in training."""

    config: RunConfig
    reference: Any
    retries: int


class _RaySweep:
    """Runs on a cluster that `ray` is connected to."""

    def __init__(
        self,
        ray: Any,
        runs_dir: Path,
        data_dir: Path,
        resources: Resources,
        jobs: int | None,
        retries: int,
        watcher: Watcher,
    ) -> None:
        self._ray, self._runs_dir, self._data_dir, self._watcher = ray, runs_dir, data_dir, watcher
        self._jobs, self._retries = jobs, retries
        self._threads = max(1, int(resources.cpus))
        # A worker that has trained is not used again: the next run has memory figures of its own.
        self._train = ray.remote(
            num_cpus=resources.cpus,
            num_gpus=resources.gpus,
            memory=resources.memory_bytes,
            max_retries=0,
            max_calls=1,
        )(train_here)
        self._tasks: list[_Task] = []
        self._outcomes: list[Outcome] = []
        self._seen: set[str] = set()

    def run(self, configs: Sequence[RunConfig]) -> list[Outcome]:
        waiting = deque(configs)
        cancelled = 0.0
        with StopSignals(ADVICE) as signals:
            try:
                while self._tasks or (waiting and signals.received is None):
                    if signals.received is None:
                        self._fill(waiting)
                    elif not cancelled:
                        cancelled = time.monotonic()
                        self._cancel(force=False)
                    elif time.monotonic() - cancelled > _SAVE_SECONDS:
                        break
                    self._gather(stopping=signals.received is not None)
                    self._look()
            finally:
                self._cancel(force=True)
        if signals.received is not None:
            raise signals.error(stopped(self._outcomes, len(configs)))
        return self._outcomes

    def _fill(self, waiting: deque[RunConfig]) -> None:
        while waiting and (self._jobs is None or len(self._tasks) < self._jobs):
            config = waiting.popleft()
            outcome = settled(config, self._runs_dir)
            if outcome is not None:
                self._end(outcome)
                continue
            self._start(config, self._retries)

    def _start(self, config: RunConfig, retries: int) -> None:
        text = to_yaml(with_threads(config, self._threads))
        reference = self._train.remote(text, str(self._runs_dir), str(self._data_dir))
        self._tasks.append(_Task(config, reference, retries))

    def _gather(self, *, stopping: bool) -> None:
        if not self._tasks:
            return
        references = [task.reference for task in self._tasks]
        ready, _ = self._ray.wait(references, timeout=PROGRESS_SECONDS)
        for task in [task for task in self._tasks if task.reference in ready]:
            self._tasks.remove(task)
            self._take(task, stopping)

    def _take(self, task: _Task, stopping: bool) -> None:
        report, died = self._report(task)
        outcome = self._outcome(task.config, report, stopping)
        if died and outcome.ending is Ending.FAILED and task.retries:
            self._watcher.restarted(task.config, outcome.reason)
            self._start(task.config, task.retries - 1)
        else:
            self._end(outcome)

    def _report(self, task: _Task) -> tuple[Report, bool]:
        """What the worker says, and whether it died instead."""
        errors = self._ray.exceptions
        try:
            return self._ray.get(task.reference), False
        except errors.TaskCancelledError:
            return Report(Ending.INTERRUPTED, STOPPED), False
        except errors.RayTaskError as error:
            return Report(Ending.FAILED, _last_line(error)), False
        except errors.RayError as error:
            return Report(Ending.FAILED, f"its worker died: {_first_line(error)}"), True

    def _outcome(self, config: RunConfig, report: Report, stopping: bool) -> Outcome:
        if report.ending is Ending.FAILED:
            # The last moment of a worker may come after its result is written.
            found = settled(config, self._runs_dir)
            if found is not None and found.result is not None:
                return Outcome(config, Ending.FINISHED, found.result)
        ending = Ending.INTERRUPTED if stopping and report.result is None else report.ending
        return Outcome(config, ending, report.result, report.reason)

    def _end(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)
        self._watcher.ended(outcome)

    def _look(self) -> None:
        """A task may wait for a node long after it was handed over; the run's folder tells when it has begun."""
        for config in [task.config for task in self._tasks if is_running(task.config, self._runs_dir)]:
            step = step_of(config, self._runs_dir)
            if config.run_name() not in self._seen:
                self._seen.add(config.run_name())
                self._watcher.started(config, step)
            self._watcher.progressed(config, step)

    def _cancel(self, *, force: bool) -> None:
        for task in self._tasks:
            with suppress(self._ray.exceptions.RayError):
                self._ray.cancel(task.reference, force=force)
