"""Interleaved timing: contenders run alternately in one process, so that a noisy moment affects all of them."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from skyformer.studies.record import significant

T = TypeVar("T")


@dataclass(frozen=True)
class StepTimes:
    """The seconds of one attention's training steps: for each batch, those of every repetition."""

    attention: str
    seconds: tuple[tuple[float, ...], ...]

    def typical(self) -> float:
        """The median of the repetitions, averaged over the batches."""
        return statistics.mean(statistics.median(times) for times in self.seconds)

    def fastest(self) -> float:
        return statistics.mean(min(times) for times in self.seconds)


@dataclass(frozen=True)
class Times:
    """The times of several attentions, measured alternately."""

    rows: tuple[StepTimes, ...]

    def typical(self) -> dict[str, float]:
        return {row.attention: row.typical() for row in self.rows}

    def ratio(self, one: str, other: str) -> float:
        """The typical time of one attention divided by that of another."""
        times = self.typical()
        return times[one] / times[other]


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


def rounded(seconds: list[float]) -> tuple[float, ...]:
    """Seconds for the record, with four significant digits."""
    return tuple(significant(each) or 0.0 for each in seconds)
