"""The study of accuracy: its tables of given runs, and runs that are resumed, diverge or lack their data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from skyformer.errors import DataError, DivergedError, InterruptedRunError, UnknownNameError
from skyformer.report.tables import Table
from skyformer.studies import run_study
from skyformer.studies.accuracy import FULL_BUDGET, Accuracy, Cell, Options, Result, thinned
from skyformer.training import fit, load_preset
from tests.helpers import refused

TINY = (
    "task.max_length=64",
    "task.limit=64",
    "model.features=8",
    "model.dim=16",
    "model.hidden_dim=16",
    "optim.warmup_steps=1",
    "loop.steps=4",
    "loop.batch_size=4",
    "loop.eval_every=2",
    "loop.dev_limit=16",
    "loop.test_limit=32",
)


def a_run(test: float | None, **changes: object) -> Result:
    given = Result(
        test_accuracy=test,
        dev_accuracy=test,
        best_step=None if test is None else 300,
        seconds_a_step=0.1,
        diverged="",
        dev_curve=((100, 9.5, 0.3, 2.0), (200, 19.0, 0.35, None)),
        train_curve=((100, 2.1),),
        chance=0.2,
        train_examples=16000,
        dev_examples=1000,
        test_examples=1600,
        length=256,
        steps=600,
        batch_size=32,
        learning_rate=0.002,
        note="reduced: all of it",
    )
    return replace(given, **changes)  # type: ignore[arg-type]


def a_cell(attention: str, seed: int = 0, task: str = "listops") -> Cell:
    return Cell(task, attention, seed, "c0", "d0")


def row(table: Table, *beginning: str) -> list[str]:
    [found] = [list(each) for each in table.rows if list(each[: len(beginning)]) == list(beginning)]
    return found


RESULTS = {
    a_cell("softmax", 0): a_run(0.36),
    a_cell("softmax", 1): a_run(0.40),
    a_cell("skyformer", 0): a_run(0.42),
    a_cell("skyformer", 1): a_run(None, diverged="the loss is nan at step 7, on training examples 1, 2; last"),
    a_cell("linformer"): a_run(None, diverged="the loss is inf at step 3, on training examples 1"),
    # Two standard errors above 0.2 are 0.22.
    a_cell("performer"): a_run(0.22),
    a_cell("reformer"): a_run(0.2206),
    a_cell("softmax", task="text"): a_run(0.61, chance=0.5),
}


class TestTables:
    def test_table_1_has_means_spreads_and_the_papers_figures(self) -> None:
        table = Accuracy.tables(RESULTS)[0]
        assert table.groups == [("", 1), ("Text", 2), ("ListOps", 2), ("average", 2)]
        assert row(table, "softmax") == ["softmax", "**61.0**", "61.95", "**38.0 ± 2.8**", "38.37", "49.5", "50.16"]
        assert row(table, "skyformer")[3:] == ["42.0 (1 of 2 diverged)", "38.69", "-", "51.70"]
        assert row(table, "linformer")[1:5] == ["-", "58.93", "diverged", "37.45"]
        assert row(table, "(chance)") == ["(chance)", "50.0", "", "20.0", "", "", ""]
        assert FULL_BUDGET in table.note

    def test_a_star_marks_runs_at_chance(self) -> None:
        table = Accuracy.tables(RESULTS)[0]
        assert row(table, "performer")[3] == "22.0*"
        assert row(table, "reformer")[3] == "22.1"

    def test_nothing_at_chance_is_bold(self) -> None:
        lost = {a_cell("performer"): a_run(0.22), a_cell("linformer"): a_run(None, diverged="the loss is nan")}
        table = Accuracy.tables(lost)[0]
        assert row(table, "performer")[1] == "22.0*"
        assert row(table, "linformer")[1] == "diverged"

    def test_the_protocol_is_shown(self) -> None:
        protocol = row(Accuracy.tables(RESULTS)[1], "ListOps")
        assert protocol[1:8] == ["256", "600", "32", "0.002", "16,000", "1,000", "1,600"]
        assert protocol[8:] == ["0, 1", "reduced: all of it"]

    def test_every_run_is_listed_with_its_outcome(self) -> None:
        table = Accuracy.tables(RESULTS)[2]
        assert len(table.rows) == len(RESULTS)
        assert row(table, "ListOps", "performer")[3:] == ["22.0", "22.0", "300", "0.1", "at chance"]
        assert row(table, "ListOps", "softmax", "1")[-1] == "learned"
        assert row(table, "ListOps", "skyformer", "1")[3:] == [
            *("-", "-", "-", "0.1"),
            "diverged: the loss is nan at step 7",
        ]

    def test_curves_are_of_the_dev_set_and_the_first_seed(self) -> None:
        accuracy, loss, steps = Accuracy.figures(RESULTS)
        assert [panel.title for panel in accuracy.panels] == ["Text", "ListOps"]
        [softmax] = [line for line in accuracy.panels[1].series if line.label == "softmax"]
        assert (softmax.x, softmax.y) == ([9.5, 19.0], [30.0, 35.0])
        assert loss.panels[1].series[0].y == [2.0, None]
        assert steps.panels[1].series[0].x == [100, 200]

    def test_partial_records_can_be_shown(self) -> None:
        one = {a_cell("softmax"): a_run(0.36)}
        assert len(Accuracy.tables(one)[0].rows) == 2
        assert Accuracy.figures({})[0].panels == []


def test_long_curves_are_thinned_between_their_ends() -> None:
    assert thinned(range(10)) == list(range(10))
    few = thinned(range(1000))
    assert (len(few), few[0], few[-1]) == (25, 0, 999)


class TestPlan:
    def test_the_repeated_tasks_come_first_with_all_their_seeds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        study = Accuracy(Options())
        monkeypatch.setattr(study, "_data", lambda: dict.fromkeys(study.options.tasks, "d0"))
        cells = study.cells()
        assert len(cells) == len(set(cells)) == 63
        assert {cell.task for cell in cells[:45]} == {"listops", "image", "text"}
        assert {cell.seed for cell in cells[:27]} == {cell.seed for cell in cells[45:]} == {0}
        assert {(cell.attention, cell.seed) for cell in cells[27:45]} == {
            (name, seed) for name in ("skyformer", "kernelized", "softmax") for seed in (1, 2)
        }

    def test_the_protocol_is_the_same_for_all_but_the_attention(self) -> None:
        for task in Options().tasks:
            configs = [load_preset(task, "study", attention=name) for name in Options().attentions]
            assert len({config.optim for config in configs}) == 1
            assert len({config.loop for config in configs}) == 1
            assert all("reduced: " in config.note for config in configs)

    def test_missing_data_is_reported_before_anything_is_trained(self, tmp_path: Path) -> None:
        options = Options(data_dir=str(tmp_path), tasks=("text", "pathfinder"), runs_dir=str(tmp_path / "runs"))
        commands = ("skyformer data prepare text", "skyformer data prepare pathfinder", "--limit 3000")
        with refused(DataError, "not prepared", str(tmp_path), *commands):
            run_study(Accuracy(options), tmp_path / "record")
        assert not (tmp_path / "runs").exists()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Options:
    folder = tmp_path_factory.mktemp("accuracy")
    return Options(
        changes=TINY,
        tasks=("listops",),
        attentions=("softmax",),
        more_seeds=(),
        data_dir=str(folder / "data"),
        runs_dir=str(folder / "runs"),
    )


class TestRuns:
    def test_a_run_gives_what_the_tables_need(self, tiny: Options, tmp_path: Path) -> None:
        record = run_study(Accuracy(tiny), tmp_path)
        [(cell, result)] = record.results().items()
        assert (cell.task, cell.attention, cell.seed) == ("listops", "softmax", 0)
        assert (result.length, result.steps, result.batch_size) == (64, 4, 4)
        assert (result.train_examples, result.dev_examples, result.test_examples) == (64, 16, 32)
        assert [point[0] for point in result.dev_curve] == [2, 4]
        assert result.test_accuracy is not None
        assert result.test_accuracy * 32 % 1 < 1e-2 or result.test_accuracy * 32 % 1 > 0.99

    def test_a_finished_run_is_read_and_not_trained_again(
        self, tiny: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = run_study(Accuracy(tiny), tmp_path / "a").results()
        monkeypatch.setattr(fit, "_run_to_end", lambda training: pytest.fail("trained again"))
        assert run_study(Accuracy(tiny), tmp_path / "b").results() == first

    def test_an_interrupted_run_is_resumed(
        self, tiny: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        options = replace(tiny, runs_dir=str(tmp_path / "runs"))
        with monkeypatch.context() as patch:
            patch.setattr(fit, "_fit_and_test", _stopped)
            with pytest.raises(InterruptedRunError):
                run_study(Accuracy(options), tmp_path)
        resumed = run_study(Accuracy(options), tmp_path).results()
        assert [point[0] for result in resumed.values() for point in result.dev_curve] == [2, 4]

    def test_a_run_that_diverges_is_a_result(
        self, tiny: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(fit, "_fit_and_test", _diverged)
        [result] = run_study(Accuracy(replace(tiny, runs_dir=str(tmp_path / "runs"))), tmp_path).results().values()
        assert (result.test_accuracy, result.diverged) == (None, "the loss is nan at step 3, on training examples 1")


def _stopped(*_: object) -> None:
    raise InterruptedRunError("stopped", 15)


def _diverged(*_: object) -> None:
    raise DivergedError("the loss is nan at step 3, on training examples 1")


@pytest.mark.parametrize("name", ["tasks", "repeated_tasks", "attentions", "repeated"])
def test_unknown_names_are_refused(name: str) -> None:
    with refused(UnknownNameError, "txet"):
        Accuracy(Options(**{name: ("txet",)}))  # type: ignore[arg-type]


def test_only_requested_attentions_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Accuracy, "_data", lambda self: dict.fromkeys(self.options.tasks, "d0"))
    cells = Accuracy(Options(tasks=("listops",), attentions=("linformer", "softmax"))).cells()
    assert [(cell.attention, cell.seed) for cell in cells] == [
        *(("linformer", 0), ("softmax", 0)),
        *(("softmax", 1), ("softmax", 2)),
    ]
