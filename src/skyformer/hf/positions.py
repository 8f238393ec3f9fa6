"""Longer inputs for models with learned positions: their position embeddings are interpolated."""

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
    """Extends a model with learned positions (BERT and related models) to `max_length` tokens.

    The first and the last position keep their embeddings; those between are linear interpolations of the old ones. The
    config and the buffers are updated, so that the model can be saved and loaded again. Create the optimizer after this
    call, because the embeddings become a new parameter, and set `tokenizer.model_max_length` as well.

    Returns:
        The model itself.
    """
    check_at_least("max_length", max_length, 1)
    found = list(_position_embeddings(model))
    if not found:
        raise UnsupportedError(
            f"{type(model).__name__} has no learned position_embeddings of max_position_embeddings rows to extend. "
            "Rotary positions need no extension; call a vision model with interpolate_pos_encoding=True; extend a "
            "model of several parts part by part"
        )
    refuse_fixed_lengths(model)
    for owner, name, embedding in found:
        first = _first_position(embedding)
        current = embedding.num_embeddings - first
        if max_length < current:
            raise InputError(f"max_length must be at least the model's own {current}; got {max_length}")
        setattr(owner, name, _extended(embedding, first, max_length))
        _extend_buffers(owner, first + max_length)
    model.config.max_position_embeddings = first + max_length
    return model


def refuse_fixed_lengths(model: PreTrainedModel) -> None:
    """Raises for Linformer now; otherwise it would raise only at the first longer text."""
    for module in model.modules():
        if isinstance(module, LinformerAttention):
            raise UnsupportedError(
                f"'linformer' attention has projections of {module.max_length} tokens, which cannot be extended; use "
                "another attention, or train a model with a larger max_position_embeddings"
            )


def _position_embeddings(model: PreTrainedModel) -> Iterator[tuple[nn.Module, str, nn.Embedding]]:
    """Every embedding with as many rows as the config has positions: its module, its name there, and itself."""
    count = getattr(model.config, "max_position_embeddings", None)
    for owner in model.modules():
        for name in _EMBEDDINGS:
            embedding = getattr(owner, name, None)
            if isinstance(embedding, nn.Embedding) and embedding.num_embeddings == count:
                yield owner, name, embedding


def learned_positions(model: PreTrainedModel) -> int | None:
    """The number of tokens that a model has learned positions for; None if it has none of `max_position_embeddings`."""
    found = [embedding for _, _, embedding in _position_embeddings(model)]
    return min((each.num_embeddings - _first_position(each) for each in found), default=None)


def first_position(model: PreTrainedModel) -> int:
    """The row of a model's first position, 0 if it has no learned positions."""
    return next((_first_position(embedding) for _, _, embedding in _position_embeddings(model)), 0)


def _first_position(embedding: nn.Embedding) -> int:
    """The row of the first position: RoBERTa reserves the rows up to its padding index."""
    return 0 if embedding.padding_idx is None else embedding.padding_idx + 1


def _extended(embedding: nn.Embedding, first: int, length: int) -> nn.Embedding:
    weight = embedding.weight
    rows = torch.cat([weight[:first], _interpolated(weight[first:], length)])
    longer = nn.Embedding(rows.shape[0], rows.shape[1], embedding.padding_idx, device=weight.device, dtype=weight.dtype)
    longer.weight.copy_(rows)
    return longer.requires_grad_(weight.requires_grad).train(embedding.training)


def _interpolated(rows: Tensor, length: int) -> Tensor:
    """(n, E) to (length, E), with the same first and last row."""
    longer = F.interpolate(rows.float().mT[None], size=length, mode="linear", align_corners=True)
    return longer[0].mT.to(rows.dtype)


def _extend_buffers(owner: nn.Module, length: int) -> None:
    for name in _BUFFERS:
        buffer = getattr(owner, name, None)
        if isinstance(buffer, Tensor):
            numbers = torch.arange(length, device=buffer.device)
            setattr(owner, name, (numbers if name == "position_ids" else torch.zeros_like(numbers))[None])
