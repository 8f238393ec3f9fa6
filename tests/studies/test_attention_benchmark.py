"""The attention benchmarks check before they measure, and measure what they say."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from skyformer.attention import list_attentions
from skyformer.errors import InputError, MissingExtraError, SkyformerError, UnknownNameError
from skyformer.studies import run_study
from skyformer.studies.benchmarks import attention, targets
from skyformer.studies.benchmarks.attention import (
    AttentionBenchmark,
    Cell,
    Options,
    Result,
    Row,
    approximation_error,
    measure_fresh,
    measure_here,
)
from skyformer.studies.benchmarks.authors import load_class
from skyformer.studies.benchmarks.contenders import (
    AUTHORS,
    SDPA,
    Contender,
    Shape,
    attention_contender,
    choose_contenders,
    find_contender,
)
from skyformer.studies.benchmarks.correctness import IncorrectError, check_contender
from skyformer.studies.benchmarks.inputs import make_tokens
from skyformer.studies.benchmarks.targets import TargetsBenchmark
from skyformer.studies.benchmarks.timing import interleave
from tests.helpers import refused

SMALL = Shape(length=96, heads=2, head_dim=8, landmarks=16)
OPTIONS = Options(lengths=(96, 64), attention=("skyformer",), head_dim=8, landmarks=16, repeats=2)


@pytest.fixture
def without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures memory in this process; that a fresh process is used is tested below."""
    monkeypatch.setattr(attention, "measure_fresh", lambda name, shape, *_: measure_here(name, vars(shape), 1))


def with_reversed_values(shape: Shape) -> Callable[..., Tensor]:
    right = attention_contender("skyformer").build(shape)
    return lambda q, k, v: right(q, k, v.flip(2))


