"""Steps a second of whole training runs, printed with pass or fail.

    skyformer data prepare text --from aclImdb_v1.tar.gz --data-dir DATA
    python benchmarks/training.py --data-dir DATA [--steps 12] [--rounds 3]
    python benchmarks/training.py --only overhead

Overhead: `train` on ListOps with the `cpu` preset against a bare loop of the same model on the same batches, the two
taking turns step by step; their losses must agree. Text: the paper's preset on the reviews, Skyformer against softmax
attention (`F.scaled_dot_product_attention`), whole runs taking turns on the same batches: of similar lengths, and
padded to the longest. A step lasts from its start to the start of the next, so data, logging and progress are in it.
Float32 on 2 threads. Writes results/training.json. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from bar import Bar, keep, show
from lightning.pytorch.callbacks import Callback
from torch import nn

from skyformer.errors import SkyformerError
from skyformer.lra import Batch, Task, load_task, prepare, training_loader
from skyformer.training import RunConfig, load_preset, train
from skyformer.training.building import build_model, mixed_seed, one_cycle
from skyformer.training.module import ClassifierModule

THREADS = 2
WARM_UP = 2
LISTOPS_EXAMPLES = 2000
LARGEST_OVERHEAD, LARGEST_DATA_SHARE = 0.05, 0.05
LEAST_SPEEDUP = {"similar lengths": 2.0, "padded to 4,000": 4.0}
LOSS_TOLERANCE = 1e-4


class EnoughError(Exception):
    """All steps that were asked for have been timed."""


class StepClock(Callback):
    """Seconds from the start of each step to the start of the next, without those that `between` takes."""

    def __init__(self, steps: int, between: Callable[[float], None] | None = None) -> None:
        self.seconds: list[float] = []
        self._steps, self._between = WARM_UP + steps, between
        self._since: float | None = None

    def on_train_batch_start(self, trainer: object, pl_module: object, batch: object, batch_idx: int) -> None:
        if self._since is not None:
            self.seconds.append(time.perf_counter() - self._since)
            assert isinstance(pl_module, ClassifierModule)
            if self._between is not None:
                self._between(float(pl_module.parts[-1].loss))
            if len(self.seconds) == self._steps:
                raise EnoughError
        self._since = time.perf_counter()


class BareLoop:
    """The run's model and batches in a loop of five lines."""

    def __init__(self, config: RunConfig, task: Task) -> None:
        self.seconds: list[float] = []
        self._config, self._model = config, build_model(config).train()
        self._batches = iter(loader_of(config, task))
        optim = config.optim
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True
        )
        self._schedule = one_cycle(self._optimizer, optim, config.loop.steps)

    def step(self, harness_loss: float) -> None:
        """One step, whose loss must be the harness's."""
        torch.manual_seed(mixed_seed("step", self._config.seed, len(self.seconds), 0))
        start = time.perf_counter()
        batch: Batch = next(self._batches)
        self._optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(self._model(batch.tokens, batch.mask), batch.label)
        loss.backward()
        nn.utils.clip_grad_value_(self._model.parameters(), self._config.optim.clip_value or float("inf"))
        self._optimizer.step()
        self._schedule.step()
        self.seconds.append(time.perf_counter() - start)
        if abs(loss.item() - harness_loss) > LOSS_TOLERANCE:
            raise SkyformerError(f"the two loops do not train the same: losses {loss.item()} and {harness_loss}")


def loader_of(config: RunConfig, task: Task) -> Iterator[Batch]:
    loop = config.loop
    return training_loader(
        task.train,
        loop.batch_size,
        seed=config.seed,
        group_by_length=loop.group_by_length,
        pad_to_max=loop.pad_to_max,
    )


def run_steps(config: RunConfig, data_dir: Path | None, clock: StepClock) -> list[float]:
    """Train until the clock has all its steps; seconds of each after the warm-up."""
    with tempfile.TemporaryDirectory() as runs:
        try:
            train(config, runs_dir=runs, data_dir=data_dir, callbacks=[clock])
        except EnoughError:
            return clock.seconds[WARM_UP:]
    raise SkyformerError(f"the run ended after {len(clock.seconds)} steps; give fewer --steps")


def overhead_config(steps: int) -> RunConfig:
    """Saved and logged more often than the preset asks for, to be sure that both are in the measure."""
    return load_preset(
        "listops",
        "cpu",
        overrides=[
            f"task.limit={LISTOPS_EXAMPLES}",
            f"loop.checkpoint_every={max(1, steps // 2)}",
            "loop.log_every=10",
            f"hardware.threads={THREADS}",
            "hardware.accelerator=cpu",
        ],
    )


