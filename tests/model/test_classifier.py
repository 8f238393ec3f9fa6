"""The classifiers: padding, batch mates and black pixels change nothing that they should not."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyformer import PairClassifier, SequenceClassifier
from skyformer.attention import Promise, attention_class
from skyformer.model.classifier import masked_mean
from tests.model.small import ATTENTIONS, MAX_LENGTH, draw_mask, draw_tokens, small_config


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("batch", [1, 3])
def test_logits(attention: str, batch: int) -> None:
    model = SequenceClassifier(small_config(attention))
    tokens, mask = draw_tokens(batch, 20), draw_mask(batch, 20)
    assert model(tokens, mask).shape == (batch, 3)
    pair = PairClassifier(small_config(attention))
    assert pair(tokens, draw_tokens(batch, 7), mask, None).shape == (batch, 3)


def test_keywords_build_what_a_config_builds() -> None:
    config = small_config("kernelized")
    torch.manual_seed(1)
    by_config = SequenceClassifier(config)
    torch.manual_seed(1)
    by_keywords = SequenceClassifier(**config.model_dump())
    assert by_keywords.config == config
    tokens = draw_tokens(2, 9)
    assert torch.equal(by_config.eval()(tokens), by_keywords.eval()(tokens))


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("length", [3, 21])
def test_padding_changes_nothing(attention: str, length: int) -> None:
    if Promise.PADDING in attention_class(attention).cannot:
        pytest.skip(attention_class(attention).cannot[Promise.PADDING])
    model = SequenceClassifier(small_config(attention)).double().eval()
    tokens = draw_tokens(2, length)
    padded = torch.cat([tokens, draw_tokens(2, MAX_LENGTH - length)], 1)
    mask = (torch.arange(MAX_LENGTH) < length).expand(2, -1)
    torch.testing.assert_close(model(padded, mask), model(tokens), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_batch_mates_change_nothing(attention: str) -> None:
    if Promise.BATCH in attention_class(attention).cannot:
        pytest.skip(attention_class(attention).cannot[Promise.BATCH])
    model = SequenceClassifier(small_config(attention)).double().eval()
    tokens, mask = draw_tokens(3, 30), torch.rand(3, 30) > 0.3
    together = model(tokens, mask)
    for b in range(3):
        torch.testing.assert_close(model(tokens[b : b + 1], mask[b : b + 1])[0], together[b], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_fully_masked_example_is_finite(attention: str) -> None:
    model = SequenceClassifier(small_config(attention)).train()
    mask = torch.ones(2, 15, dtype=torch.bool)
    mask[1] = False
    logits = model(draw_tokens(2, 15), mask)
    assert logits.isfinite().all()
    logits.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_token_zero_is_a_token_like_any_other() -> None:
    model = SequenceClassifier(small_config("softmax")).eval()
    black = torch.zeros(1, 12, dtype=torch.int64)
    assert not torch.allclose(model(black), model(black[:, :5]))
    partly = black.clone()
    partly[:, 6:] = 4
    model(partly).sum().backward()
    gradient = model.encoder.embeddings.token.grad
    assert gradient is not None
    assert (gradient[0] != 0).any()


@given(data=st.data())
def test_masked_mean_is_the_mean_of_what_is_real(data: st.DataObject) -> None:
    batch, length = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9))
    bits = data.draw(st.lists(st.booleans(), min_size=batch * length, max_size=batch * length))
    mask = torch.tensor(bits).view(batch, length)
    x = torch.randn(batch, length, 4, dtype=torch.float64).masked_fill(~mask[..., None], float("nan"))
    pooled = masked_mean(x, mask)
    for b in range(batch):
        expected = x[b, mask[b]].mean(0) if mask[b].any() else torch.zeros(4, dtype=torch.float64)
        torch.testing.assert_close(pooled[b], expected)


def test_masked_mean_in_half_precision_does_not_overflow() -> None:
    x = torch.full((1, 4000, 2), 60.0, dtype=torch.float16)
    assert (masked_mean(x, None) == 60).all()
    assert (masked_mean(x, torch.ones(1, 4000, dtype=torch.bool)) == 60).all()


def test_a_pair_has_one_encoder_and_four_features() -> None:
    model = PairClassifier(small_config("softmax")).double().eval()
    first, second, mask = draw_tokens(2, 12), draw_tokens(2, 8), draw_mask(2, 12)
    a, b = masked_mean(model.encoder(first, mask), mask), masked_mean(model.encoder(second), None)
    expected = model.head(torch.cat([a, b, a * b, a - b], -1))
    torch.testing.assert_close(model(first, second, mask), expected)
    one = sum(p.numel() for p in SequenceClassifier(small_config("softmax")).parameters())
    assert sum(p.numel() for p in model.parameters()) == one + 3 * 16 * 24


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    model = SequenceClassifier(small_config()).to(dtype)
    logits = model(draw_tokens(2, 30), draw_mask(2, 30))
    assert logits.dtype == dtype
    assert logits.isfinite().all()


# torch's tracer warns about its own doings.
@pytest.mark.filterwarnings("ignore")
def test_compiled_agrees() -> None:
    torch._dynamo.reset()
    model = SequenceClassifier(small_config("softmax", dropout=0.0)).double()
    tokens, mask = draw_tokens(2, 24), draw_mask(2, 24)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    expected, actual = model(tokens, mask), compiled(tokens, mask)
    torch.testing.assert_close(actual, expected)
    parameters = tuple(model.parameters())
    for a, e in zip(
        torch.autograd.grad(actual.square().sum(), parameters),
        torch.autograd.grad(expected.square().sum(), parameters),
        strict=True,
    ):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_it_learns(attention: str) -> None:
    """Which of two tokens is in the majority: a few dozen steps are enough."""
    model = SequenceClassifier(small_config(attention, dropout=0.0, num_classes=2)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(30):
        tokens = torch.randint(2, (32, 9))
        loss = torch.nn.functional.cross_entropy(model(tokens), (tokens.sum(1) > 4).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    tokens = torch.randint(2, (64, 9))
    correct = model.eval()(tokens).argmax(1) == (tokens.sum(1) > 4).long()
    assert correct.double().mean() > 0.8
