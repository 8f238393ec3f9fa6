"""Saving and loading: every attention, every Auto class, half precision, and files that lack some weights."""

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
def test_a_saved_model_is_loaded_unchanged(attention: str, tmp_path: Path) -> None:
    model = grown(classifier(attention, seed=4))
    if attention == "performer":
        # As in training: afterwards the model differs from what its seed would draw.
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
    half = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        out, expected_logits = half(**INPUTS).logits.float(), model(**INPUTS).logits
    torch.testing.assert_close(out, expected_logits, rtol=0, atol=0.2 * float(expected_logits.abs().max()))


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


def test_models_with_different_heads_share_the_encoder(tmp_path: Path) -> None:
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


def test_a_new_attention_in_a_trained_model_is_initialised_as_in_a_new_model(tmp_path: Path) -> None:
    """Models are built on the meta device, so weights that the file lacks are initialised after loading."""
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
    """Performer's projection depends on the seed alone; the others are drawn from the same distribution."""
    assert fresh.keys() == loaded.keys()
    assert fresh
    for name, tensor in loaded.items():
        if name == "projection":
            assert torch.equal(tensor, fresh[name])
        else:
            assert 0.5 < tensor.std() / fresh[name].std() < 2


def test_extended_positions_and_half_precision_are_saved(tmp_path: Path) -> None:
    model = classifier().to(torch.bfloat16)
    skyformer.hf.extend_positions(model, 80)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16
    ids = torch.randint(13, (1, 80))
    assert torch.equal(loaded(ids).logits, model(ids).logits)
