"""Informer: softmax attention when u = L, its definition when all keys are sampled, and the sampled keys."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from skyformer import build_attention, softmax_attention
from skyformer.attention.informer import _Quota, informer_attention, sample_keys
from skyformer.errors import InputError
from skyformer.testing.suite import AttentionSuite, LargestStorage, OptionSuite


class TestInformer(AttentionSuite):
    name = "informer"
    options = {"num_features": 12}


class TestInformerByFactor(OptionSuite):
    name = "informer"
    options = {"factor": 2.5}


def dense_informer(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, num_features: int) -> Tensor:
    """One example and one head at a time, every valid key sampled; zeros at masked queries."""
    out = torch.zeros(*query.shape[:3], value.shape[-1], dtype=query.dtype)
    for b in range(query.shape[0]):
        valid = mask[b].nonzero().squeeze(-1)
        for h in range(query.shape[1]):
            q, k, v = query[b, h, valid], key[b, h, valid], value[b, h, valid]
            scores = q @ k.T / q.shape[-1] ** 0.5
            measure = scores.max(-1).values - scores.mean(-1)
            rows = v.mean(0).repeat(len(valid), 1)
            for i in measure.argsort(descending=True)[:num_features]:
                rows[i] = torch.softmax(scores[i], -1) @ v
            out[b, h, valid] = rows
    return out


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


SCATTERED = torch.tensor([[True] * 11, [False, True, True, False, False, True, False, True, True, True, False]])


@pytest.mark.parametrize("options", [{"num_features": 11}, {"num_features": 99}, {"factor": 11.0}])
def test_exact_when_every_query_attends_fully(options: dict[str, float]) -> None:
    q, k, v = random(2, 2, 11, 4, seed=1), random(2, 2, 17, 4, seed=2), random(2, 2, 17, 3, seed=3)
    out = informer_attention(q, k, v, **options, num_samples=3)  # type: ignore[arg-type]
    torch.testing.assert_close(out, softmax_attention(q, k, v))


@pytest.mark.parametrize("num_features", [1, 3, 7])
def test_agrees_with_the_definition_when_every_key_is_sampled(num_features: int) -> None:
    q, k, v = random(2, 2, 11, 4, seed=1), random(2, 2, 11, 4, seed=2), random(2, 2, 11, 3, seed=3)
    out = informer_attention(q, k, v, num_features=num_features, num_samples=11, key_mask=SCATTERED)
    expected = dense_informer(q, k, v, SCATTERED, num_features)
    out = out.masked_fill(~SCATTERED[:, None, :, None], 0)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


def test_all_but_u_queries_get_the_mean() -> None:
    q, k, v = random(1, 2, 40, 4, seed=1), random(1, 2, 30, 4, seed=2), random(1, 2, 30, 3, seed=3)
    out = informer_attention(q, k, v, num_features=6, num_samples=5)
    is_mean = (out - v.mean(2, keepdim=True)).abs().amax(-1) < 1e-12
    assert is_mean.sum(-1).tolist() == [[34, 34]]
    torch.testing.assert_close(out[~is_mean], softmax_attention(q, k, v)[~is_mean])


def test_the_factor_counts_the_valid_tokens_of_each_example() -> None:
    count = torch.tensor([[0], [1], [2], [100], [4096]])
    expected = [0, 1, 2, math.ceil(5 * math.log(100)), math.ceil(5 * math.log(4096))]
    assert _Quota(128, 5.0).among(count).squeeze(-1).tolist() == expected
    assert _Quota(128, 5.0).slots(4096) == expected[-1]
    assert _Quota(128, None).among(count).squeeze(-1).tolist() == [0, 1, 2, 100, 128]


def test_sampled_keys_are_distinct_valid_and_spread_over_the_sequence() -> None:
    mask = torch.rand(3, 200) > 0.4
    mask[2] = torch.arange(200) < 7
    rows, sampled = sample_keys(torch.randn(3, 1, 200, 4), mask, _Quota(20, None), seed=1)
    assert sampled.sum(-1).tolist() == [20, 20, 7]
    for b in range(3):
        own = rows[b, sampled[b]]
        assert mask[b, own].all()
        assert (own.diff() > 0).all()
        rank = mask[b].cumsum(0)[own] - 1
        edge = torch.arange(len(own) + 1) * int(mask[b].sum()) // len(own)
        assert (edge[:-1] <= rank).all()
        assert (rank < edge[1:]).all()


def test_sampled_keys_differ_between_seeds_and_training_calls() -> None:
    key = torch.randn(1, 1, 200, 4)
    first, second = (sample_keys(key, None, _Quota(20, None), seed)[0] for seed in (1, 2))
    assert not torch.equal(first, second)
    module = build_attention("informer", 2, 4, num_features=20)
    q = torch.randn(1, 2, 200, 4)
    assert not torch.equal(module(q, q, q), module(q, q, q))


def test_keys_are_not_expanded_to_the_queries() -> None:
    """The largest tensor is L times the sampled keys, not that times P, and not L times S."""
    length, samples = 1024, 8
    q, k, v = (torch.randn(1, 1, length, 16, requires_grad=True) for _ in range(3))
    with LargestStorage() as largest:
        informer_attention(q, k, v, num_features=16, num_samples=samples).sum().backward()
    assert largest.bytes <= 4 * length * 16


def test_equal_queries_are_taken_in_order_whatever_the_padding() -> None:
    q = random(1, 2, 1, 4).expand(-1, -1, 9, -1)
    k, v = random(1, 2, 9, 4, seed=2), random(1, 2, 9, 4, seed=3)
    out = informer_attention(q, k, v, num_features=3)
    mask = torch.arange(40)[None] < 9
    padded = [torch.cat([x, random(1, 2, 31, 4, seed=4)], 2) for x in (q, k, v)]
    longer = informer_attention(*padded, num_features=3, key_mask=mask)[:, :, :9]
    torch.testing.assert_close(longer, out)


def test_no_queries_and_no_keys() -> None:
    some, none = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 0, 4)
    assert informer_attention(none, some, some).shape == (1, 2, 0, 4)
    assert not informer_attention(some, none, none).any()


def test_bad_options_are_named() -> None:
    q = torch.randn(1, 2, 6, 4)
    with pytest.raises(InputError, match="num_samples"):
        build_attention("informer", 2, 4, num_samples=0)
    with pytest.raises(InputError, match="factor"):
        informer_attention(q, q, q, factor=-1.0)
