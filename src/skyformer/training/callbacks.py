"""What a run does around Lightning's steps: log, save, evaluate, stop when told, and refuse what is not finite."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint

from skyformer.errors import DivergedError
from skyformer.lra.batching import Batch
from skyformer.lra.tasks import Split
from skyformer.training.checkpoints import JOURNAL, CheckpointStore, export_model, stored_weights_digest
from skyformer.training.config import RunConfig
from skyformer.training.data import TaskData
from skyformer.training.evaluation import score_within_fit
from skyformer.training.metrics_log import MetricsLog
from skyformer.training.module import ClassifierModule, build_model
from skyformer.training.progress import RunProgress
from skyformer.training.runs import Run
from skyformer.training.scores import Evaluation
from skyformer.training.signals import StopSignals

_STATE_SECONDS = 10.0
_SHOWN_IDS = 64


def agreed(trainer: pl.Trainer, *flags: bool) -> list[bool]:
    """Which flags any process has raised; each has to ask at the same time."""
    if trainer.world_size == 1:
        return list(flags)
    votes = torch.tensor(flags, dtype=torch.int32, device=trainer.strategy.root_device)
    result: list[bool] = trainer.strategy.reduce(votes, reduce_op="max").bool().tolist()
    return result


class StayFinite(Callback):
    """Ends a run before a loss or gradient that is not finite reaches the weights.

    Both are looked at where all processes meet: a loss that is no number in one of them makes the common gradient one.
    """

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        assert isinstance(pl_module, ClassifierModule)
        bad_loss = any(not torch.isfinite(part.loss) for part in pl_module.parts)
        bad = bad_loss or not self._gradients_are_finite(pl_module)
        if agreed(trainer, bad)[0]:
            raise DivergedError(self._describe(trainer, pl_module))

    @staticmethod
    def _gradients_are_finite(module: ClassifierModule) -> bool:
        if module.config.hardware.precision == "16-mixed":
            # Its loss scaler leaves such steps out by itself.
            return True
        gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
        return bool(torch.isfinite(torch.nn.utils.get_total_norm(gradients)))

    def _describe(self, trainer: pl.Trainer, module: ClassifierModule) -> str:
        found = [(float(part.loss), part.ids.tolist()) for part in module.parts]
        losses = [pair for pairs in _from_all(trainer, found) for pair in pairs]
        bad = [pair for pair in losses if not torch.isfinite(torch.tensor(pair[0]))]
        what = f"the loss is {bad[0][0]}" if bad else "the loss is finite, but a gradient is not,"
        ids = [number for _, numbers in (bad or losses) for number in numbers]
        newest = self._store.newest()
        return (
            f"{what} at step {trainer.global_step + 1}, on training examples {_listed(ids)}; "
            f"last checkpoint: {newest or 'none yet'}. Try a lower optim.lr, or another seed"
        )


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
    """The best evaluation so far, and the sum of its weights in the model's folder."""

    step: int
    evaluation: Evaluation
    weights: str


class Clock:
    """Seconds of a run over all the processes that worked on it, and those of them that it trained."""

    def __init__(self) -> None:
        self.total = self.training = 0.0
        self._since = time.perf_counter()

    def start(self) -> None:
        self._since = time.perf_counter()

    def lap(self, *, training: bool) -> float:
        """Adds the time since the last lap, as training or not; the total."""
        now = time.perf_counter()
        passed, self._since = now - self._since, now
        self.total += passed
        self.training += passed if training else 0.0
        return self.total


