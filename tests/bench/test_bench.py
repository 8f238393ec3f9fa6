"""The benchmark checks before it measures, measures what it says, and keeps what it has finished."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from skyformer.bench.contenders import SDPA, Contender, Setting, attention_contender, choose_contenders
from skyformer.bench.correctness import IncorrectError, check_contender
from skyformer.bench.fresh import measure_here
from skyformer.bench.inputs import make_tokens
from skyformer.bench.measure import approximation_error, measure_fresh, time_interleaved
from skyformer.bench.study import BenchResult, run_benchmark
from skyformer.errors import SkyformerError, UnknownNameError

SMALL = Setting(length=96, heads=2, head_dim=8, landmarks=16)


def skyformer_with_shuffled_values(setting: Setting) -> object:
    right = attention_contender("skyformer").build(setting)
    return lambda q, k, v: right(q, k, v.flip(2))


@pytest.mark.parametrize("name", ["sdpa", "kernelized", "skyformer", "performer", "bigbird"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_right_contenders_pass_the_check(name: str, dtype: str) -> None:
    contender = SDPA if name == "sdpa" else attention_contender(name)
    check_contender(contender, replace(SMALL, dtype=dtype))


def test_wrong_numbers_stop_the_benchmark_before_any_speed(tmp_path: Path) -> None:
    broken = Contender("skyformer", False, skyformer_with_shuffled_values)  # type: ignore[arg-type]
    kept: list[BenchResult] = []
    with pytest.raises(IncorrectError, match="skyformer: output is off"):
        run_benchmark([SDPA, broken], SMALL, [96], 1, 1, "test", keep=kept.append)
    assert kept == []


def test_values_that_are_not_finite_are_incorrect() -> None:
    def infinite(setting: Setting) -> object:
        return lambda q, k, v: q * torch.inf

    with pytest.raises(IncorrectError, match="not finite"):
        check_contender(Contender("broken", False, infinite), SMALL)  # type: ignore[arg-type]


@pytest.mark.usefixtures("without_processes")
def test_rows_carry_ratios_and_are_kept_after_every_length(tmp_path: Path) -> None:
    kept: list[int] = []
    contenders = choose_contenders(["skyformer"], peers=False)
    result = run_benchmark(
        contenders, SMALL, [64, 96], 2, 1, "test", keep=lambda partial: kept.append(len(partial.rows))
    )
    assert kept == [2, 4]
    assert [row.name for row in result.rows] == ["sdpa", "skyformer"] * 2
    baseline, ours = result.rows[:2]
    assert baseline.speedup == 1.0
    assert ours.speedup == pytest.approx(baseline.step_seconds / ours.step_seconds)
    result.write(tmp_path / "attention.json")
    assert len(json.loads((tmp_path / "attention.json").read_text())["rows"]) == 4


def test_interleaved_times_are_of_the_whole_step() -> None:
    timing = time_interleaved({"sdpa": SDPA.job(SMALL)}, repeats=3)["sdpa"]
    assert timing.forward is not None
    assert 0 < timing.forward < timing.step <= timing.median


def test_error_falls_with_more_landmarks_and_vanishes_for_the_exact() -> None:
    setting = replace(SMALL, length=400)
    few = approximation_error(attention_contender("skyformer"), setting)
    many = approximation_error(attention_contender("skyformer"), replace(setting, landmarks=200))
    exact = approximation_error(attention_contender("kernelized"), setting)
    assert few is not None
    assert many is not None
    assert exact is not None
    assert exact < 1e-5 < many < few


def test_fresh_process_sees_the_memory_of_the_matrix_it_keeps() -> None:
    setting = Setting(length=2048, heads=1, head_dim=8, landmarks=16)
    lean = measure_fresh("skyformer", setting, threads=1)
    assert lean.input_bytes == 3 * 2048 * 8 * 4
    assert lean.added_bytes < 2048 * 2048 * 4


@pytest.mark.parametrize(
    ("ending", "reason"),
    [("echo 'ValueError: no such thing' >&2; exit 1", "ValueError: no such thing"), ("kill -9 $$", "signal 9")],
)
def test_failure_in_the_fresh_process_is_reported_with_its_reason(
    ending: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpreter = tmp_path / "python"
    interpreter.write_text(
        f"#!/bin/sh\necho Traceback >&2\n{ending}\n" if "echo" in ending else f"#!/bin/sh\n{ending}\n"
    )
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    with pytest.raises(SkyformerError, match=f"skyformer at length 96 failed in its process: {reason}"):
        measure_fresh("skyformer", SMALL, threads=1)


def test_an_unknown_contender_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="unknown attention 'none'"):
        measure_here("none", SMALL)


def test_unknown_data_and_dtype_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="walk"):
        make_tokens("chess", (1, 1, 4, 4), torch.Generator())
    with pytest.raises(UnknownNameError, match="float32"):
        replace(SMALL, dtype="int8")


def test_queries_and_keys_of_a_walk_share_their_curve() -> None:
    q, k, v = make_tokens("walk", (1, 1, 64, 8), torch.Generator().manual_seed(0))

    def gap(x: Tensor, y: Tensor) -> float:
        return float((x - y).norm() / x.norm())

    assert gap(q, k) < 0.5 < gap(q, v)
