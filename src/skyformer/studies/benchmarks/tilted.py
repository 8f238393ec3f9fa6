"""Tilted attention against its targets: error on the heads of a pretrained model, whole models, memory and speed.

heads: relative spectral errors of the output on every head, against softmax attention or Kernelized Attention. Texts
    longer than the model's limit use extended positions.
suggestion: `suggest_budget` on one passage, and the errors with that budget on another one.
model: embeddings of a whole model in which every layer uses tilted attention, compared with the exact ones.
memory: what a forward and backward pass adds to q, k and v, and what long texts add to a model, in fresh processes.
times: forward, and forward and backward, interleaved with `F.scaled_dot_product_attention`; and forward passes of the
    model.

The budget was divided by trials on heads of all-MiniLM-L6-v2 over the validation text of WikiText-2; give another text
to judge it.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from skyformer.attention.budget import suggest_budget
from skyformer.attention.tilted import BUDGET, tilted_attention
from skyformer.functional import kernelized_attention, softmax_attention
from skyformer.processes import run_in_fresh_process
from skyformer.report.tables import NOTHING, Table, number
from skyformer.studies.base import Fact, Study, check_names, option
from skyformer.studies.benchmarks.attention import measure_fresh
from skyformer.studies.benchmarks.contenders import Shape
from skyformer.studies.benchmarks.conversion import cosines, embed, load, measure_memory
from skyformer.studies.benchmarks.timing import interleave, rounded, seconds_of
from skyformer.studies.frames import quantile
from skyformer.studies.heads import SHORTEST, Heads, HeadSource, ModelOptions
from skyformer.studies.record import significant
from skyformer.studies.registry import register_benchmark
from skyformer.studies.targets import Target, at_least, at_most
from skyformer.studies.theorem import spectral_norm

PARTS = ("heads", "suggestion", "model", "memory", "model memory", "times", "model times")
LONG_BUDGET = 400
EPSILON, SHARE = 0.02, 0.9
HEAD_DIMS = (32, 64)
MEMORY_LENGTH = 65536
LIMIT_GB = 8.0
FORWARD_SPEED_UPS = {2048: 1, 8192: 3, 32768: 10}
STEP_SPEED_UPS = {8192: 2}
"""By tokens: how many times as fast as exact attention it must be."""


@dataclass(frozen=True)
class Options(ModelOptions):
    parts: tuple[str, ...] = option(
        PARTS, small=("heads", "suggestion", "model"), required=True, help="Parts to measure."
    )
    length: int = option(512, small=64, least=SHORTEST, help="Tokens of short passages, at most the model's limit.")
    budget: int = option(BUDGET, small=16, least=8, help="Scores per query on short passages.")
    long_lengths: tuple[int, ...] = option((2048, 8192), small=(600,), least=SHORTEST, help="Tokens of long passages.")
    long_budget: int = option(LONG_BUDGET, small=64, least=8, help="Scores per query on long passages.")
    head_passages: int = option(2, least=1, help="Short passages for the errors of heads.")
    passages: int = option(16, small=2, least=1, help="Short passages for the embeddings of the model.")
    long_passages: int = option(2, small=1, least=1, help="Long passages for the embeddings of the model.")
    speed_lengths: tuple[int, ...] = option(
        tuple(FORWARD_SPEED_UPS), small=(512,), least=1, help="Tokens for the times of the function."
    )
    repeats: int = option(5, small=1, least=1, help="Repetitions of every timed step.")


@dataclass(frozen=True)
class Cell:
    part: str
    length: int
    budget: int
    kernel: str = "softmax"
    head_dim: int | None = None


@dataclass(frozen=True)
class Times:
    """Seconds of every repetition, with tilted and with exact attention."""

    tilted: tuple[float, ...]
    exact: tuple[float, ...]

    def speed_up(self) -> float:
        return statistics.median(self.exact) / statistics.median(self.tilted)


@dataclass(frozen=True)
class Result:
    """The numbers of one part; the others are empty.

    Args:
        errors: one per head and passage, None where the output is not finite. budget: the suggested one.
        cosines: similarity to the exact embeddings, one per passage.
        added_bytes, input_bytes: memory added, and the size of q, k and v.
        exact_bytes: memory that the model adds with exact attention.
    """

    errors: tuple[float | None, ...] = ()
    budget: int | None = None
    cosines: tuple[float, ...] = ()
    added_bytes: int | None = None
    input_bytes: int | None = None
    exact_bytes: int | None = None
    forward: Times | None = None
    step: Times | None = None


Results = Mapping[Cell, Result]


@register_benchmark
class TiltedBenchmark(Study[Options, Cell, Result]):
    name = "tilted"
    title = "Tilted attention: error on trained heads, whole models, memory and speed, with targets"
    is_timing_study = True

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        check_names("part", options.parts, PARTS)

    def facts(self) -> Mapping[str, Fact]:
        options = self.options
        for length, count in (
            (options.length, options.passages),
            *((n, options.long_passages) for n in options.long_lengths),
        ):
            self._source.check_passage(length, count - 1)
        counts = ("head_passages", "passages", "long_passages")
        return {**self._source.facts(), **{name: getattr(options, name) for name in counts}}

    def cells(self) -> Sequence[Cell]:
        short, options = (self.options.length, self.options.budget), self.options
        long = [(length, options.long_budget) for length in options.long_lengths]
        found = {
            "heads": [*(Cell("heads", *each) for each in (short, *long)), Cell("heads", *short, kernel="gaussian")],
            "suggestion": [Cell("suggestion", *short)],
            "model": [Cell("model", *each) for each in (short, *long, *((n, options.budget) for n, _ in long))],
            "memory": [Cell("memory", MEMORY_LENGTH, LONG_BUDGET, head_dim=dim) for dim in HEAD_DIMS],
            "model memory": [Cell("model memory", n, options.budget) for n, _ in long],
            "times": [
                Cell("times", n, BUDGET if n <= min(FORWARD_SPEED_UPS) else LONG_BUDGET, head_dim=dim)
                for n in options.speed_lengths
                for dim in HEAD_DIMS
            ],
            "model times": [Cell("model times", *each) for each in long],
        }
        return [cell for part in PARTS if part in options.parts for cell in found[part]]

    def measure(self, cell: Cell) -> Result:
        measures: Mapping[str, Callable[[Cell], Result]] = {
            "heads": self._heads,
            "suggestion": self._suggestion,
            "model": self._model,
            "memory": _memory,
            "model memory": self._model_memory,
            "times": self._times,
            "model times": self._model_times,
        }
        return measures[cell.part](cell)

    @cached_property
    def _source(self) -> HeadSource:
        return HeadSource(self.options.model, self.options.text)

    def _heads(self, cell: Cell) -> Result:
        count = self.options.head_passages if cell.length == self.options.length else 1
        found = [head_errors(self._source.extended(cell.length, i), cell) for i in range(count)]
        return Result(errors=tuple(error for each in found for error in each))

    def _suggestion(self, cell: Cell) -> Result:
        heads = self._source.extended(cell.length, 0).flat()
        budget = suggest_budget(heads.query, heads.key, heads.value, EPSILON, share=SHARE)
        other = self._source.extended(cell.length, 1)
        return Result(budget=budget, errors=head_errors(other, Cell("heads", cell.length, budget)))

    def _tokens(self, length: int) -> Tensor:
        count = self.options.passages if length == self.options.length else self.options.long_passages
        return torch.cat([self._source.passage(length, i) for i in range(count)])

    def _encoder(self, attention: str, length: int) -> Any:
        return load(self._source, attention, length if length > self._source.longest else None)

    def _model(self, cell: Cell) -> Result:
        tokens = self._tokens(cell.length)
        exact, found = (
            embed(self._encoder(name, cell.length), tokens, size=1) for name in ("softmax", _registered(cell.budget))
        )
        return Result(cosines=cosines(found, exact))

    def _model_memory(self, cell: Cell) -> Result:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "tokens.pt"
            torch.save(self._tokens(cell.length)[:1], file)
            arguments = {"model": self.options.model, "text": self.options.text, "tokens_file": str(file)}
            tilted = {"attention": "tilted", "budget": cell.budget}
            added, exact = (
                run_in_fresh_process(
                    measure_memory,
                    **arguments,
                    attention=name,
                    options=options,
                    training=False,
                    limit_gb=LIMIT_GB,
                    threads=torch.get_num_threads(),
                ).result(f"{name} at {cell.length} tokens")["added_bytes"]
                for name, options in ((f"tilted-{cell.budget}", tilted), ("softmax", None))
            )
        return Result(added_bytes=added, exact_bytes=exact)

    def _times(self, cell: Cell) -> Result:
        assert cell.head_dim is not None
        drawn = Shape(cell.length, heads=8, head_dim=cell.head_dim).draw()
        tilted = partial(tilted_attention, budget=cell.budget)
        forward = _compare(
            partial(_forward, tilted, drawn), partial(_forward, exact_attention, drawn), self.options.repeats
        )
        if cell.length not in STEP_SPEED_UPS:
            return Result(forward=forward)
        step = _compare(partial(_step, tilted, drawn), partial(_step, exact_attention, drawn), self.options.repeats)
        return Result(forward=forward, step=step)

    def _model_times(self, cell: Cell) -> Result:
        tokens = self._tokens(cell.length)[:1]
        tilted = partial(embed, self._encoder(_registered(cell.budget), cell.length), tokens)
        exact = partial(embed, self._encoder("softmax", cell.length), tokens)
        return Result(forward=_compare(tilted, exact, self.options.repeats))

    @classmethod
    def targets(cls, results: Results) -> Sequence[Target]:
        return [target for cell, result in results.items() for target in _targets(cell, result)]

    @classmethod
    def tables(cls, results: Results) -> Sequence[Table]:
        found = [_heads_table(results), _models_table(results), _speed_table(results)]
        return [table for table in found if table.rows]


exact_attention = F.scaled_dot_product_attention


def _registered(budget: int) -> str:
    """The name under which Hugging Face models know tilted attention with this budget."""
    import skyformer.hf

    name = f"tilted-{budget}"
    skyformer.hf.register(name, attention="tilted", budget=budget)
    return name


@torch.no_grad()
def head_errors(heads: Heads, cell: Cell) -> tuple[float | None, ...]:
    """The relative spectral error of every head, a layer at a time."""
    exact = softmax_attention if cell.kernel == "softmax" else kernelized_attention
    found: list[float | None] = []
    for layer in zip(heads.query, heads.key, heads.value, strict=True):
        query, key, value = (x.unsqueeze(0) for x in layer)
        expected = exact(query, key, value).double()
        out = tilted_attention(query, key, value, budget=cell.budget, kernel=cell.kernel)
        errors = spectral_norm(out.double() - expected) / spectral_norm(expected)
        found += [significant(float(error), 3) for error in errors.flatten()]
    return tuple(found)


def _memory(cell: Cell) -> Result:
    assert cell.head_dim is not None
    fresh = measure_fresh("tilted", Shape(cell.length, head_dim=cell.head_dim, landmarks=cell.budget))
    return Result(added_bytes=fresh.added_bytes, input_bytes=fresh.input_bytes)


def _forward(attend: Callable[..., Tensor], inputs: Sequence[Tensor]) -> None:
    with torch.no_grad():
        attend(*inputs)


def _step(attend: Callable[..., Tensor], inputs: Sequence[Tensor]) -> None:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = attend(*leaves)
    out.backward(torch.ones_like(out))


def _compare(tilted: Callable[[], object], exact: Callable[[], object], repeats: int) -> Times:
    tilted()
    taken = interleave({"tilted": partial(seconds_of, tilted), "exact": partial(seconds_of, exact)}, repeats)
    return Times(rounded(taken["tilted"]), rounded(taken["exact"]))


def _targets(cell: Cell, result: Result) -> Iterator[Target]:
    where = f"n={cell.length:,}, {cell.budget} scores per query"
    short = cell.length <= 512
    if cell.part == "heads" and cell.kernel == "softmax":
        yield at_most(f"{where}: median error of heads", quantile(result.errors, 0.5), 0.018 if short else 0.03, "")
        if short:
            yield at_most(f"{where}: upper quartile of errors", quantile(result.errors, 0.75), 0.03, "")
    elif cell.part == "heads":
        yield at_most(f"{where}: median error, Gaussian kernel", quantile(result.errors, 0.5), 0.012, "")
    elif cell.part == "suggestion":
        reached = sum(error is not None and error <= EPSILON for error in result.errors) / len(result.errors)
        what = f"n={cell.length:,}: heads of another passage within {EPSILON} at the suggested {result.budget} scores"
        yield at_least(what, 100 * reached, 100 * SHARE - 10, " %")
    elif cell.part == "model" and short:
        yield at_least(f"{where}: mean cosine of embeddings", statistics.mean(result.cosines), 0.995, "")
        yield at_least(f"{where}: least cosine of embeddings", min(result.cosines), 0.99, "")
    elif cell.part == "memory" and result.added_bytes is not None and result.input_bytes:
        what = f"{where}, P={cell.head_dim}: memory added / size of q, k, v"
        yield at_most(what, result.added_bytes / result.input_bytes, 12)
    elif cell.part == "times":
        yield from _time_targets(cell, result, f"{where}, P={cell.head_dim}")


def _time_targets(cell: Cell, result: Result, where: str) -> Iterator[Target]:
    named = (("forward", result.forward, FORWARD_SPEED_UPS), ("forward and backward", result.step, STEP_SPEED_UPS))
    for name, times, limits in named:
        if times is not None and cell.length in limits:
            yield at_least(f"{where}: speed-up over sdpa, {name}", times.speed_up(), limits[cell.length])


def _heads_table(results: Results) -> Table:
    rows = []
    for cell, result in results.items():
        if result.errors:
            low, middle, high, extreme = (number(quantile(result.errors, q)) for q in (0.25, 0.5, 0.75, 0.95))
            budget = cell.budget if result.budget is None else result.budget
            kind = cell.kernel if result.budget is None else f"{cell.kernel}, suggested on another passage"
            rows.append([f"{cell.length:,}", kind, str(budget), f"{middle} [{low}, {high}]", extreme])
    header = ["tokens", "kernel", "scores per query", "error", "95 %"]
    return Table("Heads", header, rows, "Relative spectral error of the output: median [quartiles] over all heads.")


def _models_table(results: Results) -> Table:
    rows = []
    for cell, result in results.items():
        if cell.part == "model":
            memory = results.get(Cell("model memory", cell.length, cell.budget), Result())
            forward = results.get(Cell("model times", cell.length, cell.budget), Result()).forward
            close = f"{statistics.mean(result.cosines):.4f} ({min(result.cosines):.4f})"
            rows.append([f"{cell.length:,}", str(cell.budget), close, *_pairs(memory, forward)])
    header = ["tokens", "scores per query", "cosine", "memory, GB (softmax)", "forward, s (softmax)"]
    return Table("Whole model", header, rows, "Mean (lowest) cosine to the exact embeddings; softmax is sdpa.")


def _pairs(memory: Result, times: Times | None) -> tuple[str, str]:
    shown = NOTHING
    if memory.added_bytes is not None and memory.exact_bytes is not None:
        shown = f"{memory.added_bytes / 1e9:.2f} ({memory.exact_bytes / 1e9:.2f})"
    if times is None:
        return shown, NOTHING
    return shown, f"{statistics.median(times.tilted):.2f} ({statistics.median(times.exact):.2f})"


def _speed_table(results: Results) -> Table:
    rows = []
    for cell, result in results.items():
        if cell.part == "times" and result.forward is not None:
            step = NOTHING if result.step is None else f"{result.step.speed_up():.2f}x"
            milliseconds = number(1e3 * statistics.median(result.forward.tilted))
            speed_up = f"{result.forward.speed_up():.2f}x"
            rows.append([f"{cell.length:,}", str(cell.head_dim), str(cell.budget), milliseconds, speed_up, step])
    header = ["tokens", "head dim", "scores per query", "forward, ms", "speed-up", "speed-up with backward"]
    return Table("Speed", header, rows, "8 heads, batch 1, float32, compared with F.scaled_dot_product_attention.")
