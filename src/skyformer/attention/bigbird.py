"""BigBird: block-sparse softmax attention, linear in length.

The valid tokens of an example are cut into blocks. A query block attends to

    the first and the last block, the block before, itself and the block after, and a few random blocks,

each counted once; the first and the last block attend to everything. With M the mask that this describes,

    out = softmax(Q K^T scale + log M) V

The last block is the last one of the example, and the random blocks depend on the seed, the head, the number of the
block and the number of blocks of the example, so neither padding nor the rest of the batch changes the pattern.
Zaheer et al., "Big Bird: Transformers for Longer Sequences", 2020.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from skyformer.attention.base import Attention, Inputs, Promise, computed_in_float32
from skyformer.attention.registry import register_attention
from skyformer.attention.rows import Ranks, in_blocks
from skyformer.checks import check_at_least, check_probability, check_scale
from skyformer.functional import attend_softmax
from skyformer.ops.noise import Seed, draw_seed, draw_seed_unseen, uniform_noise


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
        key_mask: bool (B, n), True = attend. query_mask: bool (B, n), `key_mask` by default. The tokens that are valid
            in either are cut into blocks.
        is_causal: not supported, because the first and the last block see everything.
        block_size: tokens per block; the last may have fewer.
        num_random_blocks: random blocks per query block, in addition to those that it always sees.
        scale: factor of the inner products; P ** -0.5 by default.
        dropout_p: the probability with which an attention weight is dropped.
        generator: the source of the pattern's seed; torch's global generator by default.

    Returns:
        (B, H, n, Pv).
    """
    inputs = BigBirdAttention.checked(Inputs(query, key, value, key_mask, query_mask, is_causal))
    check_scale(scale)
    check_probability("dropout_p", dropout_p)
    return _attend(inputs, _Pattern(block_size, num_random_blocks, draw_seed_unseen(generator)), scale, dropout_p)


def bigbird_block_mask(
    num_blocks: int, num_heads: int, *, num_random_blocks: int = 3, generator: torch.Generator | None = None
) -> Tensor:
    """Which key blocks each query block attends to, for an example of T = `num_blocks` blocks: bool (H, T, T).

    With a generator in the same state, this is the pattern that `bigbird_attention` uses.
    """
    check_at_least("num_blocks", num_blocks, 1)
    return _Pattern(1, num_random_blocks, draw_seed(generator)).block_mask(num_blocks, num_heads)


@dataclass(frozen=True)
class _Pattern:
    """Which blocks attend to which."""

    block_size: int
    num_random: int
    seed: Seed

    def __post_init__(self) -> None:
        check_at_least("block_size", self.block_size, 1)
        check_at_least("num_random_blocks", self.num_random, 0)

    def block_mask(self, blocks: int, heads: int) -> Tensor:
        """bool (H, T, T) for an example of T blocks."""
        table = self.table(torch.tensor([blocks]), blocks, heads)[0]
        # One more column, for the slots without a block.
        mask = torch.zeros(heads, blocks, blocks + 1, dtype=torch.bool).scatter_(2, table, True)
        mask[:, [0, -1]] = True
        return mask[..., :-1]

    def table(self, count: Tensor, blocks: int, heads: int) -> Tensor:
        """The key blocks that each of T query blocks attends to, for examples of count (B,) blocks: (B, H, T, 5 +
        num_random). No block is repeated; slots without a block hold T."""
        table = _fixed_blocks(count, blocks).expand(-1, heads, -1, -1)
        noise = uniform_noise(self.seed, 0, blocks * heads * self.num_random, count.device)
        for of_slot in noise.view(blocks, heads, self.num_random).permute(2, 1, 0):
            other = _other_block(table, count.view(-1, 1, 1), blocks, of_slot)
            table = torch.cat([table, other.unsqueeze(-1)], -1)
        return table


def _fixed_blocks(count: Tensor, blocks: int) -> Tensor:
    """First, last, previous, own and next block, without repetition: (B, 1, T, 5)."""
    own = torch.arange(blocks, device=count.device).expand(count.shape[0], 1, -1)
    count = count.view(-1, 1, 1)
    last = (count - 1).expand_as(own)
    fixed = torch.stack([torch.zeros_like(own), last, own - 1, own, own + 1], -1)
    repeated = (fixed.unsqueeze(-1) == fixed.unsqueeze(-2)).tril(-1).any(-1)
    return fixed.masked_fill(repeated | (fixed < 0) | (fixed >= count.unsqueeze(-1)), blocks)


def _other_block(table: Tensor, count: Tensor, blocks: int, noise: Tensor) -> Tensor:
    """One of the blocks that are not yet in the table (B, H, T, k), chosen by noise (H, T): (B, H, T)."""
    free = count - (table < blocks).sum(-1)
    nth = torch.minimum((noise * free).long(), free - 1)
    # The nth free block comes after those taken blocks that have at most n free blocks before them.
    free_before = table.sort(-1).values - torch.arange(table.shape[-1], device=table.device)
    block = nth + (free_before <= nth.unsqueeze(-1)).sum(-1)
    return torch.where(free > 0, block, blocks)


