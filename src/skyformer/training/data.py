"""The data of a run: training batches from any step on, and evaluations that count every example once."""

from __future__ import annotations

from collections.abc import Iterator

import lightning.pytorch as pl
import numpy as np
from torch.utils.data import DataLoader, Sampler

from skyformer.lra.batching import EvaluationBatches, loader_of, training_loader
from skyformer.lra.dataset import Example, Task
from skyformer.lra.examples import Integers, choose
from skyformer.lra.tasks import Split
from skyformer.training.config import LoopConfig


class EvenBatches(Sampler[list[int]]):
    """The evaluation batches of one process, followed by padding batches so that all processes have equally many.

    A process with fewer batches would leave the others waiting in a collective operation. Only the first `count`
    batches are scored; a padding batch has one example.
    """

    def __init__(self, batches: EvaluationBatches, rows: Integers, most: int) -> None:
        self._batches, self._rows, self._most = batches, rows, most

    @property
    def count(self) -> int:
        return len(self._batches)

    def __len__(self) -> int:
        return self._most

    def __iter__(self) -> Iterator[list[int]]:
        yield from (self._rows[batch].tolist() for batch in self._batches)
        yield from ([0] for _ in range(self._most - self.count))


class TaskData(pl.LightningDataModule):
    """The three splits of a task, in the batches of a run."""

    def __init__(self, task: Task, loop: LoopConfig, seed: int, sequence_parallel: int = 1) -> None:
        """`sequence_parallel` neighbouring processes get the same batches."""
        super().__init__()
        self.task, self.loop, self.seed, self._shared = task, loop, seed, sequence_parallel

    def train_dataloader(self) -> DataLoader[Example]:
        """Endless batches, starting at the trainer's current step, which may be restored from a checkpoint."""
        trainer, loop = self.trainer, self.loop
        assert trainer is not None
        return training_loader(
            self.task.train,
            loop.batch_size,
            seed=self.seed,
            group_by_length=loop.group_by_length,
            rank=trainer.global_rank // self._shared,
            world_size=trainer.world_size // self._shared,
            start_step=trainer.global_step * loop.accumulate,
            pad_to_max=loop.pad_to_max,
            num_workers=loop.workers,
            pin_memory=trainer.strategy.root_device.type == "cuda",
        )

    def evaluation(
        self, split: Split, batch_size: int | None = None, rank: int = 0, world_size: int = 1
    ) -> EvenBatches:
        """The batches of a split that one process evaluates."""
        size = self.loop.eval_batch_size or self.loop.batch_size if batch_size is None else batch_size
        rank, world_size = rank // self._shared, world_size // self._shared
        rows = self._rows(split)
        lengths = self.task[split].lengths()[rows]
        batches = EvaluationBatches(lengths, size, rank=rank, world_size=world_size)
        return EvenBatches(batches, rows, most=len(EvaluationBatches(lengths, size, rank=0, world_size=world_size)))

    def _rows(self, split: Split) -> Integers:
        """All examples, or a limited number: classes in proportion, and the same examples in every run."""
        limit = {Split.DEV: self.loop.dev_limit, Split.TEST: self.loop.test_limit}.get(split)
        examples = self.task[split]
        return np.arange(len(examples)) if limit is None else choose(examples.stored.labels, limit, seed=0)

    def loader(self, split: Split, batches: EvenBatches) -> DataLoader[Example]:
        return loader_of(self.task[split], batches, pad_to_max=self.loop.pad_to_max, num_workers=self.loop.workers)
