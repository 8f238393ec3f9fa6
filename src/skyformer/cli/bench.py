"""`skyformer bench`: measure attention on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from skyformer.bench.contenders import Setting, choose_contenders, missing_peers
from skyformer.bench.show import as_rivalry, as_table, draw
from skyformer.bench.study import run_benchmark
from skyformer.errors import InputError

app = typer.Typer(no_args_is_help=True, help="Measure time, memory and error of attention on this machine.")


@app.callback()
def _bench() -> None:
    """Keeps `attention` a sub-command."""


@app.command()
def attention(
    lengths: Annotated[str, typer.Option(help="Sequence lengths, separated by commas.")] = "1024,4096,16384,65536",
    attention: Annotated[
        str, typer.Option(help="Attentions to measure, separated by commas, or 'all' of them.")
    ] = "kernelized,skyformer",
    batch: Annotated[int, typer.Option(min=1, help="Batch size B.")] = 1,
    heads: Annotated[int, typer.Option(min=1, help="Heads H.")] = 2,
    head_dim: Annotated[int, typer.Option(min=1, help="Head dim P.")] = 32,
    landmarks: Annotated[int, typer.Option(min=1, help="Landmarks, or features, d.")] = 128,
    dtype: Annotated[str, typer.Option(help="float32, float64, bfloat16 or float16.")] = "float32",
    data: Annotated[str, typer.Option(help="Inputs: 'walk' (smooth sequences) or 'normal' (noise).")] = "walk",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 2,
    repeats: Annotated[int, typer.Option(min=1, help="Interleaved repetitions of each measurement.")] = 7,
    seed: Annotated[int, typer.Option(help="Seed of inputs and landmarks.")] = 0,
    peers: Annotated[
        bool, typer.Option("--peers/--no-peers", help="Also measure the packages of the extra 'peers'.")
    ] = False,
    output: Annotated[Path, typer.Option(help="Folder for attention.json, .png and .svg.")] = Path("results/bench"),
) -> None:
    """Exact Kernelized Attention and Skyformer beside F.scaled_dot_product_attention as the sequence grows.

    First each contender is checked against a dense float64 computation; one that fails stops the benchmark. Then peak
    memory is taken from a fresh process each, times from interleaved runs in one process (steps longer than 5 s are
    timed once), and the error against exact attention of the same kind.
    """
    console = Console()
    sizes = _parse_lengths(lengths)
    contenders = choose_contenders([name.strip() for name in attention.split(",")], peers)
    if peers and missing_peers():
        console.print(f"not installed, so left out: {', '.join(missing_peers())} (pip install 'skyformer[peers]')")
    setting = Setting(sizes[0], batch, heads, head_dim, landmarks, dtype, data, seed)
    command = " ".join(["skyformer", *sys.argv[1:]])
    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    steps = len(contenders) + len(sizes) * (2 * len(contenders) + 1)
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=steps)
        result = run_benchmark(
            contenders,
            setting,
            sizes,
            repeats,
            threads,
            command,
            report=lambda text: progress.update(task, description=text, advance=1),
            keep=lambda partial: partial.write(output / "attention.json"),
        )
    console.print(as_table(result))
    rivalry = as_rivalry(result)
    if rivalry is not None:
        console.print(rivalry)
    for file in (output / "attention.json", *draw(result, output)):
        console.print(f"wrote {file}")


def _parse_lengths(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"--lengths must be whole numbers separated by commas; got {text!r}") from None
    if min(sizes) < 1:
        raise InputError(f"--lengths must be at least 1; got {min(sizes)}")
    return sorted(set(sizes))
