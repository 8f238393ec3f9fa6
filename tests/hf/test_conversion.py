"""Conversion between this package's models and the Hugging Face classes, model cards, and the further heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from skyformer import PairClassifier, SequenceClassifier, SkyformerEncoder
from skyformer.errors import DataError, InputError, UnsupportedError
from skyformer.hf import SkyformerConfig, SkyformerForMaskedLM, SkyformerModel, from_huggingface, to_huggingface
from tests.helpers import refused

SETTINGS: dict[str, Any] = {"vocab_size": 50, "max_length": 64, "num_classes": 3, "hidden_dim": 96, "dropout": 0.2}
PAPER: dict[str, Any] = {
    **dict.fromkeys(("embedding_dropout", "attention_output_dropout", "mlp_hidden_dropout", "mlp_output_dropout"), 0.1),
    "head_activation": "relu",
}
CASES = [
    ("skyformer", {"attention_options": {"num_landmarks": 8, "landmarks": "probe"}, "seed": 3}),
    ("linformer", {"attention_options": {"num_features": 4}, **PAPER}),
    ("performer", {}),
]
TOKENS = torch.randint(50, (2, 40), generator=torch.Generator().manual_seed(0))
MASK = torch.arange(40) < torch.tensor([[40], [25]])


@pytest.mark.parametrize(("attention", "more"), CASES, ids=[name for name, _ in CASES])
def test_there_and_back_with_the_same_outputs(attention: str, more: dict[str, Any], tmp_path: Path) -> None:
    own = SequenceClassifier(**SETTINGS, attention=attention, **more).eval()
    own.save_pretrained(tmp_path / "own")
    theirs = to_huggingface(tmp_path / "own", labels=["a", "b", "c"])
    expected = own(TOKENS, MASK)
    torch.testing.assert_close(theirs(TOKENS, MASK.long()).logits, expected, rtol=0, atol=1e-5)
    assert theirs.config.id2label == {0: "a", 1: "b", 2: "c"}
    theirs.save_pretrained(tmp_path / "theirs")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "theirs").eval()
    torch.testing.assert_close(loaded(TOKENS, MASK.long()).logits, expected, rtol=0, atol=1e-5)
    again = from_huggingface(tmp_path / "theirs")
    assert torch.equal(again(TOKENS, MASK), expected)
    for name in ("attention_options", "head_activation", "seed", "num_classes", "max_length"):
        assert getattr(again.config, name) == getattr(own.config, name)
    for name in ("embedding_dropout", "mlp_hidden_dropout", "attention_output_dropout", "mlp_output_dropout"):
        assert again.config.dropout_or(getattr(again.config, name)) == own.config.dropout_or(getattr(own.config, name))


def test_an_encoder_alone_and_its_dtype() -> None:
    own = SkyformerEncoder(vocab_size=50, max_length=64, attention="softmax").double().eval()
    theirs = to_huggingface(own)
    assert isinstance(theirs, SkyformerModel)
    torch.testing.assert_close(theirs(TOKENS).last_hidden_state, own(TOKENS))
    assert torch.equal(from_huggingface(theirs)(TOKENS), own(TOKENS))


def test_what_cannot_be_converted_is_refused(tmp_path: Path) -> None:
    with refused(UnsupportedError, "PairClassifier", "encoder"):
        to_huggingface(PairClassifier(vocab_size=9, max_length=8))
    with refused(UnsupportedError, "attention_output_dropout 0.3", "mlp_output_dropout 0.1"):
        to_huggingface(SequenceClassifier(vocab_size=9, max_length=8, attention_output_dropout=0.3))
    with refused(InputError, "labels", "2 names", "got 1"):
        to_huggingface(SequenceClassifier(vocab_size=9, max_length=8), labels=["a"])
    config = SkyformerConfig(vocab_size=9, max_position_embeddings=8)
    SkyformerForMaskedLM(config).save_pretrained(tmp_path)
    with refused(UnsupportedError, "SkyformerForMaskedLM", "no counterpart"):
        from_huggingface(tmp_path)
    with refused(DataError, "does not describe a model of this package"):
        to_huggingface(tmp_path)
    with refused(UnsupportedError, "type_vocab_size"):
        from_huggingface(SkyformerModel(SkyformerConfig(vocab_size=9, max_position_embeddings=8, type_vocab_size=2)))
    with refused(UnsupportedError, "layer_norm_eps must be 1e-05", "1e-12"):
        from_huggingface(SkyformerModel(SkyformerConfig(vocab_size=9, max_position_embeddings=8, layer_norm_eps=1e-12)))
    switched = SkyformerModel(config)
    switched.set_attn_implementation("tilted")
    with refused(UnsupportedError, "attn_implementation must be 'config'", "'tilted'"):
        from_huggingface(switched)


def test_a_model_card_is_written_once(tmp_path: Path) -> None:
    own = SequenceClassifier(**SETTINGS, attention_options={"num_landmarks": 8})
    model = to_huggingface(own, labels=["low", "middle", "high"])
    model.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    words = ("library_name: transformers", "pipeline_tag: text-classification", "low, middle, high", "num_landmarks")
    assert all(word in card for word in words)
    (tmp_path / "README.md").write_text("mine")
    model.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"


def test_the_card_is_what_is_uploaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library puts its own template into the folder just before the upload."""
    model = to_huggingface(SequenceClassifier(**SETTINGS))
    uploaded: list[str] = []

    def upload(self: object, working_dir: str, *args: object, **kwargs: object) -> None:
        uploaded.append((Path(working_dir) / "README.md").read_text())

    monkeypatch.setattr("transformers.PreTrainedModel._upload_modified_files", upload)
    (tmp_path / "README.md").write_text("This model card has been automatically generated.")
    model._upload_modified_files(tmp_path)
    assert "# SkyformerForSequenceClassification" in uploaded[0]


def test_heads_for_tokens_and_answers(tmp_path: Path) -> None:
    config = SkyformerConfig(vocab_size=50, max_position_embeddings=64, num_labels=5)
    tagger = AutoModelForTokenClassification.from_config(config)
    labels = torch.where(MASK, TOKENS % 5, -100)
    out = tagger(TOKENS, MASK.long(), labels=labels)
    expected = torch.nn.functional.cross_entropy(out.logits[MASK], labels[MASK])
    assert out.logits.shape == (2, 40, 5)
    torch.testing.assert_close(out.loss, expected)
    out.loss.backward()
    reader = AutoModelForQuestionAnswering.from_config(config)
    answer = reader(TOKENS, MASK.long(), start_positions=torch.tensor([3, 4]), end_positions=torch.tensor([5, 9]))
    assert answer.start_logits.shape == answer.end_logits.shape == (2, 40)
    answer.loss.backward()
    assert reader(TOKENS, return_dict=False)[0].shape == (2, 40)
    for model, kind in ((tagger, AutoModelForTokenClassification), (reader, AutoModelForQuestionAnswering)):
        model.save_pretrained(tmp_path / kind.__name__)
        assert type(kind.from_pretrained(tmp_path / kind.__name__)) is type(model)
        assert json.loads((tmp_path / kind.__name__ / "config.json").read_text())["model_type"] == "skyformer"
