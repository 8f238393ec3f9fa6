"""Runs in any state become rows, and only runs that differ in nothing but the seed are averaged."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from skyformer.training.collect import RunRow, changes_to_preset, collect_runs, summarise, validation_curve
from skyformer.training.presets import list_presets, load_preset
from tests.training.fakes import a_config, finish, start, write_curve


def by_name(rows: list[RunRow]) -> dict[str, RunRow]:
    return {row.name: row for row in rows}


def test_a_finished_run_has_everything(tmp_path: Path) -> None:
    config = a_config(seed=3)
    finish(config, tmp_path, accuracy=0.375, seconds=50)
    (row,) = collect_runs(tmp_path)
    assert (row.name, row.state, row.seed, row.step) == (config.run_name(), "finished", 3, config.loop.steps)
    assert (row.test_accuracy, row.dev_accuracy, row.seconds) == (0.375, 0.385, 50)
    assert (row.task, row.attention, row.preset, row.note) == ("listops", "skyformer", "cpu", config.note)
    assert (row.changes, row.options, row.digest) == ((), (), config.digest())
    (summary,) = summarise([row])
    assert summary.means[0].spread is None, "one seed has no standard deviation"
    assert collect_runs(tmp_path / "nowhere") == []


@pytest.mark.parametrize("state", ["interrupted", "failed"])
def test_an_unfinished_run_says_how_far_it_is(tmp_path: Path, state: str) -> None:
    start(a_config(), tmp_path, state=state, step=500)
    (row,) = collect_runs(tmp_path)
    assert (row.state, row.step, row.dev_accuracy, row.test_accuracy) == (state, 500, 0.25, None)


def test_filters(tmp_path: Path) -> None:
    for task, attention, preset in (
        ("listops", "softmax", "cpu"),
        ("text", "softmax", "paper"),
        ("text", "reformer", "cpu"),
    ):
        finish(a_config(task, attention, preset=preset), tmp_path)
    assert [row.attention for row in collect_runs(tmp_path, tasks=["text"])] == ["reformer", "softmax"]
    assert [row.task for row in collect_runs(tmp_path, attentions=["softmax"])] == ["listops", "text"]
    assert [row.task for row in collect_runs(tmp_path, attentions=["softmax"], presets=["paper"])] == ["text"]


@pytest.mark.parametrize("file", ["config.yaml", "result.json"])
@pytest.mark.parametrize("content", ["", "{", '{"format": 99}', "\0\0"])
def test_damage_is_shown_and_stops_nothing(tmp_path: Path, file: str, content: str) -> None:
    run, whole = finish(a_config("text", seed=1), tmp_path), finish(a_config("text", seed=2), tmp_path)
    (run.folder / file).write_text(content)
    rows = by_name(collect_runs(tmp_path, tasks=["text"]))
    assert rows[run.name].state == "damaged"
    assert str(run.folder) in str(rows[run.name].reason)
    assert (rows[run.name].task, rows[run.name].attention, rows[run.name].seed) == ("text", "skyformer", 1)
    assert rows[whole.name].state == "finished"
    (summary,) = summarise(rows.values())
    assert [row.name for row in summary.left_out] == [run.name]
    assert summary.means[0].seeds == (2,)


def test_a_damaged_state_and_a_result_of_another_config_are_damage(tmp_path: Path) -> None:
    first, second = start(a_config(), tmp_path), finish(a_config(seed=1), tmp_path)
    (first.folder / "state.json").write_text("{")
    other = json.loads((second.folder / "result.json").read_text()) | {"config_digest": "12345678"}
    (second.folder / "result.json").write_text(json.dumps(other))
    rows = by_name(collect_runs(tmp_path))
    state, result = rows[first.name], rows[second.name]
    assert (state.state, state.step, state.steps) == ("damaged", None, 5000)
    assert "state.json is damaged" in str(state.reason)
    assert (result.state, result.test_accuracy) == ("damaged", None)
    assert "another config" in str(result.reason)


def test_mean_and_sample_standard_deviation(tmp_path: Path) -> None:
    accuracies = {10: 0.35, 2: 0.42, 0: 0.40}
    for seed, accuracy in accuracies.items():
        finish(a_config(seed=seed), tmp_path, accuracy=accuracy)
    rows = collect_runs(tmp_path)
    assert [row.seed for row in rows] == [0, 2, 10]
    (summary,) = summarise(rows)
    (mean,) = summary.means
    assert (mean.seeds, mean.accuracies) == ((0, 2, 10), (0.40, 0.42, 0.35))
    assert mean.mean == pytest.approx(0.39)
    assert mean.spread == pytest.approx(statistics.stdev(accuracies.values()))


def test_runs_are_averaged_only_if_no_setting_with_effect_differs(tmp_path: Path) -> None:
    overrides = ([], ["optim.lr=1e-3"], ["loop.eval_every=100"], ["model.dim=32"], ["hardware.precision=64-true"])
    without_effect = {0: ["hardware.threads=1", "loop.log_every=7"], 1: []}
    for seed in (0, 1):
        finish(a_config(seed=seed, preset="paper"), tmp_path)
        for changed in overrides:
            finish(a_config(seed=seed, overrides=[*changed, *without_effect[seed]]), tmp_path)
    summaries = summarise(collect_runs(tmp_path))
    assert [(s.preset, len(s.changes)) for s in summaries] == [("paper", 0), ("cpu", 0), *[("cpu", 1)] * 4]
    assert [mean.seeds for summary in summaries for mean in summary.means] == [(0, 1)] * 6
    assert {change for summary in summaries for change in summary.changes} >= {"optim.lr=0.001", "model.dim=32"}


def test_options_of_an_attention_stay_in_the_same_summary(tmp_path: Path) -> None:
    for attention in ("softmax", "skyformer", "performer"):
        for overrides in ([], ["model.features=32"]):
            config = a_config(attention=attention, overrides=overrides)
            if not (tmp_path / config.run_name()).exists():
                finish(config, tmp_path)
    (summary,) = summarise(collect_runs(tmp_path))
    assert [(mean.attention, mean.options) for mean in summary.means] == [
        ("performer", ()),
        ("performer", ("num_features=32",)),
        ("skyformer", ()),
        ("skyformer", ("num_landmarks=32",)),
        ("softmax", ()),
    ]


def test_a_copied_folder_counts_once(tmp_path: Path) -> None:
    run = finish(a_config(), tmp_path)
    copy = tmp_path / "zzz-copy"
    copy.mkdir()
    for name in ("config.yaml", "state.json", "result.json"):
        (copy / name).write_bytes((run.folder / name).read_bytes())
    (summary,) = summarise(collect_runs(tmp_path))
    assert summary.means[0].seeds == (0,)
    assert [row.name for row in summary.left_out] == ["zzz-copy"]


@pytest.mark.parametrize("preset", list_presets())
def test_a_preset_as_it_is_has_no_changes(preset: str) -> None:
    for task in ("listops", "text", "retrieval", "pathfinder", "image"):
        if preset in list_presets(task):
            assert changes_to_preset(load_preset(task, preset, attention="reformer", seed=7)) == []


def test_changes_name_the_setting_and_its_value() -> None:
    config = a_config("pathfinder", overrides=["task.level=easy", "optim.betas=[0.9, 0.99]", "seed=4"])
    assert changes_to_preset(config) == ['task.level="easy"', "optim.betas=[0.9, 0.99]"]
    options = {"num_landmarks": 128, "landmarks": "paper"}
    fewer = a_config().replace(model=a_config().model.replace(attention_options=options))
    assert changes_to_preset(fewer) == ["model.attention_options.gamma=default"]


def test_a_preset_unknown_here_is_a_setting_of_its_own() -> None:
    first, second = a_config().replace(preset="mine"), a_config(seed=1).replace(preset="mine")
    assert changes_to_preset(first) == changes_to_preset(second) != changes_to_preset(a_config(preset="paper"))


def test_curves_are_evaluations_in_order(tmp_path: Path) -> None:
    run = finish(a_config(), tmp_path, accuracy=0.5, seconds=30)
    (row,) = collect_runs(tmp_path)
    assert [(p.step, p.seconds, p.accuracy) for p in validation_curve(row)] == [
        (100, 10, 0.3),
        (200, 20, 0.35),
        (300, 30, 0.5),
    ]
    write_curve(run, [(0.1, float("nan"), 1.0), (0.2, 2.0, 2.0)])
    assert [point.step for point in validation_curve(row)] == [200]


@pytest.mark.parametrize("content", [b"", b"step,split\n1,dev\n", b"\xff\xfe\0", b"\0\n\0"])
def test_damaged_metrics_are_an_empty_curve(tmp_path: Path, content: bytes) -> None:
    run = finish(a_config(), tmp_path)
    run.metrics_file.write_bytes(content)
    (row,) = collect_runs(tmp_path)
    assert validation_curve(row) == []
