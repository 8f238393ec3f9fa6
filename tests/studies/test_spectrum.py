"""The study of the spectrum: known singular values are found, and runs are reused, trained or resumed."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from skyformer import SequenceClassifier
from skyformer.errors import DataError, InputError, UnknownNameError
from skyformer.lra.batching import collate
from skyformer.lra.dataset import Example as Row
from skyformer.studies import run_study
from skyformer.studies.spectrum import (
    INDEX,
    MATRICES,
    SMALL_TRAINING,
    Cell,
    Example,
    Options,
    Result,
    Spectrum,
    effective_rank,
    energy_rank,
    read_layer,
    row_spread,
    statistics_of,
    summarise,
)
from skyformer.studies.tasks import runs_of_data
from tests.helpers import refused

TINY = (*(each for each in SMALL_TRAINING if "loop" not in each and "warmup" not in each), "optim.warmup_steps=1")
CHANGES = (*TINY, "task.limit=64", "loop.steps=4", "loop.eval_every=4")


def with_singular_values(values: list[float], rows: int) -> Tensor:
    """A matrix (rows, len(values)) between random orthogonal ones."""
    left, _ = torch.linalg.qr(torch.randn(rows, len(values), dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(len(values), len(values), dtype=torch.float64))
    return left @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ right


def test_known_singular_values_are_found() -> None:
    spectra = statistics_of([with_singular_values([8.0, 4.0, 2.0, 1.0], 10), with_singular_values([4.0, 1.0, 1.0], 7)])
    assert spectra["curves"][:3] == pytest.approx((1.0, (0.5 + 0.25) / 2, (0.25 + 0.25) / 2))
    assert spectra["curves"][3:] == (None,) * (len(INDEX) - 3)
    # 8^2 + 4^2 + 2^2 + 1^2 = 85, of which 84 are 98.8 %; 17 of 18 are 94 %.
    assert spectra["energy_rank"] == (4 + 3) / 2
    assert spectra["visible"] == (4 + 3) / 2
    assert spectra["condition"] == pytest.approx((8.0 + 4.0) / 2)
    assert spectra["singular"] == 0.0


def test_ranks_of_plain_spectra() -> None:
    equal = torch.tensor([3.0, 3.0, 3.0, 0.0])
    assert effective_rank(equal) == pytest.approx(3.0)
    assert energy_rank(equal) == 3
    assert energy_rank(torch.tensor([10.0, 0.5])) == 1
    assert effective_rank(torch.tensor([1.0, 0.0])) == pytest.approx(1.0)


def test_a_singular_matrix_has_no_condition_number_but_a_bound() -> None:
    rank_one = torch.ones(6, 6)
    spectra = statistics_of([rank_one, rank_one, with_singular_values([2.0, 1.0], 2)])
    assert spectra["singular"] == pytest.approx(2 / 3)
    assert spectra["visible"] == pytest.approx((1 + 1 + 2) / 3, abs=1e-3)
    assert spectra["condition"] == pytest.approx(1 / (6 * 2.2204e-16), rel=1e-3)
    gone = statistics_of([torch.zeros(3, 3)])
    assert (gone["singular"], gone["condition"], gone["curves"][0]) == (1.0, None, None)


def test_scores_are_those_of_the_paper() -> None:
    query, key, value = torch.randn(3, 2, 5, 4, dtype=torch.float64)
    A, normalised, C = (torch.stack(heads) for heads in Example(query, key, value).scores())
    exact = (query @ key.mT / 2).exp()
    torch.testing.assert_close(A / A.amax((-2, -1), keepdim=True), exact / exact.amax((-2, -1), keepdim=True))
    torch.testing.assert_close(normalised, exact / exact.sum(-1, keepdim=True))
    torch.testing.assert_close(C, (-(torch.cdist(query, key) ** 2) / 4).exp())
    assert row_spread([torch.tensor([[1.0, 1.0], [4.0, 2.0]])]) == 3.0
    assert row_spread(list(normalised)) == pytest.approx(1.0)


def test_outputs_are_attention_with_heads_side_by_side() -> None:
    query, key, value = torch.randn(3, 2, 40, 4)
    softmax, kernelized, skyformer = Example(query, key, value).outputs(landmarks=80, seed=0)
    weights = torch.softmax(query.double() @ key.double().mT / 2, -1)
    torch.testing.assert_close(softmax, torch.cat(list(weights @ value.double()), -1))
    assert kernelized.shape == (40, 8)
    # With all rows as landmarks Skyformer is exact.
    torch.testing.assert_close(skyformer, kernelized)


def test_the_second_layer_is_read_without_padding() -> None:
    model = SequenceClassifier(vocab_size=9, max_length=64, attention="softmax", dropout=0.5)
    rows = [Row(torch.arange(n) % 8 + 1, 0, 0) for n in (5, 30)]
    short, long = read_layer(model, collate(rows), 2)
    assert (short.query.shape, long.value.shape) == ((2, 5, 32), (2, 30, 32))
    (alone,) = read_layer(model, collate(rows[:1]), 2)
    torch.testing.assert_close(alone.key, short.key)
    (first_layer,) = read_layer(model, collate(rows[:1]), 1)
    assert (first_layer.key - short.key).abs().max() > 1e-3


def test_a_batch_gives_one_value_for_every_matrix() -> None:
    examples = [Example(*torch.randn(3, 2, n, 4)) for n in (20, 30)]
    figures = summarise(examples, landmarks=8, seed=0)
    assert all(len(values) == len(MATRICES) for values in figures.values())
    assert [curve[0] for curve in figures["curves"]] == [1.0] * len(MATRICES)
    assert figures["row_spread"][:3] == (None,) * 3
    # A has rows as different as exponentials are, D^-1 A has rows that sum to one.
    assert figures["row_spread"][3] > 1.5
    assert figures["row_spread"][4] == pytest.approx(1.0)
    assert all(1 <= rank <= 30 for rank in figures["effective_rank"])


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Options:
    root = tmp_path_factory.mktemp("spectrum")
    runs, data = str(root / "runs"), str(root / "data")
    return Options(
        tasks=("listops",),
        preset="short",
        changes=CHANGES,
        runs_dir=runs,
        data_dir=data,
        examples=2,
        length=48,
        landmarks=16,
    )


def test_a_missing_run_is_trained_once_and_then_read(options: Options, tmp_path: Path) -> None:
    from skyformer.training import open_run

    record = run_study(Spectrum(options), tmp_path / "first")
    ((cell, result),) = record.results().items()
    shared = runs_of_data(options.runs_dir, Spectrum(options)._data["listops"])
    run = open_run(shared / cell.run)
    assert cell.task == "listops"
    assert run.result is not None
    assert (result.steps, result.test_accuracy) == (4, run.result.test_accuracy)
    assert (cell.preset, cell.attention, result.trained_length) == ("short", "softmax", 128)
    assert len(result.lengths) == 2
    assert max(result.lengths) <= 48
    # The same run, moved one folder up as `skyformer train` leaves its own.
    run.folder.rename(Path(options.runs_dir) / run.name)
    again = run_study(Spectrum(options), tmp_path / "second")
    assert again.results() == record.results()
    assert not run.folder.exists()


def test_a_run_on_other_data_is_not_used(options: Options, tmp_path: Path) -> None:
    study = Spectrum(replace(options, runs_dir=str(tmp_path / "runs")))
    run = study._trained("listops", "softmax")
    run.folder.rename(tmp_path / "runs" / run.name)
    other = Spectrum(replace(options, runs_dir=str(tmp_path / "runs")))
    found = other._finished_run("listops", "softmax")
    assert found is not None
    data = found.folder / "data.json"
    data.write_text(re.sub(r'("test": ")[0-9a-f]{64}', rf"\g<1>{'0' * 64}", data.read_text()))
    assert other._finished_run("listops", "softmax") is None


def test_an_interrupted_run_is_resumed(options: Options, tmp_path: Path) -> None:
    from skyformer.training.runs import create_run

    study = Spectrum(replace(options, runs_dir=str(tmp_path / "runs")))
    begun = create_run(study._config("listops", "softmax"), study._runs_dir("listops"))
    assert study._finished_run("listops", "softmax") is None
    assert study._trained("listops", "softmax").folder == begun.folder
    assert begun.finished


def test_models_of_other_attentions_and_lengths_join_the_record_if_they_are_finished(
    options: Options, tmp_path: Path
) -> None:
    run_study(Spectrum(options), tmp_path / "record")
    others = replace(options, attentions=("softmax", "skyformer"), train=False, length=32)
    record = run_study(Spectrum(others), tmp_path / "record")
    assert [(cell.attention, cell.length) for cell in record.cells] == [("softmax", 48), ("softmax", 32)]
    trained = run_study(Spectrum(replace(others, train=True)), tmp_path / "record")
    assert [(cell.attention, cell.length) for cell in trained.cells][2:] == [("skyformer", 32)]
    with refused(DataError, "--runs-dir", "'short'", "has none"):
        Spectrum(replace(others, seed=1)).cells()


def test_wrong_options_and_missing_data_are_reported_first(options: Options, tmp_path: Path) -> None:
    with refused(UnknownNameError, "task", "'list'"):
        Spectrum(replace(options, tasks=("list",)))
    with refused(UnknownNameError, "attention of this study", "'performer'"):
        Spectrum(replace(options, attentions=("performer",)))
    with refused(InputError, "--examples", "at least 1", "got 0"):
        Spectrum(replace(options, examples=0))
    with refused(InputError, "model.num_layers must be at least 2", "got 1"):
        Spectrum(replace(options, changes=(*options.changes, "model.num_layers=1"))).cells()
    missing = Spectrum(Options(tasks=("text",), data_dir=str(tmp_path), runs_dir=str(tmp_path / "runs")))
    with refused(DataError, "text is not prepared", "skyformer data prepare text"):
        run_study(missing, tmp_path / "out")
    assert not (tmp_path / "runs").exists()


def made_up(rank: float, condition: tuple[float, float], singular: tuple[float, float]) -> Result:
    """Six matrices alike, but for the conditions of D^-1 A and C."""
    curve = tuple(1.0 / i if i <= 64 else None for i in INDEX)
    conditions, lost = (10.0,) * 4 + condition, (0.0,) * 4 + singular
    values = tuple(None if value is None else rank * value for value in curve)
    curves, ranks = ((curve,) * 6, (values,) * 6), ((9.0,) * 6, (5.0,) * 6, (rank,) * 6)
    return Result(100, 0.5, (64, 60), 256, *curves, *ranks, conditions, lost, (2.0,) * 6)


def test_the_papers_conclusions_are_checked() -> None:
    study = ("study", "softmax", 1024)
    results = {
        Cell("text", "t", *study): made_up(10.0, (100.0, 50.0), (0.0, 0.0)),
        Cell("text", "long", "paper", "skyformer", 4000): made_up(15.0, (100.0, 50.0), (0.0, 0.0)),
        Cell("listops", "l", *study): made_up(30.0, (100.0, 500.0), (0.0, 0.0)),
        Cell("retrieval", "r", *study): made_up(20.0, (4e12, 4e12), (1.0, 1.0)),
        Cell("pathfinder", "p", *study): made_up(40.0, (4e12, 9e3), (1.0, 0.0)),
        Cell("image", "i", *study): made_up(5.0, (100.0, 50.0), (0.0, 0.0)),
    }
    claims, values, outputs, scores, runs = Spectrum.tables(results)
    assert all(row[1] == "study" for row in claims.rows), "the claims are about softmax models"
    verdicts = {row[0]: row[2:] for row in claims.rows}
    assert verdicts["singular values of the output decay slower on Retrieval than on Text"] == ["20", "10", "yes"]
    assert verdicts["singular values of the output decay slower on Retrieval than on ListOps"] == ["20", "30", "no"]
    assert verdicts["singular values of the output decay slower on Pathfinder than on ListOps"][-1] == "yes"
    better = [verdicts[f"C is better conditioned than D^-1 A on {task}"] for task in ("Text", "ListOps", "Retrieval")]
    assert [each[-1] for each in better] == ["yes", "no", "both singular"]
    assert verdicts["C is better conditioned than D^-1 A on Pathfinder"] == ["9,000", "> 4.0e+12", "yes"]
    against_a = [verdicts[f"C is better conditioned than A on {task}"][-1] for task in ("Text", "Retrieval")]
    assert against_a == ["no", "no"], "A has a condition of 10"
    shorter = {Cell("text", "s", "study", "softmax", 64): made_up(70.0, (100.0, 50.0), (0.0, 0.0))}
    assert Spectrum.tables(results | shorter)[0] == claims, "the model with the longest examples counts"
    assert [figure.panels for figure in Spectrum.figures(results | shorter)] == [
        figure.panels for figure in Spectrum.figures(results)
    ]
    models = ["Text", "ListOps", "Retrieval", "Pathfinder", "Image"]
    assert [row[:2] for row in outputs.rows] == [*([name, "study"] for name in models), ["Text, skyformer", "paper"]]
    assert outputs.rows[0] == ["Text", "study", *["9", "5", "10"] * 3]
    assert scores.rows[2][-5:] == ["9", "5", "20", "> 4.0e+12", "2"]
    assert values.rows[-1][:5] == ["Text, skyformer", "paper", "15", "7.5", "5"]
    assert runs.rows[1] == ["ListOps", "study", "l", "100", "256", "50.0", "60 to 64"]
    paper, matrices, matrices_of_paper = Spectrum.figures(results)
    assert [panel.title for panel in paper.panels] == models[:4]
    lines = ["softmax, preset study", "skyformer, preset paper", "softmax, the paper"]
    assert [line.label for line in paper.panels[0].series] == lines
    assert paper.panels[1].series[0].y[:2] == [30.0, 15.0], "absolute values"
    assert [panel.title for panel in matrices.panels[::5]] == ["Text, output", "Text, scores"]
    assert (matrices.name, matrices_of_paper.name) == ("matrices_study", "matrices_paper")
    assert paper.panels[0].series[0].x == [i for i in INDEX if i <= 64]
