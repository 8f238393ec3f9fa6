"""The targets for speed, memory and import time, on any machine: `make bench` runs this benchmark."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from skyformer.report.tables import Table, number
from skyformer.studies.base import Study, option
from skyformer.studies.benchmarks.attention import measure_fresh, time_interleaved
from skyformer.studies.benchmarks.contenders import PEERS, Shape, find_contender
from skyformer.studies.benchmarks.correctness import check_contender
from skyformer.studies.benchmarks.timing import StepTimes, Times, rounded
from skyformer.studies.registry import register_benchmark
from skyformer.studies.targets import Target, at_least, at_most

_IMPORT = "import time, torch; s = time.perf_counter(); import skyformer; print(time.perf_counter() - s)"


@dataclass(frozen=True)
class Options:
    million: bool = option(True, small=False, help="Also measure a million tokens.")


@dataclass(frozen=True)
class Cell:
    """quantity: "time" (interleaved), "memory" (in fresh processes) or "import"."""

    quantity: str
    length: int = 0
    batch: int = 1
    contenders: tuple[str, ...] = ()
    repeats: int = 3


@dataclass(frozen=True)
class Result(Times):
    """Times of every contender; the bytes are those of the last fresh process."""

    added_bytes: int | None = None
    input_bytes: int | None = None


LONG = Cell("time", 4096, 4, ("sdpa", "kernelized", "skyformer", "plain linformer"), 9)
SHORT = Cell("time", 1024, 16, ("sdpa", "skyformer", "plain linformer"), 15)
SKYFORMER_MEMORY = Cell("memory", 65536, 1, ("skyformer",))
KERNELIZED_MEMORY = Cell("memory", 65536, 1, ("kernelized",), 1)
MILLION = Cell("memory", 1048576, 1, ("skyformer",), 1)
IMPORT = Cell("import")
FAST_PEERS = tuple(peer for peer in PEERS if peer.rival not in ("bigbird", "reformer"))

Results = Mapping[Cell, Result]


def peers_cell() -> Cell:
    """Skyformer as a function and as a layer, and the installed packages that it is compared with."""
    peers = [peer.name for peer in FAST_PEERS if peer.available()]
    return Cell("time", LONG.length, LONG.batch, ("skyformer", "skyformer layer", *peers), 7)


@register_benchmark
class TargetsBenchmark(Study[Options, Cell, Result]):
    name = "targets"
    title = "The targets for speed, memory and import time: 2 heads of 32, 128 features, float32, forward and backward"
    is_timing_study, default_threads = True, 2

    def cells(self) -> Sequence[Cell]:
        million = (MILLION,) if self.options.million else ()
        return [LONG, SHORT, peers_cell(), SKYFORMER_MEMORY, KERNELIZED_MEMORY, *million, IMPORT]

    def measure(self, cell: Cell) -> Result:
        if cell.quantity == "import":
            return _result({"import": [_import_seconds() for _ in range(cell.repeats)]})
        shape = Shape(cell.length, cell.batch)
        contenders = [find_contender(name) for name in cell.contenders]
        for each in contenders:
            check_contender(each, shape)
        if cell.quantity == "time":
            times = time_interleaved(contenders, shape, cell.repeats)
            return _result({name: [step for _, step in taken] for name, taken in times.items()})
        fresh = [measure_fresh(cell.contenders[0], shape) for _ in range(cell.repeats)]
        times_of_steps = {cell.contenders[0]: [each.seconds for each in fresh]}
        return _result(times_of_steps, fresh[-1].added_bytes, fresh[-1].input_bytes)

    @classmethod
    def targets(cls, results: Results) -> Sequence[Target]:
        return [*_time_targets(results), *_peer_targets(results), *_memory_targets(results), *_import_target(results)]

    @classmethod
    def tables(cls, results: Results) -> Sequence[Table]:
        rows = [
            [f"{cell.length:,}", str(cell.batch), row.attention, number(1e3 * row.typical()), str(cell.repeats)]
            for cell, result in results.items()
            for row in result.rows
            if cell != IMPORT
        ]
        return [Table("Median times", ["tokens", "batch", "attention", "ms", "repetitions"], rows)]


def _import_seconds() -> float:
    """Seconds that `import skyformer` takes after `import torch`, in a new interpreter."""
    command = [sys.executable, "-c", _IMPORT]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def _result(times: Mapping[str, list[float]], added_bytes: int | None = None, input_bytes: int | None = None) -> Result:
    rows = tuple(StepTimes(name, (rounded(seconds),)) for name, seconds in times.items())
    return Result(rows, added_bytes, input_bytes)


def _size(cell: Cell) -> str:
    return f"B={cell.batch}, n={cell.length:,}"


def _time_targets(results: Results) -> Iterator[Target]:
    for cell, speed_up, share in ((LONG, 9, 1.15), (SHORT, 2, 1.3)):
        if cell in results:
            faster = results[cell].ratio("sdpa", "skyformer")
            yield at_least(f"{_size(cell)}: speed-up of skyformer over sdpa", faster, speed_up)
            slower = results[cell].ratio("skyformer", "plain linformer")
            yield at_most(f"{_size(cell)}: time of skyformer / plain linformer", slower, share)
    if LONG in results:
        ratio = results[LONG].ratio("kernelized", "sdpa")
        yield at_most(f"{_size(LONG)}: time of exact kernelized / sdpa", ratio, 1.1)


def _peer_targets(results: Results) -> Iterator[Target]:
    """Functions are compared with the function, layers with projections with the layer."""
    cell = next((each for each in results if "skyformer layer" in each.contenders), None)
    for peer in FAST_PEERS if cell else ():
        assert cell is not None
        ours = "skyformer layer" if peer.layer else "skyformer"
        what = f"{_size(cell)}: speed-up of {ours} over {peer.name}"
        if peer.name in cell.contenders:
            yield at_least(what, results[cell].ratio(peer.name, ours), 1)
        else:
            yield Target(what, "at least 1x", "not installed", False)


def _memory_targets(results: Results) -> Iterator[Target]:
    for cell in (SKYFORMER_MEMORY, KERNELIZED_MEMORY):
        result = results.get(cell)
        if result is not None and result.added_bytes is not None and result.input_bytes:
            what = f"{_size(cell)}: memory added by {cell.contenders[0]} / size of q, k, v"
            yield at_most(what, result.added_bytes / result.input_bytes, 4)
    million, shorter = results.get(MILLION), results.get(SKYFORMER_MEMORY)
    if million is not None and million.added_bytes is not None and million.input_bytes is not None:
        total = (million.added_bytes + 2 * million.input_bytes) / 1e9
        yield at_most(f"{_size(MILLION)}: memory of skyformer including inputs and gradients", total, 6, " GB")
        if shorter is not None:
            growth = million.rows[0].fastest() / (16 * shorter.rows[0].fastest())
            yield at_most(f"{_size(MILLION)}: time of skyformer / (16 x time at 65,536)", growth, 1.25)


def _import_target(results: Results) -> Iterator[Target]:
    if IMPORT in results:
        yield at_most("import skyformer after import torch", results[IMPORT].rows[0].fastest(), 0.3, " s")
