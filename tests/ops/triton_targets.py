"""Compile the Triton kernels for GPUs that need not be present, and report what the compiler says.

Run as a program without TRITON_INTERPRET, it reads cases from the standard input and writes reports, both as JSON.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
POINTER = {"float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16"}


@dataclass(frozen=True)
class Case:
    """One pass ("r", "t" or "rt") of a product with this head dim and dtype, on this target."""

    target: str
    outputs: str
    head_dim: int
    dtype: str
    causal: int = 0
    precision: str = "ieee"
    precise: bool = False
    """Whether r is float32 while the inputs are in half precision."""


@dataclass(frozen=True)
class Report:
    """Registers per thread, bytes of stack per thread, bytes of shared memory per block, and matrix instructions."""

    case: dict[str, Any]
    registers: int
    stack: int
    shared: int
    matrix_instructions: int


def compile_case(case: Case) -> Report:
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from skyformer.ops.triton_kernels import gaussian_rows
    from skyformer.ops.triton_products import choose_config, launch_options, padded

    dtype, pointer = getattr(torch, case.dtype), POINTER[case.dtype]
    is_amd = case.target.startswith("gfx")
    config = choose_config(case.outputs, case.head_dim, case.head_dim, 4096, dtype, case.precise, is_amd)
    options = launch_options(config)
    constants: dict[str, Any] = {
        "CENTRE": None, "HALF_X": None, "PEAK_A": None, "PEAK_B": None,
        "P": case.head_dim, "PV": case.head_dim, "BLOCK_P": padded(case.head_dim), "BLOCK_PV": padded(case.head_dim),
        "BLOCK_M": options["BLOCK_M"], "BLOCK_N": options["BLOCK_N"],
        "WANT_R": "r" in case.outputs, "WANT_T": "t" in case.outputs,
        "CAUSAL": case.causal, "PRECISION": case.precision, "AS_BFLOAT16": False,
        "PRECISE_R": case.precise,
    }  # fmt: skip
    pointers = {"X": pointer, "Y": pointer, "B": pointer, "HALF_Y": "*fp32"}
    if case.dtype == "float32":
        del constants["CENTRE"]
        pointers["CENTRE"] = "*fp32"
    for name, wanted, kind in (
        ("A", "t", pointer),
        ("R", "r", "*fp32" if case.precise else pointer),
        ("T", "t", pointer),
    ):
        if wanted in case.outputs:
            pointers[name] = kind
        else:
            constants[name] = None
    if case.outputs == "rt":
        # The pass over masked keys, which reads its norms.
        del constants["HALF_X"]
        pointers["HALF_X"] = "*fp32"
    signature = {
        name: "constexpr" if name in constants else pointers.get(name, "fp32" if name == "scale" else "i32")
        for name in gaussian_rows.arg_names
    }
    divisible = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(gaussian_rows.arg_names)
        if name in pointers or (name.startswith("stride") and name[7] != "_") or name == "columns_per_split"
    }
    source = ASTSource(gaussian_rows, signature, constants, divisible)
    made = triton.compile(
        source,
        target=GPUTarget(*TARGETS[case.target]),
        options={"num_warps": options["num_warps"], "num_stages": options["num_stages"]},
    )
    return _report(case, made)


def _report(case: Case, made: Any) -> Report:
    shared = int(made.metadata.shared)
    if case.target.startswith("gfx"):
        text = made.asm["amdgcn"]
        registers = int(re.search(r"\.vgpr_count:\s+(\d+)", text)[1])  # type: ignore[index]
        stack = int(re.search(r"\.private_segment_fixed_size:\s+(\d+)", text)[1])  # type: ignore[index]
        return Report(asdict(case), registers, stack, shared, len(re.findall(r"v_mfma_", text)))
    usage = _resource_usage(made.asm["cubin"])
    found = len(re.findall(r"mma\.sync|wgmma\.mma_async|tcgen05\.mma", made.asm["ptx"]))
    return Report(asdict(case), usage["REG"], usage["STACK"], shared, found)


def _resource_usage(cubin: bytes) -> dict[str, int]:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    text = done.stdout + done.stderr
    line = text[text.index("gaussian_rows") :]
    return {name: int(re.search(rf"{name}:(\d+)", line)[1]) for name in ("REG", "STACK")}  # type: ignore[index]


def compile_cases(cases: list[Case]) -> list[Report]:
    """The reports of a fresh process, in which kernels are compiled and not interpreted."""
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps([asdict(case) for case in cases]),
        capture_output=True,
        text=True,
        env={**_environment(), "TRITON_INTERPRET": "0"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [Report(**report) for report in json.loads(done.stdout)]


def _environment() -> dict[str, str]:
    import os

    import skyformer

    return {**os.environ, "PYTHONPATH": str(Path(skyformer.__file__).parents[1])}


if __name__ == "__main__":
    json.dump([asdict(compile_case(Case(**each))) for each in json.load(sys.stdin)], sys.stdout)
