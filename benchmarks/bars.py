"""The package's promises of speed and memory, measured on this machine and printed with pass or fail.

    make bench            or            python benchmarks/bars.py [--quick]

Writes results/bars.json. `--quick` leaves out the million tokens. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from bar import Bar, at_least, at_most, keep, show

from skyformer.bench.contenders import (
    PEERS,
    PLAIN_LINFORMER,
    SDPA,
    Contender,
    Setting,
    attention_contender,
    layer_contender,
    missing_peers,
)
from skyformer.bench.correctness import check_contender
from skyformer.bench.measure import Timing, measure_fresh, time_interleaved

THREADS = 2
SKYFORMER, KERNELIZED = attention_contender("skyformer"), attention_contender("kernelized")
LONG = Setting(length=4096, batch=4)
SHORT = Setting(length=1024, batch=16)
IMPORT_SECONDS = "import time, torch; s = time.perf_counter(); import skyformer; print(time.perf_counter() - s)"


def times(contenders: list[Contender], setting: Setting, repeats: int) -> dict[str, Timing]:
    for contender in contenders:
        check_contender(contender, setting)
    return time_interleaved({c.name: c.job(setting) for c in contenders}, repeats)


def time_bars() -> list[Bar]:
    long = times([SDPA, KERNELIZED, SKYFORMER, PLAIN_LINFORMER], LONG, 9)
    short = times([SDPA, SKYFORMER, PLAIN_LINFORMER], SHORT, 15)
    at = "B=4, n=4096: "
    other = "B=16, n=1024: "
    return [
        at_least(at + "skyformer, times faster than sdpa", long["sdpa"].median / long["skyformer"].median, 9),
        at_most(at + "skyformer / plain linformer", long["skyformer"].median / long["plain linformer"].median, 1.15),
        at_least(other + "skyformer, times faster than sdpa", short["sdpa"].median / short["skyformer"].median, 2),
        at_most(
            other + "skyformer / plain linformer", short["skyformer"].median / short["plain linformer"].median, 1.3
        ),
        at_most(at + "exact kernelized / sdpa", long["kernelized"].median / long["sdpa"].median, 1.1),
    ]


def peer_bars() -> list[Bar]:
    """Functions face the function, layers with projections face the layer."""
    layer = layer_contender("skyformer")
    peers = [peer for peer in PEERS if peer.available() and peer.rival not in ("bigbird", "reformer")]
    taken = times([SKYFORMER, layer, *peers], LONG, 7)
    bars = []
    for peer in peers:
        ours = layer if peer.layer else SKYFORMER
        ratio = taken[peer.name].median / taken[ours.name].median
        bars.append(at_least(f"B=4, n=4096: {ours.name}, times faster than {peer.name}", ratio, 1))
    bars += [Bar(f"B=4, n=4096: {name}", "at least 1x", "not installed", False, 0.0) for name in missing_peers()]
    return bars


def memory_bars() -> list[Bar]:
    bars = []
    for name in ("skyformer", "kernelized"):
        fresh = measure_fresh(name, Setting(length=65536), THREADS)
        ratio = fresh.added_bytes / fresh.input_bytes
        bars.append(at_most(f"B=1, n=65,536: memory added by {name} / bytes of q, k, v", ratio, 4))
    return bars


def million_bars() -> list[Bar]:
    shorter = [measure_fresh("skyformer", Setting(length=65536), THREADS) for _ in range(3)]
    million = measure_fresh("skyformer", Setting(length=1048576), THREADS)
    total = (million.added_bytes + 2 * million.input_bytes) / 1e9
    growth = million.seconds / (16 * min(f.seconds for f in shorter))
    return [
        at_most("B=1, n=1,048,576: skyformer, inputs and all", total, 6, " GB"),
        at_most("B=1, n=1,048,576: skyformer time / (16 x that at 65,536)", growth, 1.25),
    ]


def import_bar() -> Bar:
    command = [sys.executable, "-c", IMPORT_SECONDS]
    seconds = min(float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(3))
    return at_most("import skyformer after import torch", seconds, 0.3, " s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="leave out the million tokens")
    parser.add_argument("--output", type=Path, default=Path("results/bars.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(THREADS)
    bars = [*time_bars(), *peer_bars(), *memory_bars(), *([] if arguments.quick else million_bars()), import_bar()]
    show(bars, f"{THREADS} threads, float32, forward and backward; 2 heads of 32, 128 features")
    command = "python benchmarks/bars.py" + (" --quick" if arguments.quick else "")
    keep(arguments.output, command, THREADS, bars=[asdict(bar) for bar in bars])
    sys.exit(0 if all(bar.passed for bar in bars) else 1)


if __name__ == "__main__":
    main()
