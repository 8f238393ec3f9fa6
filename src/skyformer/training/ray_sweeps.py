"""Sweeps on a Ray cluster: each run is a Ray task with its own resources, alone in a worker process.

The folder of runs is on storage that all nodes share, so a run whose worker died can be started again on any node from
its last checkpoint. The sweep does that itself instead of Ray's retries, so that it is reported, and so that the number
of attempts is limited also when memory is short.
"""

from __future__ import annotations

import logging
import os
import platform
import secrets
import signal
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ByteSize, TypeAdapter, ValidationError

from skyformer.environment import installed_version
from skyformer.errors import DataError, InputError, InterruptedRunError, MissingExtraError, SkyformerError
from skyformer.files import runs_dir_or_default
from skyformer.lra.folders import data_dir_or_default
from skyformer.registry import IMPORT_VARIABLE, import_chosen_modules
from skyformer.report.progress import Progress
from skyformer.training.config import RunConfig, TaskConfig
from skyformer.training.runs import DataRecord
from skyformer.training.sweeps import (
    DEFAULT_RETRIES,
    PROGRESS_SECONDS,
    STOPPED,
    SWEEP_FOLDER,
    Ending,
    Outcome,
    Sweep,
    check_data,
    data_problems,
    with_threads,
)

CONNECT_SECONDS = 5.0
_CLIENT = "ray://"


@dataclass(frozen=True)
class Resources:
    """What each run reserves on a node."""

    cpus: float = 1.0
    gpus: float = 0.0
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.cpus <= 0 or self.gpus < 0 or (self.memory_bytes is not None and self.memory_bytes <= 0):
            raise InputError(f"a run needs more than 0 CPUs, at least 0 GPUs and more than 0 bytes; got {self}")

    def fit(self, node: dict[str, float]) -> bool:
        """Whether a node with these resources can run it when idle."""
        wanted = (("CPU", self.cpus), ("GPU", self.gpus), ("memory", self.memory_bytes or 0))
        return all(node.get(name, 0) >= amount for name, amount in wanted)

    def __str__(self) -> str:
        memory = f", {self.memory_bytes / 1e9:g} GB of memory" if self.memory_bytes is not None else ""
        return f"{self.cpus:g} CPUs, {self.gpus:g} GPUs{memory}"


def parse_memory(text: str) -> int:
    """Bytes from a number and a unit: 500MB, 4GB, 1.5GiB."""
    try:
        return TypeAdapter(ByteSize).validate_python(text)
    except ValidationError:
        raise InputError(f"--memory must be a number and a unit, such as 500MB or 4GB; got {text!r}") from None


def ray_sweep(
    configs: Sequence[RunConfig],
    *,
    runs_dir: Path | str | None = None,
    data_dir: Path | str | None = None,
    address: str | None = None,
    resources: Resources = Resources(),
    jobs: int | None = None,
    retries: int = DEFAULT_RETRIES,
    progress: Progress | None = None,
) -> list[Outcome]:
    """As `sweep`, on a Ray cluster.

    Args:
        runs_dir: on storage that all nodes share.
        data_dir: on shared storage, or prepared in the same place on every node.
        address: of the cluster, as `ray start` prints it; None starts one on this machine and shuts it down at the end.
        resources: what each run reserves.
        jobs: the largest number of runs at the same time; None starts as many as fit.
    """
    loop = Sweep(runs_dir_or_default(runs_dir).resolve(), jobs, retries, progress)
    digests = check_data(configs, data_dir, loop.runs_dir)
    data = data_dir_or_default(data_dir).resolve()
    with _cluster(address) as ray:
        _check_nodes(ray, digests, loop.runs_dir, data, resources)
        return loop.run(configs, RayExecutor(ray, loop.runs_dir, data, resources))


