"""A run on disk: a folder with its config, environment, state, metrics, checkpoints, model and result.

    config.yaml         the RunConfig
    environment.json    versions, machine, command
    data.json           the SHA-256 sums of the prepared data, and where it was
    state.json          state and progress
    metrics.csv         one row per logged step and split
    tensorboard/        the same numbers as TensorBoard events
    checkpoints/        what the run resumes from
    model/              the best model, for `from_pretrained`
    tokenizer/          the tokenizer, where own data has one
    result.json         written last: a run that has it is finished

The folder is created in one step, with config, environment, data and state. The process that trains a run holds its
lock, which the system releases when that process ends, for any reason.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import platform
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

from filelock import FileLock, Timeout

from skyformer.environment import Environment, describe_environment, now
from skyformer.errors import CheckpointWarning, DataError, DataWarning, InputError, SkyformerError
from skyformer.files import (
    dump_json,
    read_document,
    read_json,
    remove_litter,
    runs_dir_or_default,
    sync_folder,
    write_atomic,
)
from skyformer.lra.folders import Manifest
from skyformer.lra.own import TOKENIZER_FOLDER
from skyformer.processes import process_exists
from skyformer.settings import Accuracy, JsonRecord, check_format, read_json_record
from skyformer.training.config import RunConfig, from_yaml, to_yaml
from skyformer.training.metrics import MetricRow, MetricsFile

CONFIG_FILE, ENVIRONMENT_FILE, DATA_FILE, STATE_FILE = "config.yaml", "environment.json", "data.json", "state.json"
METRICS_FILE, RESULT_FILE, LOCK_FILE = "metrics.csv", "result.json", ".lock"
# A process that only checks whether the lock is free holds it for a moment.
_LOCK_TIMEOUT_SECONDS, _CHECK_TIMEOUT_SECONDS = 2.0, 0.05

_DRAFT = ".new-"
_DIGEST = re.compile("[0-9a-f]{8}")
_DEAD_SECONDS = 3600.0
"""A file that takes a moment to write and is older than this belongs to a process that was killed."""

StateName = Literal["running", "interrupted", "failed", "finished", "damaged"]


class RunState(JsonRecord):
    """State and progress of a run; `damaged` is never written, it means that the state cannot be read."""

    state: StateName
    steps: int
    step: int = 0
    best_step: int | None = None
    best_accuracy: Accuracy | None = None
    pid: int | None = None
    host: str | None = None
    started: str = ""
    updated: str = ""
    seconds: float = 0.0
    reason: str | None = None

    @classmethod
    def starting(cls, steps: int) -> Self:
        """The state of a run that this process is about to train."""
        moment = now()
        return cls(state="running", steps=steps, pid=os.getpid(), host=platform.node(), started=moment, updated=moment)

    @classmethod
    def of_result(cls, result: RunResult, started: str = "") -> Self:
        """The state of a run that has a result; `started` is what its stored state says."""
        return cls(
            state="finished",
            steps=result.steps,
            step=result.steps,
            best_step=result.best_step,
            best_accuracy=result.dev_accuracy,
            started=started,
            updated=result.finished,
            seconds=result.seconds,
        )

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed and the time of the change."""
        return type(self)(**{**self.model_dump(), "updated": now(), **changes})


class DataRecord(JsonRecord):
    """The prepared data of a run: its name, what it was prepared from, the SHA-256 sum of each split, and the data
    folder that it was read from first."""

    name: str
    source: str
    sha256: dict[str, str]
    folder: str | None = None

    @classmethod
    def of(cls, manifest: Manifest, data_dir: Path | None = None) -> Self:
        folder = None if data_dir is None else str(data_dir.resolve()).encode(errors="backslashreplace").decode()
        return cls(name=manifest.variant.name, source=manifest.source, sha256=manifest.hashes, folder=folder)

    def digest(self) -> str:
        """Sixteen hexadecimal digits that are equal only for equal data."""
        lines = "".join(f"{split} {sha256}\n" for split, sha256 in sorted(self.sha256.items()))
        return hashlib.sha256(lines.encode()).hexdigest()[:16]


