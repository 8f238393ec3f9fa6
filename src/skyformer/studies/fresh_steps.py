"""Training steps in a fresh process, with their time and peak memory.

The process imports only what a model needs, reads its batches from a file, and may allocate a limited amount of memory:
steps that need more fail, and are reported as not fitting.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from skyformer.attention.base import Attention, Inputs, Promise
from skyformer.processes import (
    limit_added_memory,
    peak_bytes,
    release_free_memory,
    reset_peak,
    run_in_fresh_process,
)

if TYPE_CHECKING:
    from skyformer.lra.batching import Batch

MOST_PASSES = 5
FEWEST_STEPS = 2
PAPER_ATTENTION_DROPOUT = 0.1


@dataclass(frozen=True)
class Request:
    """What to train, on which batches, and for how long.

    Args:
        config: a RunConfig as YAML.
        form: a name from `SOFTMAX_FORMS`, which replaces softmax attention; None leaves the attention as it is.
        batches: a file from `save_batches`; the first batch is for the warm-up, the others are timed.
        batch_size: number of examples to use from each batch.
        seconds: approximate total time of the timed steps.
        may_add: bytes that the process may allocate in addition to what it holds before the first step.
    """

    config: str
    form: str | None
    batches: str
    batch_size: int
    threads: int
    seconds: float
    may_add: int


@dataclass(frozen=True)
class Steps:
    """Seconds of each timed step and the padded length of its batch; bytes held before the first step, and the peak;
    seconds of a computation that is always the same, which shows how fast the machine was at the time."""

    seconds: tuple[float, ...]
    lengths: tuple[int, ...]
    before_bytes: int
    peak_bytes: int
    reference_seconds: float


class MaterialisedSoftmax(Attention):
    """softmax(Q K^T / sqrt(P)) V with plain autograd: the matrix of scores is computed and kept for the backward
    pass. It has no dropout, whatever the config says."""

    name = "softmax"
    exact = True
    cannot: ClassVar[Mapping[Promise, str]] = {Promise.CAUSAL: "the paper's tasks do not need it"}

    def attend(self, inputs: Inputs) -> Tensor:
        scores = inputs.query @ inputs.key.mT / math.sqrt(inputs.query.shape[-1])
        if inputs.key_mask is not None:
            scores = scores.masked_fill(~inputs.key_mask[:, None, None, :], -math.inf)
        return self._drop(torch.softmax(scores, -1)) @ inputs.value

    def _drop(self, weights: Tensor) -> Tensor:
        return weights


class RecomputedSoftmax(MaterialisedSoftmax):
    """As the paper's authors ran it: with dropout of the weights, and with activation checkpointing, so that the matrix
    of scores is formed, not kept, and formed again in the backward pass."""

    def attend(self, inputs: Inputs) -> Tensor:
        out: Tensor = checkpoint(super().attend, inputs, use_reentrant=False)
        return out

    def _drop(self, weights: Tensor) -> Tensor:
        return F.dropout(weights, PAPER_ATTENTION_DROPOUT, self.training)


MATERIALISED, RECOMPUTED = "softmax, materialised", "softmax, recomputed"
SOFTMAX_FORMS: Mapping[str, type[MaterialisedSoftmax]] = {
    MATERIALISED: MaterialisedSoftmax,
    RECOMPUTED: RecomputedSoftmax,
}


def replace_attention(model: nn.Module, kind: type[Attention]) -> None:
    """Replace every attention of a model by one of this class, with its default options."""
    for module in list(model.modules()):
        old = getattr(module, "attention", None)
        if isinstance(old, Attention):
            module.attention = kind(old.num_heads, old.head_dim)


def save_batches(batches: Sequence[Batch], path: str) -> None:
    torch.save([{name: value for name, value in vars(batch).items() if value is not None} for batch in batches], path)


def load_batches(path: str, batch_size: int) -> list[Batch]:
    """The first `batch_size` examples of each batch."""
    from skyformer.lra.batching import Batch

    stored = torch.load(path, weights_only=True)
    return [Batch(**{name: value[:batch_size] for name, value in each.items()}) for each in stored]


def measure_steps(request: Request) -> Steps | None:
    """Take the steps in a fresh process; None if they ran out of memory, any other failure is an error."""
    run = run_in_fresh_process(_take_steps, **asdict(request))
    if run.out_of_memory:
        return None
    answer = run.result("the training steps")
    return Steps(**{**answer, "seconds": tuple(answer["seconds"]), "lengths": tuple(answer["lengths"])})


def _take_steps(**request: Any) -> Steps:
    return take_steps(Request(**request))


def take_steps(request: Request) -> Steps:
    """Train and measure in this process."""
    from skyformer.training.building import Trainee, build_model
    from skyformer.training.config import from_yaml

    torch.set_num_threads(request.threads)
    config = from_yaml(request.config)
    model = build_model(config).train()
    if request.form is not None:
        replace_attention(model, SOFTMAX_FORMS[request.form])
    warm_up, *batches = load_batches(request.batches, request.batch_size)
    reference = reference_seconds()
    step = Trainee(config, model).step
    release_free_memory()
    before = reset_peak()
    limit_added_memory(request.may_add)
    step(warm_up)
    seconds, lengths = time_steps(step, batches, request.seconds)
    peak = peak_bytes()
    if peak - before > request.may_add:  # possible in free parts of the heap
        raise MemoryError(f"the steps may add at most {request.may_add:,} bytes; they added {peak - before:,}")
    return Steps(tuple(seconds), tuple(lengths), before, peak, reference)


def time_steps(
    step: Callable[[Batch], object],
    batches: Sequence[Batch],
    budget: float,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[list[float], list[int]]:
    """Seconds and lengths of complete passes over the batches: at least two steps, and no pass that would exceed the
    budget of seconds."""
    seconds: list[float] = []
    for passes in range(MOST_PASSES):
        if len(seconds) >= FEWEST_STEPS and sum(seconds) * (passes + 1) / passes > budget:
            break
        for batch in batches:
            start = clock()
            step(batch)
            seconds.append(clock() - start)
    return seconds, [padded_length(batch) for batch in batches] * (len(seconds) // len(batches))


def padded_length(batch: Batch) -> int:
    """Tokens of an example; for a pair, of both sequences."""
    return batch.tokens.shape[1] + (0 if batch.second is None else batch.second.shape[1])


def reference_seconds(repeats: int = 7) -> float:
    """The median time of a matrix product and a pass over memory."""
    matrix, row = torch.full((1024, 1024), 0.5), torch.ones(1 << 22)
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        (matrix @ matrix).sum() + row.exp().sum()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)