@contextmanager
def _cluster(address: str | None) -> Iterator[Any]:
    """Ray, connected; a cluster that was started here is shut down at the end, another one keeps running."""
    if address is not None:
        _check_reachable(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ModuleNotFoundError as error:
        raise MissingExtraError("ray") from error
    try:
        ray.init(
            address=address or "local",
            # Only a cluster that is started here can be started without a dashboard.
            include_dashboard=False if address is None else None,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env=_environment(),
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise InputError(f"no Ray cluster answers at {address or 'this machine'}: {_lines(error)[0]}") from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _environment() -> dict[str, Any] | None:
    """What workers on every node must know: the modules that register parts from outside the package."""
    modules = os.environ.get(IMPORT_VARIABLE)
    return {"env_vars": {IMPORT_VARIABLE: modules}} if modules else None


def _check_reachable(address: str) -> None:
    """Checked here because Ray takes more than a minute to report that nothing answers."""
    if address == "auto":
        return
    host, colon, port = address.removeprefix(_CLIENT).rpartition(":")
    # Some systems connect to port 99999 as to 99999 modulo 65536.
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise InputError(f"--address must be HOST:PORT, ray://HOST:PORT or auto; got {address!r}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        raise InputError(
            f"no Ray cluster answers at {address}: {error}; start one with: ray start --head --port {port}"
        ) from None


def _lines(error: BaseException) -> list[str]:
    return str(error).strip().splitlines() or [type(error).__name__]


def _check_nodes(
    ray: Any, digests: dict[TaskConfig, str], runs_dir: Path, data_dir: Path, resources: Resources
) -> None:
    """Check that every node with enough resources can import this package, and sees the runs and the same data."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    able = [node for node in nodes if resources.fit(node["Resources"])]
    if not able:
        offers = "; ".join(_offer(node) for node in nodes)
        raise InputError(f"no node has the resources of a run ({resources}); available: {offers}")
    mark = runs_dir / SWEEP_FOLDER / f"mark-{secrets.token_hex(8)}"
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.write_text("written to check that all nodes see this folder")
    try:
        problems = list(_node_problems(ray, able, str(mark), digests, str(data_dir)))
    finally:
        mark.unlink(missing_ok=True)
    if problems:
        raise DataError("\n".join(problems))


def _offer(node: dict[str, Any]) -> str:
    offered = node["Resources"]
    memory = offered.get("memory", 0) / 1e9
    counts = f"{offered.get('CPU', 0):g} CPUs, {offered.get('GPU', 0):g} GPUs, {memory:.1f} GB of memory"
    return f"{node['NodeManagerHostname']} with {counts}"


def _node_problems(
    ray: Any, nodes: Iterable[dict[str, Any]], mark: str, digests: dict[TaskConfig, str], data_dir: str
) -> Iterator[str]:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    check = ray.remote(num_cpus=0, max_retries=0)(check_node)
    checks = []
    for node in nodes:
        place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        answer = check.options(scheduling_strategy=place).remote(
            mark, digests, data_dir, installed_version("skyformer")
        )
        checks.append((node["NodeManagerHostname"], answer))
    for name, answer in checks:
        try:
            problem = ray.get(answer)
        except ray.exceptions.RayError as error:
            problem = f"skyformer does not run there: {_lines(error)[-1].strip()}"
        if problem:
            yield f"node {name}: {problem}"


def check_node(mark: str, digests: dict[TaskConfig, str], data_dir: str, version: str | None) -> str | None:
    """Called on a node: why it cannot train, or None if it can. `digests` are those of the data of each task."""
    if installed_version("skyformer") != version:
        return f"has skyformer {installed_version('skyformer')}, not {version}; install the same version on all nodes"
    try:
        import_chosen_modules()
    except SkyformerError as error:
        return str(error)
    folder = Path(mark).parent.parent
    if not Path(mark).exists():
        return f"does not see {folder}; --runs-dir must be on storage that all nodes share"
    if not os.access(folder, os.W_OK):
        return f"may not write to {folder}"
    problems, found = data_problems(digests, data_dir)
    for task, manifest in found.items():
        digest = DataRecord.of(manifest).digest()
        if digest != digests[task]:
            name = manifest.variant.name
            problems.append(f"has other data of {name} in {data_dir}: data digest {digest}, not {digests[task]}")
    return "; ".join(problems) or None


def train_here(config: RunConfig, runs_dir: str, data_dir: str) -> Outcome:
    """Called on a node: train or resume one run in this process. Errors are returned as text, not all can be sent."""
    from skyformer.training import fit

    try:
        result = fit.train_or_resume(config, runs_dir=runs_dir, data_dir=data_dir, progress=False)
    except (InterruptedRunError, KeyboardInterrupt):
        return Outcome(config, Ending.INTERRUPTED, reason=STOPPED)
    except (SkyformerError, OSError) as error:
        return Outcome(config, Ending.FAILED, reason=f"{error} (on node {platform.node()})")
    return Outcome(config, Ending.FINISHED, result)


class RayExecutor:
    """Runs `train_here` as tasks of the cluster that `ray` is connected to."""

    queues = True
    save_seconds = 120.0

    def __init__(self, ray: Any, runs_dir: Path, data_dir: Path, resources: Resources) -> None:
        self._ray, self._runs_dir, self._data_dir = ray, runs_dir, data_dir
        self._threads = max(1, int(resources.cpus))
        self._train = ray.remote(
            num_cpus=resources.cpus,
            num_gpus=resources.gpus,
            memory=resources.memory_bytes,
            max_retries=0,
            # A worker trains only one run, so that the peak memory is measured for each run.
            max_calls=1,
        )(train_here)
        self._tasks: dict[Any, RunConfig] = {}

    def start(self, config: RunConfig) -> None:
        threaded = with_threads(config, self._threads)
        self._tasks[self._train.remote(threaded, str(self._runs_dir), str(self._data_dir))] = config

    def collect(self) -> list[Outcome]:
        if not self._tasks:
            return []
        ready, _ = self._ray.wait(list(self._tasks), timeout=PROGRESS_SECONDS)
        return [self._outcome(task, self._tasks.pop(task)) for task in ready]

    def _outcome(self, task: Any, config: RunConfig) -> Outcome:
        errors = self._ray.exceptions
        try:
            outcome: Outcome = self._ray.get(task)
            return outcome
        except errors.TaskCancelledError:
            return Outcome(config, Ending.INTERRUPTED, reason=STOPPED)
        except errors.RayTaskError as error:
            return Outcome(config, Ending.FAILED, reason=_lines(error)[-1].strip())
        except errors.RayError as error:
            return Outcome(config, Ending.FAILED, reason=f"its worker died: {_lines(error)[0]}", died=True)

    def interrupt(self, number: signal.Signals) -> None:
        self._cancel(force=False)

    def kill(self) -> None:
        self._cancel(force=True)

    def _cancel(self, *, force: bool) -> None:
        for task in self._tasks:
            with suppress(self._ray.exceptions.RayError):
                self._ray.cancel(task, force=force)
