"""The study of efficiency: steps that fit in memory are timed, others are reported, and the tables compare costs."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from skyformer.errors import DataError, InputError, UnknownNameError
from skyformer.functional import softmax_attention
from skyformer.lra.batching import Batch
from skyformer.studies import efficiency, fresh_steps, run_study
from skyformer.studies.base import make_options
from skyformer.studies.efficiency import (
    GB,
    MATERIALISED,
    PADDED,
    RECOMPUTED,
    SIMILAR,
    Cell,
    Costs,
    Efficiency,
    Options,
    Result,
    choose_batches,
)
from skyformer.studies.fresh_steps import (
    MaterialisedSoftmax,
    RecomputedSoftmax,
    Request,
    Steps,
    measure_steps,
    save_batches,
    take_steps,
    time_steps,
)
from skyformer.training.building import build_model
from skyformer.training.config import from_yaml, to_yaml
from tests.helpers import refused, scattered_mask

LENGTH = 64
STEPS = Steps((2.0, 4.0, 3.0), (LENGTH,) * 3, GB, 3 * GB, 0.01)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("data"))


def small_options(data_dir: str, length: int) -> Options:
    return Options(
        tasks=("listops",),
        attentions=("skyformer",),
        length=length,
        rounds=1,
        memory=1.0,
        listops_limit=1000,
        data_dir=data_dir,
    )


@pytest.fixture
def study(data_dir: str) -> Efficiency:
    return Efficiency(small_options(data_dir, LENGTH))


@pytest.fixture
def request_of(study: Efficiency, tmp_path: Path) -> Request:
    """Two small batches of ListOps for materialised softmax."""
    config = study._config("listops", "softmax")
    batches = choose_batches(study._data["listops"], config, PADDED)
    save_batches(batches, str(tmp_path / "batches.pt"))
    return Request(to_yaml(config), MATERIALISED, str(tmp_path / "batches.pt"), 8, 1, 0.01, GB)


def test_a_step_without_enough_memory_does_not_fit(request_of: Request) -> None:
    assert measure_steps(replace(request_of, form=None, may_add=2**20)) is None


def test_steps_that_exceed_the_limit_within_the_heap_do_not_fit_either(
    request_of: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fresh_steps, "limit_added_memory", lambda more: None)
    monkeypatch.setattr(fresh_steps, "reset_peak", lambda: 10 * GB)
    for added, fits in ((GB, True), (GB + 1, False)):
        monkeypatch.setattr(fresh_steps, "peak_bytes", lambda added=added: 10 * GB + added)
        with nullcontext() if fits else refused(MemoryError, f"{GB:,}", f"{GB + 1:,}"):
            take_steps(request_of)


def test_the_materialised_form_is_softmax_attention() -> None:
    q, k, v = torch.randn(3, 2, 2, 9, 4, dtype=torch.float64)
    mask = scattered_mask(2, 9)
    module = MaterialisedSoftmax(2, 4)
    torch.testing.assert_close(module(q, k, v, key_mask=mask), softmax_attention(q, k, v, key_mask=mask))
    torch.testing.assert_close(module(q, k, v), softmax_attention(q, k, v))


def test_the_recomputed_form_is_the_same_with_dropout_of_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = torch.randn(3, 2, 2, 9, 4, dtype=torch.float64).requires_grad_().unbind()
    mask = scattered_mask(2, 9)
    recomputed, kept = RecomputedSoftmax(2, 4), MaterialisedSoftmax(2, 4)
    evaluated = recomputed.eval()(q, k, v, key_mask=mask)
    torch.testing.assert_close(evaluated, kept(q, k, v, key_mask=mask))
    monkeypatch.setattr(kept, "_drop", lambda weights: torch.nn.functional.dropout(weights, 0.1))
    found = []
    for module in (recomputed.train(), kept):
        torch.manual_seed(3)
        out = module(q, k, v, key_mask=mask)
        found.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    assert not torch.equal(found[0][0], evaluated)
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected)


def test_the_recomputed_form_keeps_no_scores() -> None:
    q, k, v = torch.randn(3, 1, 2, 50, 4).requires_grad_().unbind()
    sizes: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
        RecomputedSoftmax(2, 4)(q, k, v)
        assert max(sizes, default=0) < 50 * 50
        MaterialisedSoftmax(2, 4)(q, k, v)
    assert max(sizes) >= 2 * 50 * 50


def test_both_forms_of_softmax_train_the_same_model(request_of: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    models: list[torch.nn.Module] = []

    def one_step(step: Any, batches: list[Batch], budget: float) -> tuple[list[float], list[int]]:
        models.append(step.__self__.model)
        return [step(batches[0])], [1]

    monkeypatch.setattr(fresh_steps, "limit_added_memory", lambda more: None)
    monkeypatch.setattr(fresh_steps, "time_steps", one_step)
    for form in (MATERIALISED, None):
        take_steps(replace(request_of, form=form))
    attentions = [[m for m in model.modules() if isinstance(m, MaterialisedSoftmax)] for model in models]
    assert [len(found) for found in attentions] == [2, 0]
    models.append(build_model(from_yaml(request_of.config)))
    *after, before = (torch.cat([p.detach().flatten() for p in model.parameters()]) for model in models)
    assert (after[0] - before).abs().max() > 1e-6
    torch.testing.assert_close(after[0], after[1], rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("cost", "batches", "steps"), [(6.0, 1, 2), (0.5, 1, 5), (3.0, 1, 3), (1.0, 5, 10), (3.0, 5, 5)]
)
def test_whole_passes_are_timed_until_the_budget_is_spent(cost: float, batches: int, steps: int) -> None:
    now = [0.0]

    def step(batch: Batch) -> None:
        now[0] += cost

    same = Batch(torch.zeros(2, 7), torch.ones(2, 7), torch.zeros(2), torch.zeros(2))
    seconds, lengths = time_steps(step, [same] * batches, 10.0, clock=lambda: now[0])
    assert seconds == [cost] * steps
    assert lengths == [7] * steps


def test_batches_of_similar_lengths_represent_an_epoch(data_dir: str) -> None:
    longer = Efficiency(small_options(data_dir, 192))
    config, task = longer._config("listops", "softmax"), longer._data["listops"]
    padded, similar = (choose_batches(task, config, kind) for kind in (PADDED, SIMILAR))
    assert [batch.tokens.shape for batch in padded] == [(32, 192)] * 2
    longest = [int(batch.mask.sum(1).max()) for batch in similar]
    assert longest[0] == max(longest)
    assert longest[1:] == sorted(longest[1:])
    assert [batch.tokens.shape[1] for batch in similar] == [64 * -(-each // 64) for each in longest]
    assert len({batch.tokens.shape[1] for batch in similar}) > 1
    with refused(InputError, "4000", "1000"):
        choose_batches(task, config.replace(loop=config.loop.replace(batch_size=4000)), PADDED)


def test_one_batch_represents_others_of_the_same_length(study: Efficiency) -> None:
    similar = choose_batches(study._data["listops"], study._config("listops", "softmax"), SIMILAR)
    assert [batch.tokens.shape for batch in similar] == [(32, LENGTH)] * 2


def test_what_does_not_fit_is_measured_with_half_the_batch(study: Efficiency, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def fits_with_eight(request: Request) -> Steps | None:
        sizes.append(request.batch_size)
        return STEPS if request.batch_size <= 8 else None

    monkeypatch.setattr(efficiency, "measure_steps", fits_with_eight)
    cell = Cell("listops", LENGTH, PADDED, MATERIALISED)
    result = study.measure(cell)
    assert sizes == [32, 16, 8]
    assert (result.batch_size, result.whole_batch, result.did_not_fit) == (8, 32, (32, 16))
    assert result.step_seconds() == 3.0 * 4
    assert result.memory_gb() == 2.0 * 4
    shown = {table.title: table for table in Efficiency.tables({cell: result})}
    assert shown["Seconds per step, padded batches"].rows == [[MATERIALISED, "~12"]]
    (row,) = shown["Steps that did not fit in memory"].rows
    assert row[3] == "0"
    assert "GB with 32 or 16 examples" in row[4]
    assert row[5] == "8 of 32 examples"
    later = {cell: replace(result, did_not_fit=()), replace(cell, round=1): result}
    shown = {table.title: table for table in Efficiency.tables(later)}
    assert [row[3] for row in shown["Steps that did not fit in memory"].rows] == ["1"]


def test_a_step_that_never_fits_is_reported(study: Efficiency, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(efficiency, "measure_steps", lambda request: None)
    cell = Cell("listops", LENGTH, PADDED, MATERIALISED)
    result = study.measure(cell)
    assert result.did_not_fit == (32, 16, 8, 4, 2, 1)
    assert result.step_seconds() is None
    shown = {table.title: table for table in Efficiency.tables({cell: result})}
    assert shown["Seconds per step, padded batches"].rows == [[MATERIALISED, "does not fit"]]
    assert Efficiency.figures({cell: result}) == []


def test_a_step_is_the_mean_over_lengths_of_medians() -> None:
    result = Result((1.0, 10.0, 2.0, 12.0, 9.0, 11.0), (64, 128) * 3, 0, GB, 0.01, 16, 16, (), 20.0)
    assert result.step_seconds() == (2.0 + 11.0) / 2
    assert result.hours() == pytest.approx(6.5 * 50_000 / 3600)


def whole_results() -> dict[Cell, Result]:
    """Text at the paper's length: softmax 8 s and 4 GB, Skyformer 1.6 s and 1 GB, Linformer 1.3 s and 0.5 GB."""
    costs = {MATERIALISED: (8.0, 4.0), "skyformer": (1.6, 1.0), "linformer": (1.3, 0.5), "softmax": (6.0, 1.0)}
    return {
        Cell("text", 4000, PADDED, name): Result((s,) * 3, (4000,) * 3, 0, int(gb * GB), 0.01, 16, 16, (), 20.0)
        for name, (s, gb) in costs.items()
    }


