"""Dropout that is faster on the CPU: its mask takes 16 random bits per entry instead of a random number."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from skyformer.ops.noise import keep_mask, rounded_probability


class Dropout(nn.Dropout):
    """`nn.Dropout` with p rounded to a multiple of 2^-16; it draws from torch's global generator."""

    def forward(self, x: Tensor) -> Tensor:
        p = rounded_probability(self.p)
        packed = x.device.type == "cpu" and not torch.compiler.is_compiling()
        if not self.training or not packed or p == 0 or self.p == 1:
            return super().forward(x)
        return torch.where(keep_mask(x, p), x, 0) * (1 / (1 - p))
