"""The attention benchmark: for each length, check, measure memory, time and error, and gather the rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from skyformer.bench.contenders import Contender, Setting
from skyformer.bench.correctness import check_contender
from skyformer.bench.measure import (
    SLOW_SECONDS,
    Fresh,
    Timing,
    approximation_error,
    describe_machine,
    measure_fresh,
    time_interleaved,
)

Report = Callable[[str], None]


@dataclass(frozen=True)
class Row:
    """One contender at one length; ratios are to `F.scaled_dot_product_attention`."""

    name: str
    layer: bool
    length: int
    forward_seconds: float | None
    step_seconds: float
    median_seconds: float
    how_timed: str
    added_bytes: int
    input_bytes: int
    error: float | None
    rival: str | None = None
    speedup: float | None = None
    memory_ratio: float | None = None


@dataclass(frozen=True)
class BenchResult:
    """All rows, and what they must be read with."""

    setting: Setting
    lengths: list[int]
    repeats: int
    machine: dict[str, str | int]
    command: str
    rows: list[Row] = field(default_factory=list)
    made: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self), indent=1) + "\n")
        partial.replace(path)


def run_benchmark(
    contenders: list[Contender],
    setting: Setting,
    lengths: list[int],
    repeats: int,
    threads: int,
    command: str,
    report: Report = lambda text: None,
    keep: Callable[[BenchResult], Any] = lambda result: None,
) -> BenchResult:
    """Every contender at every length. `keep` gets the result after each length, so that nothing finished is lost."""
    torch.set_num_threads(threads)
    for contender in contenders:
        report(f"checking {contender.name}")
        check_contender(contender, setting)
    result = BenchResult(setting, lengths, repeats, describe_machine(threads), command)
    for length in lengths:
        result.rows.extend(_measure_length(contenders, replace(setting, length=length), repeats, threads, report))
        keep(result)
    return result


def _measure_length(
    contenders: list[Contender], setting: Setting, repeats: int, threads: int, report: Report
) -> list[Row]:
    fresh: dict[str, Fresh] = {}
    for contender in contenders:
        report(f"{setting.length:,} tokens: memory of {contender.name}")
        fresh[contender.name] = measure_fresh(contender.name, setting, threads)
    quick = [c for c in contenders if fresh[c.name].seconds <= SLOW_SECONDS]
    report(f"{setting.length:,} tokens: times, interleaved")
    timings = time_interleaved({c.name: c.job(setting) for c in quick}, repeats)
    rows = []
    for contender in contenders:
        report(f"{setting.length:,} tokens: error of {contender.name}")
        timing = timings.get(contender.name) or _from_fresh(fresh[contender.name])
        rows.append(_row(contender, setting, timing, fresh[contender.name]))
    return [_with_ratios(row, rows[0]) for row in rows]


def _from_fresh(fresh: Fresh) -> Timing:
    return Timing(None, fresh.seconds, fresh.seconds, 1, "once, in its fresh process")


def _row(contender: Contender, setting: Setting, timing: Timing, fresh: Fresh) -> Row:
    exact = contender.name in ("sdpa", "kernelized")
    return Row(
        name=contender.name,
        layer=contender.layer,
        length=setting.length,
        forward_seconds=timing.forward,
        step_seconds=timing.step,
        median_seconds=timing.median,
        how_timed=timing.how,
        added_bytes=fresh.added_bytes,
        input_bytes=fresh.input_bytes,
        rival=None if contender.rival is None else contender.rival + (" layer" if contender.layer else ""),
        error=None if exact and setting.length > 16384 else approximation_error(contender, setting),
    )


def _with_ratios(row: Row, baseline: Row) -> Row:
    return replace(
        row,
        speedup=baseline.step_seconds / row.step_seconds,
        memory_ratio=row.added_bytes / max(1, baseline.added_bytes),
    )
