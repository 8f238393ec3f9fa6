"""Longer inputs for models with learned positions: their embeddings stretched by interpolation."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from skyformer.attention.linformer import LinformerAttention
from skyformer.checks import check_at_least
from skyformer.errors import InputError, UnsupportedError

_EMBEDDINGS = ("position_embeddings", "position_embedding")
_BUFFERS = ("position_ids", "token_type_ids")


@torch.no_grad()
def extend_positions(model: PreTrainedModel, max_length: int) -> PreTrainedModel:
    """Let a model of learned positions (BERT and its relatives) take `max_length` tokens; returns the model itself.

    The first position and the last keep their embeddings, those between are read off the straight lines that join the
    old ones. The config and the buffers follow, so that the model can be saved and loaded again. Do this before an
    optimizer is made, for the embeddings become a new parameter; and raise `tokenizer.model_max_length`.
    """
    check_at_least("max_length", max_length, 1)
    found = list(_position_embeddings(model))
    if not found:
        raise UnsupportedError(
            f"{type(model).__name__} has no learned position_embeddings of max_position_embeddings rows to stretch. "
            "Rotary positions need none; a vision model is called with interpolate_pos_encoding=True; a model of "
            "several parts is stretched part by part"
        )
    _refuse_fixed_lengths(model)
    for owner, name, embedding in found:
        first = _first_position(embedding)
        current = embedding.num_embeddings - first
        if max_length < current:
            raise InputError(f"max_length must be at least the model's own {current}; got {max_length}")
        setattr(owner, name, _stretched(embedding, first, max_length))
        _lengthen_buffers(owner, first + max_length)
    model.config.max_position_embeddings = first + max_length
    return model


def _refuse_fixed_lengths(model: PreTrainedModel) -> None:
    """Linformer would refuse longer texts only when they come."""
    for module in model.modules():
        if isinstance(module, LinformerAttention):
            raise UnsupportedError(
                f"'linformer' attention has projections of {module.max_length} tokens, which cannot be stretched; use "
                "another attention, or train a model with more max_position_embeddings"
            )


def _position_embeddings(model: PreTrainedModel) -> Iterator[tuple[nn.Module, str, nn.Embedding]]:
    """Every embedding of as many positions as the config says, with the module that owns it."""
    count = getattr(model.config, "max_position_embeddings", None)
    for owner in model.modules():
        for name in _EMBEDDINGS:
            embedding = getattr(owner, name, None)
            if isinstance(embedding, nn.Embedding) and embedding.num_embeddings == count:
                yield owner, name, embedding


def first_position(model: PreTrainedModel) -> int:
    """Where the positions of a model begin, 0 if it has no table of them."""
    return next((_first_position(embedding) for _, _, embedding in _position_embeddings(model)), 0)


def _first_position(embedding: nn.Embedding) -> int:
    """Where positions begin: RoBERTa keeps the rows up to its padding index for padding."""
    return 0 if embedding.padding_idx is None else embedding.padding_idx + 1


def _stretched(embedding: nn.Embedding, first: int, length: int) -> nn.Embedding:
    weight = embedding.weight
    rows = torch.cat([weight[:first], _interpolated(weight[first:], length)])
    longer = nn.Embedding(rows.shape[0], rows.shape[1], embedding.padding_idx, device=weight.device, dtype=weight.dtype)
    longer.weight.copy_(rows)
    return longer.requires_grad_(weight.requires_grad).train(embedding.training)


def _interpolated(rows: Tensor, length: int) -> Tensor:
    """(n, E) to (length, E), the first and the last row kept."""
    stretched = F.interpolate(rows.float().mT[None], size=length, mode="linear", align_corners=True)
    return stretched[0].mT.to(rows.dtype)


def _lengthen_buffers(owner: nn.Module, length: int) -> None:
    for name in _BUFFERS:
        buffer = getattr(owner, name, None)
        if isinstance(buffer, Tensor):
            numbers = torch.arange(length, device=buffer.device)
            setattr(owner, name, (numbers if name == "position_ids" else torch.zeros_like(numbers))[None])
