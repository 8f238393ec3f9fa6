"""Interleaved timing: contenders run alternately in one process, so that a noisy moment affects all of them."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from skyformer.studies.record import significant

T = TypeVar("T")


def interleave(
    runs: Mapping[str, Callable[[], T]], repeats: int, before: Callable[[], object] = gc.collect, seed: int = 0
) -> dict[str, list[T]]:
    """Call every run `repeats` times, alternately and in a new random order each time.

    Args:
        runs: functions by name; each returns what it measured.
        before: called before each run, to bring the process into the same state.

    Returns:
        What each run returned, by name.
    """
    measured: dict[str, list[T]] = {name: [] for name in runs}
    order = random.Random(seed)
    for _ in range(repeats):
        for name in order.sample(list(runs), len(runs)):
            before()
            measured[name].append(runs[name]())
    return measured


def seconds_of(work: Callable[[], object]) -> float:
    """The seconds that one call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def rounded(seconds: Iterable[float]) -> tuple[float, ...]:
    """Seconds for the record, with four significant digits."""
    return tuple(significant(each) or 0.0 for each in seconds)
