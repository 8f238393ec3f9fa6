"""BigBird: block-sparse softmax attention, linear in length.

The valid tokens of an example are cut into blocks. A query block attends to

    the first and the last block, the block before, itself and the block after, and a few random blocks,

each counted once, and the first and the last block attend to everything: with M the mask that this describes,

    out = softmax(Q K^T scale + log M) V

The last block is the example's own, and the random blocks depend on the seed, the head, the number of the
block and how many blocks the example has, so neither padding nor the rest of the batch changes the pattern.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from skyformer.attention.base import Attention, Promise
from skyformer.attention.ranks import Ranks
from skyformer.attention.registry import register
from skyformer.checks import (
    check_at_least,
    check_mask,
    check_positive,
    check_probability,
    check_query_key_value,
    check_scale,
)
from skyformer.ops.noise import draw_seed, uniform_noise
from skyformer.ops.precision import at_least_float32, without_autocast


def bigbird_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    is_causal: bool = False,
    block_size: int = 64,
    num_random_blocks: int = 3,
    scale: float | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """softmax(Q K^T scale) V over the blocks of `bigbird_block_mask`, in O(n block_size P) time.

    Args:
        query: (B, H, n, P). key: (B, H, n, P). value: (B, H, n, Pv).
        key_mask: bool (B, n), True = attend. query_mask: bool (B, n), key_mask by default. Blocks are cut
            from the tokens that are valid in either.
        is_causal: refused, as the global blocks see everything.
        block_size: tokens in a block; the last may have fewer.
        num_random_blocks: random blocks that a query block attends to, of those it would not see otherwise.
        scale: what the inner products are multiplied by; P ** -0.5 by default.
        dropout_p: the probability with which a weight is dropped.
        generator: where the seed of the pattern is drawn from; torch's own by default.

    Returns:
        (B, H, n, Pv).
    """
    check_query_key_value(query, key, value)
    check_mask("key_mask", key_mask, key.shape[0], key.shape[2])
    check_mask("query_mask", query_mask, query.shape[0], query.shape[2])
    check_at_least("block_size", block_size, 1)
    check_at_least("num_random_blocks", num_random_blocks, 0)
    if scale is not None:
        check_positive("scale", scale)
    check_probability("dropout_p", dropout_p)
    if is_causal:
        BigBirdAttention.require(Promise.CAUSAL)
    if query.shape[2] != key.shape[2]:
        BigBirdAttention.require(Promise.CROSS_ATTENTION)
    pattern = _Pattern(block_size, num_random_blocks, draw_seed(generator))
    return _attend(query, key, value, key_mask, query_mask, pattern, _Dense(scale, dropout_p))


def bigbird_block_mask(
    num_blocks: int, num_heads: int, *, num_random_blocks: int = 3, generator: torch.Generator | None = None
) -> Tensor:
    """Which key blocks each query block attends to when an example has `num_blocks` of them: bool (H, T, T).

    A generator in the same state gives the pattern that `bigbird_attention` uses.
    """
    check_at_least("num_blocks", num_blocks, 1)
    return _Pattern(1, num_random_blocks, draw_seed(generator)).block_mask(num_blocks, num_heads)


@dataclass(frozen=True)
class _Pattern:
    """Which blocks see which."""

    block_size: int
    num_random: int
    seed: int

    def block_mask(self, blocks: int, heads: int) -> Tensor:
        """bool (H, T, T) for an example of T blocks."""
        table = self.table(torch.tensor([blocks]), blocks, heads)[0]
        # One column more, for the slots that hold no block.
        mask = torch.zeros(heads, blocks, blocks + 1, dtype=torch.bool).scatter_(2, table, True)
        mask[:, [0, -1]] = True
        return mask[..., :-1]

    def table(self, count: Tensor, blocks: int, heads: int) -> Tensor:
        """The key blocks that each of T query blocks attends to, for examples of count (B,) blocks each:
        (B, H, T, 5 + num_random), every block once, and T in a slot that holds none."""
        table = _fixed_blocks(count, blocks).expand(-1, heads, -1, -1)
        noise = uniform_noise(self.seed, 0, blocks * heads * self.num_random, count.device)
        for of_slot in noise.view(blocks, heads, self.num_random).permute(2, 1, 0):
            other = _other_block(table, count.view(-1, 1, 1), blocks, of_slot)
            table = torch.cat([table, other.unsqueeze(-1)], -1)
        return table


def _fixed_blocks(count: Tensor, blocks: int) -> Tensor:
    """First, last, previous, own and next block, each once: (B, 1, T, 5)."""
    own = torch.arange(blocks, device=count.device).expand(count.shape[0], 1, -1)
    count = count.view(-1, 1, 1)
    last = (count - 1).expand_as(own)
    fixed = torch.stack([torch.zeros_like(own), last, own - 1, own, own + 1], -1)
    repeated = (fixed.unsqueeze(-1) == fixed.unsqueeze(-2)).tril(-1).any(-1)
    return fixed.masked_fill(repeated | (fixed < 0) | (fixed >= count.unsqueeze(-1)), blocks)


def _other_block(table: Tensor, count: Tensor, blocks: int, noise: Tensor) -> Tensor:
    """One of the blocks that are not in the table (B, H, T, k) yet, chosen by noise (H, T): (B, H, T)."""
    free = count - (table < blocks).sum(-1)
    nth = torch.minimum((noise * free).long(), free - 1)
    # The nth free block follows those taken ones that have at most n free blocks before them.
    free_before = table.sort(-1).values - torch.arange(table.shape[-1], device=table.device)
    block = nth + (free_before <= nth.unsqueeze(-1)).sum(-1)
    return torch.where(free > 0, block, blocks)


@without_autocast
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    query_mask: Tensor | None,
    pattern: _Pattern,
    dense: _Dense,
) -> Tensor:
    """Puts the valid tokens of each example first, attends, and puts the rows back where they were."""
    q, k, v = (at_least_float32(t) for t in (query, key, value))
    if key_mask is None:
        visible = torch.ones(query.shape[0], query.shape[2], dtype=torch.bool, device=query.device)
        return _attend_by_rank(q, k, v, visible, visible.sum(-1), pattern, dense).to(query.dtype)
    tokens = key_mask if query_mask is None else key_mask | query_mask
    ranks = Ranks.of(tokens)
    q, k, v = (ranks.compact(t) for t in (q, k, v))
    visible = key_mask.gather(1, ranks.position.clamp(min=0)) & (ranks.position >= 0)
    out = _attend_by_rank(q, k, v, visible, ranks.count.squeeze(1), pattern, dense)
    return ranks.spread(out).to(query.dtype)


def _attend_by_rank(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    count: Tensor,
    pattern: _Pattern,
    dense: _Dense,
) -> Tensor:
    """The same for tokens that stand at their ranks; visible bool (B, n): the keys to attend to, count (B,):
    how many tokens there are."""
    length = query.shape[2]
    blocks = max(1, -(-length // pattern.block_size))
    query, key, value = (_in_blocks(x, blocks, pattern.block_size) for x in (query, key, value))
    visible = _in_blocks(visible[:, None, :, None], blocks, pattern.block_size)[:, 0, ..., 0]
    own_blocks = -(-count // pattern.block_size)
    last = (own_blocks - 1).clamp(min=0)
    table = pattern.table(own_blocks, blocks, query.shape[1])
    out = _attend_to_table(query, key, value, visible, table, dense)
    ends = torch.stack([torch.zeros_like(last), last], 1)
    of_ends = _attend_to_all(_take_blocks(query, ends), key, value, visible, dense)
    out = torch.cat([of_ends[:, :, :1], out[:, :, 1:]], 2)
    of_last = of_ends[:, :, 1:]
    out = out.scatter(2, last.view(-1, 1, 1, 1, 1).expand_as(of_last), of_last)
    return out.flatten(2, 3)[:, :, :length]


def _attend_to_table(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, table: Tensor, dense: _Dense
) -> Tensor:
    """Each query block (B, H, T, block_size, P) to the key blocks in its row of the table (B, H, T, k)."""
    batch, heads, blocks, slots = table.shape
    present = table < blocks
    table = table.clamp(max=blocks - 1)
    start = torch.arange(batch * heads, device=table.device).view(batch, heads, 1, 1) * blocks
    rows = (table + start).flatten()
    example = torch.arange(batch, device=table.device).view(-1, 1, 1, 1)
    seen = visible[example, table] & present.unsqueeze(-1)
    keys, values = (x.flatten(0, 2).index_select(0, rows) for x in (key, value))
    keys, values = (x.view(-1, 1, slots * x.shape[-2], x.shape[-1]) for x in (keys, values))
    out = dense(query.flatten(0, 2).unsqueeze(1), keys, values, seen.view(keys.shape[0], -1))
    return out.view(*query.shape[:4], value.shape[-1])


def _attend_to_all(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, dense: _Dense) -> Tensor:
    """Query blocks (B, H, k, block_size, P) to every visible key."""
    out = dense(query.flatten(2, 3), key.flatten(2, 3), value.flatten(2, 3), visible.flatten(1))
    return out.view(*query.shape[:4], value.shape[-1])


@dataclass(frozen=True)
class _Dense:
    """Softmax attention of query (N, H, L, P) to the keys (N, H, S, P) that are seen (N, S)."""

    scale: float | None
    dropout_p: float

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
        # A bias can be expanded to all queries; a mask would be turned into a bias of full size.
        bias = torch.zeros(seen.shape, dtype=query.dtype, device=seen.device).masked_fill_(~seen, -math.inf)
        bias = bias[:, None, None].expand(-1, -1, query.shape[2], -1)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=bias, scale=self.scale, dropout_p=self.dropout_p
        )


def _in_blocks(x: Tensor, blocks: int, block_size: int) -> Tensor:
    """x (B, H, n, c), filled up with zeros: (B, H, T, block_size, c)."""
    filled = F.pad(x, (0, 0, 0, blocks * block_size - x.shape[2]))
    return filled.reshape(*x.shape[:2], blocks, block_size, x.shape[-1])


def _take_blocks(x: Tensor, number: Tensor) -> Tensor:
    """Blocks number (B, k) of x (B, H, T, block_size, P): (B, H, k, block_size, P)."""
    index = number[:, None, :, None, None].expand(-1, x.shape[1], -1, *x.shape[3:])
    return x.gather(2, index)


@register
class BigBirdAttention(Attention):
    """softmax(Q K^T scale + log M) V with a block-sparse mask M, which `seed` fixes in training as well."""

    name = "bigbird"
    cannot: ClassVar[Mapping[Promise, str]] = {
        Promise.CAUSAL: "the first and the last block attend to everything and are seen by all",
        Promise.CROSS_ATTENTION: "the window pairs the blocks of queries and keys, as of one sequence",
    }

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        max_length: int | None = None,
        seed: int = 0,
        block_size: int = 64,
        num_random_blocks: int = 3,
        scale: float | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(num_heads, head_dim, max_length=max_length, seed=seed)
        check_scale(scale)
        check_at_least("block_size", block_size, 1)
        check_at_least("num_random_blocks", num_random_blocks, 0)
        check_probability("dropout", dropout)
        self.block_size, self.scale, self.dropout = block_size, scale, dropout
        self.pattern = _Pattern(block_size, num_random_blocks, draw_seed(torch.Generator().manual_seed(seed)))

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None,
        query_mask: Tensor | None,
        is_causal: bool,
    ) -> Tensor:
        dense = _Dense(self.scale, self.dropout if self.training else 0.0)
        return _attend(query, key, value, key_mask, query_mask, self.pattern, dense)

    def block_mask(self, num_tokens: int) -> Tensor:
        """Which blocks attend to which in an example of so many valid tokens: bool (H, T, T)."""
        blocks = -(-num_tokens // self.block_size)
        return self.pattern.block_mask(blocks, self.num_heads)