class RunKeeper(Checkpoint):
    """Keeps the run's folder up to date, step by step.

    After a step: a row of metrics, then a checkpoint, then the evaluation. So a checkpoint never knows of its own
    step's evaluation, and a run that resumes from it does that first. The last evaluation comes after the fit.
    """

    def __init__(
        self,
        run: Run,
        config: RunConfig,
        data: TaskData,
        store: CheckpointStore,
        metrics: MetricsLog,
        display: RunProgress,
        signals: StopSignals,
    ) -> None:
        self.run, self.config, self.data, self.store = run, config, data, store
        self.metrics, self.display, self.signals = metrics, display, signals
        self.best: Best | None = None
        self.clock = Clock()
        self._lr = 0.0
        self._state_written = 0.0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        # Here and not before: a launcher of several processes divides the cores among them.
        if self.config.hardware.threads is not None:
            torch.set_num_threads(self.config.hardware.threads)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.signals.listen()
        if trainer.is_global_zero:
            self.display.begin(self.run.name, trainer.global_step, self.config.loop.steps)
        self.clock.start()
        if self._evaluation_is_due(trainer.global_step):
            self._evaluate(trainer, pl_module)

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.signals.listen()

    def on_test_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *rest: Any) -> None:
        self._stop_if_told(trainer)

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
        if step % loop.log_every == 0 or step == loop.steps:
            self._log_training(trainer, pl_module)
        [stop] = agreed(trainer, self.signals.received is not None)
        if stop or step % loop.checkpoint_every == 0 or step == loop.steps or self._evaluation_is_due(step):
            self._save(trainer, pl_module)
        if stop:
            raise self.signals.error(f"stopped at step {step} of {loop.steps}")
        if self._evaluation_is_due(step) and step < loop.steps:
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
            "window": pl_module.window.gather(),
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
        if trainer.is_global_zero:
            pl_module.window.restore(journal["window"])
            self.metrics.truncate(journal["metrics_size"])

    def record_evaluation(self, trainer: pl.Trainer, step: int, evaluation: Evaluation) -> None:
        """Take note of an evaluation on the dev set; if it is the best, its model is the run's."""
        seconds = self.clock.lap(training=False)
        self._log(trainer, step, Split.DEV, evaluation, seconds=seconds)
        better = self.best is None or evaluation.accuracy > self.best.evaluation.accuracy
        if better:
            self.best = Best(step, evaluation, self.export(step) if trainer.is_global_zero else "")
        if not trainer.is_global_zero:
            return
        self.store.mark(step, evaluation.accuracy)
        self.store.prune(self._best_step)
        self._write_state(step)
        self.display.note(
            f"step {step:,}: dev accuracy {evaluation.accuracy:.4f}, loss {evaluation.loss:.4f}"
            + (", the best so far" if better else "")
        )

    def export(self, step: int) -> str:
        """Make the checkpoint of a step the run's model; the sum of its weights."""
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
        self.display.evaluating(Split.DEV)
        evaluation = score_within_fit(trainer, module, self.data, Split.DEV, lambda: self._stop_if_told(trainer))
        self.record_evaluation(trainer, trainer.global_step, evaluation)

    def _stop_if_told(self, trainer: pl.Trainer) -> None:
        if agreed(trainer, self.signals.received is not None)[0]:
            raise self.signals.error("stopped while evaluating")

    def _show(self, trainer: pl.Trainer, module: ClassifierModule) -> None:
        if trainer.is_global_zero:
            examples = sum(len(part.ids) for part in module.parts)
            loss = sum(float(part.loss) for part in module.parts) / len(module.parts)
            self.display.advance(trainer.global_step, loss, sum(int(part.correct) for part in module.parts) / examples)

    def _log_training(self, trainer: pl.Trainer, module: ClassifierModule) -> None:
        seconds = self.clock.lap(training=True)
        self._log(trainer, trainer.global_step, Split.TRAIN, module.window.take(), lr=self._lr, seconds=seconds)
        if trainer.is_global_zero and time.monotonic() - self._state_written > _STATE_SECONDS:
            self._write_state(trainer.global_step)

    def _log(self, trainer: pl.Trainer, step: int, split: Split, evaluation: Evaluation, **more: float) -> None:
        numbers = {"loss": evaluation.loss, "accuracy": evaluation.accuracy, **more}
        for logger in trainer.loggers:
            logger.log_metrics({f"{split}/{name}": value for name, value in numbers.items()}, step)

    def _save(self, trainer: pl.Trainer, module: ClassifierModule) -> None:
        step = trainer.global_step
        for logger in trainer.loggers:
            logger.save()
        trainer.save_checkpoint(self.store.path(step))
        if trainer.is_global_zero:
            self.store.prune(self._best_step)
            self._write_state(step)

    def _write_state(self, step: int) -> None:
        best = self.best
        self._state_written = time.monotonic()
        self.run.write_state(
            self.run.stored_state().replace(
                step=step,
                best_step=self._best_step,
                best_accuracy=best and best.evaluation.accuracy,
                seconds=self.clock.total,
            )
        )
