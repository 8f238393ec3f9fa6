"""train, resume and evaluate: from a config to a result.

A run is fitted to its last step, evaluated on the dev set once more, tested once with its best model, and then gets its
`result.json`. A run that was killed at any point resumes from its last intact checkpoint and repeats what came after.
"""

from __future__ import annotations

import errno
import logging
import os
import platform
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from skyformer.distributed.collectives import reason_for_lost_rank
from skyformer.environment import now
from skyformer.errors import (
    DivergedError,
    InputError,
    InterruptedRunError,
    MissingExtraError,
    RankLostError,
    SkyformerError,
    TrainingError,
    UnknownNameError,
)
from skyformer.files import runs_dir_or_default
from skyformer.lra.dataset import Task
from skyformer.lra.tasks import Split
from skyformer.model.storage import stored_weights_digest
from skyformer.processes import (
    ISA_VARIABLE,
    ISA_WITHOUT_AMX,
    half_precision_crashes,
    is_oom_error,
    peak_bytes,
    reset_peak,
)
from skyformer.report.progress import display
from skyformer.training.building import build_model
from skyformer.training.callbacks import Best, RunRecorder, ShowEvaluation, StopIfNotFinite, reason_for_nan
from skyformer.training.checkpoints import CheckpointRecord, CheckpointStore
from skyformer.training.config import RunConfig
from skyformer.training.data import TaskData
from skyformer.training.loggers import build_loggers, check_loggers
from skyformer.training.module import ClassifierModule, Evaluation, score
from skyformer.training.prediction import load_best_model
from skyformer.training.progress import RunProgress
from skyformer.training.runs import DataRecord, Run, RunResult, create_run
from skyformer.training.signals import StopSignals

_LIGHTNING_LOGGERS = ("lightning.pytorch", "lightning.fabric")
_IGNORED_WARNINGS = (
    # Loading a batch takes a thousandth of the time of its step; `loop.workers` is there for other cases.
    ".*does not have many workers.*",
    # The user chose the device.
    ".*available but not used.*",
    # Raised by Lightning's own code, about torch's internals.
    ".*isinstance\\(treespec, LeafSpec\\).*is deprecated.*",
)


def is_main_process() -> bool:
    """Whether this is the process that writes and prints, of all processes that train a run together."""
    return not getattr(rank_zero_only, "rank", 0)


def train(
    config: RunConfig,
    *,
    runs_dir: Path | str | None = None,
    data_dir: Path | str | None = None,
    progress: bool = True,
    callbacks: Sequence[Callback] = (),
) -> RunResult:
    """Train a new run to its end.

    Args:
        config: the settings, see `load_preset`.
        runs_dir: folder in which the run's folder is created; SKYFORMER_RUNS or ./runs by default.
        data_dir: folder of the prepared data; SKYFORMER_DATA or the platform's data folder by default.
        progress: show a progress bar on a terminal, or lines in a log.
        callbacks: further Lightning callbacks.

    Returns:
        The result, which is also stored in the run's folder; `open_run(result.run, runs_dir)` opens
        it.

    >>> from tempfile import TemporaryDirectory
    >>> from skyformer.lra import prepare
    >>> from skyformer.training import load_preset, train
    >>> folder = TemporaryDirectory()
    >>> _ = prepare("listops", limit=16, max_length=64, data_dir=folder.name)
    >>> changes = ["task.limit=16", "task.max_length=64", "optim.warmup_steps=1", "hardware.accelerator=cpu"]
    >>> config = load_preset("listops", "cpu", steps=2, overrides=changes)
    >>> result = train(config, runs_dir=folder.name, data_dir=folder.name, progress=False)
    >>> result.steps, result.test_examples
    (2, 16)
    >>> folder.cleanup()
    """
    task = config.task.load(data_dir)
    run = Run(runs_dir_or_default(runs_dir) / config.run_name())
    training = _Training(run, config, task, progress and is_main_process(), callbacks)
    _check_hardware(config)
    if is_main_process():
        create_run(config, runs_dir, task.manifest, task.folder)
    return _run_to_end(training)


def resume(
    run: Run,
    *,
    data_dir: Path | str | None = None,
    progress: bool = True,
    callbacks: Sequence[Callback] = (),
) -> RunResult:
    """Train an unfinished run to its end, from its last intact checkpoint. Arguments as in `train`; without `data_dir`,
    the data is read from where it was."""
    _check_unfinished(run)
    task = run.config.task.load(run.data_dir(data_dir))
    run.check_data(task.manifest)
    _check_hardware(run.config)
    return _run_to_end(_Training(run, run.config, task, progress and is_main_process(), callbacks))


