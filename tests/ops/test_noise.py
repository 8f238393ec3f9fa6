"""Random numbers that depend on a seed and a position only."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from skyformer.ops.noise import RandomWords, draw_seed, uniform_noise

CPU = torch.device("cpu")
SEEDS = [0, 1, 12345, 2**62 - 1, 2**63 - 1, -1]


def noise(seed: int, stream: int = 0, count: int = 2**14) -> Tensor:
    return uniform_noise(seed, stream, count, CPU)


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a, b]).double())[0, 1])


@pytest.mark.parametrize("seed", SEEDS)
def test_fewer_numbers_are_a_prefix_of_more(seed: int) -> None:
    longest = noise(seed, 3)
    for count in (0, 1, 17, 1000):
        assert torch.equal(noise(seed, 3, count), longest[:count])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("stream", [0, 1, 7])
def test_numbers_are_uniform(seed: int, stream: int) -> None:
    x = noise(seed, stream)
    assert x.min() >= 0
    assert x.max() < 1
    bins = torch.histc(x, 64, 0, 1)
    expected = len(x) / 64
    chi_square = float(((bins - expected) ** 2 / expected).sum())
    # 63 degrees of freedom: mean 63, standard deviation 11.2.
    assert 63 - 5 * 11.2 < chi_square < 63 + 5 * 11.2


@pytest.mark.parametrize("seed", SEEDS)
def test_neighbours_are_uncorrelated(seed: int) -> None:
    x = noise(seed)
    for lag in (1, 2, 64):
        assert abs(correlation(x[:-lag], x[lag:])) < 5 / len(x) ** 0.5


@pytest.mark.parametrize(
    ("first", "second"), [((0, 0), (0, 1)), ((0, 1), (1, 0)), ((5, 2), (5, 3)), ((7, 0), (8, 0)), ((1, 1), (2, 2))]
)
def test_streams_and_seeds_are_independent(first: tuple[int, int], second: tuple[int, int]) -> None:
    a, b = noise(*first), noise(*second)
    # Also for shifted sequences: a counter generator may return one sequence at two offsets.
    for shift in (-2, -1, 0, 1, 2):
        assert abs(correlation(a, b.roll(shift))) < 5 / len(a) ** 0.5


def test_seed_comes_from_the_generator_and_advances_it() -> None:
    first, second = (torch.Generator().manual_seed(4) for _ in range(2))
    drawn = [draw_seed(first) for _ in range(3)]
    assert drawn == [draw_seed(second) for _ in range(3)]
    assert len(set(drawn)) == 3


def test_seed_comes_from_torch_without_a_generator() -> None:
    torch.manual_seed(11)
    drawn = draw_seed(None)
    torch.manual_seed(11)
    assert draw_seed(None) == drawn
    assert draw_seed(None) != drawn


def test_meta_device_gives_shapes() -> None:
    assert uniform_noise(1, 0, 9, torch.device("meta")).shape == (9,)


def block_bytes(block: int, *, tables: bool, seed: int = 3, length: int = 2000, largest: int = 2000) -> Tensor:
    words = RandomWords(seed, largest, tables).write(block, torch.empty(length, dtype=torch.int64))
    return words.view(torch.uint8).double()


@pytest.mark.parametrize("tables", [False, True])
def test_bytes_of_a_block_are_uniform_and_uncorrelated(tables: bool) -> None:
    x = block_bytes(5, tables=tables)
    bins = torch.histc(x, 256, 0, 256)
    expected = len(x) / 256
    # 255 degrees of freedom: mean 255, standard deviation 22.6.
    assert abs(float(((bins - expected) ** 2 / expected).sum()) - 255) < 5 * 22.6
    for lag in (1, 2, 8, 64):
        assert abs(correlation(x[:-lag], x[lag:])) < 5 / len(x) ** 0.5


@pytest.mark.parametrize("tables", [False, True])
def test_blocks_and_seeds_have_different_words(tables: bool) -> None:
    x = block_bytes(0, tables=tables)
    for other in (
        block_bytes(1, tables=tables),
        block_bytes(10**6, tables=tables),
        block_bytes(0, tables=tables, seed=4),
    ):
        assert abs(correlation(x, other)) < 5 / len(x) ** 0.5
    assert torch.equal(x, block_bytes(0, tables=tables))


@pytest.mark.parametrize("tables", [False, True])
def test_words_do_not_depend_on_the_largest_block(tables: bool) -> None:
    x = block_bytes(7, tables=tables)
    assert torch.equal(x, block_bytes(7, tables=tables, largest=5000))
    assert torch.equal(x[:80], block_bytes(7, tables=tables, length=10))


def test_products_of_three_blocks_from_tables_are_uncorrelated() -> None:
    """Signs of three blocks multiply to signs with mean zero, as those of independent numbers."""
    words = RandomWords(9, 4096, True)
    signs = [
        words.write(block, torch.empty(4096, dtype=torch.int64)).view(torch.int8).sign().double() for block in range(12)
    ]
    for first in range(10):
        product = signs[first] * signs[first + 1] * signs[first + 2]
        assert abs(float(product.mean())) < 5 / len(product) ** 0.5
