"""Dropout that is faster on the CPU: its mask takes 16 random bits per entry instead of a random number."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_LEVELS = 2**16


class Dropout(nn.Dropout):
    """`nn.Dropout` with p rounded to a multiple of 2^-16; it draws from torch's global generator."""

    def forward(self, x: Tensor) -> Tensor:
        dropped = round(self.p * _LEVELS)
        packed = x.device.type == "cpu" and not torch.compiler.is_compiling()
        if not self.training or not packed or dropped in (0, _LEVELS):
            return super().forward(x)
        return torch.where(_keep(x, dropped), x, 0) * (_LEVELS / (_LEVELS - dropped))


def _keep(x: Tensor, dropped: int) -> Tensor:
    """True with probability 1 - dropped / 2^16, in the shape of x; 64 random bits give four entries."""
    words = torch.empty(-(-x.numel() // 4), dtype=torch.int64, device=x.device).random_(-(2**63), None)
    return words.view(torch.int16)[: x.numel()].view(x.shape) >= dropped - _LEVELS // 2
