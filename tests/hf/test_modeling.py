"""The models: every attention, every kind of padding and of input, and agreement with this package's own models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import skyformer
from skyformer.errors import InputError, MaskError, ShapeError, UnknownNameError
from skyformer.hf import SkyformerForMaskedLM, SkyformerForSequenceClassification, SkyformerModel
from tests.helpers import refused
from tests.hf.own_models import (
    ATTENTIONS,
    MAX_LENGTH,
    VOCAB,
    classifier,
    enable_checkpointing,
    grown,
    padded_batch,
    small_config,
)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_every_parameter_gets_a_gradient(attention: str) -> None:
    batch = padded_batch(40, 30)
    model = classifier(attention, type_vocab_size=2).train()
    segments = torch.zeros_like(batch.input_ids)
    out = model(**batch.model_inputs(), token_type_ids=segments, labels=torch.tensor([0, 2]))
    out.loss.backward()
    assert out.logits.shape == (2, 3)
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0] == []


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_padding_changes_nothing_on_either_side(attention: str) -> None:
    model = grown(classifier(attention))
    right, left = (model(**padded_batch(40, 23, side=side).model_inputs()).logits for side in ("right", "left"))
    wider = model(**padded_batch(40, 23, width=MAX_LENGTH).model_inputs()).logits
    alone = model(padded_batch(40, 23).input_ids[1:, :23]).logits
    assert right.std() > 0.1
    for other in (left, wider):
        torch.testing.assert_close(other, right, rtol=0, atol=1e-5)
    torch.testing.assert_close(alone, right[1:], rtol=0, atol=1e-5)
    # Also where there is nothing but padding.
    assert model(**padded_batch(40, 0).model_inputs()).logits.isfinite().all()


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_half_precision_is_finite(attention: str) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        model = classifier(attention).to(dtype).train()
        out = model(**padded_batch(40, 30).model_inputs(), labels=torch.tensor([0, 2]))
        out.loss.backward()
        assert out.logits.dtype == dtype
        assert out.logits.isfinite().all()
        assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("attention", ["softmax", "skyformer", "linformer"])
def test_it_is_the_papers_classifier(attention: str) -> None:
    ours = skyformer.SequenceClassifier(small_config(attention, seed=2).model_settings()).eval()
    theirs = classifier(attention, seed=2)
    theirs.load_state_dict({_name_in_transformers(name): weight for name, weight in ours.state_dict().items()})
    batch = padded_batch(40, 30)
    expected = ours(batch.input_ids, batch.attention_mask.bool())
    torch.testing.assert_close(theirs(**batch.model_inputs()).logits, expected, rtol=0, atol=1e-6)


def _name_in_transformers(name: str) -> str:
    names = {
        "embeddings.token": "embeddings.word_embeddings.weight",
        "embeddings.position": "embeddings.position_embeddings.weight",
        "attention.attention.": "attention.mechanism.",
        "encoder.": "skyformer.",
        "head.": "classifier.",
    }
    for ours, theirs in names.items():
        name = name.replace(ours, theirs)
    return name


def test_models_with_different_attentions_start_with_the_same_weights() -> None:
    weights = []
    for attention in ATTENTIONS:
        torch.manual_seed(7)
        weights.append(classifier(attention).state_dict())
    shared = [name for name in weights[0] if "mechanism" not in name]
    assert len(shared) > 20
    for other in weights[1:]:
        assert all(torch.equal(other[name], weights[0][name]) for name in shared)


def test_evaluation_repeats_and_the_seed_matters() -> None:
    batch = padded_batch(40)
    model = classifier()
    other = classifier(seed=1)
    other.load_state_dict(model.state_dict())
    first = model(**batch.model_inputs()).logits
    assert torch.equal(model(**batch.model_inputs()).logits, first)
    assert not torch.equal(other(**batch.model_inputs()).logits, first)


def test_outputs_as_a_dict_and_as_a_tuple() -> None:
    model: SkyformerModel = SkyformerModel(small_config()).eval()
    inputs = padded_batch(40, 30).model_inputs()
    out = model(**inputs, output_hidden_states=True)
    assert list(out.keys()) == ["last_hidden_state", "pooler_output", "hidden_states"]
    assert [tuple(x.shape) for x in out.hidden_states] == [(2, 40, 16)] * 3
    assert torch.equal(out.hidden_states[-1], out.last_hidden_state)
    last, pooled = model(**inputs, return_dict=False)
    assert torch.equal(last, out.last_hidden_state)
    torch.testing.assert_close(pooled[1], last[1, :30].mean(0))
    assert list(SkyformerModel(model.config, add_pooling_layer=False)(**inputs).keys()) == ["last_hidden_state"]
    for head in (SkyformerForSequenceClassification, SkyformerForMaskedLM):
        with_head = head(small_config()).eval()
        out = with_head(**inputs, output_hidden_states=True)
        assert list(out.keys()) == ["logits", "hidden_states"]
        assert len(out.hidden_states) == 3
        (logits,) = with_head(**inputs, return_dict=False)
        assert torch.equal(logits, out.logits)
        with_head.config.return_dict = False
        assert type(with_head(**inputs)) is tuple


def test_embeddings_in_place_of_tokens() -> None:
    model = classifier()
    batch = padded_batch(40, 30, side="left")
    embedded = model.get_input_embeddings()(batch.input_ids)
    expected = model(**batch.model_inputs()).logits
    actual = model(inputs_embeds=embedded, attention_mask=batch.attention_mask).logits
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
    gradient = torch.autograd.grad(
        model(inputs_embeds=embedded, attention_mask=batch.attention_mask).logits.square().sum(), embedded
    )[0]
    assert gradient[1, :10].abs().max() == 0
    assert gradient[1, 10:].abs().min() > 0


def test_masks_of_any_dtype_and_arguments_that_are_off_change_nothing() -> None:
    model = classifier()
    ids, mask = padded_batch(40, 30)
    expected = model(ids, mask).logits
    for dtype in (torch.bool, torch.int32, torch.uint8, torch.float32, torch.bfloat16):
        assert torch.equal(model(ids, mask.to(dtype)).logits, expected)
    strange = ids.masked_fill(mask == 0, -100)
    assert torch.equal(model(strange, mask).logits, expected)
    off = {"use_cache": False, "past_key_values": None, "output_attentions": None, "return_dict": None}
    assert torch.equal(model(ids, mask, **off).logits, expected)


def test_batches_of_one_and_of_no_example() -> None:
    model = classifier()
    batch = padded_batch(40, 30)
    one = model(batch.input_ids[:1], batch.attention_mask[:1], labels=torch.tensor([1]))
    assert one.loss.dim() == 0
    torch.testing.assert_close(one.logits, model(**batch.model_inputs()).logits[:1], rtol=0, atol=1e-6)
    assert model(batch.input_ids[:0]).logits.shape == (0, 3)
    assert model(batch.input_ids[:, :1]).logits.isfinite().all()


def test_given_position_ids_are_used() -> None:
    model = classifier()
    ids = padded_batch(40).input_ids
    counted = torch.arange(40).unsqueeze(0)
    assert torch.equal(model(ids, position_ids=counted).logits, model(ids).logits)
    assert not torch.allclose(model(ids, position_ids=counted.flip(1)).logits, model(ids).logits)
    with refused(InputError, "position_ids", f"from 0 to {MAX_LENGTH - 1}", "max_position_embeddings", "50"):
        model(ids, position_ids=counted + 11)


def test_segments() -> None:
    ids = padded_batch(40).input_ids
    segments = torch.zeros_like(ids)
    without, with_two = classifier(), classifier(type_vocab_size=2)
    assert torch.equal(without(ids, token_type_ids=segments).logits, without(ids).logits)
    with refused(InputError, "token_type_ids", "type_vocab_size", "1"):
        without(ids, token_type_ids=segments + 1)
    first, second = (with_two(ids, token_type_ids=segments + kind).logits for kind in (0, 1))
    assert not torch.allclose(first, second)
    assert torch.equal(with_two(ids).logits, first)


WRONG: list[tuple[type[Exception], dict[str, Any], list[str]]] = [
    (InputError, {}, ["input_ids or inputs_embeds", "neither"]),
    (InputError, {"input_ids": torch.ones(1, 4).long(), "inputs_embeds": torch.ones(1, 4, 16)}, ["both"]),
    (ShapeError, {"input_ids": torch.ones(4).long()}, ["input_ids", "2 dimensions", "(4,)"]),
    (ShapeError, {"inputs_embeds": torch.ones(1, 4)}, ["inputs_embeds", "3 dimensions", "(1, 4)"]),
    (ShapeError, {"inputs_embeds": torch.ones(1, 4, 15)}, ["inputs_embeds", "hidden_size = 16", "15"]),
    (ShapeError, {"input_ids": torch.ones(1, 4)}, ["input_ids", "integers", "torch.float32"]),
    (
        InputError,
        {"input_ids": torch.tensor([[3, VOCAB]])},
        ["input_ids", f"0 to {VOCAB - 1}", "vocab_size", "3 to 13"],
    ),
    (ShapeError, {"input_ids": torch.ones(1, 49).long()}, ["max_position_embeddings = 48", "got 49", "truncation"]),
    (
        UnknownNameError,
        {"input_ids": torch.ones(1, 4).long(), "atention_mask": 1},
        ["Did you mean 'attention_mask'"],
    ),
    *(
        (MaskError, {"input_ids": torch.ones(2, 40).long(), "attention_mask": mask}, ["attention_mask", *words])
        for mask, words in [
            (torch.ones(1, 39), ["(2, 40)", "(1, 39)"]),
            (torch.ones(2, 1, 40, 40), ["(2, 40)", "(2, 1, 40, 40)"]),
            (torch.zeros(2, 40).fill_(-1e9), ["0 and 1", "-1000000000.0", "attention_mask == 0"]),
            ([[1] * 40] * 2, ["(2, 40)", "list"]),
        ]
    ),
]


@pytest.mark.parametrize(("error", "inputs", "words"), WRONG)
def test_wrong_inputs_are_named(error: type[Exception], inputs: dict[str, Any], words: list[str]) -> None:
    with refused(error, *words):
        classifier()(**inputs)


@pytest.mark.parametrize("attention", ["skyformer", "performer", "reformer", "linformer"])
def test_checkpointing_gives_the_same_gradients(attention: str) -> None:
    batch = padded_batch(40, 30)
    model = classifier(attention, hidden_dropout_prob=0.2).train()
    gradients = []
    for checkpointed in (False, True):
        if checkpointed:
            enable_checkpointing(model)
        model.zero_grad()
        torch.manual_seed(1)
        model(**batch.model_inputs(), labels=torch.tensor([0, 2])).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(layer.gradient_checkpointing for layer in model.skyformer.layers)
    assert all(torch.equal(plain, again) for plain, again in zip(*gradients, strict=True))


@pytest.mark.parametrize(
    ("problem", "num_labels", "labels"),
    [
        ("regression", 1, torch.tensor([0.5, -1.0])),
        ("single_label_classification", 3, torch.tensor([0, 2])),
        ("multi_label_classification", 3, torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])),
    ],
)
def test_labels_decide_the_loss(problem: str, num_labels: int, labels: Tensor) -> None:
    model = classifier(num_labels=num_labels)
    out = model(**padded_batch(40, 30).model_inputs(), labels=labels)
    losses = {
        "regression": lambda: torch.nn.functional.mse_loss(out.logits.squeeze(1), labels),
        "single_label_classification": lambda: torch.nn.functional.cross_entropy(out.logits, labels),
        "multi_label_classification": lambda: torch.nn.functional.binary_cross_entropy_with_logits(out.logits, labels),
    }
    assert model.config.problem_type == problem
    torch.testing.assert_close(out.loss, losses[problem]())


def test_masked_tokens_are_scored_with_their_embeddings() -> None:
    model = grown(SkyformerForMaskedLM(small_config()).eval())
    ids, mask = padded_batch(40, 30)
    labels = torch.full_like(ids, -100)
    labels[0, 3], labels[1, 7] = 5, 9
    out = model(ids, mask, labels=labels)
    assert out.logits.shape == (2, 40, VOCAB)
    expected = torch.nn.functional.cross_entropy(out.logits[[0, 1], [3, 7]], torch.tensor([5, 9]))
    torch.testing.assert_close(out.loss, expected)
    assert model.decoder.weight is model.get_input_embeddings().weight
    loose = SkyformerForMaskedLM(small_config(tie_word_embeddings=False))
    assert loose.decoder.weight is not loose.get_input_embeddings().weight


@pytest.mark.parametrize("size", [VOCAB + 3, VOCAB - 4])
def test_resizing_the_vocabulary(size: int) -> None:
    ids, mask = padded_batch(40, 30)
    ids = ids.clamp(max=VOCAB - 5)
    model = SkyformerForMaskedLM(small_config()).eval()
    before = model(ids, mask).logits
    model.resize_token_embeddings(size, mean_resizing=False)
    after = model(ids, mask).logits
    assert after.shape == (2, 40, size)
    assert model.config.vocab_size == model.get_input_embeddings().num_embeddings == size
    assert model.decoder.weight is model.get_input_embeddings().weight
    kept = min(size, VOCAB)
    torch.testing.assert_close(after[..., :kept], before[..., :kept], rtol=0, atol=1e-6)
    text = classifier()
    text.resize_token_embeddings(size, mean_resizing=False)
    assert text(ids, mask).logits.isfinite().all()
