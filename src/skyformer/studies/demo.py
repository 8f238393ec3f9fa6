"""The demo: Skyformer is correct (the authors' outputs), fast (attention alone), and worth it (two models, equal time).

The task of the training is generated: which of eight symbols occurs most often in a sequence. The classifier reads only
the first position, so what it knows about the other tokens has passed through the attention. Every batch is new, so the
accuracy on a batch before the model has learnt from it is an accuracy on unseen sequences.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from skyformer.environment import describe_environment
from skyformer.errors import MissingExtraError, TrainingError
from skyformer.files import dump_json, write_atomic
from skyformer.functional import kernelized_attention, skyformer_attention, softmax_attention
from skyformer.model import SequenceClassifier
from skyformer.processes import available_cores, peak_bytes, release_free_memory, reset_peak
from skyformer.report.figures import Figure, Mark, Panel, Series, draw_figure
from skyformer.report.ticks import Unit

LENGTHS = (1024, 4096, 16384, 65536)
LIMIT_SECONDS = 10.0
"""An attention is timed up to the last length at which a step takes less than this."""
LANDMARKS = 128
TOLERANCE = 1e-5

SYMBOLS, LENGTH, BATCH, LEARNING_RATE = 8, 4096, 4, 1e-3
CHANCE = 1 / SYMBOLS
LEAST, MOST = 1.5, 3.0
"""The most frequent symbol is this many times as probable as each of the others, uniformly between the two."""
TEST_SEQUENCES, WINDOW = 128, 32
"""Sequences of the final test, and of the running accuracy during training."""

LEAST_SHARE = 0.85
"""With a smaller share of the cores, other programs disturb the timings."""

DRAWN_POINTS = 40
"""At most this many points of a curve are drawn."""

Function = Callable[[Tensor, Tensor, Tensor], Tensor]
ATTENTIONS: dict[str, Function] = {
    "softmax": F.scaled_dot_product_attention,
    "kernelized": kernelized_attention,
    "skyformer": lambda query, key, value: skyformer_attention(query, key, value, num_landmarks=LANDMARKS),
}


def compare_with_authors() -> dict[str, float]:
    """The relative error of each output against the authors' code, on stored inputs with padding."""
    try:
        from safetensors.torch import load
    except ModuleNotFoundError as error:
        raise MissingExtraError("safetensors") from error
    stored = load(resources.files("skyformer.studies").joinpath("authors.safetensors").read_bytes())
    query, key, value, mask = (stored[name] for name in ("q", "k", "v", "key_mask"))
    rows = stored["skyformer.landmark_index"]
    outputs = {
        "softmax": softmax_attention(query, key, value, key_mask=mask),
        "kernelized": kernelized_attention(query, key, value, key_mask=mask),
        "skyformer": skyformer_attention(query, key, value, key_mask=mask, landmarks=rows, gamma=0.1),
    }
    real = mask[:, None, :, None]
    errors = {}
    for name, out in outputs.items():
        expected = stored[f"{name}.out"]
        errors[name] = float((out * real - expected).norm() / expected.norm())
        if not errors[name] < TOLERANCE:
            raise TrainingError(f"{name} differs from the authors' output by {errors[name]:.1e}, over {TOLERANCE:.0e}")
    return errors


def share_of_cores(threads: int, seconds: float = 0.5) -> float:
    """The share of the time of its cores that this process gets while it computes: near 1 on an idle machine. Sets the
    number of torch's threads, to at most one for each core, because more of them wait for each other."""
    cores = min(threads, available_cores())
    torch.set_num_threads(cores)
    matrix = torch.ones(512, 512)
    wall, own = time.perf_counter(), time.process_time()
    while time.perf_counter() - wall < seconds:
        matrix @ matrix
    return (time.process_time() - own) / ((time.perf_counter() - wall) * cores)


@dataclass(frozen=True)
class Timing:
    """A forward and backward step of attention alone: seconds and added bytes, or None if it would take too long."""

    attention: str
    length: int
    seconds: float | None
    added_bytes: int | None


def time_attentions(lengths: Sequence[int] = LENGTHS, limit: float = LIMIT_SECONDS) -> Iterator[Timing]:
    """Each attention at each length, on 2 heads of 32; one is left out as soon as it would take more than `limit`."""
    last: dict[str, tuple[int, float]] = {}
    for length in lengths:
        for name, attention in ATTENTIONS.items():
            before = last.get(name)
            # The exact attentions take time quadratic in the length.
            growth = 1 if before is None or name == "skyformer" else (length / before[0]) ** 2
            if before is not None and before[1] * growth > limit:
                yield Timing(name, length, None, None)
                continue
            seconds, added = _measure_step(attention, length)
            last[name] = (length, seconds)
            yield Timing(name, length, seconds, added)


