"""`skyformer demo`: what Skyformer is for, measured on this machine in a few minutes."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skyformer.cli.output import say

if TYPE_CHECKING:
    from skyformer.studies.demo import Timing, Training

_EXAMPLES = """
Examples:

skyformer demo

skyformer demo --seconds 120 --output results/longer  # train for longer

skyformer demo --seed 1 --threads 4
"""


def add_commands(app: typer.Typer) -> None:
    """Add the command of this module to `app`."""
    app.command("demo", epilog=_EXAMPLES)(demo)


def demo(
    output: Annotated[Path, typer.Option("--output", help="Folder for results and figures.", metavar="FOLDER")] = Path(
        "results/run"
    ),
    seconds: Annotated[float, typer.Option("--seconds", min=1, help="Training time of each model.")] = 45.0,
    longest: Annotated[int, typer.Option("--longest", min=1024, help="Longest sequence to time.")] = 65536,
    length: Annotated[int, typer.Option("--length", min=16, help="Sequence length of the training.")] = 4096,
    threads: Annotated[int, typer.Option("--threads", min=1, help="CPU threads.")] = 2,
    seed: Annotated[int, typer.Option("--seed", help="Seed of weights and sequences.")] = 0,
) -> None:
    """Compare outputs with the authors' code, time attention, and train Skyformer and softmax for the same time."""
    import torch

    from skyformer.studies.demo import (
        LEAST_SHARE,
        LENGTHS,
        SYMBOLS,
        WINDOW,
        compare_with_authors,
        share_of_cores,
        time_attentions,
        train,
        write_files,
    )

    share = share_of_cores(threads)
    torch.set_num_threads(threads)
    if share < LEAST_SHARE:
        say(
            f"Note: other programs are running, and this one gets {100 * share:.0f} % of its cores. The times "
            "below are disturbed; run it again when the machine is idle.\n"
        )
    errors = compare_with_authors()
    found = ", ".join(f"{name} {error:.0e}" for name, error in errors.items())
    say(f"1. Correct: relative errors against the outputs of the authors' code: {found}\n")

    say("2. Fast: attention alone, forward and backward, 2 heads of 32 (softmax is PyTorch's SDPA)")
    say(f"{'tokens':>9} {'attention':<11} {'seconds':>9} {'softmax / it':>13} {'memory MB':>10}")
    timings: list[Timing] = []
    for timing in time_attentions([each for each in LENGTHS if each <= longest]):
        timings.append(timing)
        say(_timing_line(timing, timings))

    say(
        f"\n3. Worth it: the same model trained for {seconds:g} s with each attention on sequences of {length:,} tokens"
    )
    say(
        f"   Which of {SYMBOLS} symbols is the most frequent? Only the output at the first position is read. "
        f"Accuracy: of the last {WINDOW} sequences, each seen for the first time."
    )
    trainings = [
        train(name, seconds, length=length, seed=seed, report=_Reporter(name, seconds / 6))
        for name in ("skyformer", "softmax")
    ]
    files = write_files(errors, timings, trainings, threads, length, output)
    say(f"\n{_verdict(errors, timings, trainings, seconds, length)}")
    say(f"\nfigures: {', '.join(str(file) for file in files if file.suffix == '.png')}; numbers: {files[0]}")
    say(f"next: {_command()} bench attention  # with repetitions, or docs/getting_started.md to use it in code")


def _command() -> str:
    """How to call this program again: it may be in an environment that is not activated."""
    return "skyformer" if shutil.which("skyformer") else f"{os.path.relpath(sys.executable)} -m skyformer"


def _timing_line(timing: Timing, timings: list[Timing]) -> str:
    start = f"{timing.length:>9,} {timing.attention:<11}"
    if timing.seconds is None or timing.added_bytes is None:
        return f"{start} {'not run: would take more than 10 s':>9}"
    ratio = _speedup(timing, timings)
    shown = f"{'-' if ratio is None else f'{ratio:.1f}x':>13}"
    return f"{start} {timing.seconds:>9.4f} {shown} {timing.added_bytes / 1e6:>10,.0f}"


def _speedup(timing: Timing, timings: list[Timing]) -> float | None:
    """The time of softmax attention at the same length divided by this one; None if either was not run."""
    softmax = next((t for t in timings if t.length == timing.length and t.attention == "softmax"), None)
    if softmax is None or softmax.seconds is None or timing.seconds is None:
        return None
    return softmax.seconds / timing.seconds


class _Reporter:
    """Prints the running accuracy every few seconds."""

    def __init__(self, name: str, every: float) -> None:
        self.name, self.every, self.next = name, every, every

    def __call__(self, seconds: float, steps: int, accuracy: float) -> None:
        if seconds >= self.next:
            self.next += self.every
            say(f"   {self.name:<10} {seconds:5.1f} s  {steps:>5,} steps  accuracy {100 * accuracy:5.1f} %")


def _verdict(
    errors: dict[str, float], timings: list[Timing], trainings: list[Training], seconds: float, length: int
) -> str:
    """What was shown, in words."""
    from skyformer.studies.demo import CHANCE, TEST_SEQUENCES

    ours, softmax = trainings
    compared = [t for t in timings if t.attention == "skyformer" and _speedup(t, timings) is not None]
    own = [t for t in timings if t.attention == "skyformer" and t.seconds is not None]
    last, longest = compared[-1], own[-1]
    speedup = _speedup(last, timings)
    lines = [
        "What this showed:",
        f"- Outputs agree with the authors' code to {max(errors.values()):.0e}.",
        f"- At {last.length:,} tokens Skyformer is {speedup:.2g} times as fast as softmax attention; at "
        f"{longest.length:,} tokens it takes {longest.seconds:.2f} s.",
        f"- In {seconds:g} s on sequences of {length:,} tokens, Skyformer trained {ours.steps:,} steps and softmax "
        f"attention {softmax.steps:,}; on {TEST_SEQUENCES} unseen sequences they are right in "
        f"{100 * ours.test_accuracy:.0f} % and {100 * softmax.test_accuracy:.0f} % (chance: {100 * CHANCE:g} %).",
    ]
    times = [each.seconds_until(0.75) for each in trainings]
    if times[0] is not None:
        theirs = f"softmax attention needed {times[1]:.0f} s" if times[1] is not None else "softmax attention did not"
        lines.append(f"- Skyformer reached 75 % after {times[0]:.0f} s; {theirs}.")
    stuck = [each.attention for each in trainings if not each.above_chance]
    if stuck:
        lines.append(f"- In this time, {' and '.join(stuck)} did not get above chance; --seconds trains for longer.")
    return "\n".join(lines)
