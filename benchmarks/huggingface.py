"""The attention of a BERT-base-shaped encoder with Skyformer and with sdpa, printed with pass or fail.

    python benchmarks/huggingface.py [--length 4096] [--repeats 3]

12 layers of 12 heads of 64 with random weights, one sequence, float32, 2 threads; forward passes, interleaved, after a
warm-up on one layer. What is timed is the attention function of transformers in all layers, and the whole forward pass
beside it. Before that, the approximation on every token must agree with sdpa. Writes results/huggingface/speed.json.
Run it on an idle machine, where it takes about 2 minutes.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from bar import keep
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, BertConfig, BertModel

import skyformer.hf
from skyformer.errors import SkyformerError

ATTENTIONS = ("skyformer", "skyformer-softmax", "kernelized", "sdpa")
LIMIT = 0.2
"""The most that Skyformer's attention may take, as a share of sdpa's."""

TOLERANCE = 1e-4
VOCAB = 1000


@dataclass
class Meter:
    """An attention function of transformers that adds up the seconds spent in it."""

    function: Callable[..., Any]
    seconds: float = 0.0

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        start = time.perf_counter()
        try:
            return self.function(*arguments, **named)
        finally:
            self.seconds += time.perf_counter() - start


@dataclass(frozen=True)
class Result:
    """Median seconds of one attention in a forward pass, and of the pass."""

    attention: str
    in_attention: float
    forward: float
    share_of_sdpa: float
    limit: float | None

    @property
    def passed(self) -> bool:
        return self.limit is None or self.share_of_sdpa <= self.limit


def build(length: int, layers: int) -> BertModel:
    torch.manual_seed(0)
    return BertModel(BertConfig(vocab_size=VOCAB, max_position_embeddings=length, num_hidden_layers=layers)).eval()


def draw_tokens(length: int) -> Tensor:
    return torch.randint(VOCAB, (1, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def check_agreement(length: int = 96) -> None:
    """With every token a landmark, Skyformer of the softmax kernel is sdpa, in the same model on a shorter text."""
    skyformer.hf.register("every-token", kernel="softmax", num_landmarks=2 * length)
    model, tokens = build(length, layers=4), draw_tokens(length)
    outputs = []
    for implementation in ("sdpa", "every-token"):
        model.set_attn_implementation(implementation)
        outputs.append(model(tokens).last_hidden_state)
    error = float((outputs[0] - outputs[1]).abs().max())
    if not error < TOLERANCE:
        raise SkyformerError(f"the approximation on every token differs from sdpa by {error:.1e}")


def meter(attention: str) -> tuple[str, Meter]:
    """A meter around an attention, registered under a name of its own."""
    # transformers treats names with sdpa in them specially.
    name = f"metered-{attention.replace('sdpa', 'torch')}"
    metered = Meter(AttentionInterface()[attention])
    AttentionInterface.register(name, metered)
    AttentionMaskInterface.register(name, AttentionMaskInterface()[attention])
    return name, metered


@torch.no_grad()
def measure(length: int, layers: int, repeats: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds in the attention and of the whole pass, the attentions taking turns."""
    tokens = draw_tokens(length)
    meters = {attention: meter(attention) for attention in ATTENTIONS}
    warm, model = build(length, layers=1), build(length, layers)
    for name, metered in meters.values():
        time_pass(warm, tokens, name, metered)
    taken: dict[str, list[tuple[float, float]]] = {attention: [] for attention in ATTENTIONS}
    for _ in range(repeats):
        for attention, (name, metered) in meters.items():
            taken[attention].append(time_pass(model, tokens, name, metered))
    return taken


def time_pass(model: BertModel, tokens: Tensor, name: str, metered: Meter) -> tuple[float, float]:
    """Seconds in the attention, and of the whole pass."""
    model.set_attn_implementation(name)
    metered.seconds = 0.0
    start = time.perf_counter()
    model(tokens)
    return metered.seconds, time.perf_counter() - start


def judge(taken: dict[str, list[tuple[float, float]]]) -> list[Result]:
    medians = {name: [statistics.median(part) for part in zip(*pairs, strict=True)] for name, pairs in taken.items()}
    return [
        Result(name, inside, whole, inside / medians["sdpa"][0], LIMIT if name == "skyformer" else None)
        for name, (inside, whole) in medians.items()
    ]


def show(results: list[Result], length: int, layers: int, threads: int) -> None:
    table = Table(title=f"BERT-base, {layers} layers, n={length}, batch 1, float32, {threads} threads, forward")
    for title in ("attention", "attention s", "forward s", "attention / sdpa", "bar", ""):
        table.add_column(title, justify="left" if title in ("attention", "") else "right")
    for r in results:
        verdict = "" if r.limit is None else "[green]pass" if r.passed else "[red]FAIL"
        bar = "" if r.limit is None else f"at most {r.limit:g}x"
        table.add_row(r.attention, f"{r.in_attention:.3f}", f"{r.forward:.3f}", f"{r.share_of_sdpa:.3f}x", bar, verdict)
    Console(width=100).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("results/huggingface/speed.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    skyformer.hf.register()
    check_agreement()
    taken = measure(arguments.length, arguments.layers, arguments.repeats)
    results = judge(taken)
    show(results, arguments.length, arguments.layers, arguments.threads)
    command = shlex.join(["python", "benchmarks/huggingface.py", *sys.argv[1:]])
    sizes = {"length": arguments.length, "layers": arguments.layers}
    judged = [{**asdict(r), "passed": r.passed} for r in results]
    keep(arguments.output, command, arguments.threads, **sizes, results=judged, seconds=taken)
    sys.exit(0 if all(r.passed for r in results) else 1)


if __name__ == "__main__":
    main()