class RunResult(JsonRecord):
    """The result of a finished run; `note` says how its settings differ from the paper's."""

    run: str
    preset: str
    note: str
    task: str
    attention: str
    seed: int
    steps: int
    best_step: int
    dev_accuracy: Accuracy
    dev_loss: float
    dev_examples: int
    test_accuracy: Accuracy
    test_loss: float
    test_examples: int
    steps_per_second: float
    seconds: float
    peak_memory_bytes: int | None
    parameters: int
    config_digest: str
    environment_digest: str
    finished: str
    data_digest: str | None = None
    """Identifies the prepared data; None in results of versions that did not record it."""


class Run:
    """A run's folder; files are read when their content is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def model_folder(self) -> Path:
        return self.folder / "model"

    @property
    def tokenizer(self) -> Path:
        return self.folder / TOKENIZER_FOLDER

    @property
    def tensorboard(self) -> Path:
        return self.folder / "tensorboard"

    @property
    def metrics_file(self) -> Path:
        return self.folder / METRICS_FILE

    @cached_property
    def config(self) -> RunConfig:
        file = self.folder / CONFIG_FILE
        try:
            return from_yaml(read_document(file), str(file))
        except InputError as invalid:
            raise DataError(str(invalid)) from invalid

    @property
    def environment(self) -> Environment:
        """The environment in which the run was first started."""
        return read_json_record(self.folder / ENVIRONMENT_FILE, Environment)

    @property
    def data(self) -> DataRecord | None:
        """The data that the run is trained on; None for a run of a version that did not record it."""
        file = self.folder / DATA_FILE
        return read_json_record(file, DataRecord) if file.exists() else None

    def check_data(self, manifest: Manifest) -> None:
        """An error if the run was trained on other data than the prepared data of `manifest`."""
        own, found = self.data, DataRecord.of(manifest)
        if own is None or own.sha256 == found.sha256:
            return
        changed = [split for split, sha256 in found.sha256.items() if own.sha256.get(split) != sha256]
        raise DataError(
            f"{self.folder} was trained on other data: {found.name} has changed since (split {', '.join(changed)}; "
            f"prepared from {own.source!r} then, from {found.source!r} now; data digest {own.digest()} then, "
            f"{found.digest()} now). Prepare the old data again or name its folder with --data-dir, or train a new run "
            "on the new data with another --runs-dir"
        )

    def data_dir(self, given: Path | str | None) -> Path | str | None:
        """The data folder to read: the given one, or else the one that the run was first trained from, or else None,
        the default, if that folder is gone."""
        folder = self.data.folder if given is None and self.data is not None else None
        return folder if folder is not None and Path(folder).is_dir() else given

    def record_data(self, manifest: Manifest, data_dir: Path) -> None:
        """Record the data of a run of a version that did not, so that it is checked from now on."""
        if self.data is not None:
            return
        if self.checkpoints.exists():
            warnings.warn(
                f"{self.folder} does not record the data it was trained on so far; it records that of "
                f"{manifest.variant.name} from now on (data digest {DataRecord.of(manifest).digest()})",
                DataWarning,
                stacklevel=2,
            )
        self._write_data(manifest, data_dir)

    def _write_data(self, manifest: Manifest, data_dir: Path | None) -> None:
        write_atomic(self.folder / DATA_FILE, dump_json(DataRecord.of(manifest, data_dir).model_dump(mode="json")))

    @property
    def result(self) -> RunResult | None:
        """The result; None if the run is not finished."""
        file = self.folder / RESULT_FILE
        return read_json_record(file, RunResult) if file.exists() else None

    @property
    def state(self) -> RunState:
        """The true state, also after the process was killed; if it cannot be read, it is `damaged` with a reason."""
        try:
            result = self.result
            if result is not None:
                return RunState.of_result(result, self._started())
            state = self.stored_state()
        except DataError as damaged:
            return RunState(state="damaged", steps=0, reason=str(damaged))
        if state.state == "running" and not self._is_alive(state):
            return state.replace(state="interrupted", updated=state.updated, reason="its process has ended")
        return state

    def _started(self) -> str:
        with suppress(DataError):
            return self.stored_state().started
        return ""

    @property
    def finished(self) -> bool:
        return self.result is not None

    def stored_state(self) -> RunState:
        """The content of state.json, which is out of date if the process was killed."""
        return read_json_record(self.folder / STATE_FILE, RunState)

    def write_state(self, state: RunState) -> None:
        write_atomic(self.folder / STATE_FILE, dump_json(state.model_dump(mode="json")))

    def update_state(self, **changes: Any) -> None:
        """Change some fields of state.json; if it is damaged or missing, it is written anew."""
        try:
            state = self.stored_state()
        except DataError as damaged:
            _check_formats(self)
            warnings.warn(f"{damaged}; it is rebuilt from the checkpoints", CheckpointWarning, stacklevel=2)
            state = RunState.starting(self.config.loop.last_step)
        self.write_state(state.replace(**changes))

    def repair_environment(self) -> Environment:
        """The environment; if its file is damaged or missing, that of this process, which is written instead."""
        try:
            return self.environment
        except DataError as damaged:
            warnings.warn(f"{damaged}; the current environment is recorded instead", CheckpointWarning, stacklevel=2)
        environment = describe_environment(self.config.hardware.threads)
        write_atomic(self.folder / ENVIRONMENT_FILE, dump_json(asdict(environment)))
        return environment

    def remove_litter(self) -> None:
        """Remove unfinished files of killed processes; only for the process that holds the lock."""
        for folder in (self.folder, self.checkpoints, self.model_folder):
            remove_litter(folder, ".*.partial")

    def write_result(self, result: RunResult) -> None:
        """Write the result, which marks the run as finished."""
        write_atomic(self.folder / RESULT_FILE, dump_json(result.model_dump(mode="json")))

    def metrics(self) -> list[MetricRow]:
        """The rows of metrics.csv."""
        return MetricsFile(self.metrics_file).rows()

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run's lock, so that no other process trains it."""
        lock = FileLock(self.folder / LOCK_FILE)
        try:
            lock.acquire(timeout=_LOCK_TIMEOUT_SECONDS)
        except Timeout:
            raise InputError(f"{self.folder} is being trained by another process{self._owner()}") from None
        try:
            yield
        finally:
            lock.release()

    def _owner(self) -> str:
        state = self.state
        return f": {state.pid} on {state.host}" if state.pid is not None else ""

    def _is_alive(self, state: RunState) -> bool:
        """Whether a process holds the lock: host names and process numbers change from container to container."""
        held = self._lock_is_held()
        if held is not None:
            return held
        return state.host != platform.node() or (state.pid is not None and process_exists(state.pid))

    def _lock_is_held(self) -> bool | None:
        """None if the lock file cannot be opened for writing, which says nothing."""
        file = self.folder / LOCK_FILE
        if not file.exists():
            return False
        lock = FileLock(file)
        try:
            lock.acquire(timeout=_CHECK_TIMEOUT_SECONDS, poll_interval=_CHECK_TIMEOUT_SECONDS / 5)
        except Timeout:
            return True
        except OSError:
            return None
        lock.release()
        return False


