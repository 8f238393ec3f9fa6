"""BigBird: the suite, and agreement with dense attention under its block mask."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import Tensor

from skyformer.attention.bigbird import BigBirdAttention, bigbird_attention, bigbird_block_mask
from skyformer.errors import InputError, UnsupportedError
from skyformer.functional import softmax_attention
from skyformer.testing.suite import AttentionSuite, OptionSuite
from tests.helpers import assert_same_with_gradients

HEADS = 3


class TestBigBird(AttentionSuite):
    name = "bigbird"
    options: ClassVar = {"block_size": 3, "num_random_blocks": 2}


class TestBigBirdAtItsDefaults(OptionSuite):
    name = "bigbird"


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(length: int, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((length, 8), (length, 8), (length, 5))
    return tuple(torch.randn(batch, HEADS, *s, dtype=torch.float64, requires_grad=True) for s in shapes)


def token_mask(tokens: Tensor, block_size: int, num_random_blocks: int, generator: torch.Generator) -> Tensor:
    """The mask of one example with valid tokens (n,) as a full matrix: (H, n, n)."""
    count = int(tokens.sum())
    mask = torch.zeros(HEADS, len(tokens), len(tokens), dtype=torch.bool)
    if count:
        blocks = bigbird_block_mask(
            -(-count // block_size), HEADS, num_random_blocks=num_random_blocks, generator=generator
        )
        block_of = torch.arange(count) // block_size
        where = tokens.nonzero().squeeze(1)
        mask[:, where[:, None], where] = blocks[:, block_of][:, :, block_of]
    return mask


def dense_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf)
    return torch.softmax(scores, -1).nan_to_num() @ v


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("length", "block_size", "num_random"), [(1, 4, 3), (40, 4, 3), (97, 5, 2), (61, 4, 0), (64, 1, 3)]
)
def test_is_dense_attention_under_its_mask(length: int, block_size: int, num_random: int, masked: bool) -> None:
    inputs = draw(length)
    tokens = torch.rand(2, length) > 0.4 if masked else torch.ones(2, length, dtype=torch.bool)
    mask = torch.stack([token_mask(t, block_size, num_random, seeded()) for t in tokens])
    valid = tokens[:, None, :, None]
    options = {"block_size": block_size, "num_random_blocks": num_random, "key_mask": tokens if masked else None}
    assert_same_with_gradients(
        lambda *x: bigbird_attention(*x, **options, generator=seeded()) * valid,
        lambda *x: dense_attention(*x, mask) * valid,
        inputs,
        rtol=1e-7,
        atol=1e-7,
    )


def test_a_query_may_be_valid_where_its_key_is_not() -> None:
    inputs = draw(50, batch=1)
    key_mask, query_mask = torch.rand(1, 50) > 0.4, torch.rand(1, 50) > 0.4
    tokens = key_mask | query_mask
    mask = token_mask(tokens[0], 4, 2, seeded()) & key_mask[0]
    out = bigbird_attention(
        *inputs,
        key_mask=key_mask,
        query_mask=query_mask,
        block_size=4,
        num_random_blocks=2,
        generator=seeded(),
    )
    expected = dense_attention(*inputs, mask)
    torch.testing.assert_close(out[:, :, query_mask[0]], expected[:, :, query_mask[0]])


@pytest.mark.parametrize("num_random", [0, 1, 3])
@pytest.mark.parametrize("num_blocks", [1, 2, 3, 7, 8, 20])
def test_block_mask_has_window_globals_and_random_blocks(num_blocks: int, num_random: int) -> None:
    mask = bigbird_block_mask(num_blocks, HEADS, num_random_blocks=num_random, generator=seeded())
    own = torch.arange(num_blocks)
    fixed = (own[:, None] - own).abs() <= 1
    fixed[[0, -1]] = True
    fixed[:, [0, -1]] = True
    assert mask[:, fixed].all()
    free = (~fixed).sum(-1)
    assert ((mask & ~fixed).sum(-1) == free.clamp(max=num_random)).all()


def test_few_blocks_are_full_attention() -> None:
    inputs = draw(7 * 64)
    torch.testing.assert_close(bigbird_attention(*inputs, generator=seeded()), softmax_attention(*inputs))


def test_random_blocks_are_spread_evenly() -> None:
    masks = torch.stack([bigbird_block_mask(20, HEADS, generator=seeded(seed)) for seed in range(300)]).float()
    chosen = masks[:, :, 10].mean((0, 1))
    free = [b for b in range(1, 19) if abs(b - 10) > 1]
    assert (chosen[free] - 3 / len(free)).abs().max() < 0.06


def test_the_pattern_depends_on_head_and_seed() -> None:
    mask = bigbird_block_mask(20, 2, generator=seeded(0))
    assert not torch.equal(mask[0], mask[1])
    assert not torch.equal(mask, bigbird_block_mask(20, 2, generator=seeded(1)))
    assert torch.equal(mask, bigbird_block_mask(20, 2, generator=seeded(0)))


def test_the_pattern_is_fixed_in_training() -> None:
    attention = BigBirdAttention(HEADS, 8, block_size=4)
    inputs = draw(80)
    first = attention(*inputs)
    assert torch.equal(attention(*inputs), first)
    assert torch.equal(attention.eval()(*inputs), first)
    generator = seeded(attention.seed)
    assert torch.equal(attention.block_mask(80), bigbird_block_mask(20, HEADS, generator=generator))
    torch.testing.assert_close(bigbird_attention(*inputs, block_size=4, generator=seeded(attention.seed)), first)


def test_dropout_keeps_the_mean() -> None:
    q, k, v = (x.detach() for x in draw(40))
    exact = bigbird_attention(q, k, v, block_size=4, generator=seeded())
    dropped = [bigbird_attention(q, k, v, block_size=4, dropout_p=0.3, generator=seeded()) for _ in range(60)]
    assert not torch.equal(dropped[0], exact)
    assert (sum(dropped) / 60 - exact).norm() < 0.25 * exact.norm()


def test_bad_arguments_are_named() -> None:
    inputs = draw(9)
    with pytest.raises(InputError, match="block_size"):
        bigbird_attention(*inputs, block_size=0)
    with pytest.raises(InputError, match="num_random_blocks"):
        BigBirdAttention(HEADS, 8, num_random_blocks=-1)
    with pytest.raises(UnsupportedError, match="is_causal"):
        bigbird_attention(*inputs, is_causal=True)
    with pytest.raises(UnsupportedError, match="different lengths"):
        bigbird_attention(inputs[0][:, :, :4], *inputs[1:])


def test_agrees_with_transformers() -> None:
    """The block-sparse attention of transformers, with the same random blocks."""
    modeling = pytest.importorskip("transformers.models.big_bird.modeling_big_bird")
    num_blocks, size, head_dim = 16, 4, 8
    config = modeling.BigBirdConfig(
        hidden_size=HEADS * head_dim, num_attention_heads=HEADS, block_size=size, num_random_blocks=3
    )
    peer = modeling.BigBirdBlockSparseAttention(config, seed=0).double().train()
    hidden = torch.randn(2, num_blocks * size, HEADS * head_dim, dtype=torch.float64)
    q, k, v = (
        layer(hidden).view(2, -1, HEADS, head_dim).transpose(1, 2) for layer in (peer.query, peer.key, peer.value)
    )
    blocks = bigbird_block_mask(num_blocks, HEADS, generator=seeded())
    peer._bigbird_block_rand_mask_with_head = lambda **_: random_blocks_of(blocks)
    mask = torch.ones(2, num_blocks * size, dtype=torch.float64)
    masks = modeling.BigBirdModel.create_masks_for_block_sparse_attn(mask, size)
    expected, _ = peer(hidden, masks[1], masks[2], masks[3], masks[0], masks[0])
    actual = bigbird_attention(q, k, v, block_size=size, generator=seeded())
    torch.testing.assert_close(actual.transpose(1, 2).flatten(2), expected)


def random_blocks_of(blocks: Tensor) -> list:
    """The random blocks of each middle row of a block mask (H, T, T), as transformers lists them."""
    middle = torch.arange(1, blocks.shape[1] - 1)
    known = torch.zeros_like(blocks[0]).fill_diagonal_(True)
    known |= known.roll(1, 0) | known.roll(-1, 0)
    known[:, [0, -1]] = True
    return [torch.stack([(head & ~known)[row].nonzero().squeeze(1) for row in middle]).numpy() for head in blocks]
