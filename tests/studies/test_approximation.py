"""The approximation study on a tiny model: its errors against their definitions, and its tables and figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from skyformer import kernelized_attention, skyformer_attention, softmax_attention, tilted_attention
from skyformer.errors import DataError, InputError
from skyformer.functional import GAMMA
from skyformer.landmarks import SAMPLERS
from skyformer.report.tables import number
from skyformer.studies import run_study
from skyformer.studies.approximation import RIVALS, Approximation, Cell, Options, Result, Truth, approximate, cost
from skyformer.studies.base import make_options
from skyformer.studies.heads import Heads, HeadSource
from skyformer.studies.theorem import spectral_norm
from tests.helpers import refused


@pytest.fixture(scope="module")
def options(tiny_bert: Path, tiny_text: Path) -> Options:
    return Options(
        model=str(tiny_bert),
        text=str(tiny_text),
        lengths=(48,),
        long_lengths=(64,),
        features=(8, 32),
        gammas=(1.0,),
        seeds=(0, 1),
    )


@pytest.fixture(scope="module")
def results(options: Options, tmp_path_factory: pytest.TempPathFactory) -> Mapping[Cell, Result]:
    return run_study(Approximation(options), tmp_path_factory.mktemp("approximation")).results()


def heads_of(options: Options, seed: int) -> Heads:
    return HeadSource(options.model, options.text).at("pretrained", 48, seed).flat()


def test_the_split_by_layer_takes_the_heads_of_all_passages() -> None:
    # Two passages of three layers with two heads each.
    result = Result((1.0, 2.0, 3.0, 4.0, 5.0, None, 11.0, 12.0, 13.0, 14.0, 15.0, 16.0), layers=3)
    assert result.median_of_layer(0, 2) == (2 + 11) / 2
    assert result.median_of_layer(1, 2) == (4 + 13) / 2
    assert result.median_of_layer(2, 2) == (15 + 16) / 2


def pick(results: Mapping[Cell, Result], **wanted: object) -> Result:
    cells = [cell for cell in results if all(getattr(cell, name) == value for name, value in wanted.items())]
    assert len(cells) == 1, cells
    return results[cells[0]]


def test_every_method_sampler_gamma_and_solver_is_measured(results: Mapping[Cell, Result]) -> None:
    methods = {cell.method for cell in results if cell.target == "softmax"}
    assert methods == {"skyformer", "as printed", "svd", "tilted", *RIVALS}
    varied = {(c.target, c.sampler, c.solver) for c in results if (c.features, c.gamma) == (32, 1.0)}
    assert {sampler for _, sampler, _ in varied} == set(SAMPLERS.names()) - {"paper"}
    assert len(varied) == 2 * (len(SAMPLERS.names()) - 1) * 2
    assert {c.weights for c in results if c.length == 64} == {"initialised"}
    assert all(len(r.errors) == 2 * 2 * (2 if c.length == 48 else 1) for c, r in results.items())


def test_errors_are_relative_spectral_norms_of_the_output(results: Mapping[Cell, Result], options: Options) -> None:
    found = pick(results, target="gaussian", weights="pretrained", features=8, sampler="probe", gamma=GAMMA)
    expected = []
    for seed in (0, 1):
        heads = heads_of(options, seed)
        exact = kernelized_attention(heads.query.double(), heads.key.double(), heads.value.double())
        out = skyformer_attention(
            heads.query,
            heads.key,
            heads.value,
            num_landmarks=8,
            landmarks="probe",
            generator=torch.Generator().manual_seed(seed),
        )
        for head in range(4):
            rest = torch.linalg.svdvals(out[0, head].double() - exact[0, head])[0]
            expected.append(float(rest / torch.linalg.svdvals(exact[0, head])[0]))
    assert found.errors == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("target", ["softmax", "gaussian"])
def test_the_best_of_rank_d_is_the_truncated_svd(options: Options, target: str) -> None:
    heads = heads_of(options, 0)
    truth = Truth(target, heads)
    q, k, v = (x[0, 0].double() for x in (heads.query, heads.key, heads.value))
    scores = q @ k.mT * 8**-0.5
    half = (q.square().sum(-1)[:, None] + k.square().sum(-1)) * 8**-0.5 / 2
    matrix = scores.softmax(-1) if target == "softmax" else (scores - half).exp()
    torch.testing.assert_close(truth.output[0, 0], matrix @ v)
    U, s, Vh = torch.linalg.svd(matrix)
    cut = (U[:, 4:] * s[4:]) @ Vh[4:] @ v
    torch.testing.assert_close(spectral_norm(truth.rotated[0, 4:]), torch.linalg.svdvals(cut)[0])


@pytest.mark.parametrize("method", RIVALS)
def test_rivals_get_as_many_features_as_asked_for(options: Options, method: str) -> None:
    heads = heads_of(options, 0)
    cell = Cell("softmax", "pretrained", 48, method, 16, "", None, "", "0")
    out = approximate(cell, heads, seed=0)
    assert out.shape == heads.value.shape
    torch.testing.assert_close(approximate(cell, heads, seed=0), out, rtol=0, atol=0)
    # With so many features these three see all of a short sequence; the others stay random.
    everything = approximate(replace(cell, features=48 * 8), heads, seed=0)
    if method in ("nystromformer", "informer", "bigbird"):
        exact = softmax_attention(heads.query, heads.key, heads.value)
        tolerance = 0.2 if method == "nystromformer" else 1e-5
        assert (spectral_norm(everything - exact) < tolerance * spectral_norm(exact)).all()


@pytest.mark.parametrize(("target", "exact"), [("softmax", softmax_attention), ("gaussian", kernelized_attention)])
def test_tilted_attention_gets_as_many_scores_as_skyformer(options: Options, target: str, exact: Any) -> None:
    heads = heads_of(options, 0)
    inputs = heads.query, heads.key, heads.value
    cell = Cell(target, "pretrained", 48, "tilted", 8, "", None, "", "0")
    assert cost(cell) == cost(replace(cell, method="skyformer", sampler="uniform")) == 16
    assert torch.equal(approximate(cell, heads, 0), tilted_attention(*inputs, budget=16, kernel=target))
    torch.testing.assert_close(approximate(replace(cell, features=48), heads, 0), exact(*inputs))


def test_as_printed_agrees_once_every_row_is_a_landmark(options: Options) -> None:
    # Uniform landmarks repeat, so it takes many of them to have all rows.
    heads = heads_of(options, 0)
    cell = Cell("softmax", "pretrained", 48, "as printed", 1500, "", None, "", "0")
    exact = softmax_attention(heads.query, heads.key, heads.value)
    assert (spectral_norm(approximate(cell, heads, 0) - exact) < 0.05 * spectral_norm(exact)).all()


def test_a_failed_method_counts_as_an_infinite_error() -> None:
    assert spectral_norm(torch.tensor([[1.0, torch.nan]])).isnan()
    result = Result((None, None, 0.1))
    assert result.quartiles()[1] == float("inf")


def test_the_claim_is_decided_by_the_medians() -> None:
    uniform = Cell("gaussian", "pretrained", 512, "skyformer", 128, "uniform", GAMMA, "cholesky", "0")
    made = {
        uniform: Result((0.3, 0.3)),
        replace(uniform, sampler="probe"): Result((0.09, 0.09)),
        replace(uniform, sampler="probe", features=32): Result((0.31, 0.31)),
        replace(uniform, sampler="", method="svd", gamma=None, solver=""): Result((0.01, 0.01)),
    }
    claim = Approximation.tables(made)[0]
    assert claim.rows == [["gaussian", "pretrained", "512", "0.3", "0.09", "0.31", "0.3", "yes", "no"]]


def test_tables_and_figures_carry_the_medians(results: Mapping[Cell, Result]) -> None:
    median = pick(results, target="softmax", weights="pretrained", method="bigbird", features=8).quartiles()[1]
    tables = {table.title: table for table in Approximation.tables(results)}
    (row,) = [row for row in tables["All methods, pretrained weights, n = 48"].rows if row[0] == "bigbird"]
    assert row[1] == "d"
    assert row[2].startswith(f"{number(median)} [")
    for title in (
        "All methods, initialised weights, n = 64",
        "Landmarks: Skyformer against Kernelized Attention, pretrained weights, n = 48",
        "Regularisation, softmax kernel, initialised weights: median error by gamma",
    ):
        assert tables[title].rows
    figures = {figure.name: figure for figure in Approximation.figures(results)}
    assert list(figures) == ["figure", "layers", "landmarks", "gamma"]
    (panel,) = [panel for panel in figures["figure"].panels if panel.title == "pretrained weights, n = 48"]
    lines = {series.label: series for series in panel.series}
    assert (lines["bigbird"].x[0], lines["bigbird"].y[0]) == (8, median)
    assert lines["skyformer, probe"].x[0] == 2 * 8 + 32
    assert [panel.title for panel in figures["layers"].panels] == ["layer 0", "layer 1"]
    (layers,) = [table for title, table in tables.items() if title.startswith("By layer, pretrained weights, n = 48")]
    assert [row[0] for row in layers.rows][-1] == "tilted"


def test_lengths_beyond_the_model_are_refused(options: Options) -> None:
    with refused(InputError, "--lengths", "at most 48", "tiny-bert", "49", "--long-lengths"):
        Approximation(replace(options, lengths=(16, 49)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lengths": (16, 1)}, ("--lengths", "at least 4", "got 1")),
        ({"lengths": ()}, ("--lengths", "at least one", "got none")),
        ({"seeds": (0, -1)}, ("--seeds", "at least 0", "got -1")),
        ({"features": (0,)}, ("--features", "at least 1", "got 0")),
        ({"gammas": (0.1, 0.0)}, ("--gammas", "got 0.0")),
    ],
)
def test_values_outside_their_limits_are_refused(
    options: Options, change: dict[str, tuple[int, ...]], words: tuple[str, ...]
) -> None:
    with refused(InputError, *words):
        Approximation(replace(options, **change))  # type: ignore[arg-type]


def test_the_small_version_needs_no_files() -> None:
    study = Approximation(make_options(Approximation, small=True, given={}))
    cell = next(cell for cell in study.cells() if (cell.method, cell.features) == ("linformer", 16))
    assert cell.weights == "initialised"
    errors = [error for error in study.measure(cell).errors if error is not None]
    assert len(errors) == 2 * 4
    assert all(0 < error < 2 for error in errors)


def test_a_text_that_is_too_short_is_reported_before_anything_is_measured(options: Options, tmp_path: Path) -> None:
    study = Approximation(
        replace(options, features=(8,), gammas=(1.0,), lengths=(16,), long_lengths=(256,), long_seeds=(1,))
    )
    with refused(DataError, "passage 1 of 256"):
        run_study(study, tmp_path)
    assert not list(tmp_path.iterdir())
