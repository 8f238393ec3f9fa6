"""A pretrained BERT-like model with other attentions: without retraining, after fine-tuning, and on long texts.

embeddings: how close mean-pooled embeddings with an approximation of the model's softmax attention are to the exact
    ones, by sampler and number of landmarks.
fine-tuning: the same training steps on IMDb reviews with each attention, and the accuracy after them.
long texts: reviews joined to texts of 4,096 tokens, and positions extended to that length; the memory that each
    attention adds, measured in a fresh process.

Without --imdb only the embeddings are measured.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from skyformer.errors import InputError
from skyformer.landmarks import QuerySampler
from skyformer.processes import limit_added_memory, peak_bytes, release_free_memory, reset_peak, run_in_fresh_process
from skyformer.report.tables import NOTHING, Table
from skyformer.studies.base import Fact, Study, option
from skyformer.studies.benchmarks.reviews import FineTuning, Reviews, mean_pooled
from skyformer.studies.benchmarks.timing import interleave, rounded, seconds_of
from skyformer.studies.heads import SHORTEST, HeadSource, ModelOptions
from skyformer.studies.registry import register_benchmark

ATTENTIONS = ("softmax", "kernelized", "skyformer", "skyformer-softmax")
MATERIALISED = "softmax, materialised"
"""Softmax attention that stores its scores, transformers' "eager"."""

IMPLEMENTATIONS = {"softmax": "sdpa", MATERIALISED: "eager"}
"""transformers' names of its own attentions."""

SAMPLERS = ("queries", "stratified", "uniform", "probe", "leverage", "segment_means")
SHARED = "queries, shared by the heads"
DIFFERENT = "different passages"
"""The cell with the similarity between exact embeddings of different passages, as a scale for the others."""

MODES = ("forward", "training")
WARM_UP = 256
"""Tokens of the text that runs before a measurement, so that libraries and threads are loaded."""


@dataclass(frozen=True)
class Options(ModelOptions):
    imdb: str | None = option(
        None, help="IMDb reviews: the archive aclImdb or its unpacked folder. Without it only embeddings are measured."
    )
    passages: int = option(16, small=4, least=2, help="Passages of the text to embed.")
    length: int = option(512, small=64, least=SHORTEST, help="Tokens of a passage.")
    landmarks: tuple[int, ...] = option((64, 128, 256), small=(16, 64), least=1, required=True, help="Landmarks d.")
    steps: int = option(100, small=3, least=1, help="Training steps of the fine-tuning.")
    batch: int = option(16, small=4, least=1, help="Reviews in a training step.")
    review_length: int = option(128, small=20, least=SHORTEST, help="Tokens of a review, the rest is cut off.")
    lr: float = option(2e-4, above=0, help="Learning rate of the fine-tuning.")
    test_reviews: int = option(400, small=8, least=2, help="Reviews for the accuracy.")
    long_length: int = option(4096, small=600, least=SHORTEST, help="Tokens of a long text.")
    long_texts: int = option(2, small=1, least=1, help="Long texts, one at a time.")
    limit_gb: float = option(4.0, above=0, help="Memory that an attention may add on long texts.")
    repeats: int = option(5, small=1, least=1, help="Repetitions of every timed step.")
    seed: int = option(0, least=0, help="Seed for landmarks, reviews and the classifier's weights.")


@dataclass(frozen=True)
class Cell:
    """For embeddings, `attention` is the kernel that is approximated."""

    part: str
    attention: str = ""
    landmarks: str = ""
    num_landmarks: int | None = None
    mode: str = ""


@dataclass(frozen=True)
class Times:
    """Seconds of an attention in every repetition."""

    attention: str
    mode: str
    seconds: tuple[float, ...]

    def median(self) -> str:
        return f"{statistics.median(self.seconds):.2f} s"


@dataclass(frozen=True)
class Result:
    """The numbers of one part; the others are empty.

    Args:
        cosines: similarity to the exact embeddings, for every passage or long text.
        losses: the loss of every training step. accuracy: on the test reviews, with its standard error.
        added_bytes: the peak memory beyond that after loading and a warm-up; None if it exceeds the limit.
        times: of all attentions, measured alternately.
    """

    cosines: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()
    accuracy: float | None = None
    standard_error: float | None = None
    added_bytes: int | None = None
    times: tuple[Times, ...] = ()


