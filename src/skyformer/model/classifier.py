"""Classifiers of a sequence, and of a pair of sequences with one shared encoder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from skyformer.model.config import ModelConfig, as_config
from skyformer.model.encoder import SkyformerEncoder
from skyformer.model.storage import StoredModel


class SequenceClassifier(StoredModel):
    """The encoder, the mean of its output over the real tokens, and an MLP.

    Args:
        config: a `ModelConfig`.
        settings: the settings of a `ModelConfig` instead, such as `vocab_size=256, max_length=1024, num_classes=10`.

    >>> import torch
    >>> model = SequenceClassifier(vocab_size=256, max_length=1024, num_classes=10, attention="skyformer")
    >>> tokens = torch.randint(256, (4, 300))
    >>> model(tokens).shape
    torch.Size([4, 10])
    >>> model(tokens, mask=torch.arange(300) < torch.tensor([[300], [200], [7], [1]])).shape
    torch.Size([4, 10])
    """

    def __init__(self, config: ModelConfig | None = None, **settings: Any) -> None:
        super().__init__(as_config(config, settings))
        self.encoder = SkyformerEncoder(self.config)
        self.pool: nn.Module = MeanPooling()
        self.head = _mlp_head(self.config.dim, self.config)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """tokens int64 (B, n), mask bool (B, n), True = a real token, to logits (B, num_classes)."""
        logits: Tensor = self.head(self.pool(self.encoder(tokens, mask), mask))
        return logits


class PairClassifier(StoredModel):
    """One encoder for both sequences, the means a and b of its outputs, and an MLP on [a, b, a * b, a - b].

    Args:
        config: a `ModelConfig`.
        settings: the settings of a `ModelConfig` instead, such as `vocab_size=256, max_length=4096`.
    """

    def __init__(self, config: ModelConfig | None = None, **settings: Any) -> None:
        super().__init__(as_config(config, settings))
        self.encoder = SkyformerEncoder(self.config)
        self.pool: nn.Module = MeanPooling()
        self.head = _mlp_head(4 * self.config.dim, self.config)

    def forward(
        self,
        first_tokens: Tensor,
        second_tokens: Tensor,
        first_mask: Tensor | None = None,
        second_mask: Tensor | None = None,
    ) -> Tensor:
        """Tokens int64 (B, n) and (B, m), masks bool of the same shapes, True = a real token, to (B, num_classes)."""
        a = self.pool(self.encoder(first_tokens, first_mask), first_mask)
        b = self.pool(self.encoder(second_tokens, second_mask), second_mask)
        logits: Tensor = self.head(torch.cat([a, b, a * b, a - b], -1))
        return logits


class MeanPooling(nn.Module):
    """`masked_mean`, as a module that another kind of pooling can take the place of."""

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return masked_mean(x, mask)


def masked_mean(x: Tensor, mask: Tensor | None) -> Tensor:
    """The mean of x (B, n, dim) over the real tokens: (B, dim), zeros if there are none."""
    total, count = masked_sum(x, mask)
    return (total / count.clamp(min=1)).to(x.dtype)


def masked_sum(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The sum of x (B, n, dim) over the real tokens (B, dim), and their number (B, 1)."""
    # The sum over a long sequence overflows in half precision.
    dtype = torch.promote_types(x.dtype, torch.float32)
    if mask is None:
        return x.sum(1, dtype=dtype), torch.full((x.shape[0], 1), x.shape[1], device=x.device)
    mask = mask.bool()
    return x.masked_fill(~mask.unsqueeze(-1), 0).sum(1, dtype=dtype), mask.sum(1, keepdim=True)


def _mlp_head(width: int, config: ModelConfig) -> nn.Sequential:
    activation = nn.ReLU() if config.head_activation == "relu" else nn.GELU()
    return nn.Sequential(
        nn.Linear(width, config.hidden_dim), activation, nn.Linear(config.hidden_dim, config.num_classes)
    )
