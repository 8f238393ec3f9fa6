"""The suggested number of landmarks reaches the error, is small, and does not depend on padding or the batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import skyformer
from skyformer import suggest_landmarks
from skyformer.errors import InputError, MaskError, ShapeError, UnknownNameError, UnsupportedError
from skyformer.landmarks import Candidates, statistical_dimension
from skyformer.landmarks.suggestion import SampledBlock, largest_singular_value
from skyformer.ops.kernels import GaussianKernel
from skyformer.testing.suite import LargestStorage, insert_masked
from tests.helpers import refused


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def smooth(length: int, std: float = 1.0, heads: int = 2, noise: float = 0.02) -> tuple[Tensor, Tensor]:
    """Queries and keys along one closed curve, which a few landmarks describe."""
    turn = torch.linspace(0, 2 * torch.pi, length, dtype=torch.float64)
    curve = torch.stack([turn.sin(), turn.cos(), (2 * turn).sin(), (3 * turn).cos()], -1) * std
    drawn = torch.randn(2, 1, heads, length, 4, dtype=torch.float64, generator=generator(7))
    return curve + noise * drawn[0], curve.flip(0) + noise * drawn[1]


def true_error(query: Tensor, key: Tensor, count: int, seed: int, landmarks: str = "stratified") -> Tensor:
    """|C - C~| / |C| with whole matrices. The values are the identity, so that the outputs are the score matrices."""
    identity = torch.eye(key.shape[2], dtype=key.dtype).expand(*key.shape[:2], -1, -1)
    exact = skyformer.kernelized_attention(query, key, identity)
    found = skyformer.skyformer_attention(
        query, key, identity, num_landmarks=count, landmarks=landmarks, generator=generator(seed)
    )
    return torch.linalg.matrix_norm(exact - found, 2) / torch.linalg.matrix_norm(exact, 2)


@pytest.mark.parametrize("landmarks", ["stratified", "probe", "uniform"])
@pytest.mark.parametrize("epsilon", [0.3, 0.05])
def test_the_suggested_number_reaches_epsilon(landmarks: str, epsilon: float) -> None:
    query, key = smooth(300)
    count = suggest_landmarks(query, key, epsilon, landmarks=landmarks, generator=generator())
    assert isinstance(count, int)
    assert 8 <= count < 300
    reached = [bool((true_error(query, key, count, 50 + s, landmarks) <= epsilon).all()) for s in range(10)]
    assert sum(reached) >= 9


def test_a_smaller_error_takes_more_landmarks() -> None:
    query, key = smooth(300, std=1.5)
    counts = [suggest_landmarks(query, key, epsilon, generator=generator()) for epsilon in (0.5, 0.1, 0.01)]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


def test_noise_that_no_landmark_describes_takes_every_row() -> None:
    query, key = (20 * torch.randn(1, 1, 40, 16, generator=generator(s)) for s in (1, 2))
    key = torch.cat([key[:, :, :20], query[:, :, 20:]], 2)
    assert suggest_landmarks(query, key, 0.1, generator=generator()) == 80


def test_share_leaves_the_hardest_heads_out() -> None:
    easy_q, easy_k = smooth(60, heads=3)
    hard = 20 * torch.randn(1, 1, 60, 4, dtype=torch.float64, generator=generator(3))
    query, key = torch.cat([easy_q, hard], 1), torch.cat([easy_k, hard], 1)
    alone = [suggest_landmarks(query[:, [h]], key[:, [h]], 0.2, generator=generator()) for h in range(4)]
    assert max(alone[:3]) < alone[3]
    assert suggest_landmarks(query, key, 0.2, generator=generator()) == alone[3]
    assert suggest_landmarks(query, key, 0.2, share=0.75, generator=generator()) == max(alone[:3])


def test_the_search_begins_at_a_share_of_d_stat() -> None:
    # All rows are far from each other, so d_stat is near 4,000, and the search starts near 4,000 / 128.
    far = 100 * torch.randn(1, 1, 2000, 16, dtype=torch.float64, generator=generator(3))
    tried = []

    def first_rows(candidates: Candidates, count: int, _: object) -> Tensor:
        tried.append(count)
        return torch.arange(count)[None]

    key = torch.cat([far[:, :, :1], -far[:, :, 1:]], 2)
    assert suggest_landmarks(far, key, 0.5, landmarks=first_rows, num_draws=1, generator=generator()) == tried[-1]
    assert 28 <= tried[0] <= 32


def test_results_depend_on_the_generator() -> None:
    query, key = smooth(200)
    found = [statistical_dimension(query, key, 0.1, num_samples=64, generator=generator(s)) for s in (4, 4, 5)]
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_padding_does_not_change_it() -> None:
    query, key = smooth(60)
    positions = torch.randperm(90, generator=generator())[:60].sort().values
    padded_q, padded_k = (insert_masked(x, positions) for x in (query, key))
    mask = torch.zeros(1, padded_q.shape[2], dtype=torch.bool)
    mask[:, positions] = True
    assert suggest_landmarks(query, key, 0.1, generator=generator()) == suggest_landmarks(
        padded_q, padded_k, 0.1, key_mask=mask, generator=generator()
    )
    for num_samples in (32, 512):
        alone = statistical_dimension(query, key, 0.1, num_samples=num_samples, generator=generator())
        padded = statistical_dimension(
            padded_q, padded_k, 0.1, key_mask=mask, num_samples=num_samples, generator=generator()
        )
        torch.testing.assert_close(padded, alone)


def test_the_rest_of_the_batch_does_not_change_the_dimension_of_an_example() -> None:
    query, key = smooth(60)
    alone = statistical_dimension(query, key, 0.1, num_samples=32, generator=generator())
    both = statistical_dimension(
        torch.cat([query, -query]), torch.cat([key, key * 2]), 0.1, num_samples=32, generator=generator()
    )
    torch.testing.assert_close(both[:1], alone)


def exact_dimension(query: Tensor, key: Tensor, epsilon: float) -> Tensor:
    points, scale = torch.cat([query, key], 2), query.shape[-1] ** -0.5
    values = torch.linalg.eigvalsh(GaussianKernel().matrix(points, points, scale)).clamp(min=0)
    ridge = epsilon * torch.linalg.matrix_norm(GaussianKernel().matrix(query, key, scale), 2)
    return (values / (values + ridge.unsqueeze(-1))).sum(-1)


@pytest.mark.parametrize("std", [0.3, 1.0, 3.0])
def test_statistical_dimension_from_a_part_of_the_rows(std: float) -> None:
    query, key = (std * torch.randn(1, 2, 400, 4, dtype=torch.float64, generator=generator(s)) for s in (1, 2))
    estimate = statistical_dimension(query, key, 0.1, num_samples=256, generator=generator())
    ratio = estimate / exact_dimension(query, key, 0.1)
    assert (ratio > 0.85).all()
    assert (ratio < 1.3).all()


def test_the_sample_has_the_norm_of_the_whole_even_if_few_rows_make_it_up() -> None:
    # Ten queries equal ten keys, all others are far apart: a uniform sample would miss most of the norm.
    query, key = (30 * torch.randn(1, 1, 500, 8, dtype=torch.float64, generator=generator(s)) for s in (1, 2))
    query[:, :, ::50] = key[:, :, ::50] = 0
    where = Candidates(query, key, None, None, GaussianKernel(), 1.0)
    norms = torch.stack([SampledBlock.of(where, 128, seed).norm for seed in range(40)])
    assert norms.median() == pytest.approx(10.0, rel=0.15)


def test_largest_singular_value() -> None:
    matrix = torch.randn(2, 3, 40, 30, dtype=torch.float64) @ torch.randn(30, 30, dtype=torch.float64)
    expected = torch.linalg.matrix_norm(matrix, 2)
    assert ((largest_singular_value(matrix) / expected) > 0.99).all()
    assert (largest_singular_value(matrix) <= expected * (1 + 1e-12)).all()
    assert (largest_singular_value(torch.zeros(1, 1, 5, 5)) == 0).all()


def test_no_matrix_of_the_sequences_size_is_made() -> None:
    query, key = (x.float() for x in smooth(4000, heads=1))
    with LargestStorage() as largest:
        assert suggest_landmarks(query, key, 0.3, landmarks="probe", num_draws=1, generator=generator()) < 200
        assert 1 <= float(statistical_dimension(query, key, 0.3, num_samples=128, generator=generator())) < 400
    assert largest.bytes < 4000 * 4000 / 4


@pytest.mark.parametrize("length", [0, 1, 3])
def test_short_sequences(length: int) -> None:
    query, key = torch.randn(1, 2, length, 4), torch.randn(1, 2, 5, 4)
    assert 1 <= suggest_landmarks(query, key, 0.1) <= length + 5


def test_an_empty_batch_has_a_suggestion() -> None:
    empty = torch.randn(0, 2, 5, 4)
    assert 1 <= suggest_landmarks(empty, empty, 0.1) <= 10


def test_an_example_without_valid_tokens_asks_for_nothing() -> None:
    query, key = smooth(40, heads=1)
    mask = torch.zeros(1, 40, dtype=torch.bool)
    assert suggest_landmarks(query, key, 0.1, key_mask=mask, generator=generator()) == 8
    assert float(statistical_dimension(query, key, 0.1, key_mask=mask)) == 0


def test_bad_input_is_refused() -> None:
    query, key = smooth(20)
    with refused(InputError, "epsilon", "above 0", "0"):
        suggest_landmarks(query, key, 0.0)
    with refused(InputError, "epsilon", "below 1", "1.5"):
        suggest_landmarks(query, key, 1.5)
    with refused(InputError, "share", "at most 1", "2"):
        suggest_landmarks(query, key, 0.1, share=2.0)
    with refused(InputError, "num_draws", "at least 1"):
        suggest_landmarks(query, key, 0.1, num_draws=0)
    with refused(InputError, "num_samples", "at least 2"):
        statistical_dimension(query, key, 0.1, num_samples=1)
    with refused(UnknownNameError, "landmark sampler", "Did you mean 'probe'?"):
        suggest_landmarks(query, key, 0.1, landmarks="prob")
    with refused(UnsupportedError, "radial", "'softmax'"):
        suggest_landmarks(query, key, 0.1, kernel="softmax")
    with refused(ShapeError, "key", "head dim"):
        suggest_landmarks(query, key[..., :2], 0.1)
    with refused(MaskError, "key_mask", "(1, 20)"):
        suggest_landmarks(query, key, 0.1, key_mask=torch.ones(1, 5, dtype=torch.bool))
