"""train, resume, evaluate: a run from its config to its result, whatever comes between.

A run's life: fit to the last step, one more evaluation on the dev set, the test set once with the best model, and
`result.json`. Each of these is done again by a run that is resumed, from what its last good checkpoint holds.
"""

from __future__ import annotations

import os
import platform
import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from skyformer.environment import now
from skyformer.errors import (
    InputError,
    InterruptedRunError,
    SkyformerError,
    TrainingError,
    UnknownNameError,
)
from skyformer.lra.dataset import Task
from skyformer.lra.tasks import Split
from skyformer.report.progress import display
from skyformer.training.callbacks import Best, RunKeeper, StayFinite
from skyformer.training.checkpoints import CheckpointRecord, CheckpointStore, stored_weights_digest
from skyformer.training.config import RunConfig
from skyformer.training.data import TaskData, load_data
from skyformer.training.evaluation import score
from skyformer.training.metrics_log import MetricsLog
from skyformer.training.module import ClassifierModule, build_model, parameter_count
from skyformer.training.prediction import load_best_model
from skyformer.training.progress import RunProgress
from skyformer.training.quiet import quiet_lightning
from skyformer.training.runs import Run, RunResult, create_run, runs_dir_or_default
from skyformer.training.scores import Evaluation
from skyformer.training.signals import StopSignals


def is_main_process() -> bool:
    """Whether this process writes and prints, of all that train one run together."""
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
        config: from `load_preset`. runs_dir: where its folder comes. data_dir: where its data is prepared.
        progress: show a bar on a terminal, lines elsewhere. callbacks: more of Lightning's, for those who want them.
    """
    task = load_data(config, data_dir)
    run = Run(runs_dir_or_default(runs_dir) / config.run_name())
    job = _Job(run, config, task, progress and is_main_process(), callbacks)
    _check_hardware(config)
    if is_main_process():
        create_run(config, runs_dir)
    return _carry_out(job)


def resume(
    run: Run,
    *,
    data_dir: Path | str | None = None,
    progress: bool = True,
    callbacks: Sequence[Callback] = (),
) -> RunResult:
    """Train a run that was stopped to its end, from its last good checkpoint."""
    result = run.result
    if result is not None:
        raise InputError(
            f"{run.folder} is finished already, with test accuracy {result.test_accuracy:.4f}; look at it with: "
            f"skyformer evaluate {run.folder}"
        )
    task = load_data(run.config, data_dir)
    _check_hardware(run.config)
    return _carry_out(_Job(run, run.config, task, progress and is_main_process(), callbacks))


def evaluate(
    run: Run,
    *,
    split: str = "test",
    data_dir: Path | str | None = None,
    batch_size: int | None = None,
) -> Evaluation:
    """Loss and accuracy of a run's best model on every example of a split."""
    if split not in list(Split):
        raise UnknownNameError("split", split, map(str, Split))
    config = run.config
    task = load_data(config, data_dir)
    module = ClassifierModule(config, load_best_model(run))
    loop = config.loop.replace(dev_limit=None, test_limit=None)
    with quiet_lightning():
        trainer = _trainer(config, devices=1, strategy="auto", logger=False, enable_checkpointing=False)
        return score(trainer, module, TaskData(task, loop, config.seed), Split(split), batch_size)


@dataclass(frozen=True)
class _Job:
    """A run and what its training needs."""

    run: Run
    config: RunConfig
    task: Task
    show_progress: bool
    callbacks: Sequence[Callback]

    @property
    def advice(self) -> str:
        return f"go on with: skyformer train --resume {self.run.folder}"


def _trainer(config: RunConfig, **options: Any) -> pl.Trainer:
    hardware = config.hardware
    choices = {
        "accelerator": hardware.accelerator,
        "devices": hardware.devices,
        "strategy": hardware.strategy,
        "precision": hardware.precision,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_autolog_hparams": False,
        "use_distributed_sampler": False,
    }
    try:
        return pl.Trainer(**{**choices, **options})
    except (MisconfigurationException, ValueError, RuntimeError) as refused:
        chosen = ", ".join(f"hardware.{name}={value}" for name, value in hardware if value is not None)
        reason = " ".join(str(refused).split())
        raise InputError(f"these settings cannot be used on this machine: {chosen}. Lightning says: {reason}") from None


def _check_hardware(config: RunConfig) -> None:
    """Before a run's folder is made for nothing."""
    with quiet_lightning():
        _trainer(config, logger=False, enable_checkpointing=False)


def _carry_out(job: _Job) -> RunResult:
    """The run to its end, with its state told truly whatever that end is."""
    run, main = job.run, is_main_process()
    with (
        run.lock() if main else nullcontext(),
        quiet_lightning(),
        _threads_restored(),
        StopSignals(job.advice) as signals,
        display(quiet=not job.show_progress) as progress,
    ):
        try:
            if main:
                _write_beginning(run)
            return _fit_and_test(job, signals, RunProgress(progress))
        except BaseException as error:
            failure = _as_error(error, job)
            if main:
                _write_end(run, failure)
            elif isinstance(failure, InterruptedRunError | TrainingError):
                # All processes end here together, and the first one tells. An exit code would have Lightning kill it.
                raise SystemExit(0) from failure
            if failure is error:
                raise
            raise failure from error