@register_benchmark
class Conversion(Study[Options, Cell, Result]):
    name = "conversion"
    title = "A pretrained model with other attentions: embeddings, fine-tuning, long texts"
    options_type, cell_type, result_type = Options, Cell, Result
    is_timing_study = True

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        for flag, length in (("--length", options.length), ("--review-length", options.review_length)):
            if length > self._source.longest:
                limit = f"{self._source.longest}, the limit of {self._source.model_name}"
                raise InputError(f"{flag} must be at most {limit}; got {length}")

    def facts(self) -> Mapping[str, Fact]:
        options = self.options
        self._source.check_passage(options.length, options.passages - 1)
        facts = {**self._source.facts(), **_values(options, "passages", "length", "seed")}
        if options.imdb is None:
            return facts
        training = _values(options, "steps", "batch", "review_length", "lr", "test_reviews")
        long = _values(options, "long_length", "long_texts", "limit_gb")
        return {**facts, "reviews": self._reviews.digest(), **training, **long}

    def cells(self) -> Sequence[Cell]:
        """The Gaussian kernel is tried once, to show that it needs retraining."""
        counts = self.options.landmarks
        cells = [Cell("embeddings", "softmax", DIFFERENT)]
        cells += [Cell("embeddings", "softmax", name, d) for name in (*SAMPLERS, SHARED) for d in counts]
        cells.append(Cell("embeddings", "gaussian", "stratified", max(counts)))
        if self.options.imdb is None:
            return cells
        cells += [Cell("fine-tuning", attention) for attention in ATTENTIONS]
        cells += [Cell("long texts", name, mode=mode) for name in (MATERIALISED, *ATTENTIONS) for mode in MODES]
        return [*cells, Cell("times of fine-tuning"), Cell("times of long texts")]

    def measure(self, cell: Cell) -> Result:
        import skyformer.hf

        skyformer.hf.register()
        measures: Mapping[str, Callable[[Cell], Result]] = {
            "embeddings": self._embeddings,
            "fine-tuning": self._fine_tuning,
            "long texts": self._long_texts,
            "times of fine-tuning": self._fine_tuning_times,
            "times of long texts": self._long_text_times,
        }
        return measures[cell.part](cell)

    @cached_property
    def _source(self) -> HeadSource:
        return HeadSource(self.options.model, self.options.text)

    @cached_property
    def _reviews(self) -> Reviews:
        assert self.options.imdb is not None
        return Reviews(self.options.imdb, self._source, self.options.seed)

    @cached_property
    def _passages(self) -> Tensor:
        return torch.cat([self._source.passage(self.options.length, i) for i in range(self.options.passages)])

    @cached_property
    def _exact(self) -> Tensor:
        return embed(load(self._source, "softmax"), self._passages)

    def _embeddings(self, cell: Cell) -> Result:
        if cell.landmarks == DIFFERENT:
            others = ~torch.eye(len(self._exact), dtype=torch.bool)
            return Result(cosines=(float((self._exact @ self._exact.mT)[others].mean()),))
        import skyformer.hf

        sampler = QuerySampler() if cell.landmarks == SHARED else cell.landmarks
        options = {"num_landmarks": cell.num_landmarks, "landmarks": sampler, "seed": self.options.seed}
        name = f"conversion-{cell.attention}-{cell.landmarks}-{cell.num_landmarks}"
        skyformer.hf.register(name, kernel=cell.attention, **options)
        embedded = embed(load(self._source, name), self._passages)
        return Result(cosines=cosines(embedded, self._exact))

    def _fine_tuning(self, cell: Cell) -> Result:
        options = self.options
        training = self._start_training(cell.attention)
        losses = [training.step(batch) for batch in self._batches("train", options.steps * options.batch)]
        test = self._batches("test", options.test_reviews)
        accuracy = training.accuracy(test)
        error = (accuracy * (1 - accuracy) / sum(len(labels) for *_, labels in test)) ** 0.5
        return Result(losses=tuple(losses), accuracy=accuracy, standard_error=error)

    def _start_training(self, attention: str) -> FineTuning:
        options = self.options
        return FineTuning(load(self._source, attention), steps=options.steps, lr=options.lr, seed=options.seed)

    def _batches(self, split: str, count: int) -> list[Any]:
        pad_token = load(self._source, "softmax").config.pad_token_id or 0
        return self._reviews.batches(split, count, self.options.batch, self.options.review_length, pad_token)

    def _fine_tuning_times(self, cell: Cell) -> Result:
        batch, *_ = self._batches("train", self.options.batch)
        steps = {name: partial(self._start_training(name).step, batch) for name in ATTENTIONS}
        for step in steps.values():
            step()
        times = interleave({name: partial(seconds_of, step) for name, step in steps.items()}, self.options.repeats)
        return Result(times=tuple(Times(name, "training", rounded(seconds)) for name, seconds in times.items()))

    @cached_property
    def _long_tokens(self) -> Tensor:
        return self._reviews.joined(self.options.long_texts, self.options.long_length)

    @cached_property
    def _long_exact(self) -> Tensor:
        return embed(load(self._source, "softmax", self.options.long_length), self._long_tokens, size=1)

    def _long_texts(self, cell: Cell) -> Result:
        """A process that has used memory may reuse it unseen, so every attention has a fresh one."""
        with tempfile.TemporaryDirectory() as folder:
            tokens = Path(folder) / "tokens.pt"
            torch.save(self._long_tokens, tokens)
            fresh = run_in_fresh_process(
                measure_memory,
                model=self.options.model,
                text=self.options.text,
                attention=cell.attention,
                training=cell.mode == "training",
                tokens_file=str(tokens),
                limit_gb=self.options.limit_gb,
                threads=torch.get_num_threads(),
            )
        if fresh.out_of_memory:
            return Result()
        found = fresh.result(f"{cell.attention}, {cell.mode}")
        embedded = found["embeddings"]
        close = cosines(torch.tensor(embedded), self._long_exact) if embedded else ()
        return Result(cosines=close, added_bytes=found["added_bytes"])

    def _long_text_times(self, cell: Cell) -> Result:
        """On one text; without the backward pass of materialised softmax, which takes too much memory."""
        tokens, encoder = self._long_tokens[:1], load(self._source, "softmax", self.options.long_length)
        names = [(name, mode) for name in (MATERIALISED, *ATTENTIONS) for mode in MODES]
        names.remove((MATERIALISED, "training"))
        for name, mode in names:
            time_pass(encoder, name, mode, tokens[:, :WARM_UP])
        runs = {f"{name} {mode}": partial(time_pass, encoder, name, mode, tokens) for name, mode in names}
        times = interleave(runs, self.options.repeats)
        return Result(times=tuple(Times(*key, rounded(times[" ".join(key)])) for key in names))

    @classmethod
    def tables(cls, results: Mapping[Cell, Result]) -> Sequence[Table]:
        made = [_embeddings_table(results), _fine_tuning_table(results), _long_texts_table(results)]
        return [table for table in made if table.rows]


