"""Every family in the table: with every token a landmark the approximation is the model's own attention, padding has no
say, gradients arrive, and the implementation can be switched."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from skyformer.errors import UnsupportedError
from skyformer.hf import uses_interface
from tests.helpers import refused
from tests.hf.families import BIASED, CAUSAL, ENCODERS, FIVE, SHORT, STRANGERS, Family, Inputs, model_of

PAGE = Path(__file__).parent.parent.parent / "docs" / "huggingface.md"
every_encoder = pytest.mark.parametrize("family", ENCODERS, ids=lambda family: family.title)
every_padded = pytest.mark.parametrize(
    "family", [f for f in ENCODERS if f.has_padding], ids=lambda family: family.title
)
every_decoder = pytest.mark.parametrize("family", CAUSAL, ids=lambda family: family.title)


def run(model: PreTrainedModel, implementation: str, inputs: Inputs) -> Tensor:
    """The hidden states of the last layer."""
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        out: Tensor = model.eval()(**inputs)[0]
    return out


def valid(out: Tensor, inputs: Inputs) -> Tensor:
    """The rows of tokens that are no padding."""
    mask = inputs.get("attention_mask")
    return out if mask is None or mask.shape != out.shape[:2] else out[mask.bool()]


def with_gradient(model: PreTrainedModel, implementation: str, inputs: Inputs) -> set[str]:
    """Which parameters get a gradient from all that the model returns."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    outputs = [out for out in model.train()(**inputs).to_tuple() if isinstance(out, Tensor)]
    torch.autograd.backward(outputs, [torch.randn_like(out) for out in outputs])
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name for name, grad in gradients.items() if bool(grad.isfinite().all()) and bool(grad.any())}


@every_encoder
def test_with_every_token_a_landmark_it_is_the_models_own_attention(family: Family) -> None:
    model, inputs = model_of(family), family.inputs()
    own = valid(run(model, "eager", inputs), inputs)
    torch.testing.assert_close(valid(run(model, "all-of-softmax", inputs), inputs), own, rtol=1e-4, atol=1e-4)
    assert (valid(run(model, "few", inputs), inputs) - own).abs().max() > 1e-2


@every_encoder
def test_with_every_query_a_landmark_the_approximation_is_the_models_own_attention(family: Family) -> None:
    model, inputs = model_of(family), family.inputs()
    inputs.pop("attention_mask", None)
    own = run(model, "eager", inputs)
    torch.testing.assert_close(run(model, "every-query", inputs), own, rtol=1e-4, atol=1e-4)


@every_padded
@pytest.mark.parametrize("implementation", ["few", "few-of-softmax", "kernelized"])
def test_padding_changes_nothing(family: Family, implementation: str) -> None:
    model, inputs = model_of(family), family.inputs()
    padded = run(model, implementation, inputs)[1, :SHORT]
    alone = {"input_ids": inputs["input_ids"][1:, :SHORT], "attention_mask": inputs["attention_mask"][1:, :SHORT]}
    torch.testing.assert_close(padded, run(model, implementation, alone)[0], rtol=0, atol=1e-5)


@every_encoder
def test_gradients_arrive_wherever_the_models_own_attention_sends_them(family: Family) -> None:
    model, inputs = model_of(family), family.inputs()
    expected = with_gradient(model, "eager", inputs)
    assert with_gradient(model, "few", inputs) == with_gradient(model, "few-of-softmax", inputs) == expected
    assert family not in FIVE or expected == {name for name, _ in model.named_parameters()} - {"embeddings.mask_token"}


@every_encoder
def test_switching_back_gives_the_models_own_attention_again(family: Family) -> None:
    model, inputs = model_of(family), family.inputs()
    first, between, again = (run(model, name, inputs) for name in ("eager", "skyformer", "eager"))
    assert torch.equal(first, again)
    assert not torch.equal(first, between)


@every_encoder
def test_the_weights_come_when_asked_for(family: Family) -> None:
    model, inputs = model_of(family), family.inputs()
    model.set_attn_implementation("eager")
    expected = model(**inputs, output_attentions=True).attentions
    model.set_attn_implementation("all-of-softmax")
    weights = model(**inputs, output_attentions=True).attentions
    assert len(weights) == len(expected) == model.config.num_hidden_layers
    torch.testing.assert_close(weights[0], expected[0], rtol=1e-4, atol=1e-4)


@every_decoder
def test_exact_attention_serves_decoders(family: Family) -> None:
    model, inputs = model_of(family), family.inputs()
    own, exact = (valid(run(model, name, inputs), inputs) for name in ("eager", "exact-softmax"))
    torch.testing.assert_close(exact, own, rtol=1e-4, atol=1e-4)
    assert run(model, "kernelized", inputs).isfinite().all()


@every_decoder
def test_the_approximation_refuses_decoders(family: Family) -> None:
    model = model_of(family)
    with refused(UnsupportedError, "'skyformer'", "causal", "attn_implementation='kernelized'"):
        run(model, "skyformer", family.inputs())


# Importing DeBERTa scripts a function.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", STRANGERS.values())
def test_strangers_do_not_ask_the_interface(name: str) -> None:
    model = getattr(transformers, name)
    assert not uses_interface(model)
    assert "ALL_ATTENTION_FUNCTIONS" not in inspect.getsource(sys.modules[model.__module__])


@pytest.mark.parametrize("name", BIASED.values())
def test_biased_models_pass_a_bias(name: str) -> None:
    model = getattr(transformers, name)
    assert uses_interface(model)
    assert "position_bias=position_bias" in inspect.getsource(sys.modules[model.__module__])


def listed(part: str) -> list[str]:
    """The first cells of the table between two comments of the page."""
    text = re.search(rf"<!-- {part}: begin -->(.*)<!-- {part}: end -->", PAGE.read_text(), re.DOTALL)
    assert text is not None
    return [line.split("|")[1].strip() for line in text[1].strip().splitlines()[2:]]


def test_the_page_lists_the_families_that_were_run() -> None:
    assert listed("encoders") == [family.title for family in ENCODERS]
    assert listed("decoders") == [family.title for family in CAUSAL]
    assert listed("strangers") == [*STRANGERS]
    assert listed("biased") == [*BIASED]
