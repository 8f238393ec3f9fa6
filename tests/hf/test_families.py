"""Every listed family: with enough landmarks or scores the approximations are the model's own attention, padding has
no effect, gradients reach the same parameters, and the implementation can be switched."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from skyformer.errors import UnsupportedError
from skyformer.hf import uses_interface
from tests.helpers import refused
from tests.hf.families import BIASED, CAUSAL, ENCODERS, OWN_ATTENTION, SHORT, Family, Inputs, model_of

PAGE = Path(__file__).parent.parent.parent / "docs" / "huggingface.md"
every_encoder = pytest.mark.parametrize("family", ENCODERS, ids=str)
every_decoder = pytest.mark.parametrize("family", CAUSAL, ids=str)


def run(model: PreTrainedModel, implementation: str, inputs: Inputs) -> Tensor:
    """The hidden states of the last layer."""
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        out: Tensor = model.eval()(**inputs)[0]
    return out


def valid(out: Tensor, inputs: Inputs) -> Tensor:
    """The rows of tokens that are not padding."""
    mask = inputs.get("attention_mask")
    return out if mask is None or mask.shape != out.shape[:2] else out[mask.bool()]


def with_gradient(model: PreTrainedModel, implementation: str, inputs: Inputs) -> set[str]:
    """The parameters that get a gradient from everything the model returns."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    outputs = [out for out in model.train()(**inputs).to_tuple() if isinstance(out, Tensor)]
    torch.autograd.backward(outputs, [torch.randn_like(out) for out in outputs])
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name for name, grad in gradients.items() if bool(grad.isfinite().all()) and bool(grad.any())}


@every_encoder
def test_with_enough_landmarks_it_is_the_models_own_attention(family: Family) -> None:
    model, inputs = model_of(family), family.inputs()
    own = run(model, "eager", inputs)
    every_token = run(model, "all-of-softmax", inputs)
    torch.testing.assert_close(valid(every_token, inputs), valid(own, inputs), rtol=1e-4, atol=1e-4)
    assert (valid(run(model, "few", inputs), inputs) - valid(own, inputs)).abs().max() > 1e-2
    every_key = run(model, "tilted", inputs)
    torch.testing.assert_close(valid(every_key, inputs), valid(own, inputs), rtol=1e-4, atol=1e-4)
    assert not torch.equal(run(model, "few-tilted", inputs), every_key)
    assert torch.equal(run(model, "eager", inputs), own)
    inputs.pop("attention_mask", None)
    every_query = run(model, "every-query", inputs)
    torch.testing.assert_close(every_query, run(model, "eager", inputs), rtol=1e-4, atol=1e-4)


@every_encoder
def test_the_weights_are_returned_on_request(family: Family) -> None:
    model, inputs = model_of(family), family.inputs()
    model.set_attn_implementation("eager")
    expected = model(**inputs, output_attentions=True).attentions
    model.set_attn_implementation("all-of-softmax")
    weights = model(**inputs, output_attentions=True).attentions
    assert len(weights) == len(expected) == model.config.num_hidden_layers
    torch.testing.assert_close(weights[0], expected[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", [family for family in ENCODERS if family.has_padding], ids=str)
def test_padding_changes_nothing(family: Family) -> None:
    model, inputs = model_of(family), family.inputs()
    alone = {"input_ids": inputs["input_ids"][1:, :SHORT], "attention_mask": inputs["attention_mask"][1:, :SHORT]}
    for implementation in ("few", "few-of-softmax", "few-tilted", "kernelized"):
        padded = run(model, implementation, inputs)[1, :SHORT]
        torch.testing.assert_close(padded, run(model, implementation, alone)[0], rtol=0, atol=1e-5)


@every_encoder
def test_gradients_reach_the_same_parameters_as_with_the_models_own_attention(family: Family) -> None:
    model, inputs = model_of(family), family.inputs()
    expected = with_gradient(model, "eager", inputs)
    for implementation in ("few", "few-of-softmax", "few-tilted"):
        assert with_gradient(model, implementation, inputs) == expected
    if family.model in ("BertModel", "RobertaModel", "DistilBertModel", "ModernBertModel", "ViTModel"):
        assert expected == {name for name, _ in model.named_parameters()} - {"embeddings.mask_token"}


@every_decoder
def test_causal_models_work_with_the_exact_attention_only(family: Family) -> None:
    model, inputs = model_of(family), family.inputs()
    own, exact = (valid(run(model, name, inputs), inputs) for name in ("eager", "exact-softmax"))
    torch.testing.assert_close(exact, own, rtol=1e-4, atol=1e-4)
    assert run(model, "kernelized", inputs).isfinite().all()
    with refused(UnsupportedError, "'skyformer'", "causal", "attn_implementation='kernelized'"):
        run(model, "skyformer", inputs)
    with refused(UnsupportedError, "'tilted'", "causal", "attn_implementation='sdpa'"):
        run(model, "tilted", inputs)


@pytest.mark.parametrize("family", BIASED, ids=str)
def test_models_with_a_position_bias_are_refused(family: Family) -> None:
    assert uses_interface(getattr(transformers, family.model))
    for implementation in ("skyformer", "tilted"):
        with refused(UnsupportedError, "position_bias", "'sdpa' or 'eager'"):
            run(family.build(), implementation, family.inputs())


# Importing DeBERTa scripts a function.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_models_with_their_own_attention_do_not_use_the_interface() -> None:
    assert [name for name in OWN_ATTENTION if uses_interface(getattr(transformers, name))] == []


def test_the_page_lists_the_families_of_the_tests() -> None:
    def listed(part: str) -> list[str]:
        text = re.search(rf"<!-- {part}: begin -->(.*)<!-- {part}: end -->", PAGE.read_text(), re.DOTALL)
        assert text is not None
        return re.findall(r"`([^`]+)`", " ".join(text[1].split()))

    assert listed("encoders") == [str(family) for family in ENCODERS]
    assert listed("decoders") == [str(family) for family in CAUSAL]
    assert listed("biased") == [str(family) for family in BIASED]
    assert listed("own attention") == list(OWN_ATTENTION)
