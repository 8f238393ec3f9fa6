"""Launch settings of the Triton kernels: a table by pass, head dim and dtype.

They were chosen by what Triton's compiler reports for sm_80 and sm_90: the largest blocks whose registers are not
spilled, and where possible such that two blocks run on a multiprocessor. `tests/ops/test_triton_compile.py` compiles
them all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_HEAD_DIM = 256
LARGEST_FLOAT32_BLOCK = 128
"""Without tensor cores, dot products of more features do not fit into registers, so they are computed in parts."""
PART = 64
"""Features in such a part."""

LARGEST_BLOCK = 128
"""Rows or columns."""

LARGEST_THIN_SIDE = 512
"""Up to this size of one side, one launch computes the gradients of both. Every program stores sums of that size."""


@dataclass(frozen=True)
class Config:
    """Launch settings: rows and columns of a block, warps, and stages of the software pipeline."""

    rows: int
    columns: int
    warps: int
    stages: int


HALF_CONFIGS = {
    # (outputs, padded head dim): outputs are "r" (forward), "t" (dx) or "rt" (dy and dv) of `gaussian_rows`, and
    # "long" or "thin" for `gaussian_gradients`, after the side of the gradient of v.
    ("r", 16): Config(64, 64, 4, 3),
    ("r", 32): Config(64, 64, 4, 3),
    ("r", 64): Config(64, 64, 4, 3),
    ("r", 128): Config(64, 32, 4, 2),
    ("r", 256): Config(64, 32, 8, 2),
    ("t", 16): Config(64, 64, 4, 2),
    ("t", 32): Config(64, 64, 4, 2),
    ("t", 64): Config(64, 32, 4, 2),
    ("t", 128): Config(64, 32, 4, 2),
    ("t", 256): Config(32, 32, 8, 1),
    ("rt", 16): Config(64, 64, 4, 2),
    ("rt", 32): Config(64, 64, 4, 2),
    ("rt", 64): Config(64, 32, 4, 2),
    ("rt", 128): Config(64, 32, 8, 2),
    ("rt", 256): Config(32, 32, 8, 1),
    ("long", 16): Config(64, 64, 4, 2),
    ("long", 32): Config(64, 32, 4, 1),
    ("long", 64): Config(32, 64, 4, 1),
    ("long", 128): Config(32, 64, 8, 1),
    ("long", 256): Config(32, 16, 8, 1),
    ("thin", 16): Config(64, 64, 4, 2),
    ("thin", 32): Config(64, 64, 4, 2),
    ("thin", 64): Config(64, 32, 4, 1),
    ("thin", 128): Config(32, 64, 8, 1),
    ("thin", 256): Config(32, 32, 8, 1),
}

PRECISE_CONFIGS = {
    ("r", 256): Config(32, 32, 8, 1),
    ("rt", 128): Config(32, 32, 4, 2),
    ("long", 64): Config(32, 32, 4, 2),
}
"""Where the second product of a float32 result in half precision needs smaller blocks."""

RAGGED_CONFIGS = {
    ("rt", 128): Config(32, 32, 4, 2),
    ("long", 32): Config(32, 32, 4, 1),
    ("long", 64): Config(32, 32, 4, 1),
    ("thin", 32): Config(32, 64, 4, 1),
    ("thin", 64): Config(32, 32, 4, 2),
}
"""Where the masks of head dims that are no powers of two do."""

FLOAT32_CONFIGS = {
    ("r", 16): Config(64, 32, 4, 2),
    ("r", 32): Config(32, 32, 4, 2),
    ("r", 64): Config(32, 32, 8, 1),
    ("r", 128): Config(16, 32, 8, 1),
    ("r", 256): Config(32, 32, 8, 1),
    ("t", 16): Config(32, 32, 4, 2),
    ("t", 32): Config(32, 32, 4, 1),
    ("t", 64): Config(32, 32, 8, 1),
    ("t", 128): Config(16, 16, 8, 1),
    ("t", 256): Config(16, 32, 4, 1),
    ("rt", 16): Config(32, 32, 4, 2),
    ("rt", 32): Config(32, 32, 4, 2),
    ("rt", 64): Config(16, 32, 4, 1),
    ("rt", 128): Config(16, 16, 8, 1),
    ("rt", 256): Config(32, 32, 8, 1),
    ("long", 16): Config(32, 32, 4, 1),
    ("long", 32): Config(32, 32, 4, 1),
    ("long", 64): Config(16, 32, 8, 1),
    ("long", 128): Config(16, 16, 8, 1),
    ("thin", 16): Config(32, 32, 4, 1),
    ("thin", 32): Config(32, 16, 8, 1),
    ("thin", 64): Config(32, 16, 8, 1),
    ("thin", 128): Config(16, 16, 8, 1),
}
"""Larger head dims have no entry for gradients in one launch: each part of the features would compute C again."""


def choose_config(
    outputs: str,
    head_dim: int,
    value_dim: int,
    num_rows: int,
    num_columns: int,
    dtype: torch.dtype,
    precise_r: bool = False,
    is_amd: bool = False,
) -> Config | None:
    """The settings for a pass that computes `outputs`, with smaller blocks where there are fewer rows or columns, or
    None if the pass is not available. Warps of AMD GPUs have twice as many threads, so four are enough."""
    table = FLOAT32_CONFIGS if dtype == torch.float32 else HALF_CONFIGS
    if dtype != torch.float32 and precise_r:
        table = table | PRECISE_CONFIGS
    if dtype != torch.float32 and any(padded(size) != size for size in (head_dim, value_dim)):
        table = table | RAGGED_CONFIGS
    config = table.get((outputs, padded(max(head_dim, value_dim))))
    if config is None:
        return None
    warps = 4 if is_amd else config.warps
    rows, columns = min(config.rows, padded(num_rows)), min(config.columns, padded(num_columns))
    return Config(rows, columns, warps, config.stages)


def padded(size: int) -> int:
    """The next power of two, at least 16: the smallest block that matrix instructions accept."""
    return max(16, 1 << (size - 1).bit_length())


def launch_options(config: Config) -> dict[str, int]:
    """The keyword arguments of a launch."""
    return {
        "BLOCK_M": config.rows,
        "BLOCK_N": config.columns,
        "num_warps": config.warps,
        "num_stages": config.stages,
    }