@pytest.mark.parametrize("name", ["sdpa", "kernelized", "skyformer", "performer", "bigbird"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_correct_contenders_pass_the_check(name: str, dtype: str) -> None:
    contender = SDPA if name == "sdpa" else attention_contender(name)
    check_contender(contender, replace(SMALL, dtype=dtype))


def test_a_device_that_is_not_here_is_refused() -> None:
    with refused(InputError, "device", "'cpu'", "'cuda:99'"):
        AttentionBenchmark(replace(OPTIONS, device="cuda:99")).cells()


def test_wrong_numbers_stop_the_benchmark_before_any_timing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contenders = {"sdpa": SDPA, "skyformer": Contender("skyformer", False, with_reversed_values)}
    monkeypatch.setattr(attention, "find_contender", contenders.get)
    with refused(IncorrectError, "skyformer: output differs from a dense float64 computation"):
        run_study(AttentionBenchmark(OPTIONS), tmp_path)
    assert not list(tmp_path.iterdir())


def test_values_that_are_not_finite_are_incorrect() -> None:
    with refused(IncorrectError, "broken", "not finite"):
        check_contender(Contender("broken", False, lambda shape: lambda q, k, v: q * torch.inf), SMALL)


@pytest.mark.usefixtures("without_processes")
def test_tables_and_figures_show_every_contender_at_every_length(tmp_path: Path) -> None:
    results = run_study(AttentionBenchmark(OPTIONS), tmp_path).results()
    assert [str(cell) for cell in results] == ["B=1, n=64: sdpa, skyformer", "B=1, n=96: sdpa, skyformer"]
    assert all(len(row.step_seconds) == 2 for result in results.values() for row in result.rows)
    (table,) = AttentionBenchmark.tables(results)
    names = ("sdpa", "skyformer")
    assert [row[:2] for row in table.rows] == [[n, name] for n in ("1 x 64", "1 x 96") for name in names]
    sdpa, ours = results[next(iter(results))].rows
    assert table.rows[0][4] == "1.00x"
    assert table.rows[1][4] == f"{min(sdpa.step_seconds) / min(ours.step_seconds):.2f}x"
    figure, error = AttentionBenchmark.figures(results)
    assert {series.label for panel in figure.panels for series in panel.series} == {"sdpa", "skyformer"}
    assert (figure.name, error.name) == ("figure", "error")


@pytest.mark.usefixtures("without_processes")
def test_a_slow_step_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SLOW_SECONDS", 0.0)
    (result, _) = run_study(AttentionBenchmark(OPTIONS), tmp_path).results().values()
    assert all(len(row.step_seconds) == 1 and row.forward_seconds == () for row in result.rows)


def test_peers_are_compared_with_the_same_mechanism() -> None:
    names, _ = choose_contenders(["skyformer", "performer"], peers=True, shape=SMALL)
    assert names[:5] == ("sdpa", "skyformer", "performer", "plain linformer", "skyformer layer")
    row = Row("performer", (), (1.0, 3.0, 2.0), 1, 1, None)
    result = Result((row, replace(row, name="performer-pytorch", step_seconds=(4.0,))))
    _, table = AttentionBenchmark.tables({Cell(96): result})
    assert table.rows == [["96", "performer", "performer-pytorch", "0.50x"]]


@pytest.mark.parametrize(
    ("length", "left_out"),
    [(64, "Nystromformer BigBird"), (1000, "Nystromformer BigBird Reformer"), (256, "BigBird"), (1024, "")],
)
def test_peers_are_left_out_at_lengths_that_they_cannot_do(length: int, left_out: str) -> None:
    pytest.importorskip("transformers")
    names, reasons = choose_contenders(["skyformer"], peers=True, shape=Shape(length))
    ours = [reason for reason in reasons if "is not installed" not in reason and "GPUs" not in reason]
    assert [reason.split()[1] for reason in ours] == left_out.split()
    assert all(f"transformers {name}" not in names for name in left_out.split())
    row = Row("sdpa", (), (1.0,), 1, 1, None)
    (table,) = AttentionBenchmark.tables({Cell(length, left_out=reasons): Result((row,))})
    assert all(reason in table.note for reason in reasons)


def test_layers_are_drawn_apart_because_they_include_projections() -> None:
    row = Row("skyformer", (), (1.0,), 1, 1, 0.1)
    names = ("skyformer layer", "nystrom-attention", "performer-pytorch", "transformers BigBird")
    rows = (row, *(replace(row, name=name) for name in names))
    figure, layers, _ = AttentionBenchmark.figures({Cell(96): Result(rows)})
    assert {series.label for series in figure.panels[0].series} == {"skyformer", "performer-pytorch"}
    assert {series.label for series in layers.panels[0].series} == {*names} - {"performer-pytorch"}
    assert AttentionBenchmark.figures({}) == []


def test_without_any_peer_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Contender, "available", lambda self: False)
    with pytest.raises(MissingExtraError, match=re.escape("[peers]")):
        choose_contenders(["skyformer"], peers=True, shape=SMALL)


def test_xformers_is_left_out_on_a_cpu_with_the_reason_and_compared_with_sdpa_elsewhere() -> None:
    names, reasons = choose_contenders(["all"], peers=True, shape=SMALL)
    assert "xformers" not in names
    assert "xformers runs on GPUs only" in reasons
    _, reasons = choose_contenders(["all"], peers=True, shape=replace(SMALL, device="cuda"))
    assert "xformers is not installed: pip install xformers" in reasons
    row = Row("sdpa", (), (1.0,), 1, 1, None)
    _, table = AttentionBenchmark.tables({Cell(96): Result((row, replace(row, name="xformers")))})
    assert table.rows == [["96", "sdpa", "xformers", "1.00x"]]


AUTHORS_CODE = """
import torch
from torch import nn
from config import Config
from models.helpers import identity

class Skyformer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.count, self.length = config["nb_features"], config["max_seq_len"]

    def forward(self, q, k, v, mask):
        from skyformer import skyformer_attention

        self.sketching_matrix = torch.randint(2 * q.shape[2], (q.shape[0], 1, self.count))
        out = skyformer_attention(q, k, v, landmarks=self.sketching_matrix[:, 0], gamma=0.1)
        return identity(out) * FACTOR
"""
"""What the benchmark needs of the authors' code, in the places where it is."""


@pytest.fixture
def clone(tmp_path: Path) -> Callable[[str], str]:
    def make(factor: str) -> str:
        folder = tmp_path / f"clone{factor}" / "src"
        (folder / "models").mkdir(parents=True)
        (folder / "config.py").write_text("Config = {}\n")
        (folder / "models" / "__init__.py").touch()
        (folder / "models" / "helpers.py").write_text("def identity(x):\n    return x\n")
        (folder / "models" / "attention_skyformer.py").write_text(AUTHORS_CODE.replace("FACTOR", factor))
        return str(folder.parent)

    return make


class TestAuthors:
    shape = replace(SMALL, head_dim=32)

    def test_their_code_is_measured_beside_ours(self, clone: Callable[[str], str], tmp_path: Path) -> None:
        options = replace(OPTIONS, lengths=(96,), head_dim=32, authors=clone("1.0"))
        (result,) = run_study(AttentionBenchmark(options), tmp_path / "out").results().values()
        assert [row.name for row in result.rows] == ["sdpa", "skyformer", AUTHORS]
        _, table = AttentionBenchmark.tables({Cell(96): result})
        assert table.rows[0][1:3] == ["skyformer", AUTHORS]

    def test_wrong_outputs_stop_the_benchmark(self, clone: Callable[[str], str]) -> None:
        check_contender(find_contender(AUTHORS, clone("1.0")), self.shape)
        with refused(IncorrectError, AUTHORS, "output differs from a dense float64 computation by"):
            check_contender(find_contender(AUTHORS, clone("1.1")), self.shape)

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [({"head_dim": 8}, "computes heads of 32 only"), ({"dtype": "float64"}, "computes float32 only")],
    )
    def test_what_it_cannot_compute_is_named(
        self, changes: dict[str, object], reason: str, clone: Callable[[str], str]
    ) -> None:
        shape = replace(self.shape, **changes)  # type: ignore[arg-type]
        names, reasons = choose_contenders(["skyformer"], False, shape, clone("1.0"))
        assert AUTHORS not in names
        assert reasons == (f"{AUTHORS} {reason}",)

    def test_another_folder_is_refused(self, tmp_path: Path, clone: Callable[[str], str]) -> None:
        for folder in (str(tmp_path), str(tmp_path / "missing"), ""):
            with refused(InputError, "--authors must be a clone", "models/attention_skyformer.py", repr(folder)):
                AttentionBenchmark(replace(OPTIONS, authors=folder)).cells()
        broken = clone("1.0")
        (Path(broken) / "src" / "config.py").unlink()
        with refused(InputError, "could not be loaded", "config"):
            load_class(broken)

    def test_loading_leaves_nothing_behind(self, clone: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "dont_write_bytecode", False)
        path, modules, folder = list(sys.path), set(sys.modules), clone("1.0")
        load_class(folder)
        assert (sys.path, sys.dont_write_bytecode) == (path, False)
        assert not {name for name in set(sys.modules) - modules if name.partition(".")[0] in ("models", "config")}
        assert not list(Path(folder).rglob("__pycache__"))