def _check_unfinished(run: Run) -> None:
    result = run.result
    if result is not None:
        raise InputError(
            f"{run.folder} is finished already, with test accuracy {result.test_accuracy:.4f}; evaluate it with: "
            f"skyformer evaluate {run.folder}"
        )


def train_or_resume(
    config: RunConfig,
    *,
    runs_dir: Path | str | None = None,
    data_dir: Path | str | None = None,
    progress: bool = True,
) -> RunResult:
    """The result of a config's run: train it, resume it, or read its result if it is finished.

    Arguments as in `train`.
    """
    run = Run(runs_dir_or_default(runs_dir) / config.run_name())
    try:
        if not run.folder.exists():
            return train(config, runs_dir=runs_dir, data_dir=data_dir, progress=progress)
        return run.result or resume(run, data_dir=data_dir, progress=progress)
    except InputError:
        # Another process may have finished it in the meantime.
        result = run.result
        if result is None:
            raise
        return result


def evaluate(
    run: Run,
    *,
    split: str = "test",
    data_dir: Path | str | None = None,
    batch_size: int | None = None,
    progress: bool = False,
    sequence_parallel: int = 1,
) -> Evaluation:
    """Evaluate a run's best model on every example of a split.

    Args:
        split: train, dev or test.
        data_dir: folder of the prepared data; by default where it was when the run was trained.
        batch_size: examples per batch; the run's own by default.
        progress: show progress, as in `train`.
        sequence_parallel: number of processes that share each sequence, whatever the run was trained with.
    """
    if split not in list(Split):
        raise UnknownNameError("split", split, map(str, Split))
    trained = run.config
    hardware = {"devices": sequence_parallel, "strategy": "auto", "sequence_parallel": sequence_parallel}
    config = trained.replace(hardware=trained.hardware.replace(**hardware))
    task = config.task.load(run.data_dir(data_dir))
    run.check_data(task.manifest)
    module = ClassifierModule(config, load_best_model(run))
    loop = config.loop.replace(dev_limit=None, test_limit=None)
    data = TaskData(task, loop, config.seed, sequence_parallel)
    with _quiet_lightning(), display(quiet=not (progress and is_main_process())) as shown:
        shower = ShowEvaluation(shown, len(data.evaluation(Split(split), batch_size, world_size=sequence_parallel)))
        trainer = _trainer(config, logger=False, enable_checkpointing=False, callbacks=[shower])
        found = score(trainer, module, data, Split(split), batch_size)
    if not found.is_finite:
        raise DivergedError(f"the loss of {run.folder} on the {split} set is not finite{reason_for_nan(module)}")
    return found


@dataclass(frozen=True)
class _Training:
    """A run and everything that its training needs."""

    run: Run
    config: RunConfig
    task: Task
    show_progress: bool
    callbacks: Sequence[Callback]

    @property
    def advice(self) -> str:
        return f"resume with: skyformer train --resume {self.run.folder}"


def _trainer(config: RunConfig, **options: Any) -> pl.Trainer:
    hardware = config.hardware
    choices = {
        **hardware.trainer_options(),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_autolog_hparams": False,
        "use_distributed_sampler": False,
    }
    try:
        trainer = pl.Trainer(**{**choices, **options})
    except (MisconfigurationException, ValueError, RuntimeError) as refused:
        chosen = ", ".join(f"hardware.{name}={value}" for name, value in hardware if value is not None)
        reason = " ".join(str(refused).split())
        raise InputError(f"these settings cannot be used on this machine: {chosen}. Lightning says: {reason}") from None
    _check_half_precision(trainer, hardware.precision)
    return trainer


def _check_half_precision(trainer: pl.Trainer, chosen: str) -> None:
    """Refuse a precision whose first matrix product on the CPU would kill the process."""
    # Lightning may have replaced the chosen precision: on a CPU it trains in bf16-mixed instead of 16-mixed.
    dtype = {"bf16": "bfloat16", "16": "float16"}.get(str(trainer.precision).partition("-")[0])
    if dtype is not None and trainer.strategy.root_device.type == "cpu" and half_precision_crashes(dtype):
        raise InputError(
            f"hardware.precision={chosen} would crash here: the processor reports AMX instructions, but this "
            f"environment does not permit them. Set the environment variable {ISA_VARIABLE}={ISA_WITHOUT_AMX} and run "
            "the command again, or use --precision 32-true"
        )


