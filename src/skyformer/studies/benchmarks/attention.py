"""Time, memory and error of attentions as the sequence grows, beside `F.scaled_dot_product_attention`.

Every contender is first checked against a dense float64 computation; a wrong one stops the benchmark. Peak memory is
then measured in a fresh process for each contender, times are measured interleaved in one process, and the error is
that of the output against exact attention of the same kind.
"""

from __future__ import annotations

import gc
import signal
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from skyformer.errors import InputError, SkyformerError
from skyformer.functional import kernelized_attention, softmax_attention
from skyformer.processes import peak_bytes, release_free_memory, reset_peak, run_in_fresh_process
from skyformer.report.figures import Figure, Panel, Series
from skyformer.report.tables import NOTHING, Table, number
from skyformer.report.ticks import Unit
from skyformer.studies.base import OptionsT, Study, option
from skyformer.studies.benchmarks.contenders import (
    AUTHORS,
    PEERS,
    SDPA,
    Contender,
    Shape,
    Workload,
    choose_contenders,
    find_contender,
)
from skyformer.studies.benchmarks.correctness import check_contender, relative_error
from skyformer.studies.benchmarks.timing import interleave, rounded
from skyformer.studies.record import significant
from skyformer.studies.registry import register_benchmark

SLOW_SECONDS = 5.0
"""A step that takes longer in its fresh process is not repeated, because noise no longer matters."""

ROWS_FOR_ERROR = 512
LONGEST_EXACT_ERROR = 16384
"""Beyond this length, the rounding error of exact attentions is not measured: it takes long and stays the same."""


@dataclass(frozen=True)
class Options:
    lengths: tuple[int, ...] = option(
        (1024, 4096, 16384, 65536), small=(1024, 2048), least=1, required=True, help="Sequence lengths."
    )
    attention: tuple[str, ...] = option(
        ("kernelized", "skyformer"), required=True, help="Attentions to measure, or 'all' of them."
    )
    batch: int = option(1, least=1, help="Batch size B.")
    heads: int = option(2, least=1, help="Number of heads H.")
    head_dim: int = option(32, least=1, help="Head dimension P.")
    landmarks: int = option(128, least=1, help="Number of landmarks or features d.")
    dtype: str = option("float32", help="float32, float64, bfloat16 or float16.")
    data: str = option("walk", help="Inputs: 'walk' (smooth sequences) or 'normal' (noise).")
    repeats: int = option(7, small=2, least=1, help="Repetitions of each timing.")
    seed: int = option(0, help="Seed for inputs and landmarks.")
    device: str = option("cpu", help="'cpu', or a GPU such as 'cuda'.")
    peers: bool = option(False, help="Also measure other packages, those of the extra 'peers' that are installed.")
    authors: str | None = option(None, help="Also measure the authors' code, from this clone of their repository.")
    limit: float = option(120.0, above=0, help="Seconds; what takes longer for one step is left out at that length.")


@dataclass(frozen=True)
class Cell(Shape):
    """The contenders at one size.

    repeats: interleaved repetitions of each step; with 0, only the steps of the fresh processes are measured.
    processes: fresh processes for each contender.
    left_out: peers that cannot do this size or are not installed, each with the reason.
    """

    contenders: tuple[str, ...] = ()
    repeats: int = 0
    processes: int = 1
    left_out: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.size}: {', '.join(self.contenders)}"

    @property
    def size(self) -> str:
        return f"B={self.batch}, n={self.length:,}"


@dataclass(frozen=True)
class Fresh:
    """What a fresh process measured in its only step: seconds, bytes it added at most, and bytes of its inputs."""

    seconds: float
    added_bytes: int
    input_bytes: int


@dataclass(frozen=True)
class Row:
    """One contender at one size.

    forward_seconds is empty if the step was timed only in fresh processes; the bytes are those of the last of them.
    """

    name: str
    forward_seconds: tuple[float, ...]
    step_seconds: tuple[float, ...]
    added_bytes: int
    input_bytes: int
    error: float | None


