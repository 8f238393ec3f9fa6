"""Skyformer models that are small enough for tests, with weights that make differences visible."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from skyformer.attention import attention_options, list_attentions
from skyformer.hf import SkyformerConfig, SkyformerForSequenceClassification
from skyformer.hf.modeling import SkyformerPreTrainedModel

ATTENTIONS = list_attentions()
VOCAB, MAX_LENGTH = 13, 48
SMALL = {"num_landmarks": 8, "num_features": 8, "budget": 8, "chunk_size": 4, "num_buckets": 4, "block_size": 4}
"""Options, where a mechanism has them, that make it approximate already at 40 tokens."""

AnyModel = TypeVar("AnyModel", bound=SkyformerPreTrainedModel)


def small_config(attention: str = "skyformer", **settings: Any) -> SkyformerConfig:
    """16 features, 2 layers of 2 heads."""
    known = attention_options(attention)
    defaults: dict[str, Any] = {
        "vocab_size": VOCAB,
        "max_position_embeddings": MAX_LENGTH,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_labels": 3,
        "initializer_range": 0.3,
        "attention": attention,
        "attention_options": {option: size for option, size in SMALL.items() if option in known},
    }
    return SkyformerConfig(**{**defaults, **settings})


def classifier(attention: str = "skyformer", **settings: Any) -> SkyformerForSequenceClassification:
    """In `eval()`."""
    model: SkyformerForSequenceClassification = SkyformerForSequenceClassification(small_config(attention, **settings))
    return model.eval()


class Batch(NamedTuple):
    """Tokens (B, n), and 1 where they are real."""

    input_ids: Tensor
    attention_mask: Tensor

    def model_inputs(self) -> dict[str, Tensor]:
        return self._asdict()


def padded_batch(*lengths: int, side: str = "right", width: int = 40) -> Batch:
    """The same tokens for the same lengths, whatever the side and the width of the padding."""
    ids, mask = torch.zeros(2, len(lengths), width, dtype=torch.int64)
    for row, length in enumerate(lengths):
        place = slice(length) if side == "right" else slice(width - length, None)
        ids[row, place] = torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(row))
        mask[row, place] = 1
    return Batch(ids, mask)


def grown(model: AnyModel) -> AnyModel:
    """The same model with every parameter away from where it starts: norms off one, biases off zero."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def enable_checkpointing(model: PreTrainedModel, options: dict[str, Any] | None = None) -> None:
    """By the name of the method in the installed transformers, which changed in 5.23."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(options)