def _check_hardware(config: RunConfig) -> None:
    """Report what this machine lacks before a folder is created."""
    if find_spec("tensorboard") is None:
        raise MissingExtraError("tensorboard")
    check_loggers(config)
    with _quiet_lightning():
        _trainer(config, logger=False, enable_checkpointing=False)


def _run_to_end(training: _Training) -> RunResult:
    """Train to the end, and write to the run's state how it ended, also on errors."""
    run, main = training.run, is_main_process()
    with (
        run.lock() if main else nullcontext(),
        _quiet_lightning(),
        _threads_restored(),
        StopSignals(training.advice) as signals,
        display(quiet=not training.show_progress) as progress,
    ):
        # Once more, because another process may have finished the run while this one waited for the lock.
        _check_unfinished(run)
        try:
            if main:
                run.remove_litter()
                run.check_data(training.task.manifest)
                run.record_data(training.task.manifest, training.task.folder.parent)
                run.update_state(state="running", pid=os.getpid(), host=platform.node(), reason=None)
            return _fit_and_test(training, signals, RunProgress(progress))
        except BaseException as error:
            failure = _as_error(error, training)
            if main:
                _write_end(run, failure)
            elif isinstance(failure, InterruptedRunError | TrainingError):
                # All processes end here together, and the main process reports the error. With another exit code than
                # zero, Lightning would kill the main process first.
                raise SystemExit(0) from failure
            if failure is error:
                raise
            raise failure from (None if isinstance(failure, InterruptedRunError) else error)


def _as_error(error: BaseException, training: _Training) -> BaseException:
    """Turn an error of the system such as a full disk, a lack of memory and the end of another process into a one-line
    error, and an error that a signal caused into the interruption.

    A second signal interrupts Lightning at any point, and may leave it in a state that raises another error. All other
    errors are returned unchanged.
    """
    before: BaseException | None = error
    while before is not None:
        if isinstance(before, InterruptedRunError):
            return before
        before = before.__cause__ or before.__context__
    newest = CheckpointStore(training.run.checkpoints, "").newest() or "none yet"
    lost = reason_for_lost_rank(error)
    if lost is not None:
        return RankLostError(
            f"another process that trained {training.run.folder} ended or did not answer: {lost}; last checkpoint: "
            f"{newest}; {training.advice}"
        )
    if isinstance(error, RuntimeError | MemoryError) and is_oom_error(repr(error)):
        reason = (str(error).splitlines() or ["no reason is given"])[0]
        return TrainingError(
            f"{training.run.folder} is out of memory ({reason}); last checkpoint: {newest}. Train a smaller model, or "
            "smaller batches with loop.batch_size and loop.accumulate, or use a machine with more memory"
        )
    if not isinstance(error, OSError) or isinstance(error, SkyformerError):
        return error
    what, when = f"{training.run.folder} stopped: {error}", "When that is mended"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        what, when = f"cannot write to {training.run.folder}: {error.strerror}", "When there is space again"
    return TrainingError(f"{what}; last checkpoint: {newest}. {when}, {training.advice}")


def _write_end(run: Run, error: BaseException) -> None:
    interrupted = isinstance(error, InterruptedRunError | KeyboardInterrupt)
    reason = " ".join(str(error).split()) or type(error).__name__
    # On a full disk this may fail too; a running state without a process is then reported as interrupted.
    with suppress(OSError):
        run.update_state(state="interrupted" if interrupted else "failed", reason=reason)


@contextmanager
def _quiet_lightning() -> Iterator[None]:
    """Suppress Lightning's announcements, and its advice on what the config decides; other warnings are shown."""
    loggers = [logging.getLogger(name) for name in _LIGHTNING_LOGGERS]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        for message in _IGNORED_WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        for logger in loggers:
            logger.setLevel(logging.WARNING)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


