"""Activation checkpointing saves memory and changes nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from skyformer import SequenceClassifier
from skyformer.model.checkpointing import run_checkpointed
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


class Counting(nn.Module):
    """Multiplies by a buffer that it redraws in every second call."""

    factor: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("factor", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.calls % 2:
            self.factor.copy_(torch.rand(3))
        self.calls += 1
        return (x * self.factor).sin() * torch.rand(3)


@pytest.mark.parametrize("calls_before", [0, 1])
def test_a_layer_that_counts_is_recomputed_as_it_was(calls_before: int) -> None:
    results = []
    for run in (lambda layer, x: layer(x), run_checkpointed):
        torch.manual_seed(2)
        layer, x = Counting(), torch.ones(3, requires_grad=True)
        layer.calls = calls_before
        out = run(layer, x)
        state = layer.calls, layer.factor.clone()
        out.sum().backward()
        assert layer.calls == state[0]
        assert torch.equal(layer.factor, state[1])
        results.append((out, x.grad, *state))
    for plain, checkpointed in zip(*results, strict=True):
        assert torch.equal(torch.as_tensor(plain), torch.as_tensor(checkpointed))
