"""The benchmarks of training, data and transformers at tiny sizes; their targets on fabricated results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from skyformer.errors import SkyformerError, TrainingError
from skyformer.studies import run_study
from skyformer.studies.benchmarks import data, huggingface, steps, training
from skyformer.studies.benchmarks.steps import Cell, Result, Steps, StepTimes
from skyformer.studies.tasks import run_config, study_data
from tests.helpers import refused


def missed(targets: Any) -> list[str]:
    return [target.what for target in targets if not target.passed]


def test_steps_on_random_tokens_are_timed_for_every_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "CHECKED_LENGTH", 48)
    study = Steps(steps.Options(tasks=("random",), length=64, repeats=2))
    results = run_study(study, tmp_path).results()
    assert [cell.batches for cell in results] == ["full length", "padded"]
    for result in results.values():
        assert [each.attention for each in result.rows] == ["skyformer", "linformer", "softmax"]
        assert all(len(times) == 2 for each in result.rows for times in each.seconds)
    assert study.targets(results) == [], "64 tokens are no target"


def test_random_sequences_are_padded_from_half_the_length() -> None:
    full, padded = (steps.draw_batch(64, kind) for kind in ("full length", "padded"))
    assert full.mask.all()
    assert padded.mask.sum(1).tolist() == [32, 42, 53, 64]


def test_wrong_gradients_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "CHECKED_LENGTH", 48)
    monkeypatch.setattr(steps, "GRADIENT_TOLERANCE", 1e-12)
    with refused(SkyformerError, "linformer: the gradient of", "differs from float64"):
        steps.check_gradients("linformer", "full length")


def test_targets_of_steps() -> None:
    """On random tokens the limits have names, on a task the fastest other attention counts."""
    random = Cell("random", "full length", 1, steps.TARGET_LENGTH)
    seconds = {"skyformer": (1.0, 5.0, 2.0), "linformer": (1.9,), "softmax": (8.0,), "informer": (1.5,)}
    result = Result(tuple(StepTimes(name, (each, (2.0,))) for name, each in seconds.items()))
    assert result.rows[0].typical() == 2.0
    targets = Steps.targets({random: result, Cell("text", "padded", 1): result})
    assert [(target.what, target.passed) for target in targets] == [
        ("random tokens, n=4,096, full length: time of skyformer / linformer", True),
        ("random tokens, n=4,096, full length: time of skyformer / softmax", False),
        ("Text, padded: time of skyformer / informer", True),
    ]


def test_steps_on_a_task_time_every_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "APPROXIMATIONS", ("skyformer", "linformer"))
    monkeypatch.setattr(
        "skyformer.studies.tasks.run_config",
        lambda task, preset, name, seed, limit: run_config(task, preset, name, seed, 100, task_max_length=64),
    )
    study = Steps(steps.Options(tasks=("listops",), repeats=2, data_dir=str(tmp_path / "data")))
    results = run_study(study, tmp_path).results()
    assert [(cell.task, cell.batches) for cell in results] == [("listops", "padded"), ("listops", "similar lengths")]
    for result in results.values():
        assert [each.attention for each in result.rows] == ["skyformer", "linformer"]
        assert all(len(repeats) == 2 for each in result.rows for repeats in each.seconds)
    (table,) = study.tables(results)
    assert [row[0] for row in table.rows] == ["ListOps, padded", "ListOps, similar lengths"]


def test_a_loss_that_is_not_finite_is_not_timed() -> None:
    class Diverged:
        def step(self, batch: object) -> float:
            return float("nan")

    with refused(TrainingError, "skyformer", "nan"):
        steps._checked_step("skyformer", Diverged(), None)  # type: ignore[arg-type]


def test_overhead_and_text_runs_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs are of tiny ListOps; the two loops of the overhead must have the same losses."""

    def config(attention: str) -> Any:
        return run_config("listops", "short", attention, 0, 100, task_max_length=64, loop_checkpoint_every=2)

    monkeypatch.setattr(training, "_overhead_config", lambda steps: config("skyformer"))
    monkeypatch.setattr(training, "_text_config", lambda cell: config(cell.attention))
    options = training.Options(steps=1, rounds=1, overhead_steps=2, data_dir=str(tmp_path / "data"))
    study_data(config("skyformer"), options.data_dir)
    results = run_study(training.TrainingBenchmark(options), tmp_path).results()
    overhead = results.pop(training.Cell("overhead"))
    assert (len(overhead.seconds), len(overhead.bare_seconds)) == (2, 2)
    assert [cell.part for cell in results] == ["text"] * 4 + ["loading"] * 2
    assert all(len(result.seconds) == 1 for result in results.values())
    monkeypatch.setattr(training, "LOSS_TOLERANCE", -1.0)
    with refused(SkyformerError, "the two loops do not train the same"):
        training._measure_overhead(1)


