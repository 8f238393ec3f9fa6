"""One training step of the paper's model with Skyformer, Linformer and softmax attention, printed with pass or fail.

    python benchmarks/training_step.py [--padded] [--repeats 15]

The model has 2 layers, 64 features, 2 heads and the default dropout; a step is forward, backward and a fused AdamW on
4 sequences of 4096 tokens, in float32 on 2 threads. Gradients are checked against float64 first. Steps are interleaved,
after a warm-up. Writes results/training_step.json. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from bar import keep
from rich.console import Console
from rich.table import Table
from torch import Tensor

from skyformer import SequenceClassifier
from skyformer.errors import SkyformerError

THREADS, BATCH, LENGTH, VOCAB = 2, 4, 4096, 256
ATTENTIONS = ("skyformer", "linformer", "softmax")
LIMITS = {"linformer": 1.1, "softmax": 0.25}
"""The most that a step with Skyformer may take, as a share of the same step with these."""

GRADIENT_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Result:
    """Seconds of the steps with one attention, and what they are to Skyformer's."""

    attention: str
    median: float
    fastest: float
    ratio: float
    limit: float | None

    @property
    def passed(self) -> bool:
        return self.limit is None or self.ratio <= self.limit


def draw_batch(length: int, padded: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """Tokens (B, n), a mask (B, n) if some are padding, and classes (B,)."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB, (BATCH, length), generator=generator)
    classes = torch.randint(2, (BATCH,), generator=generator)
    lengths = torch.linspace(length / 2, length, BATCH).long()
    return tokens, torch.arange(length) < lengths[:, None] if padded else None, classes


def build(attention: str, length: int = LENGTH) -> SequenceClassifier:
    torch.manual_seed(0)
    return SequenceClassifier(vocab_size=VOCAB, max_length=length, attention=attention)


def check_gradients(attention: str, padded: bool) -> None:
    """In float32 what they are in float64, for a shorter sequence and without dropout."""
    tokens, mask, classes = draw_batch(512, padded)
    single = build(attention, 512).eval()
    double = build(attention, 512).double().eval()
    for model in (single, double):
        F.cross_entropy(model(tokens, mask), classes).backward()
    for (name, s), d in zip(single.named_parameters(), double.parameters(), strict=True):
        if s.grad is None or d.grad is None:
            raise SkyformerError(f"{attention}: {name} gets no gradient")
        error = float((s.grad.double() - d.grad).norm() / d.grad.norm().clamp(min=1e-6))
        if not error < GRADIENT_TOLERANCE:
            raise SkyformerError(f"{attention}: the gradient of {name} is off by {error:.1e}")


def training_step(attention: str, padded: bool) -> Callable[[], None]:
    model = build(attention).train()
    tokens, mask, classes = draw_batch(LENGTH, padded)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(tokens, mask), classes).backward()
        optimizer.step()

    return step


def measure(repeats: int, padded: bool) -> dict[str, list[float]]:
    """Seconds of each step, the attentions taking turns so that a noisy moment hits all of them alike."""
    steps = {attention: training_step(attention, padded) for attention in ATTENTIONS}
    for step in steps.values():
        step()
        step()
    taken: dict[str, list[float]] = {attention: [] for attention in ATTENTIONS}
    for _ in range(repeats):
        for attention, step in steps.items():
            start = time.perf_counter()
            step()
            taken[attention].append(time.perf_counter() - start)
    return taken


def judge(taken: dict[str, list[float]]) -> list[Result]:
    ours = statistics.median(taken["skyformer"])
    return [
        Result(name, statistics.median(seconds), min(seconds), ours / statistics.median(seconds), LIMITS.get(name))
        for name, seconds in taken.items()
    ]


def show(results: list[Result], padded: bool) -> None:
    table = Table(
        title=f"one training step: 2 layers, dim 64, B={BATCH}, n={LENGTH}, float32, {THREADS} threads"
        + (", padded" if padded else "")
    )
    for title in ("attention", "median ms", "min ms", "skyformer / this", "bar", ""):
        table.add_column(title, justify="left" if title in ("attention", "") else "right")
    for r in results:
        verdict = "" if r.limit is None else "[green]pass" if r.passed else "[red]FAIL"
        bar = "" if r.limit is None else f"at most {r.limit:g}x"
        table.add_row(r.attention, f"{r.median * 1e3:.1f}", f"{r.fastest * 1e3:.1f}", f"{r.ratio:.2f}x", bar, verdict)
    Console(width=100).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--padded", action="store_true", help="sequences of 2048 to 4096 tokens, with a mask")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--output", type=Path, default=Path("results/training_step.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(THREADS)
    for attention in ATTENTIONS:
        check_gradients(attention, arguments.padded)
    taken = measure(arguments.repeats, arguments.padded)
    results = judge(taken)
    show(results, arguments.padded)
    command = " ".join(["python benchmarks/training_step.py", *sys.argv[1:]])
    judged = [{**asdict(r), "passed": r.passed} for r in results]
    keep(arguments.output, command, THREADS, results=judged, seconds=taken)
    sys.exit(0 if all(r.passed for r in results) else 1)


if __name__ == "__main__":
    main()
