"""Tables show the runs next to the paper's accuracies, with a warning if a setting is not the paper's."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from skyformer.report.tables import Table, as_latex, duration, for_terminal, percent
from skyformer.training.collect import Summary, collect_runs, summarise
from skyformer.training.tables import as_json, means_csv, runs_csv, runs_table, summary_table
from tests.training.fakes import a_config, finish, start


def printed(table: Table) -> str:
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(for_terminal(table))
    return "\n".join([table.title, console.export_text(), table.note])


def listed(runs_dir: Path) -> str:
    return printed(runs_table(collect_runs(runs_dir)))


def summarised(runs_dir: Path) -> str:
    return printed(summary_table(only_summary(runs_dir)))


def line_with(text: str, word: str) -> str:
    (line,) = [line for line in text.splitlines() if word in line]
    return line


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Skyformer with three seeds on two tasks, softmax with two on one, and one run that is not finished."""
    folder = tmp_path_factory.mktemp("runs")
    for seed, accuracy in enumerate((0.40, 0.42, 0.35)):
        finish(a_config("listops", seed=seed), folder, accuracy=accuracy)
        finish(a_config("text", seed=seed), folder, accuracy=0.6 + accuracy / 10)
    for seed in (0, 1):
        finish(a_config("text", "softmax", seed=seed), folder, accuracy=0.62)
    start(a_config("text", "softmax", seed=2), folder, step=750)
    return folder


def only_summary(runs_dir: Path) -> Summary:
    (summary,) = summarise(collect_runs(runs_dir))
    return summary


def test_list_has_a_row_per_run(runs_dir: Path) -> None:
    text = listed(runs_dir)
    finished = line_with(text, f"{a_config('listops', seed=1).run_name()} ")
    for part in ("finished", "5,000/5,000", "43.00", "42.00", "1 min 40 s", "cpu (reduced)"):
        assert part in finished
    unfinished = line_with(text, f"{a_config('text', 'softmax', seed=2).run_name()} ")
    for part in ("interrupted", "750/2,500", "25.00", "-"):
        assert part in unfinished
    assert "preset cpu of text is reduced: reviews cut to 1,000 bytes" in text


def test_list_marks_changes_and_damage_and_gives_reasons(tmp_path: Path) -> None:
    changed = finish(a_config(overrides=["optim.lr=1e-3"]), tmp_path)
    failed = start(a_config(seed=1, preset="paper"), tmp_path, state="failed")
    failed.write_state(failed.stored_state().replace(reason="loss is nan at step 251"))
    damaged = finish(a_config(), tmp_path)
    (damaged.folder / "config.yaml").write_text("[bold]")
    text = listed(tmp_path)
    assert "cpu (reduced, changed)" in text
    assert f"changed in {changed.name}: optim.lr=0.001" in text
    assert f"{failed.name} failed: loss is nan at step 251" in text
    assert line_with(text, f" {damaged.name} ").split()[:2] == [damaged.name, "damaged"]
    assert f"{damaged.name} damaged: {damaged.folder / 'config.yaml'}" in text


def test_summary_is_the_layout_of_table_1_with_a_warning(runs_dir: Path) -> None:
    text = summarised(runs_dir)
    header = line_with(text, "attention")
    assert header.index("Text") < header.index("ListOps") < header.index("AVG")
    assert "Pathfinder" not in header
    skyformer = line_with(text, "Skyformer")
    assert "63.90±0.36 [3] (64.70)" in skyformer
    assert "39.00±3.61 [3] (38.69)" in skyformer
    assert "51.45 (51.70)" in skyformer
    softmax = line_with(text, "Self-Attention")
    assert "62.00±0.00 [2] (61.95)" in softmax
    assert "- (38.37)" in softmax
    assert "- (50.16)" in softmax
    assert "- (63.86)" in line_with(text, "BigBird")
    names = ("Self-Attention", "Kernelized", "Nystromformer", "BigBird", "Skyformer")
    assert sorted(names, key=text.index) == list(names)
    assert "preset cpu (reduced); NOT THE PAPER'S SETTING" in text
    assert "listops is reduced: 5,000 steps of 32 instead of 50,000" in text
    assert f"Not counted: {a_config('text', 'softmax', seed=2).run_name()} (interrupted)" in text