def test_costs_are_compared_with_the_paper() -> None:
    results = whole_results()
    hours, paper_hours = Costs(results, PADDED).shares("hours")
    assert hours.loc["skyformer", "text"] == pytest.approx(0.2)
    assert paper_hours.loc["skyformer", "text"] == pytest.approx(1.02 / 4.30)
    assert paper_hours.loc["softmax"].isna().all()
    assert Costs(results, PADDED).shares("memory")[0].loc["linformer", "text"] == pytest.approx(0.125)
    shown = {table.title: table.rows for table in Efficiency.tables(results)}
    time = shown["Time divided by that of materialised softmax, padded batches"]
    assert ["skyformer", "0.2 (0.237)"] in time
    assert ["softmax", "0.75"] in time
    assert ["skyformer", "22.2 (1.02)", "1 (1.59)"] in shown["Table 2, padded batches"]
    assert ["softmax", "83.3", "1"] in shown["Table 2, padded batches"]
    (verdict,) = shown["Time and memory of Skyformer"]
    assert verdict == ["Text", PADDED, "0.2", "0.237", "yes", "0.25", "0.153", "no", "linformer", "1.23", "-", "no"]


def test_softmax_as_the_paper_ran_it_is_the_baseline_where_it_was_measured() -> None:
    results = whole_results()
    recomputed = replace(results[Cell("text", 4000, PADDED, MATERIALISED)], seconds=(16.0,) * 3, peak_bytes=8 * GB)
    results[Cell("text", 4000, PADDED, RECOMPUTED)] = recomputed
    shown = {table.title: table for table in Efficiency.tables(results)}
    time = shown["Time divided by that of softmax as the paper ran it, padded batches"].rows
    assert ["skyformer", "0.1 (0.237)"] in time
    assert [RECOMPUTED, "1 (1)"] in time
    assert [MATERIALISED, "0.5"] in time
    verdict = shown["Time and memory of Skyformer"]
    assert "divided by those of softmax as the paper ran it" in verdict.note
    assert verdict.rows[0][2:9] == ["0.1", "0.237", "yes", "0.125", "0.153", "yes", "linformer"]