def test_a_step_over_the_limit_is_stopped_and_named(tmp_path: Path) -> None:
    options = Options(lengths=(20000,), attention=("skyformer",), repeats=1, limit=0.001)
    (result,) = run_study(AttentionBenchmark(options), tmp_path).results().values()
    assert result.rows == ()
    (table,) = AttentionBenchmark.tables({Cell(20000): result})
    assert "n=20,000: sdpa takes more than 0.001 s for a step; n=20,000: skyformer takes" in table.note


def test_interleaved_runs_alternate() -> None:
    order: list[str] = []
    runs: dict[str, Callable[[], int]] = {name: (lambda name=name: order.append(name) or len(order)) for name in "abc"}  # type: ignore[misc]
    measured = interleave(runs, repeats=4, before=lambda: None)
    assert [sorted(order[i : i + 3]) for i in range(0, 12, 3)] == [["a", "b", "c"]] * 4
    assert {name: [order[number - 1] for number in numbers] for name, numbers in measured.items()} == {
        name: [name] * 4 for name in "abc"
    }


def test_error_falls_with_more_landmarks_and_vanishes_for_the_exact() -> None:
    shape = replace(SMALL, length=400)
    few = approximation_error(attention_contender("skyformer"), shape)
    many = approximation_error(attention_contender("skyformer"), replace(shape, landmarks=200))
    exact = approximation_error(attention_contender("kernelized"), shape)
    assert few is not None
    assert many is not None
    assert exact is not None
    assert exact < 1e-5 < many < few
    assert approximation_error(SDPA, replace(SMALL, length=2 * attention.LONGEST_EXACT_ERROR)) is None


def test_a_fresh_process_measures_memory_and_reports_its_failure() -> None:
    lean = measure_fresh("skyformer", Shape(length=2048, heads=1, head_dim=8, landmarks=16))
    assert lean.input_bytes == 3 * 2048 * 8 * 4
    assert lean.added_bytes < 2048 * 2048 * 4
    with refused(SkyformerError, "none at length 96 failed in a process of its own", "unknown attention 'none'"):
        measure_fresh("none", SMALL)


