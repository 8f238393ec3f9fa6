"""Lightning callbacks of a run: log, save checkpoints, evaluate, stop on a signal, and stop if a loss is not finite."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint

from skyformer.attention.performer import PerformerAttention
from skyformer.errors import DivergedError
from skyformer.lra.batching import Batch
from skyformer.lra.tasks import Split
from skyformer.model.storage import stored_weights_digest
from skyformer.report.progress import Progress
from skyformer.training.building import build_model
from skyformer.training.checkpoints import JOURNAL, CheckpointRecord, CheckpointStore, export_model
from skyformer.training.config import RunConfig
from skyformer.training.data import TaskData
from skyformer.training.metrics import MetricRow, MetricsFile
from skyformer.training.module import ClassifierModule, Evaluation, score_during_fit
from skyformer.training.progress import RunProgress
from skyformer.training.runs import Run
from skyformer.training.signals import StopSignals

_STATE_SECONDS = 10.0
"""Seconds between writes of state.json that only report progress."""
_SHOWN_IDS = 64
EVALUATION = "batches evaluated"


def _performers(module: pl.LightningModule) -> list[tuple[str, PerformerAttention]]:
    """The Performers of a model by name. Their state dicts do not say how many calls ago they drew their features."""
    return [(name, each) for name, each in module.named_modules() if isinstance(each, PerformerAttention)]


def true_in_any_process(trainer: pl.Trainer, flag: bool) -> bool:
    """Whether any process passed True; all processes must call this at the same point."""
    if trainer.world_size == 1:
        return flag
    vote = torch.tensor(flag, dtype=torch.int32, device=trainer.strategy.root_device)
    return bool(trainer.strategy.reduce(vote, reduce_op="max"))


class ShowEvaluation(Callback):
    """Shows the batches of an evaluation outside of training on a progress display."""

    def __init__(self, progress: Progress, batches: int) -> None:
        self._progress = progress
        progress.begin(EVALUATION, total=batches)

    def on_test_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *rest: Any) -> None:
        self._progress.update(EVALUATION, advance=1)


class StopIfNotFinite(Callback):
    """Ends a run before a loss or gradient that is not finite changes the weights.

    Lightning's EarlyStopping(check_finite=True) checks logged metrics only, when the weights are changed already.
    """

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        assert isinstance(pl_module, ClassifierModule)
        bad_loss = any(not torch.isfinite(part.loss) for part in pl_module.parts)
        bad = bad_loss or not self._gradients_are_finite(trainer, pl_module)
        if true_in_any_process(trainer, bad):
            raise DivergedError(self._describe(trainer, pl_module))

    @staticmethod
    def _gradients_are_finite(trainer: pl.Trainer, module: ClassifierModule) -> bool:
        if trainer.precision == "16-mixed":
            # The loss scaler of this precision skips such steps. On a CPU Lightning trains in bf16-mixed instead.
            return True
        gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
        return bool(torch.isfinite(torch.nn.utils.get_total_norm(gradients)))

    def _describe(self, trainer: pl.Trainer, module: ClassifierModule) -> str:
        found = [(float(part.loss), part.ids.tolist()) for part in module.parts if module.counts]
        losses = [pair for pairs in _from_all(trainer, found) for pair in pairs]
        bad = [pair for pair in losses if not torch.isfinite(torch.tensor(pair[0]))]
        what = f"the loss is {bad[0][0]}" if bad else "the loss is finite, but a gradient is not,"
        ids = [number for _, numbers in (bad or losses) for number in numbers]
        newest = self._store.newest()
        return (
            f"{what} at step {trainer.global_step + 1}, on training examples {_listed(ids)}"
            f"{reason_for_nan(module)}; last checkpoint: {newest or 'none yet'}. Try a lower optim.lr or another seed"
        )


def reason_for_nan(module: ClassifierModule) -> str:
    """The error of an attention, in brackets, if there was one."""
    return f" (the attention says: {module.unsolved})" if module.unsolved else ""


def _from_all(trainer: pl.Trainer, own: Any) -> list[Any]:
    if trainer.world_size == 1:
        return [own]
    gathered: list[Any] = [None] * trainer.world_size
    torch.distributed.all_gather_object(gathered, own)
    return gathered


def _listed(ids: list[int]) -> str:
    shown = ", ".join(map(str, ids[:_SHOWN_IDS]))
    return shown if len(ids) <= _SHOWN_IDS else f"{shown} and {len(ids) - _SHOWN_IDS} more"


@dataclass
class Best:
    """The best evaluation so far, and the SHA-256 sum of the weights in the model folder."""

    step: int
    evaluation: Evaluation
    weights: str


class Clock:
    """Total seconds of a run, including those before it was resumed, and how many of them were spent on training."""

    def __init__(self) -> None:
        self.total = self.training = 0.0
        self._since = time.perf_counter()

    def start(self) -> None:
        self._since = time.perf_counter()

    def lap(self, *, training: bool) -> float:
        """Add the time since the last call, as training time or not; returns the total."""
        now = time.perf_counter()
        passed, self._since = now - self._since, now
        self.total += passed
        self.training += passed if training else 0.0
        return self.total


class RunRecorder(Checkpoint):
    """Writes metrics, checkpoints, the best model and the state to the run's folder.

    The order after a step is: metrics, checkpoint, evaluation. A checkpoint therefore never contains the evaluation of
    its own step; a run that resumes from it starts with that evaluation. The last evaluation follows the fit.
    """

    def __init__(
        self,
        run: Run,
        config: RunConfig,
        data: TaskData,
        store: CheckpointStore,
        progress: RunProgress,
        signals: StopSignals,
    ) -> None:
        self.run, self.config, self.data, self.store = run, config, data, store
        self.progress, self.signals = progress, signals
        self.metrics = MetricsFile(run.metrics_file)
        self.best: Best | None = None
        self.clock = Clock()
        self._lr = 0.0
        self._state_written = 0.0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        # Not earlier, because Lightning sets the number of threads when it starts several processes.
        if self.config.hardware.threads is not None:
            torch.set_num_threads(self.config.hardware.threads)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.signals.listen()
        if trainer.is_global_zero:
            self.progress.begin(self.run.name, trainer.global_step, self.config.loop.last_step)
        self.clock.start()
        if self._evaluation_is_due(trainer.global_step):
            self._evaluate(trainer, pl_module)

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.signals.listen()

    def on_test_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *rest: Any) -> None:
        self._between_batches(trainer)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self._lr = optimizer.param_groups[0]["lr"]

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        loop, step = self.config.loop, trainer.global_step
        if (batch_idx + 1) % loop.accumulate:
            return
        assert isinstance(pl_module, ClassifierModule)
        self._show(trainer, pl_module)
        if step % loop.log_every == 0 or step == loop.last_step:
            self._log_training(trainer, pl_module)
        stop = true_in_any_process(trainer, self.signals.received is not None)
        if stop or step % loop.checkpoint_every == 0 or step == loop.last_step or self._evaluation_is_due(step):
            self._save(trainer)
        if stop:
            raise self.signals.error(f"stopped at step {step} of {loop.last_step}")
        if self._evaluation_is_due(step) and step < loop.last_step:
            self._evaluate(trainer, pl_module)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        assert isinstance(pl_module, ClassifierModule)
        self.clock.lap(training=True)
        checkpoint[JOURNAL] = {
            "config": self.config.digest(),
            "best_step": self._best_step,
            "best_weights": self.best and self.best.weights,
            "best_evaluation": self.best and asdict(self.best.evaluation),
            "seconds": self.clock.total,
            "training_seconds": self.clock.training,
            "metrics_size": self.metrics.size,
            "window": pl_module.window.gather(trainer),
            "calls_since_redraw": {name: each.calls_since_redraw for name, each in _performers(pl_module)},
        }

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        assert isinstance(pl_module, ClassifierModule)
        journal = checkpoint[JOURNAL]
        if journal["best_step"] is not None:
            evaluation = Evaluation(**journal["best_evaluation"])
            self.best = Best(journal["best_step"], evaluation, journal["best_weights"])
        self.clock.total, self.clock.training = journal["seconds"], journal["training_seconds"]
        calls = journal.get("calls_since_redraw", {})  # Older checkpoints do not have it.
        for name, each in _performers(pl_module):
            each.calls_since_redraw = calls.get(name, 0)
        if trainer.is_global_zero:
            pl_module.window.restore(journal["window"])
            self.metrics.truncate(journal["metrics_size"])

    def record_evaluation(self, trainer: pl.Trainer, step: int, evaluation: Evaluation) -> None:
        """Log an evaluation on the dev set; if it is the best that may be kept, its weights become the run's model."""
        seconds = self.clock.lap(training=False)
        self._log(trainer, MetricRow(step, "dev", evaluation.loss, evaluation.accuracy, None, seconds))
        may_keep = evaluation.is_finite and self.config.loop.may_keep(step)
        better = may_keep and (self.best is None or evaluation.accuracy > self.best.evaluation.accuracy)
        if better:
            self.best = Best(step, evaluation, self.export(step) if trainer.is_global_zero else "")
        if not trainer.is_global_zero:
            return
        self.store.mark(step, evaluation.accuracy)
        self.store.prune(self._best_step)
        self._write_state(step)
        self.progress.note(
            f"step {step:,}: dev accuracy {evaluation.accuracy:.4f}, loss {evaluation.loss:.4f}"
            + (", the best so far" if better else "")
        )

    def remove_later_files(self, found: CheckpointRecord | None) -> None:
        """Remove everything that the run wrote after the checkpoint from which it resumes."""
        self.store.sweep(found.step if found else None)
        if found is None:
            self.metrics.truncate(0)
        elif found.best_step is not None and found.best_weights != stored_weights_digest(self.run.model_folder):
            self.export(found.best_step)

    def export(self, step: int) -> str:
        """Save the weights of a checkpoint as the run's model; returns their SHA-256 sum."""
        export_model(build_model(self.config), self.store.load_weights(step), self.run.model_folder)
        digest = stored_weights_digest(self.run.model_folder)
        assert digest is not None
        return digest

    @property
    def _best_step(self) -> int | None:
        return None if self.best is None else self.best.step

    def _evaluation_is_due(self, step: int) -> bool:
        return step > 0 and step % self.config.loop.eval_every == 0

    def _evaluate(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        assert isinstance(module, ClassifierModule)
        self.clock.lap(training=True)
        self.progress.evaluating(Split.DEV)
        evaluation = score_during_fit(trainer, module, self.data, Split.DEV, lambda: self._between_batches(trainer))
        self.record_evaluation(trainer, trainer.global_step, evaluation)

    def _between_batches(self, trainer: pl.Trainer) -> None:
        """Between two batches of an evaluation."""
        self.progress.still_evaluating()
        if true_in_any_process(trainer, self.signals.received is not None):
            raise self.signals.error("stopped while evaluating")

    def _show(self, trainer: pl.Trainer, module: ClassifierModule) -> None:
        if trainer.is_global_zero:
            examples = sum(len(part.ids) for part in module.parts)
            loss = sum(float(part.loss) for part in module.parts) / len(module.parts)
            self.progress.advance(trainer.global_step, loss, sum(int(part.correct) for part in module.parts) / examples)

    def _log_training(self, trainer: pl.Trainer, module: ClassifierModule) -> None:
        seconds, window = self.clock.lap(training=True), module.window.take(trainer)
        self._log(trainer, MetricRow(trainer.global_step, "train", window.loss, window.accuracy, self._lr, seconds))
        if trainer.is_global_zero and time.monotonic() - self._state_written > _STATE_SECONDS:
            self._write_state(trainer.global_step)

    def _log(self, trainer: pl.Trainer, row: MetricRow) -> None:
        if trainer.is_global_zero:
            self.metrics.append(row)
        numbers = {"loss": row.loss, "accuracy": row.accuracy, "lr": row.lr, "seconds": row.seconds}
        logged = {f"{row.split}/{name}": value for name, value in numbers.items() if value is not None}
        for logger in trainer.loggers:
            logger.log_metrics(logged, row.step)

    def _save(self, trainer: pl.Trainer) -> None:
        step = trainer.global_step
        if trainer.is_global_zero:
            self.metrics.sync()
        for logger in trainer.loggers:
            logger.save()
        trainer.save_checkpoint(self.store.path(step))
        if trainer.is_global_zero:
            self.store.prune(self._best_step)
            self._write_state(step)

    def _write_state(self, step: int) -> None:
        self._state_written = time.monotonic()
        accuracy = self.best and self.best.evaluation.accuracy
        self.run.update_state(step=step, best_step=self._best_step, best_accuracy=accuracy, seconds=self.clock.total)
