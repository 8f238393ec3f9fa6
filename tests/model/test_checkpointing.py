"""Activation checkpointing saves memory and changes nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from skyformer import PairClassifier, SequenceClassifier
from tests.model.small import ATTENTIONS, draw_mask, draw_tokens, small_config


def gradients(model: SequenceClassifier, tokens: Tensor, mask: Tensor) -> list[Tensor]:
    torch.manual_seed(9)
    loss = model(tokens, mask).square().sum()
    return list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_gradients_are_identical(attention: str) -> None:
    tokens, mask = draw_tokens(3, 40), draw_mask(3, 40)
    plain = SequenceClassifier(small_config(attention, dropout=0.2)).train()
    frugal = SequenceClassifier(small_config(attention, dropout=0.2, checkpoint_activations=True)).train()
    frugal.load_state_dict(plain.state_dict())
    for p, f in zip(gradients(plain, tokens, mask), gradients(frugal, tokens, mask), strict=True):
        assert torch.equal(p, f)


def test_less_is_kept() -> None:
    tokens = draw_tokens(2, 40)
    kept = []
    for checkpointed in (False, True):
        model = SequenceClassifier(small_config("softmax", checkpoint_activations=checkpointed)).train()
        sizes: list[int] = []

        def note(x: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(x.numel())
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            model(tokens)
        kept.append(sum(sizes))
    assert kept[1] < kept[0] / 2


@pytest.mark.parametrize("cls", [SequenceClassifier, PairClassifier])
@pytest.mark.parametrize("interval", [1, 2, 3])
def test_performer_redraws_and_is_recomputed_as_it_was(
    cls: type[SequenceClassifier] | type[PairClassifier], interval: int
) -> None:
    """Four steps; a pair of sequences calls each layer twice before the backward, with a redraw in between."""
    tokens, mask = draw_tokens(3, 40), draw_mask(3, 40)
    inputs = (tokens, mask) if cls is SequenceClassifier else (tokens, tokens.flip(1), mask, mask)
    found = []
    for checkpointed in (False, True):
        torch.manual_seed(3)
        config = small_config(
            "performer",
            attention_options={"num_features": 8, "redraw_interval": interval},
            dropout=0.0,
            checkpoint_activations=checkpointed,
        )
        model = cls(config).double().train()
        first = model.encoder.layers[0].attention.attention.projection.clone()
        for _ in range(4):
            loss = model(*inputs).square().sum()
            found.append(torch.autograd.grad(loss, list(model.parameters())))
        assert not torch.equal(model.encoder.layers[0].attention.attention.projection, first)
    for plain, frugal in zip(found[:4], found[4:], strict=True):
        for p, f in zip(plain, frugal, strict=True):
            assert torch.equal(p, f)
