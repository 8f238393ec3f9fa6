"""Dropout that is faster on the CPU: its mask takes 16 random bits per entry instead of a random number."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from skyformer.ops.noise import draw_seed, keep_mask, mixed_seed, rounded_probability


class Dropout(nn.Dropout):
    """`nn.Dropout` with p rounded to a multiple of 2^-16; it draws from torch's global generator.

    Processes that share a sequence set `stream` to their rank. Each then drops other entries, but takes one number from
    the global generator, whatever the length of its piece, so that all generators stay in the same state.
    """

    stream: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        p = rounded_probability(self.p)
        if self.stream is not None and self.training and p > 0:
            seed = mixed_seed("dropout", draw_seed(None), self.stream)
            keep = keep_mask(x, p, torch.Generator(x.device).manual_seed(seed))
            return torch.where(keep, x, 0) * (1 / (1 - p))
        packed = x.device.type == "cpu" and not torch.compiler.is_compiling()
        if not self.training or not packed or p == 0 or self.p == 1:
            return super().forward(x)
        return torch.where(keep_mask(x, p), x, 0) * (1 / (1 - p))