def measure_overhead(steps: int) -> tuple[list[Bar], dict[str, list[float]]]:
    config = overhead_config(steps)
    with tempfile.TemporaryDirectory() as folder:
        prepare("listops", limit=LISTOPS_EXAMPLES, data_dir=Path(folder))
        bare = BareLoop(config, load_task("listops", folder, limit=LISTOPS_EXAMPLES))
        harness = run_steps(config, Path(folder), StepClock(steps, bare.step))
    seconds = {"harness": harness, "bare": bare.seconds[WARM_UP:]}
    # Step by step, because each pair has the same work and the same moment: what disturbs one step is left out.
    added = statistics.median(one - other for one, other in zip(*seconds.values(), strict=True))
    share = added / statistics.median(seconds["bare"])
    total = sum(seconds["harness"]) / sum(seconds["bare"]) - 1
    what = f"overhead of the harness on a step of {statistics.median(seconds['bare']) * 1e3:.0f} ms"
    limit = f"at most {LARGEST_OVERHEAD:.0%}"
    measured = f"{share:.2%} (of all steps together: {total:.2%})"
    return [Bar(what, limit, measured, share <= LARGEST_OVERHEAD, share)], seconds


def text_config(attention: str, padded: bool) -> RunConfig:
    settings = ["hardware.accelerator=cpu", f"hardware.threads={THREADS}", f"loop.pad_to_max={str(padded).lower()}"]
    return load_preset("text", "paper", attention=attention, overrides=settings)


def measure_text(data_dir: Path | None, steps: int, rounds: int) -> tuple[list[Bar], dict[str, list[float]]]:
    bars, seconds = [], {}
    for name, least in LEAST_SPEEDUP.items():
        configs = {attention: text_config(attention, "padded" in name) for attention in ("skyformer", "softmax")}
        taken: dict[str, list[float]] = {attention: [] for attention in configs}
        for _ in range(rounds):
            for attention, config in configs.items():
                taken[attention] += run_steps(config, data_dir, StepClock(steps))
        loading = time_loading(configs["skyformer"], data_dir, steps)
        bars += [speed_bar(name, least, taken), loading_bar(name, loading, taken["skyformer"])]
        seconds |= {f"{attention}, {name}": times for attention, times in taken.items()}
        seconds[f"loading, {name}"] = loading
    return bars, seconds


def speed_bar(name: str, least: float, taken: dict[str, list[float]]) -> Bar:
    pace = {attention: len(times) / sum(times) for attention, times in taken.items()}
    ratio = pace["skyformer"] / pace["softmax"]
    measured = f"{ratio:.2f}x ({pace['skyformer']:.3f} and {pace['softmax']:.3f} steps/s)"
    return Bar(
        f"Text, {name}: Skyformer to softmax, steps a second", f"at least {least:g}x", measured, ratio >= least, ratio
    )


def time_loading(config: RunConfig, data_dir: Path | None, steps: int) -> list[float]:
    """Seconds that each batch of those steps takes to come."""
    batches, seconds = iter(loader_of(config, load_task("text", data_dir))), []
    for _ in range(WARM_UP + steps):
        start = time.perf_counter()
        next(batches)
        seconds.append(time.perf_counter() - start)
    return seconds[WARM_UP:]


def loading_bar(name: str, loading: list[float], steps: list[float]) -> Bar:
    share = statistics.mean(loading) / statistics.mean(steps)
    passed = share < LARGEST_DATA_SHARE
    return Bar(
        f"Text, {name}: data in a step of Skyformer", f"below {LARGEST_DATA_SHARE:.0%}", f"{share:.2%}", passed, share
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["overhead", "text"], help="one of the two measurements")
    parser.add_argument("--data-dir", type=Path, help="where Text is prepared (default: SKYFORMER_DATA)")
    parser.add_argument("--steps", type=int, default=12, help="steps of Text a run, after the warm-up")
    parser.add_argument("--rounds", type=int, default=3, help="runs of Text for each attention")
    parser.add_argument("--overhead-steps", type=int, default=100, help="steps of ListOps, after the warm-up")
    parser.add_argument("--output", type=Path, default=Path("results/training.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(THREADS)
    bars: list[Bar] = []
    seconds: dict[str, list[float]] = {}
    if arguments.only != "text":
        bars, seconds = measure_overhead(arguments.overhead_steps)
    if arguments.only != "overhead":
        text_bars, text_seconds = measure_text(arguments.data_dir, arguments.steps, arguments.rounds)
        bars, seconds = bars + text_bars, seconds | text_seconds
    show(bars, f"training, float32, {THREADS} threads")
    command = " ".join(["python benchmarks/training.py", *sys.argv[1:]])
    keep(arguments.output, command, THREADS, bars=[asdict(bar) for bar in bars], seconds=seconds)
    sys.exit(0 if all(bar.passed for bar in bars) else 1)


if __name__ == "__main__":
    main()
