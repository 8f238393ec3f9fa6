"""The targets for speed, memory and import time, on any machine: `make bench` runs this benchmark."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from skyformer.report.tables import Table
from skyformer.studies.base import option
from skyformer.studies.benchmarks.attention import Cell, ContenderStudy, Result, Results, Row
from skyformer.studies.benchmarks.contenders import PEERS
from skyformer.studies.benchmarks.timing import rounded
from skyformer.studies.registry import register_benchmark
from skyformer.studies.targets import Target, at_least, at_most

LONG = Cell(4096, 4, contenders=("sdpa", "kernelized", "skyformer", "plain linformer"), repeats=9)
SHORT = Cell(1024, 16, contenders=("sdpa", "skyformer", "plain linformer"), repeats=15)
SKYFORMER_MEMORY = Cell(65536, contenders=("skyformer",), processes=3)
KERNELIZED_MEMORY = Cell(65536, contenders=("kernelized",))
MILLION = Cell(1048576, contenders=("skyformer",))
IMPORT = Cell(0, contenders=("import skyformer_attention",), processes=3)
FAST_PEERS = tuple(peer for peer in PEERS if peer.rival not in ("bigbird", "reformer", "softmax"))

_IMPORT = """
import time, torch
start = time.perf_counter()
from skyformer import skyformer_attention
print(time.perf_counter() - start)
"""


@dataclass(frozen=True)
class Options:
    million: bool = option(True, small=False, help="Also measure a million tokens.")


def peers_cell() -> Cell:
    """Skyformer as a function and as a layer, and the installed packages that it is compared with."""
    peers = [peer.name for peer in FAST_PEERS if peer.available()]
    return Cell(LONG.length, LONG.batch, contenders=("skyformer", "skyformer layer", *peers), repeats=7)


@register_benchmark
class TargetsBenchmark(ContenderStudy[Options]):
    name = "targets"
    title = "The targets for speed, memory and import time"
    options_type = Options

    def cells(self) -> Sequence[Cell]:
        million = (MILLION,) if self.options.million else ()
        return [LONG, SHORT, peers_cell(), SKYFORMER_MEMORY, KERNELIZED_MEMORY, *million, IMPORT]

    def measure(self, cell: Cell) -> Result:
        if cell != IMPORT:
            return super().measure(cell)
        seconds = rounded(_import_seconds() for _ in range(cell.processes))
        return Result((Row("import skyformer_attention", (), seconds, 0, 0, None),))

    @classmethod
    def targets(cls, results: Results) -> Sequence[Target]:
        return [*_time_targets(results), *_peer_targets(results), *_memory_targets(results), *_import_target(results)]

    @classmethod
    def tables(cls, results: Results) -> Sequence[Table]:
        measured = {cell: result for cell, result in results.items() if cell != IMPORT}
        return super().tables(measured) if measured else []


def _import_seconds() -> float:
    """Seconds that importing an attention takes after `import torch`, in a new interpreter. `import skyformer` alone
    imports nothing yet."""
    command = [sys.executable, "-c", _IMPORT]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def _time_targets(results: Results) -> Iterator[Target]:
    for cell, speed_up, share in ((LONG, 9, 1.15), (SHORT, 2, 1.3)):
        if cell in results:
            faster = results[cell].ratio("sdpa", "skyformer")
            yield at_least(f"{cell.size}: speed-up of skyformer over sdpa", faster, speed_up)
            slower = results[cell].ratio("skyformer", "plain linformer")
            yield at_most(f"{cell.size}: time of skyformer / plain linformer", slower, share)
    if LONG in results:
        ratio = results[LONG].ratio("kernelized", "sdpa")
        yield at_most(f"{LONG.size}: time of exact kernelized / sdpa", ratio, 1.1)


def _peer_targets(results: Results) -> Iterator[Target]:
    """Functions are compared with the function, layers with projections with the layer."""
    compared = [(cell, result) for cell, result in results.items() if "skyformer layer" in cell.contenders]
    for cell, result in compared:
        for peer in FAST_PEERS:
            ours = "skyformer layer" if peer.layer else "skyformer"
            what = f"{cell.size}: speed-up of {ours} over {peer.name}"
            if peer.name in cell.contenders:
                yield at_least(what, result.ratio(peer.name, ours), 1)
            else:
                yield Target(what, "at least 1x", "not installed", False)


def _memory_targets(results: Results) -> Iterator[Target]:
    first = {cell: result.rows[0] for cell, result in results.items()}
    for cell in (SKYFORMER_MEMORY, KERNELIZED_MEMORY):
        if cell in first:
            what = f"{cell.size}: memory added by {first[cell].name} / size of q, k, v"
            yield at_most(what, first[cell].added_bytes / first[cell].input_bytes, 4)
    if MILLION in first:
        million, size = first[MILLION], MILLION.size
        total = (million.added_bytes + 2 * million.input_bytes) / 1e9
        yield at_most(f"{size}: memory of skyformer including inputs and gradients", total, 6, " GB")
        if SKYFORMER_MEMORY in first:
            growth = min(million.step_seconds) / (16 * min(first[SKYFORMER_MEMORY].step_seconds))
            yield at_most(f"{size}: time of skyformer / (16 x time at 65,536)", growth, 1.25)


def _import_target(results: Results) -> Iterator[Target]:
    if IMPORT in results:
        seconds = min(results[IMPORT].rows[0].step_seconds)
        yield at_most("import skyformer_attention after import torch", seconds, 0.3, " s")
