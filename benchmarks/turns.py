"""Training steps of Skyformer and the other approximations in turns, in one process, printed with pass or fail.

    skyformer data prepare all --data-dir DATA
    python benchmarks/turns.py --data-dir DATA [--tasks text,image] [--turns 5]

The study of efficiency measures each attention in a process of its own, minutes apart, and a machine that others use
changes its speed by more than these attentions differ. Here all of them take the same step one after the other, in a
random order, at the paper's settings on the batches of that study. Before each step freed memory is given back to the
system: what the step before leaves in the heap would decide how much of the next one's is there already. The time of a
step is the median over turns, on batches of similar lengths the mean of those of five batches. Pathfinder as prepared
with --limit 3000. Float32 on 2 threads. Writes results/turns.json after every task. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from bar import Bar, at_most, keep, show

from skyformer.errors import TrainingError
from skyformer.lra.batching import Batch
from skyformer.processes import release_free_memory
from skyformer.studies.efficiency import FASTER_BY, choose_batches, kinds_of
from skyformer.studies.tasks import run_config, study_data
from skyformer.training.building import Trainee

THREADS, SEED = 2, 0
OURS = "skyformer"
ATTENTIONS = (OURS, "nystromformer", "linformer", "informer", "performer", "reformer", "bigbird")
TASKS = ("text", "listops", "retrieval", "pathfinder", "image")
LIMITS = {"pathfinder": 3000}


def checked_step(trainee: Trainee, batch: Batch, name: str) -> None:
    loss = trainee.step(batch)
    if not math.isfinite(loss):
        raise TrainingError(f"the loss of {name} is {loss}: no time is given for steps that do not train")


def take_turns(task: str, kind: str, turns: int, data_dir: Path | None) -> dict[str, list[list[float]]]:
    """Seconds of each attention, batch by batch and turn by turn; the first batch warms up."""
    configs = {name: run_config(task, "paper", name, SEED, LIMITS.get(task)) for name in ATTENTIONS}
    data = study_data(configs[OURS], data_dir)
    warm_up, *batches = choose_batches(data, configs[OURS], kind)
    trainees = {name: Trainee(config) for name, config in configs.items()}
    for name, trainee in trainees.items():
        checked_step(trainee, warm_up, name)
    seconds: dict[str, list[list[float]]] = {name: [[] for _ in batches] for name in trainees}
    order = random.Random(SEED)
    for _ in range(turns):
        for number, batch in enumerate(batches):
            for name in order.sample(ATTENTIONS, len(ATTENTIONS)):
                release_free_memory()
                start = time.perf_counter()
                checked_step(trainees[name], batch, name)
                seconds[name][number].append(round(time.perf_counter() - start, 4))
    return seconds


def step_seconds(by_batch: Sequence[Sequence[float]]) -> float:
    return statistics.mean(statistics.median(turns) for turns in by_batch)


def judge(task: str, kind: str, seconds: dict[str, list[list[float]]]) -> Bar:
    """Skyformer against the fastest of the others."""
    times = {name: step_seconds(by_batch) for name, by_batch in seconds.items()}
    ours = times.pop(OURS)
    fastest = min(times, key=lambda name: times[name])
    return at_most(f"{task}, {kind}: {OURS} / {fastest}", ours / times[fastest], FASTER_BY)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, help="where the tasks are prepared (default: SKYFORMER_DATA)")
    parser.add_argument("--tasks", default=",".join(TASKS), help="separated by commas")
    parser.add_argument("--turns", type=int, default=5, help="how often each attention takes each step")
    parser.add_argument("--output", type=Path, default=Path("results/turns.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(THREADS)
    bars: list[Bar] = []
    seconds: dict[str, dict[str, list[list[float]]]] = {}
    for task in arguments.tasks.split(","):
        for kind in kinds_of(task):
            taken = take_turns(task, kind, arguments.turns, arguments.data_dir)
            bars.append(judge(task, kind, taken))
            seconds[f"{task}, {kind}"] = taken
            command = " ".join(["python benchmarks/turns.py", *sys.argv[1:]])
            keep(arguments.output, command, THREADS, bars=[asdict(bar) for bar in bars], seconds=seconds)
    show(bars, f"training steps in turns, float32, {THREADS} threads")
    sys.exit(0 if all(bar.passed for bar in bars) else 1)


if __name__ == "__main__":
    main()
