"""Extended positions: both ends stay, the rest is interpolated, and config, buffers and checkpoints are updated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification, PreTrainedModel

from skyformer.errors import InputError, UnsupportedError
from skyformer.hf import extend_positions
from tests.helpers import refused
from tests.hf.families import BERT, BERT_FAMILY, ENCODERS, MODERN_FAMILY, Family, tokens
from tests.hf.own_models import classifier

EXTENDED = (
    "BertModel",
    "RobertaModel",
    "DistilBertModel",
    "ElectraModel",
    "AlbertModel",
    "XLMRobertaModel",
    "CamembertModel",
    "ErnieModel",
    "SiglipTextModel",
)
LONG = 200


def positions(model: PreTrainedModel) -> Tensor:
    (weight,) = [p for name, p in model.named_parameters() if "position_embedding" in name]
    return weight.detach()


@pytest.mark.parametrize("family", [f for f in ENCODERS if f.model in EXTENDED], ids=str)
def test_a_longer_text_runs_and_the_model_loads_again(family: Family, tmp_path: Path) -> None:
    model = family.build()
    before = positions(model)
    first = (
        0 if model.config.model_type not in ("roberta", "xlm-roberta", "camembert") else model.config.pad_token_id + 1
    )
    assert extend_positions(model, LONG) is model
    after = positions(model)
    assert torch.equal(after[: first + 1], before[: first + 1])
    assert torch.equal(after[-1], before[-1])
    assert len(after) == model.config.max_position_embeddings == first + LONG
    model.set_attn_implementation("few-tilted")
    long = {"input_ids": torch.randint(5, 50, (2, LONG)), "attention_mask": torch.ones(2, LONG, dtype=torch.long)}
    out = model(**long)[0]
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, attn_implementation="few-tilted").eval()
    torch.testing.assert_close(again(**long)[0], out)


def test_positions_between_are_linear_interpolations() -> None:
    model = BERT_FAMILY.build()
    before = positions(model)
    after = positions(extend_positions(model, 2 * len(before) - 1))
    torch.testing.assert_close(after[::2], before)
    torch.testing.assert_close(after[1::2], (before[1:] + before[:-1]) / 2)


def test_the_models_own_length_changes_nothing() -> None:
    model = BERT_FAMILY.build()
    expected = model(**tokens())[0]
    torch.testing.assert_close(extend_positions(model, 80)(**tokens())[0], expected)


def test_frozen_positions_stay_frozen_also_in_models_with_heads() -> None:
    model = BertForSequenceClassification(BertConfig(**BERT)).half()
    embedding = model.bert.embeddings.position_embeddings
    embedding.weight.requires_grad_(False)
    extend_positions(model, LONG)
    longer = model.bert.embeddings.position_embeddings
    assert not longer.weight.requires_grad
    assert longer.weight.dtype == torch.float16
    assert model.bert.config.max_position_embeddings == LONG


def test_bad_lengths_and_other_models_are_refused() -> None:
    with refused(InputError, "max_length", "at least", "80", "40"):
        extend_positions(BERT_FAMILY.build(), 40)
    with refused(InputError, "max_length", "0"):
        extend_positions(BERT_FAMILY.build(), 0)
    with refused(UnsupportedError, "ModernBertModel", "Rotary", "interpolate_pos_encoding"):
        extend_positions(MODERN_FAMILY.build(), LONG)
    with refused(UnsupportedError, "'linformer'", "48 tokens", "max_position_embeddings"):
        extend_positions(classifier("linformer"), LONG)


def test_positions_are_cut_and_appended() -> None:
    model = classifier()
    first = model.get_position_embeddings().weight.clone()
    count = len(first)
    model.resize_position_embeddings(count + 5)
    assert torch.equal(model.get_position_embeddings().weight[:count], first)
    assert model(torch.ones(1, count + 5, dtype=torch.int64)).logits.isfinite().all()
    model.resize_position_embeddings(count - 5)
    assert torch.equal(model.get_position_embeddings().weight, first[: count - 5])
    assert model.config.max_position_embeddings == count - 5
    with refused(InputError, "new_num_position_embeddings"):
        model.resize_position_embeddings(0)
    with refused(UnsupportedError, "linformer"):
        classifier("linformer").resize_position_embeddings(count + 5)
