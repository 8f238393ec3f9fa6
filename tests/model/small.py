"""Models small enough for tests, one for each attention of the registry."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from skyformer import ModelConfig
from skyformer.attention import attention_options, list_attentions

ATTENTIONS = list_attentions()
VOCAB, MAX_LENGTH = 11, 48


def small_config(attention: str = "skyformer", **settings: Any) -> ModelConfig:
    """16 features and, where the mechanism has such an option, 8 landmarks, features or scores per query."""
    known = attention_options(attention)
    shrunk = {option: 8 for option in ("num_landmarks", "num_features", "budget") if option in known}
    defaults: dict[str, Any] = {
        "vocab_size": VOCAB,
        "max_length": MAX_LENGTH,
        "num_classes": 3,
        "dim": 16,
        "hidden_dim": 24,
        "attention": attention,
        "attention_options": shrunk,
    }
    return ModelConfig(**{**defaults, **settings})


def draw_tokens(batch: int, length: int) -> Tensor:
    return torch.randint(VOCAB, (batch, length))


def draw_mask(batch: int, length: int) -> Tensor:
    """Prefixes of random lengths, the first of them whole."""
    lengths = torch.randint(1, length + 1, (batch,))
    lengths[0] = length
    return torch.arange(length) < lengths[:, None]
