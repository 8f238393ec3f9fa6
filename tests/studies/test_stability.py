"""The study of stability: the score against its definition, the three variants, and the tables."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path

import pytest
import torch

from skyformer.errors import DataError, InputError, UnknownNameError
from skyformer.lra import prepare
from skyformer.lra.dataset import Task
from skyformer.studies import run_study, study_class
from skyformer.studies.base import make_options
from skyformer.studies.stability import (
    Cell,
    Options,
    Result,
    Scores,
    Stability,
    _changes,
    _Evaluator,
    _short_training,
    embedding,
    score_steps,
)
from skyformer.studies.tasks import batches_of, study_data
from skyformer.training.building import Trainee
from skyformer.training.config import RunConfig
from tests.helpers import refused
from tests.training.tiny import tiny_config

STEPS = 3


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Task:
    folder = tmp_path_factory.mktemp("data")
    prepare("listops", limit=64, max_length=64, data_dir=folder)
    return study_data(tiny_config(), folder)


def config_with(dropout: float, attention: str = "skyformer") -> RunConfig:
    config = tiny_config(attention=attention, options={} if attention == "softmax" else {"num_landmarks": 8})
    return config.replace(model=config.model.replace(dropout=dropout))


def scores_of(config: RunConfig, data: Task, steps: int, examples: int) -> Result:
    return score_steps(config, batches_of(data, config), steps, examples)


@pytest.mark.parametrize("attention", ["skyformer", "softmax", "nystromformer"])
def test_without_dropout_the_variants_agree(data: Task, attention: str) -> None:
    result = scores_of(config_with(0.0, attention), data, STEPS, 4)
    assert len(result.update) == len(result.loss) == STEPS
    assert result.off == result.same == result.fresh
    assert result.noise == (0.0,) * STEPS
    assert min(result.off) > 0


def test_dropout_adds_its_noise_to_fresh_masks_alone(data: Task) -> None:
    result = scores_of(config_with(0.3), data, STEPS, 4)
    for same, fresh, noise in zip(result.same, result.fresh, result.noise, strict=True):
        assert noise > 0
        assert abs(fresh - noise) < 0.2 * fresh + 5 * same


DROPOUTS = (
    "embedding_dropout",
    "attention_dropout",
    "attention_output_dropout",
    "mlp_hidden_dropout",
    "mlp_output_dropout",
)


@pytest.mark.parametrize("place", DROPOUTS)
def test_dropout_at_every_place_adds_noise(data: Task, place: str) -> None:
    config = config_with(0.0, "softmax")
    config = config.replace(model=config.model.replace(**dict.fromkeys(DROPOUTS, 0.0) | {place: 0.3}))
    result = scores_of(config, data, 1, 4)
    assert result.noise[0] > 0
    assert result.normed_noise[0] > 0


def test_the_same_masks_add_next_to_nothing(data: Task) -> None:
    result = scores_of(config_with(0.1), data, STEPS, 4)
    assert result.same == pytest.approx(result.off, rel=0.5)


def test_a_step_whose_update_is_lost_in_rounding_does_not_count() -> None:
    names = [field.name for field in fields(Result) if field.name not in ("loss", "update")]

    def result(update: tuple[float | None, ...], change: tuple[float, ...]) -> Result:
        return Result((1.0,) * len(update), update, **dict.fromkeys(names, change))

    def ratios(
        update: tuple[float | None, ...], of_softmax: tuple[float | None, ...] = (1.0, 1.0, 1e-11)
    ) -> tuple[float, float]:
        cells = {
            Cell("score", "text", "softmax", 0, None): result(of_softmax, (1.0, 1.0, 1e-9)),
            Cell("score", "text", "kernelized", 0, None): result(update, (2.0, 4.0, 1.0)),
        }
        scores = Scores(cells)
        return scores.ratios("off")["kernelized", "text", 0], scores.ratios_of_means("off")["kernelized", "text", 0]

    assert ratios((1.0, 1.0, 1e-11)) == (3.0, 3.0)
    assert ratios((1.0, 1.0, 0.0)) == (3.0, 3.0)
    assert ratios((1.0, None, 1e-11)) == (math.inf, math.inf)
    assert ratios((1.0, math.inf, 1e-11)) == (math.inf, math.inf)
    assert ratios((1.0, 1.0, 1e-11), of_softmax=(1.0, None, 1e-11)) == (math.inf, math.inf)


def test_wrong_options_are_refused() -> None:
    with refused(InputError, "--rate-steps", "at least 2", "got 1"):
        Stability(Options(rate_steps=1))
    with refused(InputError, "--steps must be at most 800", "short on listops", "got 900"):
        Stability(Options(tasks=("listops",), preset="short", steps=900))
    with refused(InputError, "--dropout", "at least 0 and below 1", "1.5"):
        Stability(Options(dropout=1.5))
    with refused(UnknownNameError, "attention of this study", "linformer"):
        Stability(Options(attentions=("softmax", "linformer")))
    with refused(InputError, "--attentions", "'softmax'", "got skyformer"):
        Stability(Options(attentions=("skyformer",)))


def test_missing_data_is_reported_before_any_is_generated(tmp_path: Path) -> None:
    study = Stability(Options(tasks=("listops", "text"), data_dir=str(tmp_path / "data"), listops_limit=20))
    with refused(DataError, "text is not prepared"):
        run_study(study, tmp_path / "record")
    assert not (tmp_path / "data").exists()


def test_dropout_of_the_small_version_is_that_of_the_scores_alone() -> None:
    small = Stability(make_options(Stability, True, {}))
    dropout = {cell.measure: small._config(cell).model.dropout for cell in small.cells()}
    assert dropout == {"score": 0.1, "rates": 0.0}


def test_the_score_is_its_definition(data: Task) -> None:
    """Recomputed by hand for the first step of a model without dropout."""
    config = config_with(0.0)
    trainee = Trainee(config)
    batch = next(batches_of(data, config))

    def look() -> tuple[torch.Tensor, torch.Tensor]:
        trainee.model.eval()
        with torch.no_grad():
            f = embedding(trainee.model.encoder, batch.tokens[:4], batch.mask[:4])[0]
        return f, torch.cat([p.detach().flatten() for p in trainee.model.parameters()])

    f_before, w_before = look()
    trainee.step(batch)
    f_after, w_after = look()
    tau = (f_after - f_before).square().sum() / (w_after - w_before).square().sum()
    result = scores_of(config, data, 1, 4)
    assert result.off[0] / result.update[0] == pytest.approx(float(tau), rel=1e-4)


def test_evaluations_repeat_and_leave_the_random_state_alone(data: Task) -> None:
    config = config_with(0.3)
    trainee = Trainee(config)
    evaluator = _Evaluator(trainee.model, next(batches_of(data, config)), 4, seed=7)
    state = torch.get_rng_state()
    size, off, same, fresh, noise, *_ = _changes(evaluator.evaluate(), evaluator.evaluate())
    assert torch.equal(state, torch.get_rng_state())
    assert off == same == 0.0
    assert fresh == noise > 0
    assert size > 0


def test_evaluating_f_does_not_change_the_training(data: Task) -> None:
    config = config_with(0.1)
    trainee = Trainee(config)
    plain = [trainee.step(batch) for batch in islice(batches_of(data, config), STEPS)]
    assert scores_of(config, data, STEPS, 2).loss == pytest.approx(plain, rel=1e-3)


def test_a_training_ends_with_the_first_loss_that_is_not_finite(data: Task) -> None:
    config = tiny_config(attention="kernelized", options={})
    config = config.replace(optim=config.optim.replace(lr=1e30))
    result = _short_training(config, data)
    assert result.loss[-1] is None
    assert result.final_loss() is None
    assert result.diverged()


def hand_made(scale: float) -> Result:
    ones = (1.0, 1.0)
    return Result(
        loss=(2.0, 1.0),
        update=(0.5, 0.25),
        size=(400.0 * scale, 400.0),
        off=(300.0 * scale, 300.0 * scale),
        same=ones,
        fresh=ones,
        noise=ones,
        normed_size=ones,
        normed_off=(scale, 2.0 * scale),
        normed_same=ones,
        normed_fresh=(2.0, 2.0),
        normed_noise=ones,
    )


def test_the_table_averages_ratios_and_shows_the_paper_beside_them() -> None:
    results = {}
    for seed, scale in ((0, 0.5), (1, 1.5)):
        results[Cell("score", "text", "softmax", seed, None)] = hand_made(1.0)
        results[Cell("score", "text", "skyformer", seed, None)] = hand_made(scale)
    off, same, _, raw_off, *_ = Stability.tables(results)
    assert off.rows == [["Skyformer", "1.00 ± 0.71 (0.81)"]]
    assert same.rows == [["Skyformer", "1.00 ± 0.00 (0.81)"]]
    assert raw_off.rows == [["Skyformer", "1.00 ± 0.71"]], "the paper is compared only after the norm"
    makeup = next(table for table in Stability.tables(results) if table.title == "Components of the score")
    assert makeup.rows[0] == ["Text", "Self-Attention", "50.00 %", "50.00 %", "1", "1", "1"]


def test_both_averages_over_steps_are_shown_for_each_seed() -> None:
    """tau of softmax is 2 and 8; that of the other 1 and 4 with one seed, 6 and 4 with the next."""
    own = (hand_made(0.5), replace(hand_made(1.0), normed_off=(3.0, 1.0)))
    results = {Cell("score", "text", "softmax", seed, None): hand_made(1.0) for seed in (0, 1)}
    results |= {Cell("score", "text", "skyformer", seed, None): own[seed] for seed in (0, 1)}
    table = next(table for table in Stability.tables(results) if table.title == "Instability score of each seed")
    assert table.rows[0] == ["Text", "Skyformer", "dropout off", "0.50, 1.75", "0.50, 1.00"]
    assert len(table.rows) == 3


def test_a_score_that_is_not_finite_has_no_ratio() -> None:
    lost = replace(hand_made(1.0), normed_off=(1.0, None))
    results = {
        Cell("score", "text", "softmax", 0, None): hand_made(1.0),
        Cell("score", "text", "skyformer", 0, None): lost,
    }
    assert Stability.tables(results)[0].rows == [["Skyformer", "not finite (0.81)"]]
    (figure,) = Stability.figures(results)
    assert figure.panels[0].series[0].y == [1.0, None]


def test_the_table_of_rates_counts_what_diverged() -> None:
    good, bad, lost = Result((2.0, 1.0)), Result((2.0, 6.0)), Result((2.0, None))
    results = {Cell("rates", "listops", "softmax", seed, 0.1): result for seed, result in enumerate((good, bad, lost))}
    (table,) = Stability.tables(results)
    assert table.rows == [["Self-Attention", "2.75 (1.50 to 4.00), 1 not finite", "2 of 3"]]
    (figure,) = Stability.figures(results)
    assert figure.name == "rates"
    assert figure.panels[0].series[0].y == [2.75]


def test_a_tiny_study(tmp_path: Path) -> None:
    """From the settings to the tables."""
    options = Options(
        data_dir=str(tmp_path / "data"),
        tasks=("listops",),
        attentions=("softmax", "skyformer"),
        seeds=(0,),
        preset="short",
        steps=2,
        examples=2,
        rates=(1e-3,),
        rate_steps=2,
        listops_limit=40,
    )
    study = study_class("stability")(options)
    results = run_study(study, tmp_path / "record").results()
    assert study.tables(results)[0].title == "Instability score divided by that of softmax, dropout off"
    for cell, result in results.items():
        assert len(result.loss) == 2
        assert (min(result.off) > 0 and min(result.update) > 0) if cell.measure == "score" else not result.update
