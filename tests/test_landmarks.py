"""Landmarks: the rows that each sampler draws, independently of padding and of the rest of the batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from skyformer import kernelized_attention, skyformer_attention
from skyformer.errors import InputError, ShapeError, UnknownNameError
from skyformer.landmarks import (
    SAMPLERS,
    Candidates,
    Landmarks,
    LeverageSampler,
    PaperSampler,
    ProbeSampler,
    QuerySampler,
    Sampler,
    SegmentMeansSampler,
    StratifiedSampler,
    UniformSampler,
    get_sampler,
    landmark_rows,
    segment_means,
)
from skyformer.landmarks.leverage import exact_leverage_scores, kernel_diagonal
from skyformer.landmarks.samplers import query_share
from skyformer.ops.kernels import GaussianKernel, SoftmaxKernel
from skyformer.testing.suite import draw, insert_masked, relative_error
from tests.helpers import assert_same_with_gradients, refused, scattered_mask

RECURSIVE = LeverageSampler(exact_limit=8)
BY_HEAD = [kind(per_head=True) for kind in (UniformSampler, PaperSampler, StratifiedSampler, QuerySampler)]
DRAWING = [
    UniformSampler(),
    PaperSampler(),
    StratifiedSampler(),
    ProbeSampler(),
    LeverageSampler(),
    RECURSIVE,
    *BY_HEAD,
]
WITHOUT_REPEATS = [StratifiedSampler(), ProbeSampler(), LeverageSampler(), RECURSIVE, StratifiedSampler(per_head=True)]
ALL = [*DRAWING, SegmentMeansSampler()]


def candidates(
    query: Tensor, key: Tensor, query_mask: Tensor | None = None, key_mask: Tensor | None = None
) -> Candidates:
    return Candidates(query.detach(), key.detach(), query_mask, key_mask, GaussianKernel(), query.shape[-1] ** -0.5)


def some_candidates(length: int, size: int, masked: bool = False, batch: int = 2) -> Candidates:
    q, k, _ = draw(batch, length, size, 3, 3)
    if not masked:
        return candidates(q, k)
    return candidates(q, k, scattered_mask(batch, length, seed=1), scattered_mask(batch, size, seed=2))


def rows_of(sampler: Sampler, where: Candidates, count: int, seed: int = 0) -> Tensor:
    """The rows that a sampler draws, (B, 1 or H, d)."""
    rows = sampler(where, count, torch.Generator().manual_seed(seed))
    assert isinstance(rows, Tensor)
    return rows if rows.dim() == 3 else rows[:, None]


def points_of(sampler: Sampler, where: Candidates, count: int) -> Tensor:
    """The points (B, H, d, P) that a sampler draws, sorted, because the order of the draws does not matter."""
    drawn = sampler(where, count, torch.Generator().manual_seed(0))
    if isinstance(drawn, Landmarks):
        return drawn.points * drawn.all_active()[..., None]
    points = landmark_rows(where.query, where.key, drawn if drawn.dim() == 3 else drawn[:, None])[2]
    return points.gather(2, points[..., :1].argsort(2).expand_as(points))


def test_valid_rows_are_those_of_both_masks() -> None:
    q, k, _ = draw(2, 3, 2, 3, 3)
    mask = torch.tensor([[True, False], [False, True]])
    expected = torch.tensor([[True, True, True, True, False], [True, True, True, False, True]])
    assert torch.equal(candidates(q, k, None, mask).valid_rows(), expected)
    assert candidates(q, k).valid_rows().all()


def repeats(rows: Tensor) -> int:
    ordered = rows.sort(-1).values
    return int((ordered[..., 1:] == ordered[..., :-1]).sum())


@pytest.mark.parametrize("sampler", DRAWING, ids=str)
@given(
    length=st.integers(6, 40),
    size=st.integers(6, 40),
    count=st.integers(1, 6),
    seed=st.integers(0, 999),
    data=st.data(),
)
def test_only_valid_rows_are_drawn(
    sampler: Sampler, length: int, size: int, count: int, seed: int, data: st.DataObject
) -> None:
    q, k, _ = draw(2, length, size, 3, 3)
    keep = data.draw(st.sampled_from([0.2, 0.5, 1.0]))
    where = candidates(q, k, scattered_mask(2, length, keep, seed), scattered_mask(2, size, keep, seed + 1))
    count = min(count, int(where.valid_rows().sum(-1).min()))
    rows = rows_of(sampler, where, count, seed)
    assert rows.shape[-1] == count
    assert rows.dtype == torch.int64
    valid = where.valid_rows()[:, None].expand(-1, rows.shape[1], -1)
    assert valid.gather(-1, rows).all()


@pytest.mark.parametrize("sampler", WITHOUT_REPEATS, ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_rows_do_not_repeat(sampler: Sampler, masked: bool) -> None:
    where = some_candidates(33, 29, masked)
    assert all(repeats(rows_of(sampler, where, count, seed)) == 0 for count in (1, 7, 20) for seed in range(10))


@pytest.mark.parametrize("sampler", [StratifiedSampler(), ProbeSampler()], ids=str)
@pytest.mark.parametrize(
    ("length", "size", "expected"), [(30, 30, 6), (3, 30, 3), (30, 3, 10), (0, 30, 0), (30, 0, 13)]
)
def test_half_come_from_the_queries_unless_a_side_is_short(
    sampler: Sampler, length: int, size: int, expected: int
) -> None:
    rows = rows_of(sampler, some_candidates(length, size), 13)
    assert ((rows < length).sum(-1) == expected).all()
    assert repeats(rows) == 0


@pytest.mark.parametrize(("length", "size", "expected"), [(30, 30, 6), (3, 30, 6), (0, 30, 0), (30, 0, 13)])
def test_the_papers_half_comes_from_the_queries_unless_a_side_is_empty(length: int, size: int, expected: int) -> None:
    rows = rows_of(PaperSampler(), some_candidates(length, size), 13)
    assert ((rows < length).sum(-1) == expected).all()


def test_the_paper_draws_each_row_equally_often_and_with_replacement() -> None:
    where = some_candidates(5, 10, batch=1)
    rows = torch.cat([rows_of(PaperSampler(), where, 40, seed).flatten() for seed in range(100)])
    counts = rows.bincount(minlength=15).double()
    expected = torch.tensor([400.0] * 5 + [200.0] * 10)
    assert float(((counts - expected).square() / expected).sum()) < 40, "chi-squared with 13 degrees of freedom"


def test_query_share_goes_by_the_example() -> None:
    queries, keys = torch.tensor([[30], [3], [30]]), torch.tensor([[30], [30], [3]])
    assert query_share(queries, keys, 12).flatten().tolist() == [6, 3, 9]


def test_stratified_picks_one_row_in_each_stratum() -> None:
    where = some_candidates(40, 60)
    for seed in range(20):
        rows = rows_of(StratifiedSampler(), where, 20, seed)[0, 0]
        assert torch.equal(rows[:10] // 4, torch.arange(10))
        assert torch.equal((rows[10:] - 40) // 6, torch.arange(10))


@pytest.mark.parametrize(("length", "size", "from_queries"), [(40, 40, 16), (10, 40, 10), (40, 5, 16)])
def test_queries_come_first(length: int, size: int, from_queries: int) -> None:
    rows = rows_of(QuerySampler(), some_candidates(length, size), 16)
    assert ((rows < length).sum(-1) == from_queries).all()


def test_stratified_reaches_every_row() -> None:
    where = some_candidates(7, 11)
    seen = {int(r) for seed in range(200) for r in rows_of(StratifiedSampler(), where, 4, seed)[0, 0]}
    assert seen == set(range(18))


def test_uniform_draws_every_valid_row_equally_often() -> None:
    where = some_candidates(9, 14, masked=True)
    valid, draws = where.valid_rows(), 20_000
    for b, rows in enumerate(rows_of(UniformSampler(), where, draws)[:, 0]):
        counts = torch.bincount(rows, minlength=23)[valid[b]].double()
        expected = draws / len(counts)
        chi_square, freedom = float(((counts - expected) ** 2 / expected).sum()), len(counts) - 1
        assert chi_square < freedom + 5 * (2 * freedom) ** 0.5


def test_uniform_draws_with_replacement() -> None:
    assert repeats(rows_of(UniformSampler(), some_candidates(5, 5), 50)) > 0


def test_probe_prefers_rows_near_the_other_side() -> None:
    q, k, _ = draw(1, 40, 40, 3, 3)
    q, k = q.detach() / 10, k.detach() / 10
    q[:, :, ::2] += 100
    k[:, :, 1::2] -= 100
    for seed in range(5):
        rows = rows_of(ProbeSampler(), candidates(q, k), 16, seed)
        of_queries, of_keys = rows[..., :8], rows[..., 8:] - 40
        assert (of_queries % 2 == 1).all()
        assert (of_keys % 2 == 0).all()


def test_probe_draws_by_weight() -> None:
    # One key; two kinds of queries, whose squared kernel values with it are 1 and exp(-1): weights 1 : 0.368.
    q, k = torch.zeros(1, 1, 200, 1), torch.zeros(1, 1, 400, 1)
    q[:, :, 100:] = 1
    near = sum(int((rows_of(ProbeSampler(), candidates(q, k), 4, seed)[..., :2] < 100).sum()) for seed in range(150))
    share = 1 / (1 + torch.exp(torch.tensor(-1.0)))
    assert abs(near / 300 - share) < 5 * (0.25 / 300) ** 0.5


def test_probe_for_normalised_rows_prefers_attended_keys() -> None:
    # Every query attends to one key in ten, and there are as many key landmarks as such keys.
    query, key = torch.zeros(1, 1, 200, 4), torch.zeros(1, 1, 200, 4)
    query[..., 0], key[:, :, ::10, 0] = 4.0, 4.0
    where = replace(candidates(query, key), normalised=True)
    rows = rows_of(ProbeSampler(), where, 40)
    taken = rows[rows >= 200] - 200
    assert taken.numel() == 20
    assert (taken % 10 == 0).all()


def test_probe_for_normalised_rows_gives_queries_equal_weights() -> None:
    where = some_candidates(60, 60)
    where = replace(where, query=torch.cat([where.query[:, :, :30], where.query[:, :, 30:] + 50], 2))

    def far(rows: Tensor) -> int:
        return int(((rows >= 30) & (rows < 60)).sum())

    assert far(rows_of(ProbeSampler(), where, 20)) == 0
    assert far(rows_of(ProbeSampler(), replace(where, normalised=True), 20)) > 0


def test_probe_for_normalised_rows_draws_valid_keys_only() -> None:
    where = replace(some_candidates(40, 40, masked=True), normalised=True)
    rows = rows_of(ProbeSampler(), where, 12)
    valid = where.valid_rows()
    assert valid[torch.arange(2)[:, None, None], rows].all()


def definition_of_leverage(gram: Tensor, ridge: Tensor | float) -> Tensor:
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype)
    return torch.linalg.solve(gram + ridge * identity, gram).diagonal(dim1=-2, dim2=-1)


def random_gram(count: int, batch: int = 2, heads: int = 2) -> Tensor:
    x = torch.randn(batch, heads, count, 3, dtype=torch.float64)
    return GaussianKernel().matrix(x, x)


def test_exact_leverage_scores_are_the_definition() -> None:
    gram = random_gram(15)
    scores = exact_leverage_scores(gram, torch.ones(2, 15).bool(), 6, 0.3)
    torch.testing.assert_close(scores, definition_of_leverage(gram, 0.3))


def test_exact_leverage_scores_leave_masked_rows_out() -> None:
    gram, valid = random_gram(15, batch=1), scattered_mask(1, 15)
    scores = exact_leverage_scores(gram, valid, 6, 0.3)
    inside = valid[0].nonzero().flatten()
    torch.testing.assert_close(scores[..., inside], definition_of_leverage(gram[..., inside, :][..., inside], 0.3))
    torch.testing.assert_close(scores[:, :, ~valid[0]], torch.zeros(1, 2, int((~valid).sum()), dtype=torch.float64))


def test_default_ridge_is_the_tail_of_the_spectrum() -> None:
    gram = random_gram(15)
    ridge = torch.linalg.eigvalsh(gram)[..., :-4].sum(-1)[..., None, None] / 4
    scores = exact_leverage_scores(gram, torch.ones(2, 15).bool(), 8, None)
    torch.testing.assert_close(scores, definition_of_leverage(gram, ridge))
    # With this ridge the scores add up to at most d = 2 k, as the fixed-size algorithm needs.
    assert (scores.sum(-1) <= 8).all()


def uneven_candidates(length: int) -> Candidates:
    """Nearly all rows in one tight cluster and a few outliers, which leverage sampling finds and uniform does not."""
    x = torch.randn(1, 1, 2 * length, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    x[:, :, : 2 * length - 16] *= 0.05
    x[:, :, 2 * length - 16 :] *= 8
    x = x[:, :, torch.randperm(2 * length, generator=torch.Generator().manual_seed(6))]
    return candidates(x[:, :, :length], x[:, :, length:])


def far_rows_found(sampler: Sampler, where: Candidates) -> float:
    """The share of the 16 outliers among 32 landmarks, on average over seeds."""
    far = torch.cat([where.query, where.key], 2)[0, 0].norm(dim=-1) > 3
    hits = [int(far[rows_of(sampler, where, 32, seed)[0, 0]].sum()) for seed in range(12)]
    return sum(hits) / len(hits) / int(far.sum())


def test_recursive_leverage_finds_what_exact_leverage_finds() -> None:
    where = uneven_candidates(150)
    exact, recursive, uniform = (
        far_rows_found(sampler, where)
        for sampler in (LeverageSampler(), LeverageSampler(exact_limit=32), UniformSampler())
    )
    assert exact > 0.9
    assert recursive > 0.55
    assert uniform < 0.2


def test_recursive_leverage_approximates_nearly_as_well_as_exact() -> None:
    q, k, v = (x.detach() for x in draw(1, 120, 120, 4, 4))
    exact_output = kernelized_attention(q, k, v)

    def mean_error(sampler: Sampler) -> float:
        errors = []
        for seed in range(6):
            generator = torch.Generator().manual_seed(seed)
            out = skyformer_attention(q, k, v, num_landmarks=30, landmarks=sampler, gamma=1e-6, generator=generator)
            errors.append(relative_error(out, exact_output))
        return sum(errors) / len(errors)

    assert mean_error(LeverageSampler(exact_limit=32)) < 1.5 * mean_error(LeverageSampler())


@pytest.mark.parametrize("std", [0.0, 1e-3, 30.0, 1e3])
def test_recursive_leverage_survives_awkward_points(std: float) -> None:
    x = torch.randn(2, 2, 300, 8) * std
    rows = rows_of(LeverageSampler(), candidates(x, x), 48)
    assert rows.shape == (2, 2, 48)
    assert repeats(rows) == 0


def segment_means_by_loop(x: Tensor, mask: Tensor, count: int) -> list[list[Tensor]]:
    """For each example the means of its segments of valid rows, computed one by one."""
    means = []
    for rows, valid in zip(x, mask, strict=True):
        present = rows[:, valid]
        n = present.shape[1]
        used = min(n, count)
        rank = torch.arange(n)
        means.append([present[:, rank * used // max(n, 1) == s].mean(1) for s in range(used)])
    return means


@pytest.mark.parametrize("length", [1, 3, 5, 12, 23])
@pytest.mark.parametrize("masked", [False, True])
def test_segment_means_agree_with_a_loop(length: int, masked: bool) -> None:
    x = torch.randn(3, 2, length, 4, dtype=torch.float64)
    mask = scattered_mask(3, length) if masked else None
    found = segment_means(x, mask, 4)
    for b, means in enumerate(segment_means_by_loop(x, torch.ones(3, length).bool() if mask is None else mask, 4)):
        assert found.all_active()[b, 0].sum() == len(means)
        for s, mean in enumerate(means):
            torch.testing.assert_close(found.points[b, :, s], mean)


@pytest.mark.parametrize("masked", [False, True])
def test_segments_differ_in_length_by_at_most_one(masked: bool) -> None:
    # The row numbers themselves: the distance between two means is the mean length of the two segments.
    x = torch.arange(23.0).view(1, 1, 23, 1)
    mask = torch.ones(1, 23, dtype=torch.bool) if masked else None
    centres = segment_means(x, mask, 5).points.flatten()
    lengths = (centres[1:] - centres[:-1]) * 2
    assert ((lengths >= 8) & (lengths <= 10)).all()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_segment_means_work_with_few_landmarks(count: int) -> None:
    drawn = SegmentMeansSampler()(some_candidates(9, 9), count, None)
    assert drawn.points.shape == (2, 2, count, 3)
    assert drawn.all_active().all()


@pytest.mark.parametrize("sampler", ALL, ids=str)
@pytest.mark.parametrize("scattered", [False, True])
def test_padding_changes_no_landmark(sampler: Sampler, scattered: bool) -> None:
    q, k, _ = draw(2, 31, 31, 3, 3)
    positions = torch.randperm(50)[:31].sort().values if scattered else torch.arange(31)
    longer = [insert_masked(x, positions) for x in (q, k)]
    mask = torch.zeros(2, longer[0].shape[2], dtype=torch.bool)
    mask[:, positions] = True
    torch.testing.assert_close(
        points_of(sampler, candidates(*longer, mask, mask), 10), points_of(sampler, candidates(q, k), 10)
    )


@pytest.mark.parametrize("sampler", ALL, ids=str)
def test_the_rest_of_the_batch_changes_no_landmark(sampler: Sampler) -> None:
    q, k, _ = draw(3, 40, 30, 3, 3)
    masks = torch.ones(3, 40).bool(), torch.ones(3, 30).bool()
    masks[0][1, 12:] = False
    masks[1][1] = scattered_mask(1, 30)[0]
    masks[0][2] = scattered_mask(1, 40)[0]
    together = points_of(sampler, candidates(q, k, *masks), 10)
    for b in range(3):
        one = slice(b, b + 1)
        alone = points_of(sampler, candidates(q[one], k[one], *(m[one] for m in masks)), 10)
        torch.testing.assert_close(together[one], alone)


@pytest.mark.parametrize("sampler", DRAWING, ids=str)
def test_rows_depend_on_the_generator(sampler: Sampler) -> None:
    where = some_candidates(60, 60)
    assert torch.equal(rows_of(sampler, where, 12, 1), rows_of(sampler, where, 12, 1))
    assert not torch.equal(rows_of(sampler, where, 12, 1), rows_of(sampler, where, 12, 2))


@pytest.mark.parametrize("sampler", BY_HEAD, ids=lambda sampler: sampler.name)
def test_each_head_may_draw_its_own_rows(sampler: Sampler) -> None:
    rows = rows_of(sampler, some_candidates(40, 40), 16)
    assert rows.shape == (2, 2, 16)
    assert not torch.equal(rows[:, 0], rows[:, 1])


def test_kernel_diagonal_is_the_diagonal() -> None:
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    for kernel in (GaussianKernel(), SoftmaxKernel()):
        diagonal = kernel.matrix(x, x, 0.3).diagonal(dim1=-2, dim2=-1)
        torch.testing.assert_close(kernel_diagonal(kernel, x, 0.3), diagonal)


@pytest.mark.parametrize("heads", [1, 2])
def test_landmark_rows_are_rows_of_queries_and_keys(heads: int) -> None:
    rows = torch.randint(0, 16, (2, heads, 9))

    def indexed(q: Tensor, k: Tensor) -> Tensor:
        both = torch.cat([q, k], 2)
        return both.gather(2, rows[..., None].expand(-1, 2, -1, 3))

    q, k, _ = draw(2, 7, 9, 3, 3)
    assert_same_with_gradients(lambda q, k: landmark_rows(q, k, rows)[2], indexed, (q, k))


def test_landmark_rows_add_their_gradient_to_other_gradients() -> None:
    rows = torch.tensor([[[0, 3, 3, 5]]])

    def through(q: Tensor, k: Tensor) -> Tensor:
        q, k, points = landmark_rows(q, k, rows)
        return torch.cat([q.sin(), k.cos(), points.exp()], 2)

    q, k, _ = draw(1, 4, 3, 2, 2)
    assert torch.autograd.gradcheck(through, (q, k))


def attend(landmarks: Any, **options: Any) -> Tensor:
    torch.manual_seed(3)
    q, k, v = draw(2, 10, 12, 4, 4)
    return skyformer_attention(q, k, v, landmarks=landmarks, gamma=0.1, **options)


def test_explicit_rows_may_differ_by_head() -> None:
    rows = torch.randint(22, (2, 2, 6))
    both = attend(rows)
    for h in range(2):
        torch.testing.assert_close(both[:, h], attend(rows[:, h])[:, h])


def test_an_empty_slot_counts_for_nothing() -> None:
    rows = torch.randint(22, (2, 6))
    holes = torch.full((2, 9), -1)
    holes[:, [0, 2, 3, 5, 7, 8]] = rows
    torch.testing.assert_close(attend(holes), attend(rows))


def test_no_landmark_at_all_gives_zeros() -> None:
    assert (attend(torch.full((2, 3), -1)) == 0).all()


class LeavesHoles(Sampler):
    """A custom sampler: rows 4 and 15, and an empty slot between."""

    name = "leaves_holes"

    def __call__(self, candidates: Candidates, num_landmarks: int, generator: torch.Generator | None) -> Tensor:
        return torch.tensor([[4, -1, 15]]).expand(candidates.query.shape[0], -1)


def own_rows(candidates: Candidates, num_landmarks: int, generator: torch.Generator | None) -> Tensor:
    return torch.tensor([[4, 15]]).expand(candidates.query.shape[0], -1)


def own_points(candidates: Candidates, num_landmarks: int, generator: torch.Generator | None) -> Landmarks:
    return Landmarks(torch.cat([candidates.query[:, :, 4:5], candidates.key[:, :, 5:6]], 2))


@pytest.mark.parametrize("own", [LeavesHoles(), own_rows, own_points])
def test_custom_samplers_are_called(own: Any) -> None:
    torch.testing.assert_close(attend(own), attend(torch.tensor([[4, 15], [4, 15]])))


def test_a_custom_sampler_gets_the_number_and_the_generator() -> None:
    seen = {}

    def spy(candidates: Candidates, num_landmarks: int, generator: torch.Generator | None) -> Tensor:
        seen.update(count=num_landmarks, generator=generator, shape=tuple(candidates.key.shape))
        return own_rows(candidates, num_landmarks, generator)

    generator = torch.Generator()
    attend(spy, num_landmarks=5, generator=generator)
    assert seen == {"count": 5, "generator": generator, "shape": (2, 2, 12, 4)}


@pytest.mark.parametrize(
    ("landmarks", "error", "words"),
    [
        (torch.zeros(2, 3), InputError, ("landmarks must", "int64", "torch.float32")),
        (torch.zeros(2, 3, dtype=torch.int32), InputError, ("landmarks must", "int64", "torch.int32")),
        (torch.zeros(3, 3).long(), ShapeError, ("landmarks must", "(2, d) or (2, 2, d)", "(3, 3)")),
        (torch.zeros(2, 5, 3).long(), ShapeError, ("landmarks must", "(2, 2, d)", "(2, 5, 3)")),
        (torch.zeros(4).long(), ShapeError, ("landmarks must", "(2, d)", "(4,)")),
        (torch.zeros(2, 0).long(), ShapeError, ("landmarks must", "d >= 1", "(2, 0)")),
        (torch.full((2, 3), 22), InputError, ("landmarks must", "between 0 and 21", "22")),
        (torch.full((2, 3), -2), InputError, ("landmarks must", "between 0 and 21", "-2")),
        ("stratifed", UnknownNameError, ("sampler", "'stratifed'", *SAMPLERS.names())),
        ([[0, 1], [2, 3]], UnknownNameError, ("sampler", *SAMPLERS.names())),
        (lambda *_: None, InputError, ("landmarks must", "tensor of row numbers", "NoneType")),
        (lambda *_: torch.full((2, 3), 22), InputError, ("landmarks must", "between 0 and 21", "22")),
        (lambda *_: Landmarks(torch.zeros(2, 2, 3, 5)), ShapeError, ("points", "(2, 2, d, 4)", "(2, 2, 3, 5)")),
        (lambda *_: Landmarks(torch.zeros(2, 2, 3, 4)), InputError, ("points", "torch.float64", "torch.float32")),
        (
            lambda *_: Landmarks(torch.zeros(2, 2, 3, 4).double(), torch.ones(2, 3).bool()),
            ShapeError,
            ("active", "(2, 1 or 2, 3)", "(2, 3)"),
        ),
    ],
)
def test_bad_landmarks_are_refused(landmarks: Any, error: type[Exception], words: tuple[str, ...]) -> None:
    with refused(error, *words):
        attend(landmarks)


def test_samplers_are_found_by_name() -> None:
    assert SAMPLERS.names() == ["leverage", "paper", "probe", "queries", "segment_means", "stratified", "uniform"]
    assert all(get_sampler(name) is SAMPLERS.get(name) for name in SAMPLERS.names())


def test_bad_settings_are_refused() -> None:
    with refused(InputError, "num_probes", "at least 1", "0"):
        ProbeSampler(num_probes=0)
    with refused(InputError, "ridge", "above 0", "-1.0"):
        LeverageSampler(ridge=-1.0)
    with refused(InputError, "exact_limit", "at least 1", "0"):
        LeverageSampler(exact_limit=0)
