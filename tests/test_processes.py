"""Calls in fresh processes, and the probe for processors whose half precision kills the process (faked here)."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from skyformer import processes
from skyformer.errors import SkyformerError
from tests.helpers import refused


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """The dtypes probed on a machine that advertises AMX; bfloat16 dies there, float16 does not."""
    dtypes: list[str] = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        dtypes.append(command[-1])
        return SimpleNamespace(returncode=-signal.SIGILL if command[-1] == "bfloat16" else 0)

    monkeypatch.delenv(processes.ISA_VARIABLE, raising=False)
    monkeypatch.setattr(subprocess, "run", run)
    _set_flags(monkeypatch, tmp_path, "avx512_bf16 amx_bf16 amx_tile")
    processes._matmul_is_illegal.cache_clear()
    yield dtypes
    processes._matmul_is_illegal.cache_clear()


def _set_flags(monkeypatch: pytest.MonkeyPatch, folder: Path, flags: str) -> None:
    cpuinfo = folder / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nmodel name\t: A processor\nflags\t\t: fpu {flags}\n")
    monkeypatch.setattr(processes, "_CPUINFO", cpuinfo)


def test_a_child_that_dies_of_an_illegal_instruction_is_found_once(probed: list[str]) -> None:
    assert processes.half_precision_crashes("bfloat16")
    assert processes.half_precision_crashes("bfloat16")
    assert not processes.half_precision_crashes("float16")
    assert probed == ["bfloat16", "float16"]


def test_no_child_is_started_without_the_flag(
    probed: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _set_flags(monkeypatch, tmp_path, "avx512_bf16")
    assert not processes.half_precision_crashes("bfloat16")
    monkeypatch.setattr(processes, "_CPUINFO", tmp_path / "missing")
    assert not processes.half_precision_crashes("bfloat16")
    assert probed == []


def test_the_variable_counts_also_after_the_probe(probed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert processes.half_precision_crashes("bfloat16")
    monkeypatch.setenv(processes.ISA_VARIABLE, processes.ISA_WITHOUT_AMX)
    assert not processes.half_precision_crashes("bfloat16")
    for allows_amx in ("avx512_core_amx", "ALL", "default"):
        monkeypatch.setenv(processes.ISA_VARIABLE, allows_amx)
        assert processes.half_precision_crashes("bfloat16")


def test_the_probe_itself_runs() -> None:
    environment = {processes.ISA_VARIABLE: processes.ISA_WITHOUT_AMX}
    done = subprocess.run(
        [sys.executable, "-c", processes._MATMUL_PROBE, "bfloat16"], env=environment, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr


def _double(number: int) -> dict[str, int]:
    return {"double": 2 * number}


def test_a_call_in_a_fresh_process_returns_its_answer() -> None:
    assert processes.run_in_fresh_process(_double, number=21).result("doubling") == {"double": 42}


@pytest.mark.parametrize(
    ("code", "stderr", "oom_kills", "out_of_memory", "reason"),
    [
        (1, "Traceback\nMemoryError", (0, 0), True, "MemoryError"),
        (1, "Traceback\nKeyError: 'x'", (0, 0), False, "KeyError: 'x'"),
        (-signal.SIGKILL, "", (0, 1), True, "exit code -9"),
        (-signal.SIGKILL, "", (0, 0), False, "exit code -9"),
        (-signal.SIGKILL, "", (None, None), True, "exit code -9"),
        (-signal.SIGSEGV, "", (0, 1), False, "exit code -11"),
    ],
)
def test_a_failed_call_has_its_reason(
    code: int,
    stderr: str,
    oom_kills: tuple[int | None, ...],
    out_of_memory: bool,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts = iter(oom_kills)
    monkeypatch.setattr(processes, "count_oom_kills", lambda: next(counts))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], code, "", stderr))
    run = processes.run_in_fresh_process(_double, number=21)
    assert run.out_of_memory == out_of_memory
    with refused(SkyformerError, f"the call failed in a process of its own: {reason}"):
        run.result("the call")
