"""`attn_implementation` of Skyformer models: the config's attention, another one, and back again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from skyformer.hf import SkyformerForSequenceClassification
from tests.hf.own_models import ATTENTIONS, classifier, enable_checkpointing, grown, padded_batch


@pytest.fixture
def model() -> SkyformerForSequenceClassification:
    return grown(classifier())


INPUTS = padded_batch(40, 30).model_inputs()


@pytest.mark.parametrize(
    ("name", "attention"), [("eager", "softmax"), ("sdpa", "softmax"), ("kernelized", "kernelized")]
)
def test_an_attention_by_name_equals_that_of_the_config(
    model: SkyformerForSequenceClassification, name: str, attention: str
) -> None:
    by_config = classifier(attention)
    by_config.load_state_dict(model.state_dict())
    expected = by_config(**INPUTS).logits
    before = model(**INPUTS).logits
    model.set_attn_implementation(name)
    torch.testing.assert_close(model(**INPUTS).logits, expected, rtol=0, atol=1e-5)
    model.set_attn_implementation("config")
    assert torch.equal(model(**INPUTS).logits, before)
    assert not torch.allclose(before, expected, atol=1e-3)


def test_the_implementation_is_not_saved_but_the_config_is(
    model: SkyformerForSequenceClassification, tmp_path: Path
) -> None:
    expected = model(**INPUTS).logits
    model.set_attn_implementation("eager")
    model.save_pretrained(tmp_path)
    loaded = SkyformerForSequenceClassification.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(**INPUTS).logits, expected, rtol=0, atol=1e-6)
    other = SkyformerForSequenceClassification.from_pretrained(tmp_path, attn_implementation="eager")
    assert torch.equal(other(**INPUTS).logits, model(**INPUTS).logits)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_under_another_attention(model: SkyformerForSequenceClassification, side: str) -> None:
    model.set_attn_implementation("sdpa")
    alone = model(padded_batch(40, 23).input_ids[1:, :23]).logits
    padded = model(**padded_batch(40, 23, side=side).model_inputs()).logits
    torch.testing.assert_close(padded[1:], alone, rtol=0, atol=1e-5)


def test_gradients_through_another_attention(model: SkyformerForSequenceClassification) -> None:
    model.set_attn_implementation("sdpa")
    enable_checkpointing(model.train())
    model(**INPUTS, labels=torch.tensor([0, 2])).loss.backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_the_weights_of_every_attention_multiply_its_values(attention: str) -> None:
    layer = grown(classifier(attention, num_hidden_layers=1)).skyformer.layers[0].attention
    x, mask = torch.randn(2, 40, 16), padded_batch(40, 30).attention_mask.bool()
    expected, none = layer(x, mask)
    out, weights = layer(x, mask, output_attentions=True)
    assert none is None
    assert weights.shape == (2, 2, 40, 40)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    value = layer.project_in(x).unflatten(-1, (3, 2, -1))[:, :, 2].transpose(1, 2)
    torch.testing.assert_close(
        layer.project_out((weights @ value).transpose(1, 2).flatten(2)), out, rtol=1e-4, atol=1e-5
    )
    assert not weights[1, :, :, 30:].any()


@pytest.mark.parametrize("name", ["config", "eager", "sdpa", "kernelized"])
def test_attention_weights_are_returned_on_request(model: SkyformerForSequenceClassification, name: str) -> None:
    model.set_attn_implementation(name)
    assert model(**INPUTS).attentions is None
    weights = model(**INPUTS, output_attentions=True).attentions
    assert [tuple(w.shape) for w in weights] == [(2, 2, 40, 40)] * 2
    assert weights[0][1, :, :, 30:].abs().max() < 1e-12
    model.config.output_attentions = True
    assert torch.equal(model(**INPUTS).attentions[0], weights[0])
    if name in ("eager", "sdpa"):
        torch.testing.assert_close(weights[0].sum(-1), torch.ones(2, 2, 40))


@pytest.mark.parametrize(
    ("name", "message"),
    [("flash_attention_2", "support|install"), ("flex_attention", "support|install"), ("skyfromer", "skyfromer")],
)
def test_unsupported_and_unknown_implementations_are_refused(
    model: SkyformerForSequenceClassification, name: str, message: str
) -> None:
    assert model._can_set_attn_implementation()
    with pytest.raises((ValueError, ImportError), match=message):
        model.set_attn_implementation(name)
    assert model.config._attn_implementation == "config"