@computed_in_float32
def _attend(inputs: Inputs, pattern: _Pattern, scale: float | None, dropout_p: float) -> Tensor:
    """Moves the valid tokens of each example to the front, attends, and moves the rows back."""
    if inputs.is_empty:
        return inputs.zeros()
    dense = functools.partial(attend_softmax, scale=scale, dropout_p=dropout_p)
    query, key, value, tokens = inputs.query, inputs.key, inputs.value, inputs.token_mask()
    if inputs.key_mask is None or tokens is None:
        visible = torch.ones(query.shape[0], query.shape[2], dtype=torch.bool, device=query.device)
        return _attend_by_rank(query, key, value, visible, visible.sum(-1), pattern, dense)
    ranks = Ranks.of(tokens)
    query, key, value = (ranks.compact(x) for x in (query, key, value))
    visible = inputs.key_mask.gather(1, ranks.position.clamp(min=0)) & (ranks.position >= 0)
    out = _attend_by_rank(query, key, value, visible, ranks.count.squeeze(1), pattern, dense)
    return ranks.spread(out)


def _attend_by_rank(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    count: Tensor,
    pattern: _Pattern,
    dense: Callable[..., Tensor],
) -> Tensor:
    """The same for valid tokens that are at the front already.

    visible: bool (B, n), the keys to attend to. count: (B,), the number of valid tokens. dense: softmax attention.
    """
    length = query.shape[2]
    query, key, value = (in_blocks(x, pattern.block_size) for x in (query, key, value))
    visible = in_blocks(visible[:, None, :, None], pattern.block_size)[:, 0, ..., 0]
    own_blocks = -(-count // pattern.block_size)
    last = (own_blocks - 1).clamp(min=0)
    table = pattern.table(own_blocks, query.shape[2], query.shape[1])
    keys, values, seen = _blocks_of_table(key, value, visible, table)
    out = dense(query.flatten(0, 2).unsqueeze(1), keys, values, key_mask=seen).view(*query.shape[:4], value.shape[-1])
    ends = _take_blocks(query, torch.stack([torch.zeros_like(last), last], 1))
    of_ends = dense(ends.flatten(2, 3), key.flatten(2, 3), value.flatten(2, 3), key_mask=visible.flatten(1))
    of_first, of_last = of_ends.view(*ends.shape[:4], value.shape[-1]).split(1, 2)
    out = torch.cat([of_first, out[:, :, 1:]], 2)
    out = out.scatter(2, last.view(-1, 1, 1, 1, 1).expand_as(of_last), of_last)
    return out.flatten(2, 3)[:, :, :length]


def _blocks_of_table(key: Tensor, value: Tensor, visible: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The keys and values (B H T, 1, k block_size, P) in each row of the table (B, H, T, k), and which are visible."""
    batch, heads, blocks, slots = table.shape
    present = table < blocks
    table = table.clamp(max=blocks - 1)
    start = torch.arange(batch * heads, device=table.device).view(batch, heads, 1, 1) * blocks
    rows = (table + start).flatten()
    example = torch.arange(batch, device=table.device).view(-1, 1, 1, 1)
    seen = visible[example, table] & present.unsqueeze(-1)
    keys, values = (x.flatten(0, 2).index_select(0, rows) for x in (key, value))
    keys, values = (x.view(-1, 1, slots * x.shape[-2], x.shape[-1]) for x in (keys, values))
    return keys, values, seen.view(keys.shape[0], -1)


def _take_blocks(x: Tensor, number: Tensor) -> Tensor:
    """Blocks number (B, k) of x (B, H, T, block_size, P): (B, H, k, block_size, P)."""
    index = number[:, None, :, None, None].expand(-1, x.shape[1], -1, *x.shape[3:])
    return x.gather(2, index)


@register_attention
@dataclass(eq=False, repr=False, kw_only=True)
class BigBirdAttention(Attention):
    """softmax(Q K^T scale + log M) V with a block-sparse mask M, which `seed` fixes in training as well."""

    name = "bigbird"
    cannot: ClassVar[Mapping[Promise, str]] = {
        Promise.CAUSAL: "the first and the last block attend to every token and are seen by every token",
        Promise.CROSS_ATTENTION: "the window pairs the blocks of queries and keys, which must be of one sequence",
    }

    block_size: int = 64
    num_random_blocks: int = 3
    scale: float | None = None
    dropout: float = 0.0
    pattern: _Pattern = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        seed = draw_seed(torch.Generator().manual_seed(self.seed))
        self.pattern = _Pattern(self.block_size, self.num_random_blocks, seed)

    def attend(self, inputs: Inputs) -> Tensor:
        return _attend(inputs, self.pattern, self.scale, self.dropout_p)

    def block_mask(self, num_tokens: int) -> Tensor:
        """Which blocks attend to which in an example of `num_tokens` valid tokens: bool (H, T, T)."""
        blocks = -(-num_tokens // self.block_size)
        return self.pattern.block_mask(blocks, self.num_heads)
