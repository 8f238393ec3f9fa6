"""Training steps of Skyformer and other attentions, interleaved in one process, with the paper's model and settings.

The study of efficiency measures each attention in a process of its own, minutes apart, and a shared machine changes its
speed by more than these attentions differ. Here all of them take the same step directly after each other, in random
order. Freed memory is returned to the system before each step, because memory that the previous step left in the heap
would make the next one faster.

The task "random" needs no data: 4 sequences of random tokens, all of the full length, or from half of it to the whole
with a mask ("padded"); the gradients of each attention are first checked against float64. The tasks of Long Range Arena
must be prepared, Pathfinder with --limit 3000; their batches are those of the study of efficiency.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from skyformer.errors import SkyformerError, TrainingError
from skyformer.processes import release_free_memory
from skyformer.report.paper import TASK_TITLES
from skyformer.report.tables import NOTHING, Table, number
from skyformer.studies.base import Study, check_names, option
from skyformer.studies.benchmarks.timing import interleave, rounded, seconds_of
from skyformer.studies.efficiency import FASTER_BY, PADDED, choose_batches, kinds_of
from skyformer.studies.registry import register_benchmark
from skyformer.studies.targets import Target, at_most

if TYPE_CHECKING:
    from skyformer.lra.batching import Batch
    from skyformer.training.building import Trainee
    from skyformer.training.config import RunConfig

SEED = 0
OURS = "skyformer"
APPROXIMATIONS = (OURS, "nystromformer", "linformer", "informer", "performer", "reformer", "bigbird")

RANDOM, FULL_LENGTH = "random", "full length"
RANDOM_ATTENTIONS = (OURS, "linformer", "softmax")
RANDOM_BATCHES, RANDOM_BATCH_SIZE, VOCAB = 3, 4, 256
TARGET_LENGTH = 4096
LIMITS = {"linformer": 1.1, "softmax": 0.25}
"""The time of a step with Skyformer, divided by the time with these, may be at most this on random tokens of
`TARGET_LENGTH`."""

CHECKED_LENGTH = 512
GRADIENT_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Options:
    tasks: tuple[str, ...] = option(
        (RANDOM, *TASK_TITLES), small=(RANDOM, "listops"), help="'random' and tasks of Long Range Arena."
    )
    length: int = option(TARGET_LENGTH, small=512, least=1, help="Tokens of the longest random sequence.")
    repeats: int = option(5, small=2, least=1, help="Repetitions of the step on each batch.")
    pathfinder_limit: int = option(3000, least=1, help="Pathfinder images per split, as prepared with --limit.")
    listops_limit: int | None = option(None, small=1000, help="ListOps examples per split; generated if missing.")
    data_dir: str | None = option(None, help="Folder of the prepared data.")


@dataclass(frozen=True)
class Cell:
    """length: of random sequences; limit: examples per split of a task, None for all."""

    task: str
    batches: str
    repeats: int
    length: int | None = None
    limit: int | None = None

    def __str__(self) -> str:
        title = f"random tokens, n={self.length:,}" if self.task == RANDOM else TASK_TITLES[self.task]
        return f"{title}, {self.batches}"


@dataclass(frozen=True)
class StepTimes:
    """The seconds of one attention's training steps: for each batch, those of every repetition."""

    attention: str
    seconds: tuple[tuple[float, ...], ...]

    def typical(self) -> float:
        """The median of the repetitions, averaged over the batches."""
        return statistics.mean(statistics.median(times) for times in self.seconds)

    def fastest(self) -> float:
        return statistics.mean(min(times) for times in self.seconds)


@dataclass(frozen=True)
class Result:
    rows: tuple[StepTimes, ...]


