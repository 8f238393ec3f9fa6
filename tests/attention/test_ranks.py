"""Ranks: valid tokens to the front and back again, with plain copies both ways."""

from __future__ import annotations

import pytest
import torch

from skyformer.attention.rows import Ranks

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
