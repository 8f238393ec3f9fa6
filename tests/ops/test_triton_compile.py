"""The Triton kernels compiled for GPUs that are not here: tensor cores are used, registers are enough."""

from __future__ import annotations

import dataclasses

import pytest

from skyformer.ops.triton_configs import FLOAT32_CONFIGS, HALF_CONFIGS, LARGEST_FLOAT32_BLOCK
from tests.ops.triton_targets import HEAD_DIMS, PASSES, TARGETS, Case, Report, available, compile_cases, recorded_launch

pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot be compiled")

SHARED_MEMORY = 99 * 1024
"""Bytes that a block may use on the smallest of the supported GPUs of NVIDIA."""

AMD_SHARED_MEMORY = 64 * 1024

DOTS = {"r": 2, "t": 3, "rt": 4, "long": 5, "thin": 5}
"""Matrix products of a pass; a precise result takes one more."""


def problems(report: Report) -> list[str]:
    """What the compiler's report says against the launch settings."""
    target, dtype, name = (report.case[key] for key in ("target", "dtype", "name"))
    found = []
    if report.shared > (AMD_SHARED_MEMORY if target == "gfx942" else SHARED_MEMORY):
        found.append("too much shared memory")
    if target in ("sm_80", "sm_90"):
        if report.stack > 0:
            found.append("registers are spilled")
        if report.config["num_warps"] == 4 and report.blocks_per_multiprocessor() < 2:
            found.append("one block per multiprocessor")
    if dtype != "float32" and name != "norms":
        dots = DOTS[name] + (report.case["precise"] and name != "t")
        if report.matrix_instructions < dots:
            found.append(f"fewer than {dots} matrix instructions")
    return found


def check(cases: list[Case]) -> None:
    reports = compile_cases(cases)
    assert [(found, report) for report in reports if (found := problems(report))] == []


def passes(target: str, dtype: str) -> list[Case]:
    return [Case(target, name, dim, dtype) for name in PASSES for dim in HEAD_DIMS if available(name, dim, dtype)]


def variants(target: str, dtype: str) -> list[Case]:
    """Every entry of the table, with and without a mask, causal, with float32 results, and for few landmarks."""
    each = dataclasses.replace
    cases = passes(target, dtype)
    found = list(cases)
    found += [each(case, masked=False) for case in cases]
    found += [each(case, causal=True) for case in cases if case.name in ("r", "t", "rt")]
    found += [each(case, thin=16) for case in cases if case.name in ("r", "long", "thin")]
    if dtype == "float32":
        tf32 = [each(case, precision="tf32") for case in cases if case.head_dim in (64, 256)]
        found += tf32 if target != "gfx942" else []
    else:
        found += [each(case, precise=True) for case in cases]
    return found + [Case(target, "norms", dim, dtype) for dim in HEAD_DIMS]


def test_the_cases_cover_the_table() -> None:
    for dtype, table in (("bfloat16", HALF_CONFIGS), ("float32", FLOAT32_CONFIGS)):
        assert {(case.name, case.head_dim) for case in passes("sm_80", dtype)} == set(table)


def test_which_kernel_runs() -> None:
    def kernel(*case: object) -> str:
        return recorded_launch(Case(*case))[0].fn.__name__  # type: ignore[arg-type]

    assert kernel("sm_80", "r", 64, "bfloat16") == "gaussian_rows"
    assert kernel("sm_80", "thin", 256, "bfloat16") == "gaussian_gradients"
    assert kernel("sm_80", "long", LARGEST_FLOAT32_BLOCK, "float32") == "gaussian_gradients"
    assert kernel("sm_80", "rt", LARGEST_FLOAT32_BLOCK + 1, "float32") == "wide_gaussian_rows"


def test_one_head_dim_on_every_target() -> None:
    cases = [Case(target, name, 64, "bfloat16") for target in TARGETS for name in ("r", "thin")]
    cases += [Case("sm_80", "rt", 64, "float16"), Case("sm_90", "long", 128, "float16", precise=True)]
    cases += [Case("sm_90", "t", 256, "float32"), Case("sm_80", "long", 32, "float32")]
    cases += [Case("sm_80", "norms", 48, "float32")]
    check(cases)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_configuration(dtype: str, target: str) -> None:
    check(variants(target, dtype))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_head_dims_that_are_no_powers_of_two(dtype: str, target: str) -> None:
    sizes = ((24, 24), (24, 40), (48, 64), (80, 48), (96, 128), (64, 256), (192, 192))
    check(
        [
            Case(target, name, dim, dtype, value_dim=values)
            for name in PASSES
            for dim, values in sizes
            if available(name, max(dim, values), dtype)
        ]
    )