def test_the_round_with_the_median_time_counts() -> None:
    results = whole_results()
    first = {name: results[Cell("text", 4000, PADDED, name)] for name in ("skyformer", "linformer")}
    for number, (own, other) in enumerate([(1.2, 1.25), (9.0, 1.2)], 1):
        for name, seconds in (("skyformer", own), ("linformer", other)):
            results[Cell("text", 4000, PADDED, name, number)] = replace(first[name], seconds=(seconds,) * 3)
    assert Costs(results, PADDED).ours("seconds").loc["skyformer", "text"] == 1.6
    (verdict,) = {table.title: table.rows for table in Efficiency.tables(results)}["Time and memory of Skyformer"]
    assert verdict[-4:] == ["linformer", "1.28", "0.96 to 7.5", "no"]
    results[Cell("text", 4000, PADDED, "skyformer", 3)] = replace(first["skyformer"], batch_size=None)
    assert Costs(results, PADDED).ours("seconds").loc["skyformer", "text"] == 1.6, "the faster of the two in the middle"


def test_the_papers_ratios_of_skyformer() -> None:
    lengths = {"text": 4000, "listops": 2000, "retrieval": 4000, "pathfinder": 1024, "image": 1024}
    any_result = next(iter(whole_results().values()))
    results = {Cell(task, length, PADDED, "skyformer"): any_result for task, length in lengths.items()}
    time, memory = (Costs(results, PADDED).shares(name)[1].loc["skyformer"].round(2) for name in ("hours", "memory"))
    assert time.to_dict() == {"text": 0.24, "listops": 0.58, "retrieval": 0.22, "pathfinder": 0.79, "image": 0.81}
    assert memory.to_dict() == {"text": 0.15, "listops": 0.33, "retrieval": 0.29, "pathfinder": 0.72, "image": 0.72}


def test_shorter_texts_are_not_compared_with_the_paper() -> None:
    short = {replace(cell, length=500): result for cell, result in whole_results().items()}
    titles = [table.title for table in Efficiency.tables(short)]
    assert "Time and memory of Skyformer" not in titles
    assert [figure.name for figure in Efficiency.figures(short)] == ["padded"]
    assert [figure.name for figure in Efficiency.figures(whole_results())] == ["figure", "padded"]


