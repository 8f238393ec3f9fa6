"""A run on disk: a folder with its config, environment, state, metrics, checkpoints, model and result.

    config.yaml         the RunConfig, written once
    environment.json    versions, machine, command
    state.json          how far it is
    metrics.csv         one row a log point
    tensorboard/        the same as events
    checkpoints/        what it resumes from
    model/              the best model, for `from_pretrained`
    result.json         written last: a run that has it is finished

The folder appears in one step, complete with config, environment and state. While a process trains the run it holds
a lock, which is free again the moment the process is gone, however that happened.
"""

from __future__ import annotations

import csv
import difflib
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from skyformer.environment import Environment, describe_environment, now
from skyformer.errors import DataError, InputError, SkyformerError
from skyformer.files import dump_json, read_document, read_json, write_atomic
from skyformer.training.config import RunConfig, from_yaml, to_yaml

FORMAT = 1
RUNS_VARIABLE = "SKYFORMER_RUNS"
CONFIG_FILE, ENVIRONMENT_FILE, STATE_FILE = "config.yaml", "environment.json", "state.json"
METRICS_FILE, RESULT_FILE, LOCK_FILE = "metrics.csv", "result.json", ".lock"
# Whoever only asks whether the lock is free holds it for a moment.
_LOCK_PATIENCE_SECONDS = 2.0

StateName = Literal["running", "interrupted", "failed", "finished", "damaged"]
AnyRecord = TypeVar("AnyRecord")


class _Record(BaseModel):
    """A JSON file of a run."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    format: int = FORMAT


class RunState(_Record):
    """How far a run is; `damaged` is never written, but stands for a state that cannot be read."""

    state: StateName
    steps: int
    step: int = 0
    best_step: int | None = None
    best_accuracy: float | None = None
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
    def of_result(cls, result: RunResult) -> Self:
        """The state of a run that has a result."""
        return cls(
            state="finished",
            steps=result.steps,
            step=result.steps,
            best_step=result.best_step,
            best_accuracy=result.dev_accuracy,
            updated=result.finished,
            seconds=result.seconds,
        )

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed and the time of the change."""
        return type(self)(**{**self.model_dump(), "updated": now(), **changes})


class RunResult(_Record):
    """What a finished run came to; `note` says how its preset departs from the paper."""

    run: str
    preset: str
    note: str
    task: str
    attention: str
    seed: int
    steps: int
    best_step: int
    dev_accuracy: float
    dev_loss: float
    dev_examples: int
    test_accuracy: float
    test_loss: float
    test_examples: int
    steps_per_second: float
    seconds: float
    peak_memory_bytes: int | None
    parameters: int
    config_digest: str
    environment_digest: str
    finished: str


@dataclass(frozen=True)
class MetricRow:
    """One row of metrics.csv; `split` is train or dev, and only training has a learning rate."""

    step: int
    split: str
    loss: float
    accuracy: float
    lr: float | None
    seconds: float


class Run:
    """A run's folder; nothing is read before it is asked for."""

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
        """Where the run was first started."""
        return _read_record(self.folder / ENVIRONMENT_FILE, Environment)

    @property
    def result(self) -> RunResult | None:
        """What came out, or nothing while the run is not finished."""
        file = self.folder / RESULT_FILE
        return _read_record(file, RunResult) if file.exists() else None

    @property
    def state(self) -> RunState:
        """How far the run is, whatever happened to it; a state that cannot be read is `damaged` and says why."""
        try:
            result = self.result
            if result is not None:
                return RunState.of_result(result)
            state = self.stored_state()
        except DataError as damaged:
            return RunState(state="damaged", steps=0, reason=str(damaged))
        if state.state == "running" and not self._is_alive(state):
            return state.replace(state="interrupted", updated=state.updated, reason="its process is gone")
        return state

    @property
    def finished(self) -> bool:
        return self.result is not None

    def stored_state(self) -> RunState:
        """What state.json says, be it true or not."""
        return _read_record(self.folder / STATE_FILE, RunState)

    def write_state(self, state: RunState) -> None:
        write_atomic(self.folder / STATE_FILE, dump_json(state.model_dump(mode="json")))

    def write_result(self, result: RunResult) -> None:
        """Makes the run a finished one."""
        write_atomic(self.folder / RESULT_FILE, dump_json(result.model_dump(mode="json")))

    def metrics(self) -> list[MetricRow]:
        """The rows of metrics.csv; the last one may be torn, and is then left out."""
        if not self.metrics_file.exists():
            return []
        with self.metrics_file.open(newline="") as file:
            rows = [_metric_row(row) for row in csv.DictReader(file)]
        return [row for row in rows if row is not None]

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Held while a process trains the run, so that no second one does."""
        lock = FileLock(self.folder / LOCK_FILE)
        try:
            lock.acquire(timeout=_LOCK_PATIENCE_SECONDS)
        except Timeout:
            raise InputError(f"{self.folder} is being trained by another process{self._whom()}") from None
        try:
            yield
        finally:
            lock.release()

    def _whom(self) -> str:
        state = self.state
        return f": {state.pid} on {state.host}" if state.pid is not None else ""

    def _is_alive(self, state: RunState) -> bool:
        if state.host != platform.node():
            # Neither the process nor, on every file system, its lock can be seen from here.
            return True
        return state.pid is not None and _process_exists(state.pid) and not self._lock_is_free()

    def _lock_is_free(self) -> bool:
        file = self.folder / LOCK_FILE
        if not file.exists():
            return True
        lock = FileLock(file)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            return False
        except OSError:
            # It cannot be opened for writing, so it cannot be asked.
            return False
        lock.release()
        return True


def runs_dir_or_default(runs_dir: Path | str | None = None) -> Path:
    """The folder given, or that of the environment, or ./runs."""
    return Path(runs_dir or os.environ.get(RUNS_VARIABLE) or "runs").expanduser()


def create_run(config: RunConfig, runs_dir: Path | str | None = None) -> Run:
    """A new run's folder; a run of this config that is there already is never touched."""
    run = check_free(config, runs_dir)
    root = run.folder.parent
    root.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".new-", dir=root))
    try:
        draft.chmod(0o755)
        write_atomic(draft / CONFIG_FILE, to_yaml(config))
        environment = describe_environment(config.hardware.threads)
        write_atomic(draft / ENVIRONMENT_FILE, dump_json(asdict(environment)))
        Run(draft).write_state(RunState.starting(config.loop.steps))
        _move(draft, run)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return run