@dataclass(frozen=True)
class Result:
    rows: tuple[Row, ...]
    left_out: tuple[str, ...] = ()
    """Contenders that were stopped, each with the reason."""

    def medians(self) -> dict[str, float]:
        """The median seconds of a step, by contender."""
        return {row.name: statistics.median(row.step_seconds) for row in self.rows}

    def ratio(self, one: str, other: str) -> float:
        """The median time of one contender divided by that of another."""
        medians = self.medians()
        return medians[one] / medians[other]


Results = Mapping[Cell, Result]


class ContenderStudy(Study[OptionsT, Cell, Result]):
    """Measures contenders at the sizes of its cells."""

    cell_type, result_type = Cell, Result
    is_timing_study = True

    authors: str | None = None
    """A clone of the authors' code."""
    limit: float | None = None
    """Seconds after which a step is stopped."""

    def measure(self, cell: Cell) -> Result:
        contenders = [find_contender(name, self.authors) for name in cell.contenders]
        for each in contenders:
            check_contender(each, cell)
        fresh, left_out = dict[str, list[Fresh]](), list[str]()
        for each in contenders:
            try:
                runs = [measure_fresh(each.name, cell, self.authors, self.limit) for _ in range(cell.processes)]
            except StoppedError as error:
                left_out.append(str(error))
            else:
                fresh[each.name] = runs
        kept = [each for each in contenders if each.name in fresh]
        quick = [each for each in kept if fresh[each.name][0].seconds <= SLOW_SECONDS]
        times = _time_interleaved(quick, cell) if cell.repeats else {}
        rows = tuple(_row(each, cell, fresh[each.name], times.get(each.name, [])) for each in kept)
        return Result(rows, tuple(left_out))

    @classmethod
    def tables(cls, results: Results) -> Sequence[Table]:
        return [_main_table(results), *_peers_table(results)]


@register_benchmark
class AttentionBenchmark(ContenderStudy[Options]):
    name = "attention"
    title = "Time, memory and error of attention as the sequence grows"
    options_type = Options

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.authors, self.limit = options.authors, options.limit

    def cells(self) -> Sequence[Cell]:
        chosen = self.options
        _check_device(chosen.device)
        shape = Shape(
            1,
            chosen.batch,
            chosen.heads,
            chosen.head_dim,
            chosen.landmarks,
            chosen.dtype,
            chosen.data,
            chosen.seed,
            chosen.device,
        )
        return [self._cell(replace(shape, length=length)) for length in sorted(chosen.lengths)]

    def _cell(self, shape: Shape) -> Cell:
        chosen = self.options
        names, left_out = choose_contenders(chosen.attention, chosen.peers, shape, chosen.authors)
        return Cell(**asdict(shape), contenders=names, repeats=self.options.repeats, left_out=left_out)

    @classmethod
    def figures(cls, results: Results) -> Sequence[Figure]:
        """Functions and layers in figures of their own, because layers include projections; the error in a third."""
        if not results:
            return []
        layers = {row.name for cell in results for row in results[cell].rows if _is_layer(row.name)}
        functions = {row.name for cell in results for row in results[cell].rows} - layers
        setting = _describe(results)
        drawn = [Figure("figure", f"Attention alone, {setting}", _cost_panels(results, functions), columns=2)]
        if layers:
            drawn.append(Figure("layers", f"Whole layers, {setting}", _cost_panels(results, layers), columns=2))
        error = _panel(results, functions, "Error", lambda row: row.error, y_label="relative error")
        return [*drawn, Figure("error", f"Error against exact attention, {setting}", [error], columns=1)]


def _is_layer(name: str) -> bool:
    return name.endswith(" layer") or any(peer.layer for peer in PEERS if peer.name == name)


def _cost_panels(results: Results, names: Collection[str]) -> list[Panel]:
    return [
        _panel(results, names, "Time, forward and backward", lambda row: min(row.step_seconds), unit=Unit.SECONDS),
        _panel(results, names, "Memory added", lambda row: row.added_bytes, unit=Unit.BYTES),
    ]


