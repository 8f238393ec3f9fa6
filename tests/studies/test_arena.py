"""The study arena: runs are collected at any step, again as they advance, and are never lost."""

from __future__ import annotations

import shutil
from pathlib import Path

from skyformer.errors import DataError, InputError
from skyformer.own import own_data
from skyformer.studies import run_study
from skyformer.studies.arena import Arena, Cell, Options, Result, latest
from skyformer.studies.record import read_record, record_path
from skyformer.training.checkpoints import CheckpointStore
from skyformer.training.presets import load_preset
from skyformer.training.runs import Run, list_runs
from tests.helpers import refused
from tests.training.fakes import a_config, finish, result_of, start, write_curve

RECORD = Path(__file__).parents[2] / "results" / "arena"
EFFICIENCY = Path(__file__).parents[2] / "results" / "efficiency" / "efficiency.json"
CURVE = [(0.5, 0.7, 10.0), (0.6, 0.6, 20.0)]


def started(folder: Path, attention: str = "skyformer", seed: int = 0) -> Run:
    run = start(a_config("text", attention, seed=seed, preset="paper"), folder)
    write_curve(run, CURVE)
    return run


def collect(folder: Path, runs: Path, **options: str) -> dict[Cell, Result]:
    return run_study(Arena(Options(runs_dir=str(runs), **options)), folder).results()


def test_runs_advance_and_remain_after_they_are_deleted(tmp_path: Path) -> None:
    runs, folder = tmp_path / "runs", tmp_path / "record"
    run, other = started(runs), started(runs, "softmax")
    first = collect(folder, runs)
    assert [cell.step for cell in first] == [200, 200]
    shutil.rmtree(other.folder)
    write_curve(run, [*CURVE, (0.65, 0.5, 30.0)])
    collect(folder, runs)
    run.write_result(result_of(run, 0.64))
    results = latest(collect(folder, runs))
    assert {cell.attention: (cell.step, cell.finished) for cell in results} == {
        "softmax": (200, False),
        "skyformer": (300, True),
    }
    shutil.rmtree(run.folder)
    assert latest(collect(folder, runs)) == results