def _values(options: Options, *names: str) -> dict[str, Fact]:
    return {name: getattr(options, name) for name in names}


def load(source: HeadSource, attention: str, length: int | None = None) -> Any:
    """The model with an attention, and positions for `length` tokens. Without attention dropout, which only some of the
    attentions have."""
    from skyformer.hf import extend_positions

    encoder = source.load(attention_probs_dropout_prob=0.0)
    encoder.set_attn_implementation(IMPLEMENTATIONS.get(attention, attention))
    return encoder if length is None else extend_positions(encoder, length)


@torch.no_grad()
def embed(encoder: Any, tokens: Tensor, size: int = 8) -> Tensor:
    """Unit vectors (count, E), `size` passages at a time."""
    return F.normalize(torch.cat([mean_pooled(encoder, batch) for batch in tokens.split(size)]), dim=-1)


def cosines(embedded: Tensor, exact: Tensor) -> tuple[float, ...]:
    return tuple((embedded * exact).sum(-1).tolist())


def train_on(encoder: Any, tokens: Tensor) -> None:
    """A forward and a backward pass."""
    encoder.train()
    mean_pooled(encoder, tokens).square().sum().backward()


def time_pass(encoder: Any, attention: str, mode: str, tokens: Tensor) -> float:
    """Seconds of a forward pass, or of a forward and a backward pass."""
    encoder.set_attn_implementation(IMPLEMENTATIONS.get(attention, attention))
    encoder.eval().zero_grad(set_to_none=True)
    return seconds_of(partial(train_on if mode == "training" else embed, encoder, tokens))