def _time_interleaved(contenders: Sequence[Contender], cell: Cell) -> dict[str, list[tuple[float, float]]]:
    """Seconds of every forward pass and of every whole step, by contender."""
    work = {each.name: Workload(each, cell) for each in contenders}
    for each in work.values():
        each.step()
        each.step()
    return interleave({name: each.step for name, each in work.items()}, cell.repeats)


class StoppedError(SkyformerError):
    """A step took longer than its limit, or did not fit into memory."""


def measure_fresh(name: str, shape: Shape, authors: str | None = None, limit: float | None = None) -> Fresh:
    """Measure one step of a contender in a fresh process; with a limit, `StoppedError` says why it did not end."""
    arguments = {"name": name, "cell": asdict(shape), "authors": authors, "limit": limit}
    run = run_in_fresh_process(measure_here, threads=torch.get_num_threads(), **arguments)
    if limit is not None and run.exit_code == -getattr(signal, "SIGALRM", 0):
        raise StoppedError(f"{name} takes more than {limit:g} s for a step")
    if limit is not None and run.out_of_memory:
        raise StoppedError(f"{name} needs more memory than there is")
    return Fresh(**run.result(f"{name} at length {shape.length}"))


def measure_here(
    name: str, cell: dict[str, Any], threads: int, authors: str | None = None, limit: float | None = None
) -> Fresh:
    """Measure one step of a contender in this process, which ends after `limit` seconds of it."""
    torch.set_num_threads(threads)
    contender, full = find_contender(name, authors), Cell(**cell)
    # A short step first, so that libraries and thread pools are loaded before the measurement.
    Workload(contender, contender.short(full)).step()
    work = Workload(contender, full)
    gc.collect()
    release_free_memory()
    before = _reset_peak_of(full.device)
    with _ending_after(limit):
        _, seconds = work.step()
    added = max(0, _peak_bytes_of(full.device) - before)
    return Fresh(seconds, added, sum(x.numel() * x.element_size() for x in work.inputs))


@contextmanager
def _ending_after(seconds: float | None) -> Iterator[None]:
    """End the process by SIGALRM if this takes longer; without such signals, as on Windows, it takes its time."""
    if seconds is None or not hasattr(signal, "setitimer"):
        yield
        return
    signal.setitimer(signal.ITIMER_REAL, seconds)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)


def _reset_peak_of(device: str) -> int:
    """Reset the peak memory of the device, for "cpu" that of this process; returns the bytes in use now."""
    if device == "cpu":
        return reset_peak()
    torch.accelerator.reset_peak_memory_stats(device)
    return torch.accelerator.memory_allocated(device)


def _peak_bytes_of(device: str) -> int:
    return peak_bytes() if device == "cpu" else torch.accelerator.max_memory_allocated(device)


@torch.no_grad()
def approximation_error(contender: Contender, shape: Shape) -> float | None:
    """|approximation - exact| / |exact| on evenly spaced query rows; None for layers.

    "Exact" is Kernelized Attention for itself and for Skyformer, and softmax attention for all others.
    """
    exact_itself = contender.name in (SDPA.name, "kernelized")
    if contender.layer or (exact_itself and shape.length > LONGEST_EXACT_ERROR):
        return None
    q, k, v = shape.draw()
    out = contender.build(shape)(q, k, v)
    rows = torch.linspace(0, shape.length - 1, min(ROWS_FOR_ERROR, shape.length)).long()
    gaussian = contender.name in ("kernelized", "skyformer", AUTHORS)
    exact = kernelized_attention if gaussian else softmax_attention
    expected = exact(q[:, :, rows].double(), k.double(), v.double())
    return significant(relative_error(out[:, :, rows], expected))


def _row(contender: Contender, cell: Cell, fresh: Sequence[Fresh], times: Sequence[tuple[float, float]]) -> Row:
    return Row(
        contender.name,
        rounded(forward for forward, _ in times),
        rounded([step for _, step in times] or [each.seconds for each in fresh]),
        fresh[-1].added_bytes,
        fresh[-1].input_bytes,
        approximation_error(contender, cell) if cell.repeats else None,
    )


