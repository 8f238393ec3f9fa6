"""The dimension study on a tiny model: the quantities of Theorem 1 against their definitions, tables and figures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from skyformer.errors import DataError, InputError, UnknownNameError
from skyformer.ops.kernels import GaussianKernel
from skyformer.report.tables import number
from skyformer.studies import run_study
from skyformer.studies.base import make_options
from skyformer.studies.dimension import DIMENSION, DRAWS, SUGGESTION, Cell, Dimension, Options, Result
from skyformer.studies.heads import HeadSource
from skyformer.studies.theorem import Completion, beta, loewner_gaps, nystrom, statistical_dimension
from tests.helpers import refused


@pytest.fixture(scope="module")
def options(tiny_bert: Path, tiny_text: Path) -> Options:
    return Options(
        model=str(tiny_bert),
        text=str(tiny_text),
        lengths=(16, 32),
        long_lengths=(64,),
        epsilons=(0.5, 0.1),
        heads=4,
        seeds=(0,),
        draw_length=16,
        draws=8,
        counts=(4, 16, 400),
        targets=(0.2,),
        held_out=(2,),
    )


@pytest.fixture(scope="module")
def results(options: Options, tmp_path_factory: pytest.TempPathFactory) -> Mapping[Cell, Result]:
    return run_study(Dimension(options), tmp_path_factory.mktemp("dimension")).results()


def gram_of(options: Options, length: int, head: int) -> Tensor:
    heads = HeadSource(options.model, options.text).at("pretrained", length, 0).flat()
    points = torch.cat([heads.query[0, head], heads.key[0, head]]).double()
    return GaussianKernel().matrix(points, points, 8**-0.5)


def test_dimension_leverage_and_bound_follow_their_definitions(
    results: Mapping[Cell, Result], options: Options
) -> None:
    n, epsilon, delta = 32, 0.1, 0.1
    result = results[Cell(DIMENSION, "pretrained", n, 4, 0, epsilon, delta)]
    for head in range(4):
        gram = gram_of(options, n, head)
        score_norm, norm = torch.linalg.svdvals(gram[:n, n:])[0], torch.linalg.svdvals(gram)[0]
        ridge = epsilon * score_norm
        leverage = (gram @ torch.linalg.inv(gram + ridge * torch.eye(2 * n, dtype=gram.dtype))).diagonal()
        d_stat, beta = leverage.sum(), leverage.sum() / (2 * n * leverage.max())
        stable_rank = d_stat / (norm / (norm + ridge))
        assert result.d_stat[head] == pytest.approx(float(d_stat), rel=1e-3)
        assert result.beta[head] == pytest.approx(float(beta), rel=1e-3)
        assert result.norm_share[head] == pytest.approx(float(score_norm / norm), rel=1e-3)
        bound = 28 / 3 * stable_rank / beta * math.log(4 * n / delta)
        assert result.bound[head] == pytest.approx(float(bound), rel=1e-3)


def test_the_estimate_is_exact_but_for_the_norm_where_all_rows_fit(results: Mapping[Cell, Result]) -> None:
    for cell, result in results.items():
        if cell.kind == DIMENSION:
            for estimate, true in zip(result.d_stat_estimate, result.d_stat, strict=True):
                assert estimate == pytest.approx(true, rel=0.15)


def test_every_draw_keeps_the_order_and_the_error_of_the_block_is_the_smaller_one(
    results: Mapping[Cell, Result],
) -> None:
    draws = [result for cell, result in results.items() if cell.kind == DRAWS]
    assert draws
    for result in draws:
        assert result.order_kept == len(result.completed_error) == len(result.score_error) == 8 * 2
        for block, whole in zip(result.score_error, result.completed_error, strict=True):
            assert block <= whole + 1e-6  # type: ignore[operator]


def test_enough_draws_cover_every_row_and_the_guarantee_holds(results: Mapping[Cell, Result]) -> None:
    def errors(count: int) -> list[float]:
        cell = Cell(DRAWS, "pretrained", 16, 2, 0, sampler="uniform", count=count, draws=8)
        return [error for error in results[cell].completed_error if error is not None]

    assert max(errors(400)) < 0.05
    assert min(errors(4)) > max(errors(400))


def test_nystrom_is_the_papers_equation() -> None:
    points = torch.randn(2, 20, 3, dtype=torch.float64)
    gram = GaussianKernel().matrix(points, points, 1.0)
    rows = torch.tensor([[3, 7, 7, 11]])
    S = torch.eye(20, dtype=torch.float64)[:, rows[0]]
    expected = gram @ S @ torch.linalg.pinv(S.T @ gram @ S, rtol=1e-10) @ S.T @ gram
    torch.testing.assert_close(nystrom(gram, rows), expected, rtol=1e-6, atol=1e-7)
    by_head = torch.tensor([[[3, 7, 11], [0, 1, 2]]])
    torch.testing.assert_close(nystrom(gram, by_head)[0], expected[0], rtol=1e-6, atol=1e-7)


def test_the_theorems_quantities_have_their_known_values() -> None:
    # Points far from each other but for query i and key i, which coincide: C-bar has the eigenvalues 2 and 0, C is I.
    apart = 100 * torch.eye(5, dtype=torch.float64)[None]
    completion = Completion(apart, apart)
    assert float(completion.score_norm) == pytest.approx(1)
    assert float(completion.norm) == pytest.approx(2)
    scores = completion.leverage_scores(0.5)
    assert float(statistical_dimension(scores)) == pytest.approx(5 * 2 / 2.5)
    assert float(beta(scores)) == pytest.approx(1)
    bound = 28 / 3 * (4 * 1.25) * math.log(2 * 10 / 0.1)
    assert float(completion.landmarks_of_theorem_1(0.5, 0.1)) == pytest.approx(bound)


def test_loewner_gaps_show_whether_the_order_holds() -> None:
    points = torch.randn(1, 20, 3, dtype=torch.float64)
    completion = Completion(points[:, :10], points[:, 10:])
    least, largest = loewner_gaps(completion.matrix, nystrom(completion.matrix, torch.tensor([[0, 5, 12]])))
    assert -1e-9 < float(least) < 1e-9
    assert 0 < float(largest) < float(completion.norm)
    least, _ = loewner_gaps(completion.matrix, completion.matrix + 0.1 * torch.eye(20, dtype=torch.float64))
    assert float(least) == pytest.approx(-0.1)


def test_suggested_numbers_are_tried_on_fresh_draws_and_an_unseen_passage(results: Mapping[Cell, Result]) -> None:
    found = [(cell, result) for cell, result in results.items() if cell.kind == SUGGESTION]
    assert {cell.sampler for cell, _ in found} == {"uniform", "stratified", "probe"}
    for _, result in found:
        assert len(result.suggested) == 4
        assert len(result.score_error) == len(result.unseen_error) == 3 * 4
        assert all(8 <= d <= 64 for d in result.suggested)
        # Where every row was asked for, the error is zero in all draws.
        for head, d in enumerate(result.suggested):
            if d == 64:
                assert max(error or 0 for error in result.score_error[head::4]) < 1e-12
    kept = [error is not None and error <= 0.2 for _, result in found for error in result.score_error]
    assert sum(kept) >= 0.8 * len(kept)


def test_tables_and_figures_show_them(results: Mapping[Cell, Result]) -> None:
    tables = {table.title: table for table in Dimension.tables(results)}
    assert [row[0] for row in tables["d_stat, pretrained weights"].rows] == ["0.5", "0.1"]
    assert tables["Estimated d_stat divided by true d_stat"].rows
    bound = results[Cell(DIMENSION, "pretrained", 32, 4, 0, 0.5, 0.1)].bound
    (row,) = [row for row in tables["The bound of Theorem 1"].rows if row[:3] == ["pretrained", "32", "0.5"]]
    assert row[-2] == number(min(each for each in bound if each is not None))
    guarantee = tables["How often the guarantee holds, initialised weights, n = 16"].rows
    assert ["uniform", "400", *["100.0 %"] * 5] in [list(row) for row in guarantee]
    suggested = tables["Suggested numbers of landmarks"].rows
    assert len(suggested) == 2 * 3
    figures = {figure.name: figure for figure in Dimension.figures(results)}
    assert list(figures) == ["figure", "guarantee", "suggestion"]
    assert len(figures["suggestion"].panels[0].series[0].x) == 4


def test_the_small_version_needs_no_files() -> None:
    study = Dimension(make_options(Dimension, small=True, given={}))
    cell = study.cells()[0]
    result = study.measure(cell)
    assert cell.weights == "initialised"
    assert len(result.d_stat) == 4
    assert all(d is not None and 0 < d < 2 * cell.length for d in result.d_stat)


def test_a_sampler_that_draws_no_rows_is_refused(options: Options) -> None:
    with refused(UnknownNameError, "sampler of rows", "'segment_means'"):
        Dimension(replace(options, samplers=("segment_means",)))


def test_a_text_too_short_for_the_next_passage_is_reported_first(options: Options, tmp_path: Path) -> None:
    """400 tokens hold twelve passages of 30 and two marks, so the last has none after it."""
    study = Dimension(replace(options, held_out=(12,)))
    with refused(DataError, "passage 13 of 32", "--text"):
        run_study(study, tmp_path)
    assert not list(tmp_path.iterdir())


def test_lengths_beyond_the_model_are_refused(options: Options) -> None:
    with refused(InputError, "--draw-length", "at most 48", "tiny-bert", "64", "--long-lengths"):
        Dimension(replace(options, draw_length=64))


def test_partial_records_can_be_shown(results: Mapping[Cell, Result]) -> None:
    cells = list(results)
    for count in (0, 1, 5, 20, len(cells) - 1):
        part = {cell: results[cell] for cell in cells[:count]}
        assert all(table.rows for table in Dimension.tables(part)) or not count
        Dimension.figures(part)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("delta", 0.0), ("delta", -1.0), ("heads", 0), ("draws", 0), ("draw_length", 1)),
        *(("held_out", (-1,)), ("counts", (0,)), ("targets", (2.0,)), ("epsilons", (0.0,))),
    ],
)
def test_values_outside_their_limits_are_refused(options: Options, name: str, value: object) -> None:
    with refused(InputError, f"--{name.replace('_', '-')}", "got"):
        Dimension(replace(options, **{name: value}))
