"""The Triton kernels compiled for GPUs that are not here: tensor cores are used, registers are enough."""

from __future__ import annotations

import pytest

from skyformer.ops.triton_products import FLOAT32_CONFIGS, HALF_CONFIGS
from tests.ops.triton_targets import TARGETS, Case, Report, compile_cases

pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot be compiled")

SHARED_MEMORY = 99 * 1024
"""Bytes that a block may use on the smallest of the supported GPUs of NVIDIA."""

AMD_SHARED_MEMORY = 64 * 1024


def check(report: Report) -> None:
    target, dtype = report.case["target"], report.case["dtype"]
    assert report.shared <= (AMD_SHARED_MEMORY if target == "gfx942" else SHARED_MEMORY), report
    if target in ("sm_80", "sm_90"):
        assert report.stack == 0, report
    if dtype != "float32" and report.case["outputs"] != "norms":
        dots = {"r": 2, "t": 3, "rt": 4}[report.case["outputs"]] + report.case["precise"]
        assert report.matrix_instructions >= dots, report


def test_one_head_dim_on_every_target() -> None:
    cases = [Case(target, outputs, 64, "bfloat16") for target in TARGETS for outputs in ("r", "rt")]
    cases += [Case("sm_80", "t", 64, "bfloat16"), Case("sm_90", "rt", 128, "float16", precise=True)]
    cases += [Case("sm_80", "r", 32, "float32"), Case("sm_80", "norms", 48, "float32")]
    for report in compile_cases(cases):
        check(report)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_configuration(dtype: str, target: str) -> None:
    table = FLOAT32_CONFIGS if dtype == "float32" else HALF_CONFIGS
    cases = [Case(target, outputs, head_dim, dtype) for outputs, head_dim in table]
    cases += [Case(target, "norms", head_dim, dtype) for outputs, head_dim in table if outputs == "r"]
    if dtype == "float32":
        cases += [Case(target, outputs, 64, dtype, precision="tf32") for outputs in ("r", "t", "rt") if "sm" in target]
    else:
        cases += [Case(target, outputs, dim, dtype, precise=True) for outputs, dim in table if "r" in outputs]
        cases += [Case(target, outputs, dim, dtype, causal=1) for outputs, dim in table if outputs != "rt"]
        cases += [Case(target, outputs, dim, dtype, causal=-1) for outputs, dim in table if outputs == "rt"]
    for report in compile_cases(cases):
        check(report)