def _main_table(results: Results) -> Table:
    rows: list[list[str]] = []
    rules: list[int] = []
    for cell, result in results.items():
        rules.append(len(rows))
        baseline = next((row for row in result.rows if row.name == SDPA.name), None)
        rows += [[f"{cell.batch} x {cell.length:,}", *_shown(row, baseline)] for row in result.rows]
    left_out = [
        f"n={cell.length:,}: {reason}"
        for cell, result in results.items()
        for reason in (*cell.left_out, *result.left_out)
    ]
    note = (
        "Best of all repetitions. MB: what one step adds to its inputs, in a fresh process. Speed-up and MB ratio "
        "compare with F.scaled_dot_product_attention (sdpa). Error: against exact attention of the same kind."
        + (f" Left out: {'; '.join(left_out)}." if left_out else "")
    )
    header = ["B x n", "attention", "forward ms", "step ms", "speed-up", "MB", "MB ratio", "error"]
    return Table(f"Forward and backward, {_describe(results)}", header, rows, note, rules=rules[1:])


def _shown(row: Row, baseline: Row | None) -> list[str]:
    step = min(row.step_seconds)
    return [
        row.name,
        number(1e3 * min(row.forward_seconds)) if row.forward_seconds else NOTHING,
        number(1e3 * step),
        NOTHING if baseline is None else f"{min(baseline.step_seconds) / step:.2f}x",
        number(row.added_bytes / 1e6),
        NOTHING if baseline is None else f"{row.added_bytes / max(1, baseline.added_bytes):.2f}x",
        NOTHING if row.error is None else f"{row.error:.1e}",
    ]


def _peers_table(results: Results) -> list[Table]:
    """This package against others with the same mechanism, by the median of whole steps."""
    rivals = {AUTHORS: "skyformer", **{peer.name: _ours(peer) for peer in PEERS}}
    rows = []
    for cell, result in results.items():
        for theirs, ours in rivals.items():
            if {ours, theirs} <= result.medians().keys():
                rows.append([f"{cell.length:,}", ours, theirs, f"{result.ratio(ours, theirs):.2f}x"])
    title = "Other packages with the same mechanism: our time / theirs"
    return [Table(title, ["tokens", "ours", "theirs", "ratio"], rows)] if rows else []


def _ours(peer: Contender) -> str:
    """What a peer is compared with."""
    if peer.rival == "softmax":
        return SDPA.name
    return f"{peer.rival} layer" if peer.layer else str(peer.rival)


def _panel(
    results: Results,
    names: Collection[str],
    title: str,
    value: Callable[[Row], float | None],
    y_label: str = "",
    unit: Unit = Unit.NUMBER,
) -> Panel:
    points: dict[str, list[tuple[int, float]]] = {}
    for cell, result in results.items():
        for row in result.rows:
            y = value(row)
            if row.name in names and y is not None and y > 1e-12:
                points.setdefault(row.name, []).append((cell.length, y))
    series = [Series(name, [x for x, _ in each], [y for _, y in each]) for name, each in points.items()]
    return Panel(title, "tokens", y_label, series, x_log=True, y_log=True, y_unit=unit)


def _check_device(device: str) -> None:
    """Refuse a device that torch does not have here."""
    present = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    names = ["cpu"]
    if present is not None:
        names += [present.type, *(f"{present.type}:{i}" for i in range(torch.accelerator.device_count()))]
    if device not in names:
        raise InputError(f"device must be one of {', '.join(map(repr, names))} on this machine; got {device!r}")


def _describe(results: Results) -> str:
    cell = next(iter(results))
    place = "" if cell.device == "cpu" else f" on {cell.device}"
    return (
        f"{cell.heads} heads of {cell.head_dim}, {cell.landmarks} features, {cell.dtype}{place}, inputs {cell.data!r}"
    )
