"""Sequences in pieces: bytes sent per rank, peak memory and time, against one process with the same threads in all.

Every cell is one attention over one sequence, forward and backward, on fresh processes that are connected by gloo over
the loopback device. The bytes are what the system says each process wrote, so headers and the exchange of shapes and
options are included; peak memory includes the process itself.

traffic: bytes sent by a rank as the sequence grows. Besides the attention, no part of a layer sends anything in the
    forward pass. Queries do not travel around the ring, so each rank has only 1,024 of them there, to save time.
memory: peak memory of a rank and of one process.
long: Skyformer over two million tokens.
time: steps after a warm-up, each as long as its slowest rank, with the threads divided among the ranks.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import skyformer.distributed as pieces
from skyformer.functional import kernelized_attention, skyformer_attention
from skyformer.processes import (
    peak_bytes,
    release_free_memory,
    reset_peak,
    run_in_fresh_process,
    written_bytes,
)
from skyformer.report.figures import Figure, Mark, Panel, Series
from skyformer.report.tables import NOTHING, Table, number
from skyformer.report.ticks import Unit
from skyformer.studies.base import Study, check_names, option
from skyformer.studies.benchmarks.timing import rounded
from skyformer.studies.registry import register_benchmark
from skyformer.studies.targets import Target, at_most, close_to

PARTS = ("traffic", "memory", "long", "time")
SKYFORMER, RING = "skyformer", "kernelized"
LIMIT_GB = 8.0
MEMORY_SHARES, FEWEST_TOKENS = {SKYFORMER: 0.6, RING: 0.75}, 16384
"""The memory that each of two ranks may add, as a share of what one process adds, from this length on. Pieces on their
way around the ring take memory too."""
BYTES = 4
TRAFFIC_QUERIES = 1024


@dataclass(frozen=True)
class Options:
    parts: tuple[str, ...] = option(PARTS, required=True, help="Parts to measure.")
    lengths: tuple[int, ...] = option(
        (4096, 16384, 65536, 262144), small=(256, 1024), least=2, help="Tokens for the traffic."
    )
    memory_tokens: int = option(1048576, small=2048, least=2, help="Tokens for the memory of Skyformer.")
    ring_tokens: int = option(16384, small=1024, least=2, help="Tokens for the memory and time of the ring.")
    long_tokens: int = option(2097152, small=4096, least=2, help="Tokens of the long sequence.")
    time_lengths: tuple[int, ...] = option((16384, 262144), small=(1024,), least=2, help="Tokens for Skyformer's time.")
    ranks: int = option(2, least=2, help="Processes that share the sequence.")
    heads: int = option(2, least=1, help="Number of heads H.")
    head_dim: int = option(32, small=16, least=1, help="Head dimension P.")
    landmarks: int = option(128, small=16, least=1, help="Number of landmarks d.")
    repeats: int = option(5, small=1, least=1, help="Timed steps.")


@dataclass(frozen=True)
class Cell:
    part: str
    attention: str
    tokens: int
    ranks: int


@dataclass(frozen=True)
class Result:
    """Of the rank with the most: bytes sent in both passes; bytes at the peak, and added since the inputs existed;
    bytes of its inputs. Seconds of the first step, or of the timed ones. `expected_bytes` are those of the tensors that
    travel."""

    forward_bytes: int
    backward_bytes: int
    expected_bytes: int
    peak_bytes: int
    added_bytes: int
    input_bytes: int
    seconds: tuple[float, ...]


Results = Mapping[Cell, Result]


@register_benchmark
class DistributedBenchmark(Study[Options, Cell, Result]):
    name = "distributed"
    title = "Sequences in pieces: bytes sent, memory and time of ranks against one process, with targets"
    is_timing_study = True

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        check_names("part", options.parts, PARTS)

    def facts(self) -> Mapping[str, int]:
        return {name: getattr(self.options, name) for name in ("heads", "head_dim", "landmarks")}

    def cells(self) -> Sequence[Cell]:
        options, both = self.options, (1, self.options.ranks)
        sizes = [(SKYFORMER, options.memory_tokens), (RING, options.ring_tokens)]
        timed = [*((SKYFORMER, n) for n in options.time_lengths), (RING, options.ring_tokens)]
        found = {
            "traffic": [Cell("traffic", name, n, options.ranks) for name in (SKYFORMER, RING) for n in options.lengths],
            "memory": [Cell("memory", *each, ranks) for each in sizes for ranks in both],
            "long": [Cell("long", SKYFORMER, options.long_tokens, options.ranks)],
            "time": [Cell("time", *each, ranks) for each in timed for ranks in both],
        }
        return [cell for part in PARTS if part in options.parts for cell in found[part]]

    def measure(self, cell: Cell) -> Result:
        options = self.options
        found = run_ranks(
            cell.ranks,
            attention=cell.attention,
            tokens=cell.tokens,
            heads=options.heads,
            head_dim=options.head_dim,
            landmarks=options.landmarks,
            queries=TRAFFIC_QUERIES if (cell.part, cell.attention) == ("traffic", RING) else cell.tokens,
            threads=max(1, torch.get_num_threads() // cell.ranks),
            repeats=options.repeats if cell.part == "time" else 0,
        )
        most = {
            name: max(each[name] for each in found)
            for name in ("forward_bytes", "backward_bytes", "peak_bytes", "added_bytes", "input_bytes")
        }
        seconds = [max(taken) for taken in zip(*(each["seconds"] for each in found), strict=True)]
        return Result(expected_bytes=expected_bytes(cell, options), seconds=rounded(seconds), **most)

    @classmethod
    def targets(cls, results: Results) -> Sequence[Target]:
        return [*_traffic_targets(results), *_memory_targets(results)]

    @classmethod
    def tables(cls, results: Results) -> Sequence[Table]:
        found = [_traffic_table(results), _memory_table(results), _time_table(results)]
        return [table for table in found if table.rows]

    @classmethod
    def figures(cls, results: Results) -> Sequence[Figure]:
        found = [_series(results, SKYFORMER, "skyformer"), _series(results, RING, "kernelized (ring)")]
        lines = [series for series in found if series.x]
        if not lines:
            return []
        title = "Sent per rank, forward and backward"
        panel = Panel(title, "tokens", "", lines, x_log=True, y_log=True, y_unit=Unit.BYTES)
        return [Figure("figure", "What a layer sends to the other ranks", [panel])]


def expected_bytes(cell: Cell, options: Options) -> int:
    """The bytes of the tensors that a rank sends, forward and backward, in float32.

    An all-reduce over R ranks sends 2 (R - 1) / R of its tensor from each. Skyformer has two in each pass, of d x P and
    d x Pv per head; a ring sends R - 1 pieces of keys and values forward, as many again backward, and R of gradients.
    """
    ranks, pair = cell.ranks, 2 * options.head_dim * options.heads * BYTES
    if ranks == 1:
        return 0
    if cell.attention == SKYFORMER:
        return 2 * 2 * (ranks - 1) * options.landmarks * pair // ranks
    return (3 * ranks - 2) * (cell.tokens // ranks) * pair


def run_ranks(ranks: int, **arguments: Any) -> list[dict[str, Any]]:
    """What every rank measured, each in a fresh process."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(ranks) as pool:
        store = str(Path(folder) / "store")
        runs = [
            pool.submit(run_in_fresh_process, attend_on_rank, rank=rank, ranks=ranks, store=store, **arguments)
            for rank in range(ranks)
        ]
        return [run.result().result(f"rank {rank} of {ranks}") for rank, run in enumerate(runs)]