def _measure_step(attention: Function, length: int) -> tuple[float, int]:
    """The seconds of the fastest of three steps, or of one slow step, and the bytes that the first one added."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, 2, length, 32, generator=generator, requires_grad=True) for _ in ("query", "key", "value")
    )

    def step() -> float:
        start = time.perf_counter()
        attention(query, key, value).sum().backward()
        return time.perf_counter() - start

    if length <= 2048:
        step()  # the first call of a process prepares things that later ones reuse
    query.grad = key.grad = value.grad = None
    gc.collect()
    release_free_memory()
    before = reset_peak()
    seconds = [step()]
    added = max(0, peak_bytes() - before)
    while len(seconds) < 3 and seconds[0] < 1.0:
        seconds.append(step())
    return min(seconds), added


@dataclass(frozen=True)
class Training:
    """A model trained for some seconds: the running accuracy over time, and the accuracy on sequences never seen."""

    attention: str
    seconds: tuple[float, ...]
    accuracies: tuple[float, ...]
    steps: int
    test_accuracy: float

    @property
    def above_chance(self) -> bool:
        """Whether a guess would reach the accuracy with a probability far below one in a thousand."""
        deviation = (CHANCE * (1 - CHANCE) / TEST_SEQUENCES) ** 0.5
        return self.test_accuracy > CHANCE + 4 * deviation

    def seconds_until(self, accuracy: float) -> float | None:
        """When the running accuracy first reached `accuracy`; None if it never did."""
        reached = (s for s, a in zip(self.seconds, self.accuracies, strict=True) if a >= accuracy)
        return next(reached, None)


class FirstPosition(nn.Module):
    """Pooling that reads the output at the first position only."""

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return x[:, 0]


def sequences(count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens int64 (count, length), a question mark and then symbols, and the most frequent symbol (count,)."""
    answer = torch.randint(SYMBOLS, (count,), generator=generator)
    weights = torch.ones(count, SYMBOLS)
    margin = LEAST + (MOST - LEAST) * torch.rand(count, 1, generator=generator)
    weights.scatter_(1, answer[:, None], margin)
    symbols = torch.multinomial(weights, length - 1, replacement=True, generator=generator)
    return torch.cat([torch.full((count, 1), SYMBOLS), symbols], 1), answer


def train(
    attention: str,
    seconds: float,
    *,
    length: int = LENGTH,
    seed: int = 0,
    report: Callable[[float, int, float], None] = lambda *_: None,
) -> Training:
    """Train a classifier with one layer for `seconds` of its own steps; the same settings for every attention.

    Args:
        report: is given the seconds, the steps and the running accuracy after every step.
    """
    torch.manual_seed(seed)
    model = SequenceClassifier(
        vocab_size=SYMBOLS + 1,
        num_classes=SYMBOLS,
        max_length=length,
        attention=attention,
        attention_options={"num_landmarks": LANDMARKS} if attention == "skyformer" else {},
        num_layers=1,
        dropout=0.0,
    )
    model.pool = FirstPosition()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    generator = torch.Generator().manual_seed(seed)
    right: list[bool] = []
    times, accuracies, spent, steps = [], [], 0.0, 0
    while spent < seconds:
        tokens, answer = sequences(BATCH, length, generator)
        start = time.perf_counter()
        logits = model(tokens)
        loss = F.cross_entropy(logits, answer)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        spent, steps = spent + time.perf_counter() - start, steps + 1
        right += (logits.argmax(-1) == answer).tolist()
        if len(right) >= WINDOW:
            times.append(spent)
            accuracies.append(sum(right[-WINDOW:]) / WINDOW)
            report(spent, steps, accuracies[-1])
    return Training(attention, tuple(times), tuple(accuracies), steps, _test(model, length))


def _test(model: SequenceClassifier, length: int) -> float:
    """The accuracy on sequences that are the same for every model."""
    tokens, answer = sequences(TEST_SEQUENCES, length, torch.Generator().manual_seed(2**31))
    model.eval()
    with torch.no_grad():
        guesses = torch.cat([model(part).argmax(-1) for part in tokens.split(BATCH)])
    return float((guesses == answer).float().mean())


def speed_figure(timings: Sequence[Timing]) -> Figure:
    """Seconds and memory against the length."""
    panels = []
    for title, unit, value in (
        ("Time of a step", Unit.SECONDS, lambda timing: timing.seconds),
        ("Memory added by a step", Unit.BYTES, lambda timing: timing.added_bytes),
    ):
        series = []
        for name in ATTENTIONS:
            own = [timing for timing in timings if timing.attention == name and timing.seconds is not None]
            series.append(Series(name, [timing.length for timing in own], [value(timing) for timing in own]))
        panels.append(Panel(title, "tokens", "", series, x_log=True, y_log=True, y_unit=unit))
    note = "Attention alone, forward and backward, 2 heads of 32, float32. softmax is PyTorch's SDPA."
    return Figure("speed", "Attention alone against the sequence length", panels, note=note)


def training_figure(trainings: Sequence[Training], length: int) -> Figure:
    """The running accuracy against the training time."""
    series = []
    for each in trainings:
        every = slice(None, None, -(-len(each.seconds) // DRAWN_POINTS) or 1)
        series.append(Series(each.attention, each.seconds[every], [100 * y for y in each.accuracies[every]]))
    end = max((each.seconds[-1] for each in trainings if each.seconds), default=0.0)
    series.append(Series("chance", [0, end], [100 * CHANCE] * 2, mark=Mark.DASHED))
    title = f"Which of {SYMBOLS} symbols is the most frequent of {length:,}?"
    panel = Panel("", "training time (s)", f"accuracy on the last {WINDOW} sequences (%)", series)
    return Figure("training", title, [panel])


def write_files(
    errors: dict[str, float],
    timings: Sequence[Timing],
    trainings: Sequence[Training],
    threads: int,
    length: int,
    folder: Path,
) -> list[Path]:
    """Write demo.json and both figures; returns the files."""
    content = {
        "environment": asdict(describe_environment(threads)),
        "errors": errors,
        "timings": [asdict(timing) for timing in timings],
        "trainings": [asdict(training) for training in trainings],
    }
    file = folder / "demo.json"
    write_atomic(file, dump_json(content))
    drawn = [draw_figure(figure, folder) for figure in (speed_figure(timings), training_figure(trainings, length))]
    return [file, *(each for files in drawn for each in files)]