@register_benchmark
class Steps(Study[Options, Cell, Result]):
    name = "steps"
    title = "Training steps of attentions, interleaved in one process"
    is_timing_study = True

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        check_names("task", options.tasks, (RANDOM, *TASK_TITLES))

    def cells(self) -> Sequence[Cell]:
        options = self.options
        limits = {"pathfinder": options.pathfinder_limit, "listops": options.listops_limit}
        return [
            Cell(task, kind, options.repeats, options.length if task == RANDOM else None, limits.get(task))
            for task in options.tasks
            for kind in ((FULL_LENGTH, PADDED) if task == RANDOM else kinds_of(task))
        ]

    def measure(self, cell: Cell) -> Result:
        """Time every attention on every batch; the first batch is for the warm-up."""
        from skyformer.training.building import Trainee

        names = RANDOM_ATTENTIONS if cell.task == RANDOM else APPROXIMATIONS
        if cell.task == RANDOM:
            for name in names:
                check_gradients(name, cell.batches)
        warm_up, *batches = self._batches(cell)
        trainees = {name: Trainee(_config(cell, name)) for name in names}
        for name, trainee in trainees.items():
            _checked_step(name, trainee, warm_up)
        times = [_time_batch(trainees, batch, cell.repeats, seed) for seed, batch in enumerate(batches)]
        return Result(tuple(StepTimes(name, tuple(rounded(each[name]) for each in times)) for name in names))

    def _batches(self, cell: Cell) -> Sequence[Batch]:
        from skyformer.studies.tasks import study_data

        if cell.length is not None:
            return [draw_batch(cell.length, cell.batches, seed) for seed in range(1 + RANDOM_BATCHES)]
        config = _config(cell, OURS)
        return choose_batches(study_data(config, self.options.data_dir), config, cell.batches)

    @classmethod
    def targets(cls, results: Mapping[Cell, Result]) -> Sequence[Target]:
        """Skyformer compared, on random tokens, with the attentions of `LIMITS`; on a task, with the fastest other."""
        found = []
        for cell, result in results.items():
            times = {row.attention: row.typical() for row in result.rows}
            ours = times.pop(OURS)
            limits = {min(times, key=times.__getitem__): FASTER_BY}
            if cell.task == RANDOM:
                limits = LIMITS if cell.length == TARGET_LENGTH else {}
            found += [at_most(f"{cell}: time of {OURS} / {name}", ours / times[name], limits[name]) for name in limits]
        return found

    @classmethod
    def tables(cls, results: Mapping[Cell, Result]) -> Sequence[Table]:
        names = dict.fromkeys(row.attention for result in results.values() for row in result.rows)
        rows = []
        for cell, result in results.items():
            shown = {row.attention: f"{number(row.typical())} ({number(row.fastest())})" for row in result.rows}
            rows.append([str(cell), *(shown.get(name, NOTHING) for name in names)])
        note = "The median of the repetitions, and in brackets the fastest; both are means over the batches."
        return [Table("Seconds per training step", ["batches", *names], rows, note)]


def check_gradients(attention: str, kind: str) -> None:
    """Compare the gradients in float32 with those in float64, on a shorter sequence and without dropout."""
    from skyformer.training.building import build_model, cross_entropy, logits_of

    batch, config = draw_batch(CHECKED_LENGTH, kind), _config(Cell(RANDOM, kind, 1, CHECKED_LENGTH), attention)
    single, double = build_model(config).eval(), build_model(config).double().eval()
    for model in (single, double):
        cross_entropy(logits_of(model, batch), batch.label).backward()
    for (name, s), d in zip(single.named_parameters(), double.parameters(), strict=True):
        if s.grad is None or d.grad is None:
            raise SkyformerError(f"{attention}: {name} gets no gradient")
        error = float((s.grad.double() - d.grad).norm() / d.grad.norm().clamp(min=1e-6))
        if not error < GRADIENT_TOLERANCE:
            raise SkyformerError(f"{attention}: the gradient of {name} differs from float64 by {error:.1e}")


def draw_batch(length: int, kind: str, seed: int = SEED) -> Batch:
    """Random tokens, all of the full length or, if padded, from half of it to the whole."""
    from skyformer.lra.batching import Batch

    generator, size = torch.Generator().manual_seed(seed), RANDOM_BATCH_SIZE
    tokens = torch.randint(1, VOCAB, (size, length), generator=generator)
    classes = torch.randint(2, (size,), generator=generator)
    lengths = torch.linspace(length / 2 if kind == PADDED else length, length, size).long()
    return Batch(tokens, torch.arange(length) < lengths[:, None], classes, torch.arange(size))


def _config(cell: Cell, attention: str) -> RunConfig:
    """The paper's settings for the task; random tokens are trained on as text."""
    from skyformer.studies.tasks import run_config

    if cell.task == RANDOM:
        return run_config("text", "paper_v1", attention, SEED, task_max_length=cell.length)
    return run_config(cell.task, "paper_v1", attention, SEED, cell.limit)


def _time_batch(trainees: Mapping[str, Trainee], batch: Batch, repeats: int, seed: int) -> dict[str, list[float]]:
    steps = {name: partial(_checked_step, name, trainee, batch) for name, trainee in trainees.items()}
    runs = {name: partial(seconds_of, step) for name, step in steps.items()}
    return interleave(runs, repeats, before=release_free_memory, seed=seed)


def _checked_step(name: str, trainee: Trainee, batch: Batch) -> None:
    loss = trainee.step(batch)
    if not math.isfinite(loss):
        raise TrainingError(f"the loss of {name} is {loss}; steps that do not train are not timed")
