"""Training steps in a process of their own: `python -m skyformer.studies.fresh_steps REQUEST` prints what they took.

The process imports no more than a model needs, takes its batches from a file, and may allocate so much memory and no
more: what does not fit fails in it, and is reported as such.
"""

from __future__ import annotations

import json
import math
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from skyformer.attention.base import Attention, Inputs, Promise
from skyformer.errors import TrainingError
from skyformer.processes import (
    count_oom_kills,
    die_with_parent,
    is_oom_error,
    limit_added_memory,
    peak_bytes,
    prefer_as_oom_victim,
    release_free_memory,
    reset_peak,
)

if TYPE_CHECKING:
    from skyformer.lra.batching import Batch
    from skyformer.training.config import RunConfig

MOST_PASSES = 5
FEWEST_STEPS = 2


@dataclass(frozen=True)
class Request:
    """What to train, on what, and how long.

    config: a RunConfig as YAML. materialised: softmax attention with its scores kept.
    batches: a file from `save_batches`; the first warms up, the others are timed. batch_size: examples of each to take.
    seconds: of timed steps, about. may_add: bytes that the process may take beyond what it holds before the first step.
    """

    config: str
    materialised: bool
    batches: str
    batch_size: int
    threads: int
    seconds: float
    may_add: int


@dataclass(frozen=True)
class Steps:
    """Seconds of each timed step and the padded length of its batch; bytes held before the first step, and at most;
    seconds of a computation that is always the same, to see how fast the machine was at the time."""

    seconds: tuple[float, ...]
    lengths: tuple[int, ...]
    before_bytes: int
    peak_bytes: int
    reference_seconds: float


class MaterialisedSoftmax(Attention):
    """softmax(Q K^T / sqrt(P)) V as it is written, under plain autograd: the scores are formed, and kept for the
    backward pass."""

    name = "softmax"
    exact = True
    cannot: ClassVar[Mapping[Promise, str]] = {Promise.CAUSAL: "the paper's tasks have no use for it"}

    def attend(self, inputs: Inputs) -> Tensor:
        scores = inputs.query @ inputs.key.mT / math.sqrt(inputs.query.shape[-1])
        if inputs.key_mask is not None:
            scores = scores.masked_fill(~inputs.key_mask[:, None, None, :], -math.inf)
        return torch.softmax(scores, -1) @ inputs.value


def materialise(model: nn.Module) -> None:
    """Every softmax attention of a model in the form that keeps its scores."""
    for module in list(model.modules()):
        old = getattr(module, "attention", None)
        if isinstance(old, Attention):
            module.attention = MaterialisedSoftmax(old.num_heads, old.head_dim)


def save_batches(batches: Sequence[Batch], path: str) -> None:
    torch.save([{name: value for name, value in vars(batch).items() if value is not None} for batch in batches], path)


def load_batches(path: str, batch_size: int) -> list[Batch]:
    """The first `batch_size` examples of each batch."""
    from skyformer.lra.batching import Batch

    stored = torch.load(path, weights_only=True)
    return [Batch(**{name: value[:batch_size] for name, value in each.items()}) for each in stored]


def run_in_fresh_process(request: Request) -> Steps | None:
    """What the steps took, or None if there was not enough memory for them."""
    command = [sys.executable, "-m", "skyformer.studies.fresh_steps", json.dumps(asdict(request))]
    before = count_oom_kills()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    by_system = before is None or count_oom_kills() != before
    return read_outcome(done.returncode, done.stdout, done.stderr, by_system=by_system)


def read_outcome(code: int, stdout: str, stderr: str, *, by_system: bool) -> Steps | None:
    """A process that failed for want of memory, or that the system killed for it, did not fit; any other failure is
    an error."""
    if code == 0:
        answer: dict[str, Any] = json.loads(stdout.strip().splitlines()[-1])
        return Steps(**{**answer, "seconds": tuple(answer["seconds"]), "lengths": tuple(answer["lengths"])})
    if (code == -signal.SIGKILL and by_system) or is_oom_error(stderr):
        return None
    last = stderr.strip().splitlines()[-1] if stderr.strip() else f"it ended with code {code}"
    raise TrainingError(f"the process of the training steps failed: {last}")


def take_steps(request: Request) -> Steps:
    """The work of the fresh process."""
    from skyformer.training.building import build_model
    from skyformer.training.config import from_yaml

    config = from_yaml(request.config)
    model = build_model(config).train()
    if request.materialised:
        materialise(model)
    warm_up, *batches = load_batches(request.batches, request.batch_size)
    reference = reference_seconds()
    step = training_step(model, config)
    release_free_memory()
    before = reset_peak()
    limit_added_memory(request.may_add)
    step(warm_up)
    seconds, lengths = time_steps(step, batches, request.seconds)
    peak = peak_bytes()
    check_peak(peak - before, request.may_add)
    return Steps(tuple(seconds), tuple(lengths), before, peak, reference)


def check_peak(added: int, may_add: int) -> None:
    """Steps that found more room than they may take, in holes that the heap already had, did not fit either."""
    if added > may_add:
        raise MemoryError(f"the steps may add {may_add:,} bytes to what the process held; they added {added:,}")


def training_step(model: nn.Module, config: RunConfig) -> Callable[[Batch], object]:
    """Forward, backward, clipping and the optimiser, as a run of the config does them."""
    from skyformer.training.building import Trainee

    return Trainee(config, model).step


def time_steps(
    step: Callable[[Batch], object],
    batches: Sequence[Batch],
    budget: float,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[list[float], list[int]]:
    """Seconds and lengths of whole passes over the batches: two steps at least, and no pass more than the budget has
    room for."""
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
    """Tokens of an example; of a pair, both halves."""
    return batch.tokens.shape[1] + (0 if batch.second is None else batch.second.shape[1])


def reference_seconds(repeats: int = 7) -> float:
    """A product of matrices and a pass over memory, the median of a few times."""
    matrix, row = torch.full((1024, 1024), 0.5), torch.ones(1 << 22)
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        (matrix @ matrix).sum() + row.exp().sum()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def main() -> None:
    request = Request(**json.loads(sys.argv[1]))
    die_with_parent()
    prefer_as_oom_victim()
    torch.set_num_threads(request.threads)
    print(json.dumps(asdict(take_steps(request))))


if __name__ == "__main__":
    main()
