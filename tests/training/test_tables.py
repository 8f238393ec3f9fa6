"""Tables say what was run, beside what the paper has, and never hide that a setting is not the paper's."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from skyformer.report.tables import duration, percent
from skyformer.training.collect import Summary, collect_runs, summarise
from skyformer.training.formats import as_json, as_latex, means_csv, runs_csv
from skyformer.training.tables import PaperLayout, run_remarks, runs_table, summary_table
from tests.training.fakes import a_config, finish, start


def printed(table: Table, width: int = 200) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(table)
    return console.export_text()


def listed(runs_dir: Path) -> str:
    rows = collect_runs(runs_dir)
    return "\n".join([printed(runs_table(rows)), *run_remarks(rows)])


def summed_up(runs_dir: Path) -> str:
    layout = PaperLayout(only_summary(runs_dir))
    return "\n".join([layout.title, printed(summary_table(layout)), *layout.remarks()])


def line_with(text: str, word: str) -> str:
    (line,) = [line for line in text.splitlines() if word in line]
    return line


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    """Skyformer with three seeds on two tasks, softmax with two on one, and one run that is not finished."""
    for seed, accuracy in enumerate((0.40, 0.42, 0.35)):
        finish(a_config("listops", seed=seed), tmp_path, accuracy=accuracy)
        finish(a_config("text", seed=seed), tmp_path, accuracy=0.6 + accuracy / 10)
    for seed in (0, 1):
        finish(a_config("text", "softmax", seed=seed), tmp_path, accuracy=0.62)
    start(a_config("text", "softmax", seed=2), tmp_path, step=750)
    return tmp_path


def only_summary(runs_dir: Path) -> Summary:
    (summary,) = summarise(collect_runs(runs_dir))
    return summary


def test_list_has_a_line_a_run(runs_dir: Path) -> None:
    text = listed(runs_dir)
    finished = line_with(text, f"{a_config('listops', seed=1).run_name()} ")
    for part in ("finished", "5,000/5,000", "43.00", "42.00", "1 min 40 s", "cpu (reduced)"):
        assert part in finished
    unfinished = line_with(text, f"{a_config('text', 'softmax', seed=2).run_name()} ")
    for part in ("interrupted", "750/2,500", "25.00", "-"):
        assert part in unfinished
    assert "preset cpu of text is reduced: reviews cut to 1,000 bytes" in text


def test_list_marks_changes_and_gives_reasons(tmp_path: Path) -> None:
    changed = finish(a_config(overrides=["optim.lr=1e-3"]), tmp_path)
    failed = start(a_config(seed=1, preset="paper"), tmp_path, state="failed")
    failed.write_state(failed.stored_state().replace(reason="loss is nan at step 251"))
    text = listed(tmp_path)
    assert "cpu (reduced, changed)" in text
    assert f"changed in {changed.name}: optim.lr=0.001" in text
    assert f"{failed.name} failed: loss is nan at step 251" in text


def test_a_damaged_run_is_listed(tmp_path: Path) -> None:
    run = finish(a_config(), tmp_path)
    (run.folder / "config.yaml").write_text("[bold]")
    text = listed(tmp_path)
    assert line_with(text, f" {run.name} ").split()[:2] == [run.name, "damaged"]
    assert f"{run.name} damaged: {run.folder / 'config.yaml'}" in text


def test_summary_is_the_layout_of_table_1(runs_dir: Path) -> None:
    text = summed_up(runs_dir)
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


def test_summary_says_what_it_is_not(runs_dir: Path) -> None:
    text = summed_up(runs_dir)
    assert "preset cpu (reduced); NOT THE PAPER'S SETTING" in text
    assert "listops is reduced: 5,000 steps of 32 instead of 50,000" in text
    assert f"not counted: {a_config('text', 'softmax', seed=2).run_name()} (interrupted)" in text


def test_the_papers_setting_has_no_warning(tmp_path: Path) -> None:
    for seed in (0, 1, 2):
        finish(a_config("image", seed=seed, preset="paper"), tmp_path)
    text = summed_up(tmp_path)
    assert "preset paper" in text
    assert "NOT THE PAPER" not in text
    assert "over 3 seeds" in text
    assert "40.00±0.00 (40.77)" in text
    assert "AVG" not in text


def test_a_changed_setting_is_named(tmp_path: Path) -> None:
    finish(a_config("image", preset="paper", overrides=["loop.steps=20000"]), tmp_path)
    title = PaperLayout(only_summary(tmp_path)).title
    assert "preset paper with loop.steps=20000; NOT THE PAPER'S SETTING" in title


def test_changed_options_are_a_line_of_their_own(tmp_path: Path) -> None:
    for overrides in ([], ["model.features=32"]):
        finish(a_config("image", overrides=overrides), tmp_path)
    text = summed_up(tmp_path)
    assert "40.00 (40.77)" in line_with(text, "Skyformer (num_landmarks=32)")
    assert "40.00 (40.77)" in line_with(text, "Skyformer  ")


def test_rows_and_columns_can_be_chosen(runs_dir: Path) -> None:
    layout = PaperLayout(only_summary(runs_dir), tasks=["image", "text"], attentions=["skyformer", "softmax"])
    assert layout.titles == ["Text", "Image", "AVG"]
    assert [line.attention for block in layout.blocks for line in block] == ["softmax", "skyformer"]


def test_nothing_finished_is_no_error(tmp_path: Path) -> None:
    start(a_config(), tmp_path)
    text = summed_up(tmp_path)
    assert "no run is finished" in text
    assert "- (38.69)" in line_with(text, "Skyformer")


def test_it_fits_a_narrow_terminal(runs_dir: Path) -> None:
    text = printed(summary_table(PaperLayout(only_summary(runs_dir))), width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert "63.90±0.36" in text


def test_latex_has_as_many_cells_in_every_row(runs_dir: Path) -> None:
    for overrides in (["model.features=32"], ["hardware.precision=64-true"]):
        finish(a_config("text", overrides=overrides), runs_dir)
    for summary in summarise(collect_runs(runs_dir)):
        latex = as_latex(PaperLayout(summary))
        columns = latex.split("\\begin{tabular}{")[1].split("}")[0]
        body = latex.split("\\midrule", 1)[1].split("\\bottomrule")[0]
        rows = [line for line in body.splitlines() if line.endswith("\\\\")]
        assert len(rows) >= 9
        assert {row.replace("\\&", "").count("&") for row in rows} == {len(columns) - 1}
        assert latex.count("{") == latex.count("}")
        assert "±" not in latex
        assert "_" not in latex.replace("\\_", "")


def test_latex_has_ours_and_the_papers(runs_dir: Path) -> None:
    latex = as_latex(PaperLayout(only_summary(runs_dir)))
    assert r"63.90$\pm$0.36 {[}3{]} & 64.70 &" in line_with(latex, "Skyformer &")
    caption = line_with(latex, "\\caption")
    assert r"Test accuracy in \%, preset cpu (reduced); NOT THE PAPER'S SETTING" in caption
    assert "reviews cut to 1,000 bytes" in caption


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


def test_numbers_for_people() -> None:
    assert [duration(x) for x in (None, 3.2, 119, 9000)] == ["-", "3.2 s", "1 min 59 s", "2 h 30 min"]
    assert [percent(x) for x in (None, 0.6195)] == ["-", "61.95"]