def test_the_papers_setting_has_no_warning(tmp_path: Path) -> None:
    for seed in (0, 1, 2):
        finish(a_config("image", seed=seed, preset="paper"), tmp_path)
    text = summarised(tmp_path)
    assert "Test accuracy in %, preset paper\n" in text
    assert "over 3 seeds" in text
    assert "40.00±0.00 (40.77)" in text
    assert "AVG" not in text
    finish(a_config("image", preset="paper", overrides=["loop.steps=20000"]), tmp_path)
    title = summary_table(summarise(collect_runs(tmp_path))[1]).title
    assert "preset paper with loop.steps=20000; NOT THE PAPER'S SETTING" in title


def test_changed_options_have_their_own_row(tmp_path: Path) -> None:
    for overrides in ([], ["model.features=32"]):
        finish(a_config("image", overrides=overrides), tmp_path)
    rows = summary_table(only_summary(tmp_path), attentions=["skyformer"]).rows
    assert rows == [["Skyformer", "40.00 (40.77)"], ["Skyformer (num_landmarks=32)", "40.00 (40.77)"]]


def test_rows_and_columns_can_be_chosen(runs_dir: Path) -> None:
    table = summary_table(only_summary(runs_dir), tasks=["image", "text"], attentions=["skyformer", "softmax"])
    assert table.header == ["attention", "Text", "Image", "AVG"]
    assert [row[0] for row in table.rows] == ["Self-Attention", "Skyformer"]
    assert table.rules == [1]


def test_nothing_finished_is_no_error(tmp_path: Path) -> None:
    start(a_config(), tmp_path)
    text = summarised(tmp_path)
    assert "No run is finished" in text
    assert "- (38.69)" in line_with(text, "Skyformer")


def test_it_fits_a_narrow_terminal(runs_dir: Path) -> None:
    shown = Console(width=80, file=io.StringIO(), record=True)
    shown.print(for_terminal(summary_table(only_summary(runs_dir))))
    text = shown.export_text()
    assert max(map(len, text.splitlines())) <= 80
    assert "63.90±0.36" in text


def test_latex_has_the_papers_accuracies_in_their_own_columns(runs_dir: Path, tmp_path: Path) -> None:
    changed = shutil.copytree(runs_dir, tmp_path / "changed")
    finish(a_config("text", overrides=["model.features=32"]), changed)
    latex = as_latex([summary_table(only_summary(changed), paper_columns=True)])
    assert r"\multicolumn{2}{c}{Text} & \multicolumn{2}{c}{ListOps} & \multicolumn{2}{c}{AVG} \\" in latex
    assert r"63.90$\pm$0.36 {[}3{]} & 64.70 &" in line_with(latex, "Skyformer &")
    rows = latex.split("\\midrule", 1)[1].split("\\bottomrule")[0].split("\\\\\n")
    assert {row.count("&") for row in rows if "&" in row} == {6}
    assert r"Test accuracy in \%, preset cpu (reduced); NOT THE PAPER'S SETTING" in line_with(latex, "\\caption")
    assert "reviews cut to 1,000 bytes" in latex
    assert "_" not in latex.replace("\\_", "")
    assert "±" not in latex


def test_csv_of_runs_has_everything(runs_dir: Path) -> None:
    records = list(csv.DictReader(io.StringIO(runs_csv(collect_runs(runs_dir)))))
    assert len(records) == 9
    (record,) = [record for record in records if record["name"] == a_config("listops", seed=2).run_name()]
    assert (record["test_accuracy"], record["seed"], record["peak_memory_bytes"]) == ("0.35", "2", "123000000")
    assert record["note"].startswith("reduced")


def test_csv_of_means_has_the_seeds_behind_them(runs_dir: Path) -> None:
    records = list(csv.DictReader(io.StringIO(means_csv(summarise(collect_runs(runs_dir))))))
    (record,) = [r for r in records if (r["task"], r["attention"]) == ("listops", "skyformer")]
    assert float(record["mean"]) == pytest.approx(0.39)
    assert (record["count"], record["seeds"], record["accuracies"]) == ("3", "0; 1; 2", "0.4; 0.42; 0.35")
    assert (record["paper"], record["as_in_paper"]) == ("0.3869", "False")


def test_json_has_runs_and_means(runs_dir: Path) -> None:
    rows = collect_runs(runs_dir)
    document = json.loads(as_json(rows, summarise(rows)))
    assert len(document["runs"]) == 9
    assert {(mean["task"], mean["attention"], mean["count"]) for mean in document["means"]} == {
        ("listops", "skyformer", 3),
        ("text", "skyformer", 3),
        ("text", "softmax", 2),
    }


def test_readable_numbers() -> None:
    assert [duration(x) for x in (None, 3.2, 119, 9000)] == ["-", "3.2 s", "1 min 59 s", "2 h 30 min"]
    assert [percent(x) for x in (None, 0.6195)] == ["-", "61.95"]
