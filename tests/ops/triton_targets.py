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
    """One pass ("r", "t" or "rt") of a product with this head dim and dtype, or its "norms", on this target."""

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

    from skyformer.ops.triton_kernels import gaussian_rows
    from skyformer.ops.triton_products import choose_config, launch_options, padded

    if case.outputs == "norms":
        return _compile_norms(case)
    dtype, pointer = getattr(torch, case.dtype), POINTER[case.dtype]
    is_amd = case.target.startswith("gfx")
    config = choose_config(case.outputs, case.head_dim, case.head_dim, 4096, dtype, case.precise, is_amd)
    options = launch_options(config)
    constants = {
        "P": case.head_dim, "PV": case.head_dim, "BLOCK_P": padded(case.head_dim), "BLOCK_PV": padded(case.head_dim),
        "WANT_R": "r" in case.outputs, "WANT_T": "t" in case.outputs,
        "CAUSAL": case.causal, "PRECISION": case.precision, "AS_BFLOAT16": False, "PRECISE_R": case.precise,
        "BLOCK_M": options.pop("BLOCK_M"), "BLOCK_N": options.pop("BLOCK_N"),
    }  # fmt: skip
    pointers = {
        "X": pointer,
        "Y": pointer,
        "A": pointer if "t" in case.outputs else None,
        "B": pointer,
        "CENTRE": "*fp32" if case.dtype == "float32" else None,
        # The pass over masked keys reads its norms.
        "HALF_X": "*fp32" if case.outputs == "rt" else None,
        "HALF_Y": "*fp32",
        "PEAK_A": "*fp32" if case.precise else None,
        "PEAK_B": "*fp32" if case.precise else None,
        "R": ("*fp32" if case.precise else pointer) if "r" in case.outputs else None,
        "T": pointer if "t" in case.outputs else None,
    }
    return _report(case, _compile(gaussian_rows, case.target, pointers, constants, options), "gaussian_rows")


def _compile_norms(case: Case) -> Report:
    from skyformer.ops.triton_kernels import half_norms
    from skyformer.ops.triton_products import padded

    width = padded(case.head_dim)
    constants = {"P": case.head_dim, "BLOCK_P": width, "BLOCK_M": 4096 // width, "PRECISION": case.precision}
    centre = "*fp32" if case.dtype == "float32" else None
    pointers = {"X": POINTER[case.dtype], "MASK": "*u8", "CENTRE": centre, "OUT": "*fp32"}
    return _report(case, _compile(half_norms, case.target, pointers, constants, {"num_warps": 4}), "half_norms")


def _compile(
    kernel: Any, target: str, pointers: dict[str, str | None], constants: dict[str, Any], options: dict[str, int]
) -> Any:
    """Compile as a launch with aligned tensors would. Pointers may be None; the rest are integers and `scale`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = constants | {name: None for name, kind in pointers.items() if kind is None}
    signature = {
        name: "constexpr" if name in constants else pointers.get(name) or ("fp32" if name == "scale" else "i32")
        for name in kernel.arg_names
    }
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or name.startswith("stride") or name == "columns_per_split"
    }
    source = ASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options)


def _report(case: Case, made: Any, kernel: str) -> Report:
    shared = int(made.metadata.shared)
    if case.target.startswith("gfx"):
        text = made.asm["amdgcn"]
        registers = int(re.search(r"\.vgpr_count:\s+(\d+)", text)[1])  # type: ignore[index]
        stack = int(re.search(r"\.private_segment_fixed_size:\s+(\d+)", text)[1])  # type: ignore[index]
        return Report(asdict(case), registers, stack, shared, len(re.findall(r"v_mfma_", text)))
    usage = _resource_usage(made.asm["cubin"], kernel)
    found = len(re.findall(r"mma\.sync|wgmma\.mma_async|tcgen05\.mma", made.asm["ptx"]))
    return Report(asdict(case), usage["REG"], usage["STACK"], shared, found)


def _resource_usage(cubin: bytes, kernel: str) -> dict[str, int]:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    text = done.stdout + done.stderr
    line = text[text.index(kernel) :]
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
