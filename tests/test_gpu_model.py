"""The model of bytes and operations in docs/gpu.md: its tables and lengths, computed again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from skyformer.ops.triton_configs import Config
from skyformer.ops.triton_launches import GradientsLaunch, Sides

PAGE = (Path(__file__).parents[1] / "docs" / "gpu.md").read_text()
HEAD_DIM, LANDMARKS = 64, 128
GPUS = {"A100": (312e12, 2.04e12, 108 * 16 * 1.41e9), "H100": (989e12, 3.35e12, 132 * 16 * 1.755e9)}
"""Operations in bfloat16, bytes and exponentials per second."""


def rows_per_split(length: int, heads: int) -> int:
    x, y = (torch.empty(1, heads, n, HEAD_DIM, device="meta", dtype=torch.bfloat16) for n in (length, LANDMARKS))
    return min(length, GradientsLaunch.of(Sides.of(x, y, None, 1.0, False), Config(64, 32, 4, 1)).rows_per_split)


def skyformer_seconds(length: int, heads: int, gpu: str) -> float:
    """Forward and backward: every pass takes as long as the slowest of its bytes, operations and exponentials."""
    operations, bandwidth, exponentials = GPUS[gpu]
    product = 2 * LANDMARKS * HEAD_DIM
    sums = 2 * 4 * LANDMARKS * HEAD_DIM / rows_per_split(length, heads)
    passes = ((384, 3), (256, 2), (384 + 2 * sums, 6), (512 + sums, 5))
    seconds = (
        max(size / bandwidth, products * product / operations, LANDMARKS / exponentials) for size, products in passes
    )
    return heads * length * sum(seconds)


def flash_seconds(length: int, heads: int, gpu: str) -> float:
    operations, bandwidth, exponentials = GPUS[gpu]
    return heads * length * max(1500 / bandwidth, 14 * HEAD_DIM * length / operations, 2 * length / exponentials)


def first_length(is_faster: Callable[[int], bool]) -> str:
    """The first multiple of ten, as the page writes it."""
    return f"{next(n for n in range(100, 100_000, 10) if is_faster(n)):,}"


def test_times() -> None:
    for length in (1024, 4096, 16384, 65536):
        times = [1e3 * seconds(length, 64, gpu) for gpu in GPUS for seconds in (skyformer_seconds, flash_seconds)]
        cells = [f"{t:.2f}" if t < 1 else f"{t:.1f}" if t < 10 else f"{t:.0f}" for t in times]
        assert f"| {length:,} | {' | '.join(cells)} |" in PAGE
    assert [rows_per_split(n, 64) for n in (1024, 4096, 16384, 65536)] == [256, 512, 1024, 4096]


def test_lengths_from_which_skyformer_is_faster() -> None:
    def passes(gpu: str, ours: float = 1.0, flash: float = 1.0) -> str:
        return first_length(lambda n: skyformer_seconds(n, 64, gpu) / ours < flash_seconds(n, 64, gpu) / flash)

    def with_small_kernels(gpu: str, heads: int) -> str:
        return first_length(lambda n: skyformer_seconds(n, heads, gpu) + 2e-4 < flash_seconds(n, heads, gpu))

    text = " ".join(PAGE.split())
    assert f"equal at n = {passes('A100')} on an A100 and n = {passes('H100')} on an H100" in text
    lengths = {(gpu, heads): with_small_kernels(gpu, heads) for gpu in GPUS for heads in (64, 8)}
    assert f"from n = {lengths['A100', 64]} (A100) or {lengths['H100', 64]} (H100) with 64 heads" in text
    assert f"from n = {lengths['A100', 8]} or {lengths['H100', 8]} with 8" in text
    assert f"alone are equal at n = {passes('A100', 0.3, 0.6)} or {passes('H100', 0.3, 0.6)}" in text
