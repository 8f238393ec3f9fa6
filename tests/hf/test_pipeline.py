"""Pipelines from text to labels, with a tokenizer made here and models loaded from a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, pipeline

from skyformer.hf import SkyformerForMaskedLM, SkyformerForSequenceClassification
from tests.hf.own_models import MAX_LENGTH, small_config

WORDS = ["[PAD]", "[UNK]", "[MASK]", "a", "good", "bad", "film", "with", "long", "scenes", "and", "songs", "."]
TEXTS = ["a good film .", "a bad film with long scenes and long songs .", "good"]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="[PAD]",
        unk_token="[UNK]",
        mask_token="[MASK]",
        model_max_length=MAX_LENGTH,
    )


@pytest.mark.parametrize("side", ["right", "left"])
def test_text_classification_end_to_end(tokenizer: PreTrainedTokenizerFast, side: str, tmp_path: Path) -> None:
    names = {0: "negative", 1: "positive"}
    model = SkyformerForSequenceClassification(small_config(num_labels=2, id2label=names, pad_token_id=0))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    classify = pipeline("text-classification", model=str(tmp_path), device="cpu")
    classify.tokenizer.padding_side = side
    one_by_one = [classify(text, top_k=None) for text in TEXTS]
    together = classify(TEXTS, batch_size=3, top_k=None)
    for text, alone, batched in zip(TEXTS, one_by_one, together, strict=True):
        ids = torch.tensor([[WORDS.index(word) for word in text.split()]])
        expected = model.eval()(ids).logits.softmax(-1)[0].tolist()
        for found in (alone, batched):
            scores = {entry["label"]: entry["score"] for entry in found}
            assert [scores[names[i]] for i in range(2)] == pytest.approx(expected, abs=1e-5)
    cut = classify(" ".join(["good"] * 100), truncation=True)
    assert cut[0]["label"] in names.values()


def test_filling_a_mask(tokenizer: PreTrainedTokenizerFast) -> None:
    fill = pipeline("fill-mask", model=SkyformerForMaskedLM(small_config()).eval(), tokenizer=tokenizer, device="cpu")
    found = fill("a good [MASK] .", top_k=3)
    assert len(found) == 3
    assert all(entry["token_str"] in WORDS for entry in found)