def attend_on_rank(
    *,
    rank: int,
    ranks: int,
    store: str,
    attention: str,
    tokens: int,
    heads: int,
    head_dim: int,
    landmarks: int,
    queries: int,
    threads: int,
    repeats: int,
) -> dict[str, Any]:
    """One forward and backward pass over this rank's piece with bytes and memory, then `repeats` timed ones; with at
    most `queries` queries."""
    import torch.distributed as dist

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    local: Callable[..., Tensor] = skyformer_attention if attention == SKYFORMER else kernelized_attention
    over_ranks: Callable[..., Tensor] = (
        pieces.skyformer_attention if attention == SKYFORMER else pieces.kernelized_attention
    )
    attend = partial(
        local if ranks == 1 else over_ranks, **({"num_landmarks": landmarks} if attention == SKYFORMER else {})
    )
    length = tokens // ranks + (rank < tokens % ranks)
    generator = torch.Generator().manual_seed(rank)
    sizes = [(1, heads, rows, head_dim) for rows in (min(queries, length), length, length)]
    inputs = [torch.randn(size, generator=generator).requires_grad_() for size in sizes]
    # The first call loads libraries.
    attend(*(torch.zeros(1, heads, 64, head_dim, requires_grad=True) for _ in range(3))).sum().backward()
    release_free_memory()
    before, start, first = reset_peak(), time.perf_counter(), written_bytes()
    out = attend(*inputs)
    middle = written_bytes()
    out.backward(out.detach())
    last, seconds, peak = written_bytes(), [time.perf_counter() - start], peak_bytes()
    for repeat in range(repeats):
        if ranks > 1:
            dist.barrier()
        start = time.perf_counter()
        out = attend(*(x.detach().requires_grad_() for x in inputs))
        out.backward(out.detach())
        seconds = [*(seconds if repeat else []), time.perf_counter() - start]
    if ranks > 1:
        # No rank leaves while another may still be sending.
        dist.barrier()
        dist.destroy_process_group()
    return {
        "forward_bytes": middle - first,
        "backward_bytes": last - middle,
        "peak_bytes": peak,
        "added_bytes": peak - before,
        "input_bytes": sum(x.nbytes for x in inputs),
        "seconds": seconds,
    }


