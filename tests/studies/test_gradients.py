"""The study gradients: the printed algorithm against its definition, and norms before clipping."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from skyformer import softmax_attention
from skyformer.studies import run_study
from skyformer.studies.gradients import PRINTED, SINGULAR, Cell, Gradients, Options, PrintedNystrom, Result


def test_with_every_row_as_a_landmark_the_printed_algorithm_is_softmax_attention() -> None:
    """Drawn with replacement, 400 of 12 rows almost surely contain all; the inverse then needs gamma."""
    attention = PrintedNystrom(2, 8)
    attention.num_landmarks, attention.gamma = 400, 1e-8
    query, key, value = torch.randn(3, 1, 2, 6, 8, dtype=torch.float64).unbind()
    mask = torch.tensor([[True] * 5 + [False]])
    torch.manual_seed(0)
    out = attention.train()(query, key, value, key_mask=mask)
    torch.testing.assert_close(out, softmax_attention(query, key, value, key_mask=mask), atol=1e-4, rtol=1e-4)


def test_a_small_study_records_norms_before_clipping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clipped: list[float] = []
    monkeypatch.setattr(
        torch.nn.utils,
        "clip_grad_value_",
        lambda weights, limit: clipped.append(math.sqrt(sum(float(w.grad.square().sum()) for w in weights))),
    )
    options = Options(
        variants=("softmax", PRINTED), seeds=(0,), rates=(1e-3,), steps=2, data_dir=str(tmp_path / "data")
    )
    results = run_study(Gradients(options), tmp_path / "record").results()
    norms = [norm for result in results.values() for norm in result.norms]
    assert norms == pytest.approx(clipped, rel=1e-3)
    losses = [result.loss[0] for result in results.values()]
    assert losses[0] == pytest.approx(losses[1], rel=0.05), "both start from the same weights"


@pytest.mark.parametrize(("gamma", "ended"), [(0.1, None), (0.0, SINGULAR)])
def test_a_singular_matrix_ends_the_printed_algorithm_by_name(
    gamma: float, ended: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With gamma zero, a landmark that is drawn twice makes two equal rows."""
    monkeypatch.setattr(PrintedNystrom, "gamma", gamma)
    monkeypatch.setattr(PrintedNystrom, "num_landmarks", 1000)
    options = Options(variants=(PRINTED,), seeds=(0,), rates=(1e-3,), steps=2, data_dir=str(tmp_path / "data"))
    (result,) = run_study(Gradients(options), tmp_path / "record").results().values()
    assert result.ended == ended
    assert (result.final_loss() is None) == (ended is not None)


def test_the_table_counts_trainings_that_ended_early() -> None:
    results = {
        Cell("softmax", 1e-3, 0): Result((1.0, 2.0), (2.0, 1.0)),
        Cell("softmax", 1e-3, 1): Result((1.0, None), (2.0, 0.5), "gradient not finite"),
        Cell("softmax", 1e-3, 2): Result((1.0, None), (2.0, None)),
    }
    (table,) = Gradients.tables(results)
    assert table.rows == [
        ["0.001", "softmax", "1.5", "inf", "inf", "1 of 3: gradient not finite, 1 of 3: not finite", "1.50"]
    ]
    (figure,) = Gradients.figures(results)
    assert figure.panels[0].series[0].y == [1.0, 2.0]