def create_run(
    config: RunConfig, runs_dir: Path | str | None = None, data: Manifest | None = None, data_folder: Path | None = None
) -> Run:
    """Create the folder of a new run on `data`; an existing run of this config is an error and is not changed.

    A tokenizer in `data_folder` is copied, so that the run can predict without its data.
    """
    run = check_free(config, runs_dir)
    root = run.folder.parent
    root.mkdir(parents=True, exist_ok=True)
    remove_litter(root, f"{_DRAFT}*", _DEAD_SECONDS)
    remove_litter(root / ".sweep", ".*.partial", _DEAD_SECONDS)
    draft = Path(tempfile.mkdtemp(prefix=_DRAFT, dir=root))
    try:
        draft.chmod(0o755)
        write_atomic(draft / CONFIG_FILE, to_yaml(config))
        environment = describe_environment(config.hardware.threads)
        write_atomic(draft / ENVIRONMENT_FILE, dump_json(asdict(environment)))
        if data is not None:
            Run(draft)._write_data(data, None if data_folder is None else data_folder.parent)
        if data_folder is not None and config.task.own is not None and config.task.own.tokenizer is not None:
            _copy_tokenizer(data_folder / TOKENIZER_FOLDER, Run(draft).tokenizer)
        Run(draft).write_state(RunState.starting(config.loop.last_step))
        _move(draft, run)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return run


def _copy_tokenizer(source: Path, target: Path) -> None:
    if not source.is_dir():
        raise DataError(f"{source} is missing, without which the run could not predict; prepare the data again")
    shutil.copytree(source, target)


