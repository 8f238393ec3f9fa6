"""Embeddings: a learned vector for each token plus one for each position."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skyformer.checks import check_mask
from skyformer.errors import InputError, ShapeError

STD = 0.02
"""Standard deviation of the initial values of both tables."""


class Embeddings(nn.Module):
    """token[tokens] + position[0 ... n - 1]. Token 0 is not special: padding is what the mask says."""

    def __init__(self, vocab_size: int, max_length: int, dim: int) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.empty(vocab_size, dim))
        self.position = nn.Parameter(torch.empty(max_length, dim))
        for table in (self.token, self.position):
            nn.init.normal_(table, std=STD)

    def forward(self, tokens: Tensor, mask: Tensor | None = None, start: int = 0) -> Tensor:
        """tokens int64 (B, n), mask bool (B, n) to (B, n, dim). Masked positions may hold any number.

        `start` is the position of the first token, if these are not the first tokens of their sequences.
        """
        tokens = self.checked(tokens, mask)
        # In place, because the backward of a lookup needs its indices, not its result.
        return F.embedding(tokens, self.token).add_(self.position[start : start + tokens.shape[1]])

    def checked(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        """The tokens, zero where masked; an error if they cannot be embedded."""
        self._check_tokens(tokens)
        mask = check_mask("mask", mask, *tokens.shape)
        if mask is not None:
            tokens = tokens.masked_fill(~mask, 0)
        self._check_range(tokens)
        return tokens

    def _check_tokens(self, tokens: Tensor) -> None:
        if not isinstance(tokens, Tensor):
            raise InputError(f"tokens must be a tensor (B, n) of int64; got {type(tokens).__name__}")
        if tokens.dim() != 2:
            raise ShapeError(f"tokens must have 2 dimensions (B, n); got shape {tuple(tokens.shape)}")
        if tokens.dtype != torch.int64:
            raise InputError(f"tokens must be int64; got {tokens.dtype}. Convert them with tokens.long()")
        if tokens.shape[1] > self.position.shape[0]:
            raise ShapeError(
                f"tokens must be at most max_length = {self.position.shape[0]} long; got {tokens.shape[1]}. Cut the "
                "text, or build the model with a larger max_length"
            )

    def _check_range(self, tokens: Tensor) -> None:
        """Only on the CPU: reading the data of another device makes it wait, and while tracing there are no data."""
        if tokens.device.type != "cpu" or torch.compiler.is_compiling() or tokens.numel() == 0:
            return
        low, high = (int(bound) for bound in tokens.aminmax())
        if low < 0 or high >= self.token.shape[0]:
            raise InputError(
                f"tokens must be from 0 to vocab_size - 1 = {self.token.shape[0] - 1}; got numbers from {low} to {high}"
            )

    def extra_repr(self) -> str:
        return f"vocab_size={self.token.shape[0]}, max_length={self.position.shape[0]}, dim={self.token.shape[1]}"
