"""torch.func, vmap, forward mode, second derivatives and fake tensors for every attention. Traces and exports, which
take minutes, are in tests/outside/torch_transforms.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import skyformer
from skyformer.attention import list_attentions
from skyformer.attention.multihead import MultiheadAttention
from skyformer.attention.tilted import tilted_attention
from skyformer.errors import UnsupportedError
from tests.helpers import refused
from tests.outside import torch_transforms as checks

QUICK = [
    checks.check_grad,
    checks.check_gradients_per_sample,
    checks.check_jacrev,
    checks.check_jvp,
    checks.check_gradgradcheck,
    checks.check_fake_tensors,
]


# torch loops over the samples where it has no batched backward pass, that of its softmax attention for example.
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", list_attentions())
@pytest.mark.parametrize("check", QUICK, ids=lambda check: check.__name__)
def test_transform(check: checks.Check, name: str) -> None:
    check(checks.build(name), checks.key_mask())


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("function", "options"),
    [
        (skyformer.kernelized_attention, {}),
        (skyformer.kernelized_attention, {"is_causal": True}),
        (skyformer.kernelized_attention, {"kernel": "softmax"}),
        (skyformer.skyformer_attention, {"landmarks": torch.arange(0, 16, 4).expand(2, -1)}),
        (skyformer.softmax_attention, {}),
        (skyformer.softmax_attention, {"is_causal": True}),
        (tilted_attention, {"num_blocks": 2, "num_exact": 2, "num_cells": 2}),
    ],
)
def test_second_derivatives_of_the_functions(function: Any, options: dict[str, Any], masked: bool) -> None:
    torch.manual_seed(0)
    inputs = tuple(x.requires_grad_() for x in checks.draw(2, 8))
    mask = checks.key_mask(2, 8) if masked else None
    with sdpa_kernel(SDPBackend.MATH):
        assert torch.autograd.gradgradcheck(
            lambda *x: function(*x, key_mask=mask, **options), inputs, atol=1e-4, rtol=1e-3, fast_mode=True
        )


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", list_attentions())
def test_second_derivatives_of_a_layer(name: str, masked: bool) -> None:
    torch.manual_seed(0)
    layer = MultiheadAttention(8, 2, batch_first=True, attention=name, **checks.OPTIONS.get(name, {})).double().eval()
    padding = ~checks.key_mask(2, 8) if masked else None
    weight = layer.in_proj_weight.detach().clone().requires_grad_()
    x = torch.randn(2, 8, 8, dtype=torch.float64, requires_grad=True)

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        options = {"key_padding_mask": padding, "need_weights": False}
        out: torch.Tensor = torch.func.functional_call(layer, {"in_proj_weight": weight}, (x, x, x), options)[0]
        return out

    with sdpa_kernel(SDPBackend.MATH):
        assert torch.autograd.gradgradcheck(run, (x, weight), atol=1e-4, rtol=1e-3, fast_mode=True)


@pytest.mark.parametrize("name", ["kernelized", "skyformer", "softmax"])
def test_gradients_per_sample_of_a_layer_in_training(name: str) -> None:
    """As differentially private training needs them, with random landmarks or dropout for each sample."""
    options = {"num_landmarks": 4} if name == "skyformer" else {"dropout": 0.2}
    layer = MultiheadAttention(8, 2, batch_first=True, attention=name, **options).train()
    parameters = dict(layer.named_parameters())

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        out, _ = torch.func.functional_call(layer, parameters, (x, x, x), {"need_weights": False})
        return out.square().mean()

    x = torch.randn(3, 2, 12, 8)
    found = torch.vmap(torch.func.grad(loss), in_dims=(None, 0), randomness="different")(parameters, x)
    assert all(found[key].shape == (3, *value.shape) for key, value in parameters.items())
    of_samples = found["out_proj.weight"]
    assert of_samples.isfinite().all()
    assert not torch.allclose(of_samples[0], of_samples[1])


def test_softmax_attention_says_that_it_has_no_second_derivative() -> None:
    q, k, v = (x.requires_grad_() for x in checks.draw())
    (g,) = torch.autograd.grad(checks.build("softmax")(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="not implemented"):
        torch.autograd.grad(g.sum(), q)


def test_a_gradient_penalty_trains_the_right_thing() -> None:
    layer = MultiheadAttention(8, 2, batch_first=True, attention="skyformer", num_landmarks=6).double().eval()
    x = torch.randn(2, 10, 8, dtype=torch.float64)

    def penalty(layer: nn.Module) -> torch.Tensor:
        given = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(layer(given, given, given)[0].sum(), given, create_graph=True)
        return g.square().sum()

    weight, step = layer.out_proj.weight, 1e-6
    (found,) = torch.autograd.grad(penalty(layer), weight)
    direction = torch.randn_like(weight)
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            weight.add_(sign * step * direction)
        values.append(penalty(layer).item())
        with torch.no_grad():
            weight.sub_(sign * step * direction)
    torch.testing.assert_close(
        float((found * direction).sum()), (values[0] - values[1]) / (2 * step), rtol=1e-5, atol=0
    )


def test_tilted_attention_is_exported_for_any_batch_size_but_one_length() -> None:
    checks.check_program(checks.build("tilted"), masked=True, strict=False, any_length=False)
    with refused(UnsupportedError, "tilted attention must have a fixed length", "dynamic_shapes"):
        checks.check_program(checks.build("tilted"), masked=True, strict=False)