def _as_error(error: BaseException, job: _Job) -> BaseException:
    """A full or failing disk as one line; everything else as it is."""
    if not isinstance(error, OSError) or isinstance(error, SkyformerError):
        return error
    newest = CheckpointStore(job.run.checkpoints, "").newest()
    reason = error.strerror or str(error)
    return TrainingError(
        f"{job.run.folder} cannot be written to: {reason}; the last checkpoint is {newest or 'none yet'}. "
        f"When there is room again, {job.advice}"
    )


def _write_beginning(run: Run) -> None:
    run.write_state(run.stored_state().replace(state="running", pid=os.getpid(), host=platform.node(), reason=None))


def _write_end(run: Run, error: BaseException) -> None:
    told = isinstance(error, InterruptedRunError | KeyboardInterrupt)
    reason = " ".join(str(error).split()) or type(error).__name__
    # On a full disk even this may fail; a state that says running without a process is read as interrupted.
    with suppress(OSError):
        run.write_state(run.stored_state().replace(state="interrupted" if told else "failed", reason=reason))


@contextmanager
def _threads_restored() -> Iterator[None]:
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _fit_and_test(job: _Job, signals: StopSignals, progress: RunProgress) -> RunResult:
    run, config = job.run, job.config
    store = CheckpointStore(run.checkpoints, config.digest())
    found = store.newest_good(lambda record: record.best_weights == stored_weights_digest(run.model_folder))
    data = TaskData(job.task, config.loop, config.seed)
    metrics = MetricsLog(run.metrics_file)
    keeper = RunKeeper(run, config, data, store, metrics, progress, signals)
    if is_main_process():
        _clear_the_way(store, metrics, keeper, found)
    module = ClassifierModule(config, build_model(config))
    trainer = _trainer(
        config,
        max_steps=config.loop.steps,
        max_epochs=-1,
        accumulate_grad_batches=config.loop.accumulate,
        gradient_clip_val=config.optim.clip_value,
        gradient_clip_algorithm="value",
        num_sanity_val_steps=0,
        logger=[metrics, _tensorboard(run, found)],
        callbacks=[StayFinite(store), keeper, *job.callbacks],
        plugins=[store],
        default_root_dir=run.folder,
    )
    trainer.fit(module, datamodule=data, ckpt_path=store.path(found.step) if found else None)
    return _finish(job, trainer, module, data, keeper)


def _tensorboard(run: Run, found: CheckpointRecord | None) -> TensorBoardLogger:
    """Events after the checkpoint come again, and are hidden until then."""
    return TensorBoardLogger(
        run.folder, name=run.tensorboard.name, version="", purge_step=found.step + 1 if found else 0
    )


def _clear_the_way(
    store: CheckpointStore, metrics: MetricsLog, keeper: RunKeeper, found: CheckpointRecord | None
) -> None:
    """Nothing is left of what the run did after the checkpoint it resumes from."""
    store.sweep(found.step if found else None)
    if found is None:
        metrics.truncate(0)
    elif found.best_step is not None and found.best_weights != stored_weights_digest(keeper.run.model_folder):
        keeper.export(found.best_step)


def _finish(job: _Job, trainer: pl.Trainer, module: ClassifierModule, data: TaskData, keeper: RunKeeper) -> RunResult:
    keeper.display.evaluating(Split.DEV)
    keeper.record_evaluation(trainer, job.config.loop.steps, score(trainer, module, data, Split.DEV))
    # The other processes read the model that the first one writes.
    trainer.strategy.barrier("best model")
    module.model.load_state_dict(load_best_model(job.run).state_dict())
    keeper.display.evaluating(Split.TEST)
    test = score(trainer, module, data, Split.TEST)
    keeper.clock.lap(training=False)
    assert keeper.best is not None
    result = _result(job, keeper, keeper.best, test, parameter_count(module.model))
    if trainer.is_global_zero:
        # The result makes a run a finished one; the state only repeats it.
        job.run.write_result(result)
        job.run.write_state(job.run.stored_state().replace(state="finished", step=result.steps, seconds=result.seconds))
    return result


def _result(job: _Job, keeper: RunKeeper, best: Best, test: Evaluation, parameters: int) -> RunResult:
    config = job.config
    return RunResult(
        run=job.run.name,
        preset=config.preset,
        note=config.note,
        task=config.task.name,
        attention=config.model.attention,
        seed=config.seed,
        steps=config.loop.steps,
        best_step=best.step,
        dev_accuracy=best.evaluation.accuracy,
        dev_loss=best.evaluation.loss,
        dev_examples=best.evaluation.examples,
        test_accuracy=test.accuracy,
        test_loss=test.loss,
        test_examples=test.examples,
        steps_per_second=config.loop.steps / keeper.clock.training,
        seconds=keeper.clock.total,
        peak_memory_bytes=_peak_memory(),
        parameters=parameters,
        config_digest=config.digest(),
        environment_digest=job.run.environment.digest(),
        finished=now(),
    )


def _peak_memory() -> int:
    """The most that this process has held: on the GPU if it uses one, in main memory otherwise."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_allocated()
    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kibibytes if sys.platform == "darwin" else 1024 * kibibytes