def test_unknown_data_and_dtype_are_refused() -> None:
    with refused(UnknownNameError, "walk"):
        make_tokens("chess", (1, 1, 4, 4), torch.Generator())
    with refused(UnknownNameError, "float32"):
        replace(SMALL, dtype="int8")


def test_queries_and_keys_of_a_walk_share_their_curve() -> None:
    q, k, v = make_tokens("walk", (1, 1, 64, 8), torch.Generator().manual_seed(0))

    def gap(x: Tensor, y: Tensor) -> float:
        return float((x - y).norm() / x.norm())

    assert gap(q, k) < 0.5 < gap(q, v)


def fake_result(seconds: dict[str, float]) -> Result:
    return Result(tuple(Row(name, (), (each,), 400, 100, None) for name, each in seconds.items()))


def fake_results(**times: float) -> dict[Cell, Result]:
    """The results of a machine on which every attention takes a second, but for `times`."""
    results = {
        cell: fake_result({name: times.get(name.replace(" ", "_"), 1.0) for name in cell.contenders})
        for cell in TargetsBenchmark(targets.Options()).cells()
    }
    return {**results, targets.MILLION: fake_result({"skyformer": 20.0}), targets.IMPORT: fake_result({"import": 0.1})}


def test_targets_are_judged_by_medians() -> None:
    results = fake_results(skyformer=1.0, sdpa=9.0, kernelized=9.9, skyformer_layer=1.0)
    assert [target.what for target in TargetsBenchmark.targets(results) if not target.passed] == []
    slower = TargetsBenchmark.targets(fake_results(skyformer=1.16, sdpa=9.0, kernelized=10.0))
    missed = [target.what for target in slower if not target.passed]
    assert any("n=4,096: speed-up of skyformer over sdpa" in what for what in missed)
    assert any("n=4,096: time of skyformer / plain linformer" in what for what in missed)
    assert any("exact kernelized" in what for what in missed)
    assert not any("n=1,024" in what for what in missed)
    (table, *_) = TargetsBenchmark.tables(results)
    assert ["1 x 65,536", "kernelized"] in [row[:2] for row in table.rows]
    assert not any("import" in row[1] for row in table.rows)


def test_targets_of_a_partial_record_and_of_missing_packages() -> None:
    one = {targets.IMPORT: fake_result({"import": 0.1})}
    assert [(target.what, target.measured) for target in TargetsBenchmark.targets(one)] == [
        ("import skyformer_attention after import torch", "0.1 s")
    ]
    assert TargetsBenchmark.tables(one) == []
    alone = replace(targets.peers_cell(), contenders=("skyformer", "skyformer layer"))
    judged = TargetsBenchmark.targets({alone: fake_result({"skyformer": 1.0, "skyformer layer": 1.0})})
    assert len(judged) == len(targets.FAST_PEERS)
    assert all(target.measured == "not installed" and not target.passed for target in judged)


@pytest.mark.usefixtures("without_processes")
def test_import_time_and_small_cells_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without repetitions, the times are those of the fresh processes."""
    once = replace(targets.IMPORT, processes=1)
    cells = [Cell(64, contenders=("skyformer",), processes=2), once]
    monkeypatch.setattr(targets, "IMPORT", once)
    monkeypatch.setattr(TargetsBenchmark, "cells", lambda self: cells)
    times, imports = run_study(TargetsBenchmark(targets.Options()), tmp_path).results().values()
    (row,) = times.rows
    assert (len(row.step_seconds), row.forward_seconds, row.error) == (2, (), None)
    (seconds,) = imports.rows[0].step_seconds
    assert 0 < seconds < math.inf


@pytest.mark.slow
@pytest.mark.parametrize("name", list_attentions())
def test_peak_memory_is_linear_in_length(name: str) -> None:
    shape = Shape(length=16384, heads=2, head_dim=16, landmarks=64)
    short, long = measure_fresh(name, shape), measure_fresh(name, replace(shape, length=2 * shape.length))
    # Page granularity and library buffers allow slightly more than twice.
    assert long.added_bytes < 2.4 * max(short.added_bytes, short.input_bytes)