@contextmanager
def _threads_restored() -> Iterator[None]:
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _fit_and_test(training: _Training, signals: StopSignals, progress: RunProgress) -> RunResult:
    run, config = training.run, training.config
    _reset_peak_memory()
    store = CheckpointStore(run.checkpoints, config.digest(), DataRecord.of(training.task.manifest).digest())
    found = store.newest_good(lambda record: record.best_weights == stored_weights_digest(run.model_folder))
    data = TaskData(training.task, config.loop, config.seed, config.hardware.sequence_parallel)
    recorder = RunRecorder(run, config, data, store, progress, signals)
    if is_main_process():
        recorder.remove_later_files(found)
        if found is not None:
            run.update_state(step=found.step, best_step=found.best_step, best_accuracy=store.accuracy(found.best_step))
    module = ClassifierModule(config, build_model(config))
    trainer = _trainer(
        config,
        max_steps=config.loop.last_step,
        max_epochs=-1,
        accumulate_grad_batches=config.loop.accumulate,
        gradient_clip_val=config.optim.clip_value,
        gradient_clip_algorithm="value",
        num_sanity_val_steps=0,
        logger=[_tensorboard(run, found), *(build_loggers(config, run) if is_main_process() else [])],
        callbacks=[StopIfNotFinite(store), recorder, *training.callbacks],
        plugins=[store],
        default_root_dir=run.folder,
    )
    trainer.fit(module, datamodule=data, ckpt_path=store.path(found.step) if found else None)
    return _finish(training, trainer, module, data, recorder)


def _tensorboard(run: Run, found: CheckpointRecord | None) -> TensorBoardLogger:
    """The TensorBoard logger; it hides old events after the checkpoint, because they are computed again."""
    return TensorBoardLogger(
        run.folder, name=run.tensorboard.name, version="", purge_step=found.step + 1 if found else 0
    )


def _finish(
    training: _Training, trainer: pl.Trainer, module: ClassifierModule, data: TaskData, recorder: RunRecorder
) -> RunResult:
    run = training.run
    recorder.progress.evaluating(Split.DEV)
    recorder.record_evaluation(trainer, training.config.loop.last_step, score(trainer, module, data, Split.DEV))
    _check_finite(recorder.best is not None, "dev", module, recorder)
    # The other processes read the model that the main process writes.
    trainer.strategy.barrier("best model")
    module.model.load_state_dict(load_best_model(run).state_dict())
    recorder.progress.evaluating(Split.TEST)
    test = score(trainer, module, data, Split.TEST)
    _check_finite(test.is_finite, "test", module, recorder)
    recorder.clock.lap(training=False)
    assert recorder.best is not None
    parameters = sum(parameter.numel() for parameter in module.model.parameters())
    result = _result(training, recorder, recorder.best, test, parameters)
    if trainer.is_global_zero:
        # The result file is what marks a run as finished; the state only repeats it.
        run.write_result(result)
        run.update_state(state="finished", step=result.steps, seconds=result.seconds)
    return result


def _check_finite(holds: bool, split: str, module: ClassifierModule, recorder: RunRecorder) -> None:
    if not holds:
        newest = recorder.store.newest()
        raise DivergedError(
            f"the loss on the {split} set is not finite{reason_for_nan(module)}, so there is no result; last "
            f"checkpoint: {newest}. Try a lower optim.lr or another seed"
        )


def _result(training: _Training, recorder: RunRecorder, best: Best, test: Evaluation, parameters: int) -> RunResult:
    config = training.config
    return RunResult(
        run=training.run.name,
        preset=config.preset,
        note=config.note,
        task=config.task.name,
        attention=config.model.attention,
        seed=config.seed,
        steps=config.loop.last_step,
        best_step=best.step,
        dev_accuracy=best.evaluation.accuracy,
        dev_loss=best.evaluation.loss,
        dev_examples=best.evaluation.examples,
        test_accuracy=test.accuracy,
        test_loss=test.loss,
        test_examples=test.examples,
        steps_per_second=config.loop.last_step / recorder.clock.training,
        seconds=recorder.clock.total,
        peak_memory_bytes=_peak_memory(),
        parameters=parameters,
        config_digest=config.digest(),
        environment_digest=training.run.repair_environment().digest(),
        finished=now(),
        data_digest=DataRecord.of(training.task.manifest).digest(),
    )


def _reset_peak_memory() -> None:
    """A process may train several runs one after the other. Where the system cannot reset the peak, that of the largest
    of them counts."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    if os.name != "nt":
        with suppress(OSError):
            reset_peak()


def _peak_memory() -> int | None:
    """Peak bytes of GPU memory if a GPU is used, else of main memory; None on Windows, which does not report it."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_allocated()
    return None if os.name == "nt" else peak_bytes()