def test_tables_have_the_layout_of_table_1_and_say_what_is_not_finished(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for seed, accuracy in ((0, 0.62), (1, 0.64)):
        finish(a_config("text", "skyformer", seed=seed, preset="paper"), runs, accuracy=accuracy)
    started(runs, "softmax")
    results = collect(tmp_path / "record", runs, efficiency=str(EFFICIENCY))
    accuracy, by_step, every = Arena.tables(results)
    rows = {row[0]: row[1:] for row in accuracy.rows}
    assert rows["skyformer"] == ["63.00 ± 1.41", "64.70"]
    assert rows["softmax"] == ["(seed 0: 60.0 at 200)", "61.95"]
    assert rows["bigbird"] == ["-", "63.86"]
    assert by_step.rows == [
        ["softmax", "50.0", "60.0", "-"],
        ["skyformer", "30.0 (2 seeds)", "35.0 (2 seeds)", "63.0 (2 seeds)"],
    ]
    assert [row[3:5] for row in every.rows] == [["200 of 50,000", "not finished"], *[["300 of 50,000", "finished"]] * 2]
    figure, loss, steps, paper = Arena.figures(results)
    (panel,) = figure.panels
    assert (figure.name, loss.name, steps.name, paper.name) == ("figure", "loss", "steps", "paper")
    idle = results[next(cell for cell in results if cell.attention == "softmax")].idle_seconds
    assert idle is not None
    assert panel.series[0].x == [100 * idle / 3600, 200 * idle / 3600]
    assert steps.panels[0].series[0].x == [100, 200]
    assert [panel.title for panel in paper.panels] == ["Text, softmax", "Text, skyformer"]
    ours, papers = paper.panels[1].series
    assert (ours.x, papers.x[:2], papers.y[:2]) == ([100, 200, 300], (500, 1000), (51.2, 60.0))


def test_another_record_of_efficiency_counts_for_all_runs(tmp_path: Path) -> None:
    runs, folder = tmp_path / "runs", tmp_path / "record"
    run = started(runs)
    collect(folder, runs)
    shutil.rmtree(run.folder)
    started(runs, "softmax")
    results = collect(folder, runs, efficiency=str(EFFICIENCY))
    assert {run.idle_settings for run in results.values()} == {"preset paper_v1, threads: 2"}
    assert all(run.idle_seconds for run in results.values())
    assert collect(folder, runs) == results, "without the option the times stay"
    *_, every = Arena.tables(results)
    assert "(preset paper_v1, threads: 2)" in every.note


def test_no_seed_counts_twice(tmp_path: Path) -> None:
    """A run that was begun again elsewhere, and a run of the same seed with another number of steps."""
    runs, folder = tmp_path / "runs", tmp_path / "record"
    first = started(runs / "first")
    collect(folder, runs)
    shutil.rmtree(first.folder)
    again = started(runs / "again")
    write_curve(again, [(0.4, 0.8, 10.0)])
    furthest = latest(collect(folder, runs)).values()
    assert [run.dev_accuracy() for run in furthest] == [0.6], "until the new one has gone further"
    write_curve(again, [(0.4, 0.8, 10.0), (0.45, 0.7, 20.0), (0.7, 0.6, 30.0)])
    started(runs / "second")
    results = collect(folder, runs)
    assert [run.dev_accuracy() for run in latest(results).values()] == [0.7]
    other = start(a_config("text", "skyformer", seed=0, preset="paper", overrides=["loop.stop_after=300"]), runs)
    write_curve(other, CURVE)
    accuracy, _, every = Arena.tables(collect(folder, runs))
    assert [row[1] for row in accuracy.rows if row[0] == "skyformer"] == ["(seed 0: 70.0 at 300)"]
    assert len(every.rows) == 2


def test_a_short_trial_does_not_take_the_place_of_a_run_at_full_length(tmp_path: Path) -> None:
    started(tmp_path / "runs")
    for change in ("task.max_length=256", "loop.steps=300", "loop.stop_after=300"):
        trial = a_config("text", "skyformer", seed=0, preset="paper", overrides=[change])
        finish(trial, tmp_path / "runs", accuracy=0.9)
    accuracy, *_ = Arena.tables(collect(tmp_path / "record", tmp_path / "runs"))
    assert [row[1] for row in accuracy.rows if row[0] == "skyformer"] == ["(seed 0: 60.0 at 200)"]


def test_a_record_has_one_preset_and_starts_with_a_run(tmp_path: Path) -> None:
    started(tmp_path / "runs")
    with refused(InputError, "nothing to measure", "no run of the preset"):
        collect(tmp_path / "record", tmp_path / "runs", preset="papr")
    before = collect(tmp_path / "record", tmp_path / "runs")
    with refused(InputError, "preset", "papr"):
        collect(tmp_path / "record", tmp_path / "runs", preset="papr")
    with refused(InputError, "nothing to measure"):
        run_study(Arena(Options(str(tmp_path / "runs"), "papr")), tmp_path / "record", fresh=True)
    assert read_record(Arena, record_path(Arena.name, tmp_path / "record")).results() == before


def test_runs_on_own_data_are_left_out(tmp_path: Path) -> None:
    data = own_data((["good", "bad", "fair"] * 10, ["a", "b", "a"] * 10), name="films", data_dir=tmp_path / "data")
    write_curve(start(load_preset(data, "paper"), tmp_path / "runs"), CURVE)
    assert Arena(Options(runs_dir=str(tmp_path / "runs"))).cells() == []


def test_without_a_record_of_efficiency_there_is_no_time_axis(tmp_path: Path) -> None:
    started(tmp_path / "runs" / "text-data")
    results = collect(tmp_path / "record", tmp_path / "runs")
    assert [figure.name for figure in Arena.figures(results)] == ["steps", "paper"]


def test_other_presets_are_left_out_and_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    finish(a_config("listops", preset="cpu"), tmp_path / "runs")
    started(tmp_path / "runs")
    assert [cell.task for cell in collect(tmp_path / "record", tmp_path / "runs")] == ["text"]
    with refused(DataError, "--runs-dir", "none at"):
        collect(tmp_path / "record", tmp_path / "nothing")


def test_the_stored_runs_are_those_of_the_record_and_can_be_trained_further() -> None:
    record = latest(read_record(Arena, record_path(Arena.name, RECORD)).results())
    reached = {cell.run: (cell.step, cell.finished) for cell in record}
    runs = list_runs(RECORD / "runs")
    assert runs
    for run in runs:
        assert reached[run.name] == (max(row.step for row in run.metrics()), run.finished)
        if not run.finished:
            data = None if run.data is None else run.data.digest()
            store = CheckpointStore(run.folder / "checkpoints", run.config.digest(), data)
            assert store.newest_good(lambda _: True), f"{run.name} has no checkpoint to resume from"
