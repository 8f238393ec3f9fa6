"""Reformer: the suite, and agreement with dense attention under the masks of its hash rounds."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import Tensor

from skyformer.attention.reformer import ReformerAttention, lsh_buckets, reformer_attention
from skyformer.errors import InputError, ShapeError, UnsupportedError
from skyformer.testing.suite import AttentionSuite, OptionSuite, backward

HEADS = 3


class TestReformer(AttentionSuite):
    name = "reformer"
    options: ClassVar = {"num_hashes": 2, "chunk_size": 4, "num_buckets": 6}
    unused_inputs = ("key",)


class TestReformerAtItsDefaults(OptionSuite):
    name = "reformer"
    unused_inputs = ("key",)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(length: int, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((length, 8), (length, 8), (length, 5))
    return tuple(torch.randn(batch, HEADS, *s, dtype=torch.float64, requires_grad=True) for s in shapes)


def rounds_mask(buckets: Tensor, tokens: Tensor, chunk_size: int, is_causal: bool) -> Tensor:
    """In how many rounds each token of one head sees each other; buckets (R, n), tokens (n,): (n, n)."""
    return causal_mask(buckets, tokens, chunk_size) if is_causal else chunks_mask(buckets, tokens, chunk_size)


def causal_mask(buckets: Tensor, tokens: Tensor, chunk_size: int) -> Tensor:
    """Itself and the latest earlier tokens of its bucket."""
    seen = torch.zeros(len(tokens), len(tokens), dtype=torch.float64)
    for bucket in buckets.tolist():
        for i in range(len(tokens)):
            earlier = [j for j in range(i) if tokens[j] and bucket[j] == bucket[i]]
            seen[i, [*earlier[-chunk_size:], i]] += 1
    return seen


def chunks_mask(buckets: Tensor, tokens: Tensor, chunk_size: int) -> Tensor:
    """Its own chunk and the one before."""
    seen = torch.zeros(len(tokens), len(tokens), dtype=torch.float64)
    for bucket in buckets.tolist():
        order = sorted((bucket[i], i) for i in range(len(tokens)) if tokens[i])
        chunks = [[i for _, i in order[start : start + chunk_size]] for start in range(0, len(order), chunk_size)]
        for number, chunk in enumerate(chunks):
            visible = {*chunk, *chunks[number - 1]}
            for i in chunk:
                seen[i, list(visible)] += 1
    return seen


def dense_shared_attention(q: Tensor, v: Tensor, count: Tensor) -> Tensor:
    """Weights count_ij exp(s_ij), and oneself only where nothing else is seen; count (B, H, n, n)."""
    k = q / (q.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    scores = q @ k.mT * q.shape[-1] ** -0.5
    others = count * (1 - torch.eye(q.shape[2], dtype=q.dtype))
    alone = others.sum(-1, keepdim=True) == 0
    weights = torch.where(alone, count, others) * (scores - scores.detach().amax(-1, keepdim=True)).exp()
    total = weights.sum(-1, keepdim=True)
    return weights @ v / total.masked_fill(total == 0, 1)


def assert_same(actual: Tensor, expected: Tensor, valid: Tensor, inputs: tuple[Tensor, ...]) -> None:
    valid = valid[:, None, :, None]
    torch.testing.assert_close(actual * valid, expected * valid)
    grad = torch.randn_like(actual) * valid
    for a, e in zip(backward(actual, inputs, grad), backward(expected, inputs, grad), strict=True):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("length", "chunk_size", "num_hashes"), [(1, 64, 2), (64, 64, 1), (40, 4, 1), (41, 5, 3), (23, 1, 2), (97, 16, 4)]
)
def test_agrees_with_dense_attention_under_its_masks(
    length: int, chunk_size: int, num_hashes: int, is_causal: bool, masked: bool
) -> None:
    q, k, v = draw(length)
    tokens = torch.rand(2, length) > 0.3 if masked else torch.ones(2, length, dtype=torch.bool)
    options = {"num_hashes": num_hashes, "num_buckets": 8}
    out = reformer_attention(
        q,
        k,
        v,
        key_mask=tokens if masked else None,
        is_causal=is_causal,
        chunk_size=chunk_size,
        generator=seeded(),
        **options,
    )
    buckets = lsh_buckets(q, generator=seeded(), **options)
    count = torch.stack(
        [
            torch.stack([rounds_mask(of_head, t, chunk_size, is_causal) for of_head in b])
            for b, t in zip(buckets, tokens, strict=True)
        ]
    )
    assert_same(out, dense_shared_attention(q, v, count), tokens, (q, v))


def test_a_token_alone_attends_to_itself() -> None:
    q, k, v = draw(1)
    torch.testing.assert_close(reformer_attention(q, k, v), v)
    q, k, v = draw(30)
    out = reformer_attention(q, k, v, is_causal=True, chunk_size=4)
    torch.testing.assert_close(out[:, :, 0], v[:, :, 0])


def test_keys_are_ignored() -> None:
    q, k, v = draw(40)
    out, other = (reformer_attention(q, key, v, chunk_size=4, generator=seeded()) for key in (k, k + 1))
    assert torch.equal(out, other)
    assert torch.autograd.grad(out.sum(), k, allow_unused=True) == (None,)


def test_buckets_are_cones() -> None:
    x = torch.randn(2, HEADS, 50, 8)
    buckets = lsh_buckets(x, num_hashes=3, num_buckets=10, generator=seeded())
    assert buckets.shape == (2, HEADS, 3, 50)
    assert set(buckets.unique().tolist()) <= set(range(10))
    assert torch.equal(lsh_buckets(5 * x, num_hashes=3, num_buckets=10, generator=seeded()), buckets)
    opposite = lsh_buckets(-x, num_hashes=3, num_buckets=10, generator=seeded())
    assert torch.equal(opposite, (buckets + 5) % 10)
    assert not torch.equal(buckets[:, :, 0], buckets[:, :, 1])


def test_near_tokens_share_buckets_more_often() -> None:
    x = torch.randn(1, 1, 400, 16)
    buckets, near, far = (
        lsh_buckets(y, num_hashes=8, num_buckets=16, generator=seeded())
        for y in (x, x + 0.1 * torch.randn_like(x), torch.randn_like(x))
    )
    assert (buckets == near).float().mean() > 0.7
    assert (buckets == far).float().mean() < 0.12


def test_more_rounds_come_closer_to_dense_attention() -> None:
    q, k, v = (x.detach() for x in draw(128))
    q = 3 * q
    exact = dense_shared_attention(q, v, torch.ones(2, HEADS, 128, 128, dtype=torch.float64))

    def error(num_hashes: int) -> float:
        outs = [
            reformer_attention(q, k, v, num_hashes=num_hashes, chunk_size=16, generator=seeded(seed))
            for seed in range(5)
        ]
        return sum(float((out - exact).norm()) for out in outs)

    assert error(1) > 1.2 * error(4) > 1.3 * error(16)


def test_dropout_keeps_the_mean() -> None:
    q, k, v = (x.detach() for x in draw(40))
    exact = reformer_attention(q, k, v, chunk_size=4, generator=seeded())
    dropped = [reformer_attention(q, k, v, chunk_size=4, dropout_p=0.3, generator=seeded()) for _ in range(60)]
    assert not torch.equal(dropped[0], exact)
    assert (sum(dropped) / 60 - exact).norm() < 0.25 * exact.norm()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiles_without_graph_breaks_when_buckets_are_given() -> None:
    torch._dynamo.reset()
    q, _, v = draw(40)
    buckets = lsh_buckets(q, num_buckets=8, generator=seeded())

    def attend(q: Tensor, v: Tensor) -> Tensor:
        return reformer_attention(q, q, v, chunk_size=8, buckets=buckets)

    torch.testing.assert_close(torch.compile(attend, backend="aot_eager", fullgraph=True)(q, v), attend(q, v))


def test_bad_arguments_are_named() -> None:
    q, k, v = draw(9)
    with pytest.raises(InputError, match="num_buckets must be even"):
        reformer_attention(q, k, v, num_buckets=7)
    with pytest.raises(InputError, match="chunk_size"):
        ReformerAttention(HEADS, 8, chunk_size=0)
    with pytest.raises(InputError, match="num_hashes"):
        reformer_attention(q, k, v, num_hashes=0)
    with pytest.raises(ShapeError, match=r"buckets must have shape \(2, 3, num_hashes, 9\)"):
        reformer_attention(q, k, v, buckets=torch.zeros(2, 9, dtype=torch.int64))
    with pytest.raises(InputError, match="int64"):
        reformer_attention(q, k, v, buckets=torch.zeros(2, HEADS, 1, 9))
    with pytest.raises(UnsupportedError, match="different lengths"):
        reformer_attention(q[:, :, :4], k, v)


def test_agrees_with_transformers() -> None:
    """One round, the same buckets, not causal. With several rounds, the first chunk of a round there looks back
    into the round before; if causal, which earlier tokens are seen there depends on later ones."""
    modeling = pytest.importorskip("transformers.models.reformer.modeling_reformer")
    length, head_dim, chunk_size, num_buckets = 48, 8, 8, 6
    config = modeling.ReformerConfig(
        hidden_size=HEADS * head_dim,
        num_attention_heads=HEADS,
        attention_head_size=head_dim,
        lsh_attn_chunk_length=chunk_size,
        num_hashes=1,
        num_buckets=num_buckets,
        lsh_attention_probs_dropout_prob=0.0,
    )
    peer = modeling.LSHSelfAttention(config).double().eval()
    hidden = torch.randn(2, length, HEADS * head_dim, dtype=torch.float64)
    q, v = (layer(hidden).view(2, length, HEADS, head_dim).transpose(1, 2) for layer in (peer.query_key, peer.value))
    buckets = lsh_buckets(q, num_hashes=1, num_buckets=num_buckets, generator=seeded())
    expected = peer(hidden, buckets=buckets).hidden_states
    actual = reformer_attention(q, q, v, chunk_size=chunk_size, buckets=buckets)
    torch.testing.assert_close(actual.transpose(1, 2).flatten(2), expected)


def test_masked_tokens_may_hold_nan() -> None:
    q, k, v = draw(40)
    mask = torch.rand(2, 40) > 0.3
    filled = tuple(x.masked_fill(~mask[:, None, :, None], torch.nan) for x in (q, k, v))
    clean, dirty = (
        reformer_attention(*x, key_mask=mask, chunk_size=4, generator=seeded()) for x in ((q, k, v), filled)
    )
    visible = mask[:, None, :, None]
    assert torch.equal(clean.masked_fill(~visible, 0), dirty.masked_fill(~visible, 0))
