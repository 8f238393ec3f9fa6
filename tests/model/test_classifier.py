"""The classifiers: shapes, padding, pooling, half precision, compilation and learning."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from skyformer import PairClassifier, SequenceClassifier
from skyformer.model.classifier import masked_mean
from tests.model.small import ATTENTIONS, MAX_LENGTH, draw_mask, draw_tokens, small_config


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_logits_of_a_batch_with_a_fully_masked_example(attention: str) -> None:
    tokens, mask = draw_tokens(3, 20), draw_mask(3, 20)
    mask[2] = False
    single, pair = SequenceClassifier(small_config(attention)), PairClassifier(small_config(attention))
    for model, logits in ((single, single(tokens, mask)), (pair, pair(tokens, draw_tokens(3, 7), mask, None))):
        assert logits.shape == (3, 3)
        assert logits.isfinite().all()
        logits.square().sum().backward()
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


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
def test_neither_padding_nor_the_batch_changes_the_logits(attention: str) -> None:
    model = SequenceClassifier(small_config(attention)).double().eval()
    lengths = [30, 21, 3]
    tokens = draw_tokens(3, MAX_LENGTH)
    together = model(tokens, torch.arange(MAX_LENGTH) < torch.tensor(lengths)[:, None])
    for example, length in enumerate(lengths):
        alone = model(tokens[example : example + 1, :length])
        torch.testing.assert_close(together[example : example + 1], alone, rtol=1e-7, atol=1e-9)


def test_token_zero_is_not_padding() -> None:
    model = SequenceClassifier(small_config("softmax")).eval()
    zeros = torch.zeros(1, 12, dtype=torch.int64)
    assert not torch.allclose(model(zeros), model(zeros[:, :5]))
    partly = zeros.clone()
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


# torch's tracer warns about its own code.
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


@pytest.mark.parametrize(("chosen", "expected"), [("gelu", nn.GELU), ("relu", nn.ReLU)])
@pytest.mark.parametrize("kind", [SequenceClassifier, PairClassifier])
def test_the_activation_of_the_head(
    kind: type[SequenceClassifier | PairClassifier], chosen: str, expected: type[nn.Module]
) -> None:
    assert isinstance(kind(small_config(head_activation=chosen)).head[1], expected)