def _move(draft: Path, run: Run) -> None:
    try:
        draft.rename(run.folder)
        sync_folder(run.folder.parent)
    except OSError:
        # Another process may have created it in the meantime.
        _check_free(run)
        raise


def check_free(config: RunConfig, runs_dir: Path | str | None = None) -> Run:
    """The run that `config` would create; if it exists already, an error says what to do."""
    run = Run(runs_dir_or_default(runs_dir) / config.run_name())
    _check_free(run)
    return run


def _check_free(run: Run) -> None:
    if not run.folder.exists():
        return
    if not (run.folder / CONFIG_FILE).exists():
        raise DataError(f"{run.folder} exists but is not a run: it has no {CONFIG_FILE}; move it elsewhere")
    result = run.result
    if result is not None:
        raise InputError(
            f"{run.folder} is finished already, with test accuracy {result.test_accuracy:.4f}; train with another "
            f"--seed or --runs-dir, or evaluate it with: skyformer evaluate {run.folder}"
        )
    raise InputError(
        f"{run.folder} exists already, {_progress(run.state)}; resume it with: skyformer train --resume {run.folder}"
    )


def _progress(state: RunState) -> str:
    return state.state if state.state == "damaged" else f"{state.state} at step {state.step} of {state.steps}"


def open_run(path_or_name: Path | str, runs_dir: Path | str | None = None) -> Run:
    """The run with this folder, or with this name or digest in `runs_dir`; an error if this version cannot read it."""
    root = runs_dir_or_default(runs_dir)
    given, named = Path(path_or_name).expanduser(), root / str(path_or_name)
    if not given.exists() and _DIGEST.fullmatch(str(path_or_name)):
        named = next((folder for folder in _folders(root) if folder.name.endswith(f"-{path_or_name}")), named)
    # A run's name comes before a folder of the same name in the current directory.
    folder = named if (named / CONFIG_FILE).exists() or not given.exists() else given
    if not folder.exists():
        name = str(path_or_name)
        raise InputError(f"there is no run {name!r}, neither in the current folder nor in {root}.{_hint(name, root)}")
    if not folder.is_dir():
        raise DataError(f"{folder} is a file; a run is a folder that `skyformer train` created")
    if not (folder / CONFIG_FILE).is_file():
        raise DataError(
            f"{folder} is not a run: it has no {CONFIG_FILE}; expected a folder that `skyformer train` created"
        )
    run = Run(folder)
    _check_formats(run)
    run.config  # noqa: B018 - reading it is the check
    return run


def _hint(name: str, root: Path) -> str:
    known = [folder.name for folder in _folders(root)]
    close = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {close[0]!r}?" if close else " `skyformer runs` lists all runs"


def _check_formats(run: Run) -> None:
    """Called before the config is read, because a newer version's config may have settings unknown here."""
    for name in (STATE_FILE, RESULT_FILE):
        file = run.folder / name
        if file.exists():
            try:
                content = read_json(file)
            except DataError:
                continue
            check_format(file, content)


@dataclass(frozen=True)
class UnreadableRun:
    """A folder that looks like a run but cannot be read, and the reason."""

    folder: Path
    reason: str


def list_runs(runs_dir: Path | str | None = None, task: str | None = None) -> list[Run]:
    """All readable runs, or those of one task, sorted by name."""
    return [run for run in scan_runs(runs_dir) if isinstance(run, Run) and task in (None, run.config.task.name)]


def scan_runs(runs_dir: Path | str | None = None) -> list[Run | UnreadableRun]:
    """All runs sorted by name, including those that cannot be read."""
    return [try_run(folder) for folder in _folders(runs_dir_or_default(runs_dir))]


def try_run(folder: Path) -> Run | UnreadableRun:
    """The run in a folder, or the reason why it cannot be read."""
    try:
        return open_run(folder, folder.parent)
    except SkyformerError as error:
        return UnreadableRun(folder, str(error))


def _folders(root: Path) -> list[Path]:
    """The folders in `root` that may be runs."""
    if not root.is_dir():
        return []
    return sorted(file.parent for file in root.glob(f"*/{CONFIG_FILE}") if not file.parent.name.startswith("."))