def test_rounds_follow_each_other_and_images_are_measured_only_padded() -> None:
    cells = Efficiency(Options(tasks=("text", "image"), attentions=("linformer", "skyformer"), rounds=2)).cells()
    second = [(1, "linformer"), (1, "skyformer")]
    first = [(0, MATERIALISED), (0, RECOMPUTED), (0, "linformer"), (0, "skyformer")]
    kinds = [("text", PADDED), ("text", SIMILAR), ("image", PADDED)]
    assert [(c.task, c.batches, c.round, c.attention) for c in cells] == [
        (*kind, *each) for kind in kinds for each in first + second
    ]
    assert len(Efficiency(Options()).cells()) == 88 + 2 * 72


def test_wrong_options_and_missing_data_are_reported_before_anything_is_measured(tmp_path: Path) -> None:
    with refused(UnknownNameError, "task", "'texts'", "Did you mean 'text'?"):
        Efficiency(Options(tasks=("texts",)))
    with refused(UnknownNameError, "attention", "'softmax2'"):
        Efficiency(Options(attentions=("softmax2",)))
    with refused(UnknownNameError, "form of softmax", "'fused'"):
        Efficiency(Options(forms=("fused",)))
    with refused(UnknownNameError, "preset of this study", "'short'"):
        Efficiency(Options(preset="short"))
    with refused(InputError, "--memory", "-1"):
        Efficiency(Options(memory=-1.0))
    with refused(InputError, "--seconds", "-1"):
        Efficiency(Options(seconds=-1.0))
    with refused(InputError, "--rounds", "1", "0"):
        Efficiency(Options(rounds=0))
    missing = Efficiency(Options(tasks=("text",), data_dir=str(tmp_path)))
    with refused(DataError, "text is not prepared", f"skyformer data prepare text --data-dir {tmp_path}"):
        run_study(missing, tmp_path / "out")
    assert make_options(Efficiency, True, {}).tasks == ("listops",)


def test_a_tiny_study_with_a_real_process(data_dir: str, tmp_path: Path) -> None:
    options = replace(small_options(data_dir, LENGTH), attentions=(), batches=(PADDED,), seconds=0.01)
    record = run_study(Efficiency(options), tmp_path)
    assert list(record.results()) == [Cell("listops", LENGTH, PADDED, form) for form in (MATERIALISED, RECOMPUTED)]
    result = next(iter(record.results().values()))
    assert 2 <= len(result.seconds) <= 5
    assert all(0 < seconds < 60 for seconds in (*result.seconds, result.reference_seconds))
    assert set(result.lengths) == {LENGTH}
    assert (result.batch_size, result.did_not_fit) == (32, ())
    # A process that has imported torch holds more than 100 MB, and a tiny step adds little.
    assert result.before_bytes > 1e8
    assert 0 < result.memory_gb() < 0.5
    assert record.facts.keys() >= {"processor", "cores", "threads", "seconds", "memory", "seed", "listops data"}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux signals a process that its parent died")
def test_the_process_ends_when_its_study_is_killed() -> None:
    child = (
        "import time; from skyformer.processes import die_with_parent; die_with_parent(); "
        "print('up', flush=True); time.sleep(60)"
    )
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.kill()
        # The pipe ends when the child, which holds its other end, is gone.
        start = time.monotonic()
        assert process.stdout.read() == b""
    assert time.monotonic() - start < 20


def test_steps_of_the_preset_of_the_arena(data_dir: str, tmp_path: Path) -> None:
    """Its softmax attention has dropout of the weights; without a form that is divided by, shares are left out."""
    options = replace(small_options(data_dir, LENGTH), attentions=("softmax", "skyformer"), batches=(SIMILAR,))
    options = replace(options, preset="paper", forms=(), seconds=0.01)
    study = Efficiency(options)
    dropout = {preset: Efficiency(replace(options, preset=preset)) for preset in ("paper", "paper_v1")}
    probabilities = {name: each._config("listops", "softmax").model for name, each in dropout.items()}
    assert {name: model.attention_dropout for name, model in probabilities.items()} == {"paper": None, "paper_v1": 0.0}
    record = run_study(study, tmp_path)
    assert record.facts["preset"] == "paper"
    assert [cell.attention for cell in record.cells] == ["softmax", "skyformer"]
    assert {table.title for table in Efficiency.tables(record.results())} == {
        "Table 2, batches of similar lengths",
        "Seconds per step, batches of similar lengths",
        "How steady the machine was",
    }
    assert [figure.name for figure in Efficiency.figures(record.results())] == ["similar_lengths"]
    with refused(InputError, "preset 'paper'", "'paper_v1'"):
        run_study(dropout["paper_v1"], tmp_path)