def _move(draft: Path, run: Run) -> None:
    try:
        draft.rename(run.folder)
    except OSError:
        # Another process may have made it meanwhile.
        _check_free(run)
        raise


def check_free(config: RunConfig, runs_dir: Path | str | None = None) -> Run:
    """The run that `config` would be, if there is none yet; if there is one, an error says what to do."""
    run = Run(runs_dir_or_default(runs_dir) / config.run_name())
    _check_free(run)
    return run


def _check_free(run: Run) -> None:
    if not run.folder.exists():
        return
    if not (run.folder / CONFIG_FILE).exists():
        raise DataError(f"{run.folder} is in the way and is not a run: it has no {CONFIG_FILE}; move it elsewhere")
    result = run.result
    if result is not None:
        raise InputError(
            f"{run.folder} is finished already, with test accuracy {result.test_accuracy:.4f}; train with another "
            f"--seed or --runs-dir, or look at it with: skyformer evaluate {run.folder}"
        )
    raise InputError(
        f"{run.folder} is there already, {_progress(run.state)}; go on with: skyformer train --resume {run.folder}"
    )


def _progress(state: RunState) -> str:
    return state.state if state.state == "damaged" else f"{state.state} at step {state.step} of {state.steps}"


def open_run(path_or_name: Path | str, runs_dir: Path | str | None = None) -> Run:
    """The run in a folder, or of a name in `runs_dir`; checked to be a run that this version can read."""
    root = runs_dir_or_default(runs_dir)
    given, named = Path(path_or_name).expanduser(), root / str(path_or_name)
    # A name that also happens to be a folder here is meant as a name.
    folder = named if (named / CONFIG_FILE).exists() or not given.exists() else given
    if not folder.exists():
        raise InputError(
            f"there is no run {str(path_or_name)!r}, neither here nor in {root}.{_hint(str(path_or_name), root)}"
        )
    if not folder.is_dir():
        raise DataError(f"{folder} is a file; a run is a folder that `skyformer train` made")
    if not (folder / CONFIG_FILE).is_file():
        raise DataError(
            f"{folder} is not a run: it has no {CONFIG_FILE}; expected a folder that `skyformer train` made"
        )
    run = Run(folder)
    _check_formats(run)
    run.config  # noqa: B018 - reading it is the check
    return run


def _hint(name: str, root: Path) -> str:
    known = [folder.name for folder in _folders(root)]
    close = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {close[0]!r}?" if close else " `skyformer runs` lists them"


def _check_formats(run: Run) -> None:
    """A newer version's config may have settings unknown here, so this comes before reading it."""
    for name in (STATE_FILE, RESULT_FILE):
        file = run.folder / name
        if file.exists():
            try:
                content = read_json(file)
            except DataError:
                continue
            _check_format(file, content)


@dataclass(frozen=True)
class UnreadableRun:
    """A folder that looks like a run, and what is wrong with it."""

    folder: Path
    reason: str


def list_runs(runs_dir: Path | str | None = None, task: str | None = None) -> list[Run]:
    """All runs that can be read, by name; those of one task, if it is given."""
    return [run for run in scan_runs(runs_dir) if isinstance(run, Run) and task in (None, run.config.task.name)]


def scan_runs(runs_dir: Path | str | None = None) -> list[Run | UnreadableRun]:
    """All runs, by name, and what is wrong with those that cannot be read."""
    return [_try_run(folder) for folder in _folders(runs_dir_or_default(runs_dir))]


def _try_run(folder: Path) -> Run | UnreadableRun:
    try:
        return open_run(folder, folder.parent)
    except SkyformerError as error:
        return UnreadableRun(folder, str(error))


def _folders(root: Path) -> list[Path]:
    """The folders in `root` that may be runs."""
    if not root.is_dir():
        return []
    return sorted(file.parent for file in root.glob(f"*/{CONFIG_FILE}") if not file.parent.name.startswith("."))


def _read_record(file: Path, cls: type[AnyRecord]) -> AnyRecord:
    content = read_json(file)
    _check_format(file, content)
    try:
        return TypeAdapter(cls).validate_python(content)
    except ValidationError as invalid:
        first = invalid.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise DataError(f"{file} is damaged: {place}: {first['msg']}") from None


def _check_format(file: Path, content: dict[str, Any]) -> None:
    version = content.get("format")
    if isinstance(version, int) and version > FORMAT:
        raise DataError(
            f"{file} has format {version}, and this skyformer reads up to {FORMAT}: it was made by a newer version; "
            "upgrade skyformer to use this run"
        )


def _metric_row(row: dict[str, Any]) -> MetricRow | None:
    try:
        lr = float(row["lr"]) if row["lr"] else None
        loss, accuracy, seconds = (float(row[name]) for name in ("loss", "accuracy", "seconds"))
        return MetricRow(int(row["step"]), row["split"], loss, accuracy, lr, seconds)
    except (KeyError, TypeError, ValueError):
        return None


def _process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
