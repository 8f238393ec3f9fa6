"""One training step of the paper's model on random tokens, with Skyformer, Linformer and softmax attention.

The model has 2 layers, 64 features, 2 heads and the default dropout; a step is forward, backward and a fused AdamW on 4
sequences. Gradients are checked against float64 first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from skyformer.errors import SkyformerError
from skyformer.report.tables import Table, number
from skyformer.studies.base import Study, option
from skyformer.studies.benchmarks.timing import StepTimes, Times, interleave, rounded, seconds_of
from skyformer.studies.registry import register_benchmark
from skyformer.studies.targets import Target, at_most

BATCH, VOCAB = 4, 256
TARGET_LENGTH = 4096
ATTENTIONS = ("skyformer", "linformer", "softmax")
LIMITS = {"linformer": 1.1, "softmax": 0.25}
"""The time of a step with Skyformer, divided by the time with these, may be at most this at `TARGET_LENGTH`."""

CHECKED_LENGTH = 512
GRADIENT_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Options:
    length: int = option(TARGET_LENGTH, small=512, least=1, help="Tokens of the longest sequence.")
    padded: bool = option(False, help="Use sequences from half the length to the whole, with a mask.")
    repeats: int = option(15, small=3, least=1, help="Repetitions of each step.")


@dataclass(frozen=True)
class Cell:
    length: int
    padded: bool
    repeats: int = 1


@register_benchmark
class TrainingStep(Study[Options, Cell, Times]):
    name = "training-step"
    title = "One training step on random tokens: 2 layers, 64 features, batch 4, float32"
    is_timing_study, default_threads = True, 2

    def cells(self) -> Sequence[Cell]:
        return [Cell(self.options.length, self.options.padded, self.options.repeats)]

    def measure(self, cell: Cell) -> Times:
        for attention in ATTENTIONS:
            check_gradients(attention, cell.padded)
        steps = {attention: _training_step(attention, cell) for attention in ATTENTIONS}
        for step in steps.values():
            step()
            step()
        runs = {name: (lambda step=step: seconds_of(step)) for name, step in steps.items()}
        times = interleave(runs, cell.repeats)
        return Times(tuple(StepTimes(name, (rounded(seconds),)) for name, seconds in times.items()))

    @classmethod
    def targets(cls, results: Mapping[Cell, Times]) -> Sequence[Target]:
        return [
            at_most(f"{_describe(cell)}: time of skyformer / {other}", times.ratio("skyformer", other), limit)
            for cell, times in results.items()
            for other, limit in LIMITS.items()
            if cell.length == TARGET_LENGTH
        ]

    @classmethod
    def tables(cls, results: Mapping[Cell, Times]) -> Sequence[Table]:
        rows = [
            [_describe(cell), each.attention, number(1e3 * each.typical()), number(1e3 * each.fastest())]
            for cell, times in results.items()
            for each in times.rows
        ]
        return [Table("Milliseconds per training step", ["sequences", "attention", "median", "fastest"], rows)]


def check_gradients(attention: str, padded: bool) -> None:
    """Compare the gradients in float32 with those in float64, on a shorter sequence and without dropout."""
    tokens, mask, classes = _draw_batch(Cell(CHECKED_LENGTH, padded))
    single, double = _build(attention, CHECKED_LENGTH).eval(), _build(attention, CHECKED_LENGTH).double().eval()
    for model in (single, double):
        F.cross_entropy(model(tokens, mask), classes).backward()
    for (name, s), d in zip(single.named_parameters(), double.parameters(), strict=True):
        if s.grad is None or d.grad is None:
            raise SkyformerError(f"{attention}: {name} gets no gradient")
        error = float((s.grad.double() - d.grad).norm() / d.grad.norm().clamp(min=1e-6))
        if not error < GRADIENT_TOLERANCE:
            raise SkyformerError(f"{attention}: the gradient of {name} differs from float64 by {error:.1e}")


def _describe(cell: Cell) -> str:
    return f"n={cell.length // 2:,} to {cell.length:,}, padded" if cell.padded else f"n={cell.length:,}"


def _draw_batch(cell: Cell) -> tuple[Tensor, Tensor | None, Tensor]:
    """Tokens (B, n), a mask (B, n) if some are padding, and classes (B,)."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB, (BATCH, cell.length), generator=generator)
    classes = torch.randint(2, (BATCH,), generator=generator)
    lengths = torch.linspace(cell.length / 2, cell.length, BATCH).long()
    return tokens, torch.arange(cell.length) < lengths[:, None] if cell.padded else None, classes


def _build(attention: str, length: int) -> torch.nn.Module:
    from skyformer.model import SequenceClassifier

    torch.manual_seed(0)
    return SequenceClassifier(vocab_size=VOCAB, max_length=length, attention=attention)


def _training_step(attention: str, cell: Cell) -> Callable[[], None]:
    model = _build(attention, cell.length).train()
    tokens, mask, classes = _draw_batch(cell)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(tokens, mask), classes).backward()
        optimizer.step()

    return step
