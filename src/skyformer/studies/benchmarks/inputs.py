"""Inputs of the attention benchmarks; speed does not depend on them, but the approximation error does."""

from __future__ import annotations

import torch
from torch import Tensor

from skyformer.errors import UnknownNameError

DATA = ("walk", "normal")


def make_tokens(
    kind: str, shape: tuple[int, int, int, int], generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v (B, H, n, P) in float32.

    - "walk": points on a smooth closed curve in P dimensions plus a little noise; queries and keys share the curve.
      Neighbours are similar, as in most real sequences.
    - "normal": independent standard normal entries, which no low-rank method can approximate well.
    """
    if kind not in DATA:
        raise UnknownNameError("kind of data", kind, DATA)
    if kind == "normal":
        q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
        return q, k, v
    batch, heads, length, dim = shape
    frequency = torch.randint(1, 9, (batch, heads, 1, dim), generator=generator)
    phase = torch.rand(batch, heads, 1, dim, generator=generator)
    position = torch.arange(length).view(1, 1, -1, 1) / length
    curve = torch.sin(2 * torch.pi * (frequency * position + phase))
    q, k = (curve + 0.1 * torch.randn(shape, generator=generator) for _ in range(2))
    return q, k, torch.randn(shape, generator=generator)