def _of(results: Results, part: str, attention: str) -> dict[int, Result]:
    """By number of tokens."""
    return {cell.tokens: result for cell, result in results.items() if (cell.part, cell.attention) == (part, attention)}


def _total(result: Result) -> int:
    return result.forward_bytes + result.backward_bytes


def _traffic_targets(results: Results) -> list[Target]:
    found = []
    for attention, grows in ((SKYFORMER, False), (RING, True)):
        measured = sorted(_of(results, "traffic", attention).items())
        if len(measured) > 1:
            (few, least), (many, most) = measured[0], measured[-1]
            what = f"{attention}: bytes sent at n={many:,} / at n={few:,}"
            found.append(close_to(what, _total(most) / _total(least), many / few if grows else 1.0, 0.05))
    return found


def _memory_targets(results: Results) -> list[Target]:
    found = []
    for cell, result in results.items():
        alone = results.get(Cell(cell.part, cell.attention, cell.tokens, 1))
        where = f"{cell.attention}, n={cell.tokens:,}, {cell.ranks} ranks"
        if cell.part == "memory" and cell.ranks == 2 and cell.tokens >= FEWEST_TOKENS and alone is not None:
            what = f"{where}: memory added per rank / by one process"
            found.append(at_most(what, result.added_bytes / alone.added_bytes, MEMORY_SHARES[cell.attention]))
        if cell.part == "long":
            found.append(at_most(f"{where}: peak memory of a process", result.peak_bytes / 1e9, LIMIT_GB, " GB"))
    return found


def _traffic_table(results: Results) -> Table:
    rows = [
        [
            cell.attention,
            f"{cell.tokens:,}",
            str(cell.ranks),
            f"{result.forward_bytes:,}",
            f"{result.backward_bytes:,}",
            f"{_total(result) / result.expected_bytes:.3f}",
        ]
        for cell, result in results.items()
        if cell.part == "traffic"
    ]
    header = ["attention", "tokens", "ranks", "bytes sent forward", "bytes sent backward", "divided by the tensors'"]
    return Table("Traffic per rank and layer", header, rows)


def _memory_table(results: Results) -> Table:
    rows = [
        [
            cell.attention,
            f"{cell.tokens:,}",
            str(cell.ranks),
            f"{result.input_bytes / 1e9:.3f}",
            f"{result.added_bytes / 1e9:.3f}",
            f"{result.peak_bytes / 1e9:.2f}",
            number(result.seconds[0]),
        ]
        for cell, result in results.items()
        if cell.part in ("memory", "long")
    ]
    header = [
        "attention",
        "tokens",
        "ranks",
        "inputs, GB",
        "added, GB",
        "peak of the process, GB",
        "seconds, not repeated",
    ]
    return Table("Memory of a process, forward and backward", header, rows)


def _time_table(results: Results) -> Table:
    rows = []
    for cell, result in results.items():
        if cell.part == "time":
            alone = results.get(Cell(cell.part, cell.attention, cell.tokens, 1))
            seconds = statistics.median(result.seconds)
            ratio = NOTHING if alone is None else f"{seconds / statistics.median(alone.seconds):.2f}"
            rows.append([cell.attention, f"{cell.tokens:,}", str(cell.ranks), number(1e3 * seconds), ratio])
    header = ["attention", "tokens", "ranks", "milliseconds", "divided by one process"]
    note = "Median of a forward and backward pass; one process has as many threads as all ranks together."
    return Table("Time", header, rows, note)


def _series(results: Results, attention: str, label: str) -> Series:
    found = sorted(_of(results, "traffic", attention).items())
    return Series(label, [float(n) for n, _ in found], [float(_total(result)) for _, result in found], mark=Mark.LINE)