def test_targets_of_training() -> None:
    results = {
        training.Cell("overhead"): training.Result((1.04, 5.0, 1.04), (1.0, 1.0, 1.0)),
        training.Cell("text", "padded", "skyformer"): training.Result((1.0, 1.0)),
        training.Cell("text", "padded", "softmax"): training.Result((3.9, 3.9)),
        training.Cell("loading", "padded", "skyformer"): training.Result((0.06, 0.06)),
    }
    targets = training.TrainingBenchmark.targets(results)
    assert missed(targets) == [
        "Text, padded: steps per second of skyformer / softmax",
        "Text, padded: share of a Skyformer step spent loading data",
    ]
    assert targets[0].measured == "4.00%"


def test_attention_inside_transformers_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(huggingface, "CHECKED_LAYERS", 1)
    monkeypatch.setattr(huggingface, "TARGET_LENGTH", 32)
    study = huggingface.HuggingFaceBenchmark(huggingface.Options(length=32, layers=1, repeats=1))
    results = run_study(study, tmp_path).results()
    (result,) = results.values()
    assert [row.attention for row in result.rows] == list(huggingface.ATTENTIONS)
    assert all(0 < row.attention_seconds[0] < row.forward_seconds[0] for row in result.rows)
    assert len(study.targets(results)) == 1
    monkeypatch.setattr(huggingface, "TOLERANCE", 0.0)
    with refused(SkyformerError, "differs from sdpa"):
        huggingface.check_agreement()


def test_data_is_prepared_drawn_and_loaded(tmp_path: Path) -> None:
    drawn = data._measure_here("pathfinder", "draw", "", None, limit=3)
    assert drawn.found.keys() == {"rate", "distractors", "mean", "bright"}
    labels = data._measure_here("pathfinder", "labels", "", None, limit=50)
    assert 0.3 < labels.found["connected"] < 0.7
    folder = str(tmp_path)
    prepared = data._measure_here("listops", "prepare", folder, None, limit=20)
    assert prepared.peak_mb > 100
    with pytest.raises(KeyError):
        data._measure_here("listops", "eat", folder, None, limit=20)


def test_targets_of_data() -> None:
    assert data.Cell("text", "load") not in data.DataBenchmark(data.Options()).cells()
    everything = data.DataBenchmark(data.Options(references="originals", cifar10="cifar"))
    found = {
        "rate": 40.0,
        "distractors": 1.25,
        "mean": 20.0,
        "bright": 150.0,
        "connected": 0.5,
        "reviews": 5,
        "seconds": 1,
    }
    results = {cell: data.Result(61.0, 500.0, found) for cell in everything.cells()}
    targets = everything.targets(results)
    assert missed(targets) == ["text: 50,000 reviews from tar.xz", "pathfinder (hard): images per second on one core"]
    assert sum("peak memory" in target.what for target in targets) == 6
    assert everything._source(data.PREPARE_TEXT) == "originals/data/imdb/aclImdb.tar.xz"
    assert everything._source(data.Cell("pathfinder", "prepare", 300)) is None
    assert everything._source(data.Cell("image", "prepare")) == "cifar"