def measure_memory(
    model: str,
    text: str,
    attention: str,
    training: bool,
    tokens_file: str,
    limit_gb: float,
    threads: int,
    options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The peak memory that long texts add; runs in a fresh process. `options`: to register the attention with."""
    import skyformer.hf

    torch.set_num_threads(threads)
    if options:
        skyformer.hf.register(attention, **options)
    tokens = torch.load(tokens_file, weights_only=True)
    encoder = load(HeadSource(model, text), attention, tokens.shape[1])
    run: Callable[[Any, Tensor], Any] = train_on if training else embed
    run(encoder, tokens[:1, :WARM_UP])
    encoder.zero_grad(set_to_none=True)
    release_free_memory()
    before = reset_peak()  # Loading the weights may have needed more than the model holds now.
    limit_added_memory(int(limit_gb * 1e9))
    outputs = [run(encoder, one) for one in tokens.split(1)]
    embeddings = [] if training else torch.cat(outputs).tolist()
    return {"added_bytes": peak_bytes() - before, "embeddings": embeddings}


def _embeddings_table(results: Mapping[Cell, Result]) -> Table:
    cells = {cell: result for cell, result in results.items() if cell.part == "embeddings"}
    scale = cells.pop(Cell("embeddings", "softmax", DIFFERENT), None)
    counts = sorted({cell.num_landmarks for cell in cells if cell.num_landmarks is not None})
    rows = []
    for kernel, landmarks in dict.fromkeys((cell.attention, cell.landmarks) for cell in cells):
        found = [cells.get(Cell("embeddings", kernel, landmarks, d)) for d in counts]
        rows.append([f"{kernel}, {landmarks}", *(NOTHING if one is None else _closeness(one.cosines) for one in found)])
    note = "Mean (lowest) cosine similarity to the exact embeddings of the same passages"
    if scale is not None:
        note += f"; between exact embeddings of different passages it is {scale.cosines[0]:.2f}"
    return Table("Without retraining", ["kernel, landmarks", *(f"d = {d}" for d in counts)], rows, note + ".")


def _closeness(similarities: Sequence[float]) -> str:
    return f"{statistics.mean(similarities):.3f} ({min(similarities):.3f})"


def _fine_tuning_table(results: Mapping[Cell, Result]) -> Table:
    times = _medians(results, "times of fine-tuning")
    rows = []
    for name in ATTENTIONS:
        found = results.get(Cell("fine-tuning", name))
        if found is not None and found.accuracy is not None and found.standard_error is not None:
            accuracy = f"{100 * found.accuracy:.1f} ± {100 * found.standard_error:.1f} %"
            loss = f"{statistics.mean(found.losses[-10:]):.2f}"
            rows.append([name, accuracy, loss, times.get((name, "training"), NOTHING)])
    header = ["attention", "test accuracy", "mean of the last 10 losses", "time per training step"]
    return Table("After fine-tuning", header, rows, "Accuracy with its standard error.")


def _long_texts_table(results: Mapping[Cell, Result]) -> Table:
    times = _medians(results, "times of long texts")
    rows = []
    for name in (MATERIALISED, *ATTENTIONS):
        found = {mode: results.get(Cell("long texts", name, mode=mode)) for mode in MODES}
        cells = [text for mode in MODES for text in (_memory(found[mode]), times.get((name, mode), NOTHING))]
        forward = found["forward"]
        close = statistics.mean(forward.cosines) if forward is not None and forward.cosines else None
        if any(found.values()):
            rows.append([name, *cells, NOTHING if close is None else f"{close:.3f}"])
    header = ["attention", "memory, forward", "time", "memory, forward and backward", "time", "cosine to softmax"]
    note = "Peak memory beyond that after loading and a short warm-up."
    return Table("On long texts", header, rows, note)


def _memory(result: Result | None) -> str:
    if result is None:
        return NOTHING
    return "over the limit" if result.added_bytes is None else f"{result.added_bytes / 1e9:.2f} GB"


def _medians(results: Mapping[Cell, Result], part: str) -> dict[tuple[str, str], str]:
    """The median time by attention and mode."""
    found = results.get(Cell(part), Result())
    return {(each.attention, each.mode): each.median() for each in found.times}
