"""The measurements themselves: interleaved times in one process, peak memory in fresh ones, errors on sampled rows."""

from __future__ import annotations

import gc
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from skyformer.bench.contenders import Contender, Job, Setting
from skyformer.errors import SkyformerError
from skyformer.functional import kernelized_attention, softmax_attention
from skyformer.processes import peak_bytes, release_free_memory, reset_peak

SLOW_SECONDS = 5.0
"""A step that took longer than this in its fresh process is not run again: noise no longer matters."""

ROWS_FOR_ERROR = 512


@dataclass(frozen=True)
class Timing:
    """Seconds of the best of `repeats` runs, the forward pass alone if it was timed; `median` is over whole steps."""

    forward: float | None
    step: float
    median: float
    repeats: int
    how: str


@dataclass(frozen=True)
class Fresh:
    """What a fresh process saw in its only step: seconds, and bytes beyond what it held before."""

    seconds: float
    added_bytes: int
    input_bytes: int


def run_step(job: Job) -> tuple[float, float]:
    """Seconds of the forward pass, and of forward and backward together."""
    job.clear()
    start = time.perf_counter()
    out = job.forward()
    middle = time.perf_counter()
    out.backward(job.grad)
    return middle - start, time.perf_counter() - start


def time_interleaved(jobs: dict[str, Job], repeats: int, tick: Callable[[], None] = lambda: None) -> dict[str, Timing]:
    """Each job in turn, again and again, so that a noisy moment hits all of them alike."""
    for job in jobs.values():
        run_step(job)
        run_step(job)
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in jobs}
    for _ in range(repeats):
        for name, job in jobs.items():
            gc.collect()
            samples[name].append(run_step(job))
            tick()
    for job in jobs.values():
        job.clear()
    return {name: _summarise(taken) for name, taken in samples.items()}


def _summarise(taken: list[tuple[float, float]]) -> Timing:
    steps = sorted(step for _, step in taken)
    return Timing(
        min(f for f, _ in taken), steps[0], steps[len(steps) // 2], len(steps), "interleaved, best of repeats"
    )


def measure_fresh(name: str, setting: Setting, threads: int) -> Fresh:
    """Runs one step of the contender in a process of its own."""
    request = json.dumps({"name": name, "setting": asdict(setting), "threads": threads})
    done = subprocess.run(
        [sys.executable, "-m", "skyformer.bench.fresh", request], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"signal {-done.returncode}"
        raise SkyformerError(f"{name} at length {setting.length} failed in its process: {reason}")
    return Fresh(**json.loads(done.stdout.strip().splitlines()[-1]))


def step_memory(job: Job) -> tuple[float, int]:
    """Seconds of one step, and the most bytes this process held during it beyond what it held before."""
    gc.collect()
    release_free_memory()
    before = reset_peak()
    _, seconds = run_step(job)
    return seconds, max(0, peak_bytes() - before)


@torch.no_grad()
def approximation_error(contender: Contender, setting: Setting) -> float | None:
    """|approximation - exact| / |exact| (Frobenius) on evenly spaced query rows; None for whole layers.

    Kernelized Attention is the measure of itself and of Skyformer, softmax attention of all others.
    """
    if contender.layer:
        return None
    q, k, v = (x.detach() for x in setting.draw())
    torch.manual_seed(setting.seed)
    out = contender.build(setting)(q, k, v)
    rows = torch.linspace(0, setting.length - 1, min(ROWS_FOR_ERROR, setting.length)).long()
    exact = kernelized_attention if contender.name in ("kernelized", "skyformer") else softmax_attention
    expected = exact(q[:, :, rows].double(), k.double(), v.double())
    return relative_error(out[:, :, rows], expected)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


def describe_machine(threads: int) -> dict[str, str | int]:
    """What a figure must be read with."""
    return {
        "processor": _processor_name(),
        "cores": os.cpu_count() or 0,
        "threads": threads,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _processor_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"
