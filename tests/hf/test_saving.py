"""Models on disk: whatever the attention, they come back as they were, with any Auto class, dtype or missing weight."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification

import skyformer.hf
from skyformer.hf import SkyformerForMaskedLM, SkyformerForSequenceClassification, SkyformerModel
from tests.hf.own_models import ATTENTIONS, classifier, grown, padded_batch, small_config

INPUTS = padded_batch(40, 30).model_inputs()


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_model_comes_back_as_it_was(attention: str, tmp_path: Path) -> None:
    model = grown(classifier(attention, seed=4))
    if attention == "performer":
        # As training does: what the seed would draw is not what the model has.
        model.skyformer.layers[0].attention.mechanism.redraw_projection()
    model.save_pretrained(tmp_path)
    torch.manual_seed(99)
    loaded, report = AutoModelForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is SkyformerForSequenceClassification
    assert not any(report.values())
    assert (tmp_path / "model.safetensors").exists()
    expected = model.state_dict()
    assert expected.keys() == loaded.state_dict().keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in loaded.state_dict().items())
    assert torch.equal(loaded(**INPUTS).logits, model(**INPUTS).logits)
    assert loaded.config.attention_options == model.config.attention_options


def test_the_auto_classes_know_the_models() -> None:
    skyformer.hf.modeling.register_models()
    config = small_config()
    for auto, expected in (
        (AutoModel, SkyformerModel),
        (AutoModelForSequenceClassification, SkyformerForSequenceClassification),
        (AutoModelForMaskedLM, SkyformerForMaskedLM),
    ):
        assert type(auto.from_config(config)) is expected


@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_are_stored_once_and_tied_again(tied: bool, tmp_path: Path) -> None:
    model = grown(SkyformerForMaskedLM(small_config(tie_word_embeddings=tied)).eval())
    model.save_pretrained(tmp_path)
    assert ("decoder.weight" in load_file(tmp_path / "model.safetensors")) is not tied
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert (loaded.decoder.weight is loaded.get_input_embeddings().weight) is tied
    assert torch.equal(loaded(**INPUTS).logits, model(**INPUTS).logits)


def test_one_body_for_all_heads(tmp_path: Path) -> None:
    model = grown(SkyformerForMaskedLM(small_config()).eval())
    model.save_pretrained(tmp_path)
    body = AutoModel.from_pretrained(tmp_path)
    expected = model.skyformer(**INPUTS).last_hidden_state
    assert torch.equal(body(**INPUTS).last_hidden_state, expected)
    text, report = SkyformerForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert torch.equal(text.skyformer(**INPUTS).last_hidden_state, expected)
    assert {name.split(".")[0] for name in report["missing_keys"]} == {"classifier"}
    assert text.classifier[0].weight.std() > 0.2
    assert text.classifier[0].bias.abs().max() == 0


def test_an_attention_put_into_a_trained_model_starts_as_a_fresh_one(tmp_path: Path) -> None:
    """Models are loaded without memory behind their weights; what the file lacks must be filled in after that."""
    trained = grown(classifier("softmax"))
    trained.save_pretrained(tmp_path)
    wanted = {
        "performer": {"num_features": 8},
        "linformer": {"num_features": 8},
        "nystromformer": {"conv_kernel_size": 5},
    }
    for attention, options in wanted.items():
        loaded = AutoModelForSequenceClassification.from_pretrained(
            tmp_path, attention=attention, attention_options=options
        )
        fresh = classifier(attention, attention_options=options)
        for name, weight in loaded.state_dict().items():
            if "mechanism" not in name:
                assert torch.equal(weight, trained.state_dict()[name])
        for old, new in zip(fresh.skyformer.layers, loaded.skyformer.layers, strict=True):
            _assert_alike(dict(old.attention.mechanism.state_dict()), dict(new.attention.mechanism.state_dict()))


def _assert_alike(fresh: dict[str, torch.Tensor], loaded: dict[str, torch.Tensor]) -> None:
    """The projection of performer comes from the seed; the others are drawn, from a distribution of known size."""
    assert fresh.keys() == loaded.keys()
    assert fresh
    for name, tensor in loaded.items():
        if name == "projection":
            assert torch.equal(tensor, fresh[name])
        else:
            assert 0.5 < tensor.std() / fresh[name].std() < 2


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_loading_in_half_precision(attention: str, tmp_path: Path) -> None:
    model = classifier(attention)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        out, expected = loaded(**INPUTS).logits, model(**INPUTS).logits
    torch.testing.assert_close(out.float(), expected, rtol=0, atol=0.2 * float(expected.abs().max()))


def test_a_model_made_in_half_precision_stays_there(tmp_path: Path) -> None:
    SkyformerModel(small_config()).to(torch.bfloat16).save_pretrained(tmp_path)
    assert AutoModel.from_pretrained(tmp_path).dtype == torch.bfloat16


def test_positions_can_be_stretched(tmp_path: Path) -> None:
    model = classifier()
    skyformer.hf.extend_positions(model, 80)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    ids = torch.randint(13, (1, 80))
    assert torch.equal(loaded(ids).logits, model(ids).logits)
