"""The attention of a BERT-shaped encoder in transformers, with Skyformer, Kernelized Attention and sdpa.

12 layers of 12 heads of 64 with random weights, one sequence, float32; forward passes, interleaved. Both the attention
function of transformers in all layers and the whole forward pass are timed. Before that, Skyformer with every token as
a landmark must agree with sdpa. Takes about 2 minutes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from skyformer.errors import SkyformerError
from skyformer.report.tables import Table, number
from skyformer.studies.base import Study, option
from skyformer.studies.benchmarks.timing import interleave, rounded
from skyformer.studies.registry import register_benchmark
from skyformer.studies.targets import Target, at_most

ATTENTIONS = ("skyformer", "skyformer-softmax", "kernelized", "sdpa")
TARGET_LENGTH, LIMIT = 4096, 0.2
"""At this length, the time in Skyformer's attention divided by the time in sdpa may be at most the limit."""

CHECKED_LENGTH, CHECKED_LAYERS = 96, 4
TOLERANCE = 1e-4
VOCAB = 1000


@dataclass(frozen=True)
class Options:
    """They are also the only cell."""

    length: int = option(TARGET_LENGTH, small=256, least=1, help="Tokens of the sequence.")
    layers: int = option(12, small=2, least=1, help="Layers of the encoder.")
    repeats: int = option(3, small=2, least=1, help="Repetitions of each forward pass.")


@dataclass(frozen=True)
class Row:
    """Seconds in the attention of all layers, and of the whole forward pass, for every repetition."""

    attention: str
    attention_seconds: tuple[float, ...]
    forward_seconds: tuple[float, ...]


@dataclass(frozen=True)
class Result:
    rows: tuple[Row, ...]

    def attention_medians(self) -> dict[str, float]:
        return {row.attention: statistics.median(row.attention_seconds) for row in self.rows}


@register_benchmark
class HuggingFaceBenchmark(Study[Options, Options, Result]):
    name = "huggingface"
    title = "Attention inside a BERT-shaped encoder of transformers: forward pass, batch 1, float32"
    is_timing_study = True

    def cells(self) -> Sequence[Options]:
        return [self.options]

    @torch.no_grad()
    def measure(self, cell: Options) -> Result:
        import skyformer.hf

        skyformer.hf.register()
        check_agreement()
        tokens = _draw_tokens(cell.length)
        meters = {attention: Meter.around(attention) for attention in ATTENTIONS}
        warm_up, model = _build(cell.length, layers=1), _build(cell.length, cell.layers)
        for meter in meters.values():
            meter.time_pass(warm_up, tokens)
        runs = {name: partial(meter.time_pass, model, tokens) for name, meter in meters.items()}
        times = interleave(runs, cell.repeats)
        return Result(tuple(Row(name, *map(rounded, zip(*pairs, strict=True))) for name, pairs in times.items()))

    @classmethod
    def targets(cls, results: Mapping[Options, Result]) -> Sequence[Target]:
        found = []
        for cell, result in results.items():
            medians = result.attention_medians()
            what = f"{cell.layers} layers, n={cell.length:,}: time in the attention of skyformer / sdpa"
            if cell.length == TARGET_LENGTH:
                found.append(at_most(what, medians["skyformer"] / medians["sdpa"], LIMIT))
        return found

    @classmethod
    def tables(cls, results: Mapping[Options, Result]) -> Sequence[Table]:
        rows = []
        for cell, result in results.items():
            inside = result.attention_medians()
            for row in result.rows:
                seconds = inside[row.attention]
                forward = number(statistics.median(row.forward_seconds))
                sizes = [str(cell.layers), f"{cell.length:,}"]
                rows.append([*sizes, row.attention, number(seconds), f"{seconds / inside['sdpa']:.3f}", forward])
        header = ["layers", "tokens", "attention", "seconds in attention", "divided by sdpa", "seconds of forward pass"]
        return [Table("Median times", header, rows)]


@dataclass
class Meter:
    """An attention function of transformers, registered as `name`, that adds up the seconds spent in it."""

    name: str
    function: Callable[..., Any]
    seconds: float = 0.0

    @staticmethod
    def around(attention: str) -> Meter:
        from transformers import AttentionInterface, AttentionMaskInterface

        # transformers treats names that contain "sdpa" specially.
        meter = Meter(f"metered-{attention.replace('sdpa', 'torch')}", AttentionInterface()[attention])
        AttentionInterface.register(meter.name, meter)
        AttentionMaskInterface.register(meter.name, AttentionMaskInterface()[attention])
        return meter

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        start = time.perf_counter()
        try:
            return self.function(*arguments, **named)
        finally:
            self.seconds += time.perf_counter() - start

    def time_pass(self, model: Any, tokens: Tensor) -> tuple[float, float]:
        """Seconds in the attention, and of the whole forward pass."""
        model.set_attn_implementation(self.name)
        self.seconds = 0.0
        start = time.perf_counter()
        model(tokens)
        return self.seconds, time.perf_counter() - start


@torch.no_grad()
def check_agreement() -> None:
    """With every token as a landmark, Skyformer with the softmax kernel must give sdpa's output."""
    import skyformer.hf

    skyformer.hf.register("every-token", kernel="softmax", num_landmarks=2 * CHECKED_LENGTH)
    model, tokens = _build(CHECKED_LENGTH, CHECKED_LAYERS), _draw_tokens(CHECKED_LENGTH)
    outputs = []
    for implementation in ("sdpa", "every-token"):
        model.set_attn_implementation(implementation)
        outputs.append(model(tokens).last_hidden_state)
    error = float((outputs[0] - outputs[1]).abs().max())
    if not error < TOLERANCE:
        raise SkyformerError(f"skyformer with every token as a landmark differs from sdpa by {error:.1e}")


def _build(length: int, layers: int) -> Any:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    return BertModel(BertConfig(vocab_size=VOCAB, max_position_embeddings=length, num_hidden_layers=layers)).eval()


def _draw_tokens(length: int) -> Tensor:
    return torch.randint(VOCAB, (1, length), generator=torch.Generator().manual_seed(0))
