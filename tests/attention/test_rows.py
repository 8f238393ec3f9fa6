"""Moving rows: valid tokens to the front and back, sorted tokens, and blocks."""

from __future__ import annotations

import pytest
import torch

from skyformer.attention.rows import Move, Ranks, in_blocks

MASK = torch.tensor([[False, True, True, False, True], [True] * 5, [False] * 5, [True, False, False, False, False]])


def test_rank_position_and_count() -> None:
    ranks = Ranks.of(MASK)
    assert ranks.move.target.squeeze(1).tolist() == [[-1, 0, 1, -1, 2], [0, 1, 2, 3, 4], [-1] * 5, [0, -1, -1, -1, -1]]
    assert ranks.position.tolist() == [[1, 2, 4, -1, -1], [0, 1, 2, 3, 4], [-1] * 5, [0, -1, -1, -1, -1]]
    assert ranks.count.tolist() == [[3], [5], [0], [1]]


def test_compact_brings_valid_rows_to_the_front_and_spread_brings_them_back() -> None:
    x = torch.randn(4, 2, 5, 3)
    ranks = Ranks.of(MASK)
    front = ranks.compact(x)
    for b in range(4):
        count = int(MASK[b].sum())
        assert torch.equal(front[b, :, :count], x[b][:, MASK[b]])
        assert not front[b, :, count:].any()
    assert torch.equal(ranks.spread(front), x.masked_fill(~MASK[:, None, :, None], 0))


def test_masked_rows_may_hold_nan() -> None:
    x = torch.where(MASK[:, None, :, None], torch.randn(4, 2, 5, 3), torch.nan)
    assert Ranks.of(MASK).compact(x).isfinite().all()


def test_gradients_to_second_order() -> None:
    x = torch.randn(4, 2, 5, 3, dtype=torch.float64, requires_grad=True)
    ranks = Ranks.of(MASK)
    for move in (ranks.compact, ranks.spread):
        assert torch.autograd.gradcheck(move, x)
        assert torch.autograd.gradgradcheck(move, x)


@pytest.mark.parametrize("shape", [(2, 0), (0, 3), (0, 0)])
def test_nothing_to_move(shape: tuple[int, int]) -> None:
    ranks = Ranks.of(torch.ones(shape, dtype=torch.bool))
    assert ranks.compact(torch.randn(shape[0], 2, shape[1], 4)).shape == (shape[0], 2, shape[1], 4)


def test_each_head_is_sorted_in_several_orders() -> None:
    x = torch.randn(2, 3, 7, 4, dtype=torch.float64, requires_grad=True)
    keys = torch.randint(4, (2, 6, 7))
    move = Move.sorting(keys)
    moved = move.apply(x)
    for b in range(2):
        for order in range(6):
            expected = x[b, order // 2][keys[b, order].argsort(stable=True)]
            assert torch.equal(moved[b, order], expected)
    assert torch.equal(move.undo(moved), x.repeat_interleave(2, 1))
    assert torch.autograd.gradcheck(move.apply, x)
    assert torch.autograd.gradgradcheck(move.apply, x)


@pytest.mark.parametrize(("length", "blocks"), [(0, 1), (1, 1), (4, 1), (9, 3)])
def test_blocks_are_filled_up_with_zeros(length: int, blocks: int) -> None:
    x = torch.randn(2, 3, length, 5)
    out = in_blocks(x, 4)
    assert out.shape == (2, 3, blocks, 4, 5)
    assert torch.equal(out.flatten(2, 3)[:, :, :length], x)
    assert not out.flatten(2, 3)[:, :, length:].any()
