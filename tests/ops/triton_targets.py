"""Compile the Triton kernels for GPUs that need not be present, and report what the compiler says.

A case describes a pass. Its launch is recorded on tensors without values, so that exactly what would be launched is
compiled. Run as a program without TRITON_INTERPRET, it reads cases from the standard input and writes reports, both as
JSON; with the argument `table` it prints the reports of the whole table for bfloat16 and float32 on sm_80 and sm_90.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
PASSES = ("r", "t", "rt", "long", "thin")
HEAD_DIMS = (16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Case:
    """One pass of a product on a target: "r", "t" or "rt" of `gaussian_rows`, the gradients in one launch with that of
    v on the "long" or "thin" side, or "norms"."""

    target: str
    name: str
    head_dim: int
    dtype: str
    value_dim: int = 0
    """0: equal to the head dim."""
    masked: bool = True
    causal: bool = False
    precision: str = "ieee"
    precise: bool = False
    """Whether v, and so its gradient or the output, is float32 while x and y are in half precision."""
    long: int = 4096
    thin: int = 128


@dataclass(frozen=True)
class Report:
    """Registers per thread, bytes of stack per thread, bytes of shared memory per block, and matrix instructions."""

    case: dict[str, Any]
    kernel: str
    config: dict[str, int]
    registers: int
    stack: int
    shared: int
    matrix_instructions: int

    def blocks_per_multiprocessor(self) -> int:
        """How many blocks an A100 (164 KB of shared memory, 65,536 registers) runs at once."""
        threads = 32 * self.config["num_warps"]
        return min(65536 // (self.registers * threads), 164 * 1024 // (self.shared + 1024))


def compile_case(case: Case) -> Report:
    if case.name == "norms":
        return _compile_norms(case)
    kernel, args, constants, config = recorded_launch(case)
    made = _compile(kernel, case.target, args, constants, config)
    return _report(case, made, kernel.__name__, config)


def recorded_launch(case: Case) -> tuple[Any, tuple[Any, ...], dict[str, Any], dict[str, int]]:
    """The kernel, its arguments, constants and launch settings, with meta tensors in place of real ones."""
    import torch

    from skyformer.ops import triton_launches
    from skyformer.ops.triton_configs import launch_options
    from skyformer.ops.triton_launches import Matrix, Outputs, Sides

    dtype = getattr(torch, case.dtype)
    wide = torch.float32 if case.precise else dtype
    swap = case.name in ("rt", "long")
    # The rows of the pass are those of x, or after swapping those of y. Gradients have the long side first.
    length, size = (case.thin, case.long) if swap else (case.long, case.thin)
    values = case.value_dim or case.head_dim

    def empty(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(2, rows, 8, width, dtype=dtype, device="meta").transpose(1, 2)

    x, y = empty(length, case.head_dim, dtype), empty(size, case.head_dim, dtype)
    v, grad = empty(size, values, wide), empty(length, values, wide)
    mask = torch.empty(2, size, dtype=torch.bool, device="meta") if case.masked else None
    found: list[Any] = []
    version = "6" if case.target.startswith("gfx") else None
    with (
        mock.patch.object(triton_launches, "launch", lambda *args: found.append(args)),
        mock.patch.object(triton_launches, "_half_norms", lambda x, *_: x.new_empty(x.shape[:3], dtype=torch.float32)),
        mock.patch.object(triton_launches, "_precision", return_value=case.precision),
        mock.patch.object(torch.version, "hip", version),
    ):
        sides = Sides.of(x, y, mask, 0.1, autotune=False)
        of_out, of_v = Matrix.of(grad, dtype), Matrix.of(v, dtype)
        if case.name == "r":
            sides.compute(of_v, None, int(case.causal), Outputs(r=torch.empty_like(grad)))
        elif case.name == "t":
            sides.compute(of_v, of_out, int(case.causal), Outputs(t=torch.empty_like(x)))
        elif case.name == "rt":
            out = Outputs(torch.empty_like(v), torch.empty_like(y))
            sides.swapped().compute(of_out, of_v, -int(case.causal), out)
        elif case.name == "thin":
            out = Outputs(torch.empty_like(v), torch.empty_like(y))
            assert sides.compute_gradients(of_out, of_v, Outputs(t=torch.empty_like(x)), out)
        else:
            out = Outputs(torch.empty_like(v), torch.empty_like(y))
            assert sides.swapped().compute_gradients(of_v, of_out, out, Outputs(t=torch.empty_like(x)))
    ((kernel, _, args, constants, config, _),) = found
    return kernel, args, constants, launch_options(config)


def _compile_norms(case: Case) -> Report:
    import torch

    from skyformer.ops.triton_configs import padded
    from skyformer.ops.triton_kernels import half_norms

    width = padded(case.head_dim)
    constants = {"P": case.head_dim, "BLOCK_P": width, "BLOCK_M": 4096 // width, "PRECISION": case.precision}
    x = torch.empty(2, 8, case.long, case.head_dim, dtype=getattr(torch, case.dtype), device="meta")
    mask = torch.empty(2, case.long, dtype=torch.uint8, device="meta")
    norms = torch.empty(2, 8, case.long, device="meta")
    centre = norms if case.dtype == "float32" else None
    args = (x, mask, centre, norms, case.long, 8, *x.stride()[:3], *mask.stride(), 0.1)
    options = {"num_warps": 4}
    return _report(case, _compile(half_norms, case.target, args, constants, options), "half_norms", options)


def _compile(
    kernel: Any, target: str, args: tuple[Any, ...], constants: dict[str, Any], options: dict[str, int]
) -> Any:
    """Compile as a launch with these arguments would, which knows integers that are 1 or multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    given = dict(zip(kernel.arg_names, args, strict=False))
    constants = {name: value for name, value in {**constants, **options}.items() if name in kernel.arg_names}
    constants |= {
        name: value for name, value in given.items() if value is None or (isinstance(value, int) and value == 1)
    }
    signature = {
        name: "constexpr" if name in constants else _kind(given[name])
        for name in kernel.arg_names
    }  # fmt: skip
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or (signature[name] == "i32" and given[name] % 16 == 0)
    }
    source = ASTSource(kernel, signature, constants, aligned)
    chosen = {name: value for name, value in options.items() if name.startswith("num")}
    return triton.compile(source, target=GPUTarget(*TARGETS[target]), options=chosen)


def _kind(value: Any) -> str:
    """Triton's name for the type of an argument."""
    if isinstance(value, int):
        return "i32"
    if isinstance(value, float):
        return "fp32"
    return {"float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16", "uint8": "*u8"}[str(value.dtype)[6:]]


def _report(case: Case, made: Any, kernel: str, config: dict[str, int]) -> Report:
    shared = int(made.metadata.shared)
    if case.target.startswith("gfx"):
        text = made.asm["amdgcn"]
        registers = int(re.search(r"\.vgpr_count:\s+(\d+)", text)[1])  # type: ignore[index]
        stack = int(re.search(r"\.private_segment_fixed_size:\s+(\d+)", text)[1])  # type: ignore[index]
        return Report(asdict(case), kernel, config, registers, stack, shared, len(re.findall(r"v_mfma_", text)))
    usage = _resource_usage(made.asm["cubin"], kernel)
    found = len(re.findall(r"mma\.sync|wgmma\.mma_async|tcgen05\.mma", made.asm["ptx"]))
    return Report(asdict(case), kernel, config, usage["REG"], usage["STACK"], shared, found)


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
        [sys.executable, "-W", "ignore", __file__],
        input=json.dumps([asdict(case) for case in cases]),
        capture_output=True,
        text=True,
        env={**_environment(), "TRITON_INTERPRET": "0"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [Report(**report) for report in json.loads(done.stdout)]


def _environment() -> dict[str, str]:
    import skyformer

    return {**os.environ, "PYTHONPATH": str(Path(skyformer.__file__).parents[1])}


def available(name: str, head_dim: int, dtype: str) -> bool:
    """Whether the table has this pass; wide float32 has no gradients in one launch."""
    return dtype != "float32" or name in ("r", "t", "rt") or head_dim <= 128


def print_table() -> None:
    print("| pass | head dim | dtype | block, warps, stages | sm_80 | sm_90 |\n|---|---|---|---|---|---|")
    for dtype in ("bfloat16", "float32"):
        for name in PASSES:
            for dim in HEAD_DIMS:
                if available(name, dim, dtype):
                    reports = [compile_case(Case(target, name, dim, dtype)) for target in ("sm_80", "sm_90")]
                    block = " x ".join(str(reports[0].config[key]) for key in ("BLOCK_M", "BLOCK_N"))
                    block += ", {num_warps}, {num_stages}".format(**reports[0].config)
                    used = " | ".join(f"{r.registers}, {r.stack}, {r.shared / 1024:.1f} KB" for r in reports)
                    print(f"| {name} | {dim} | {dtype} | {block} | {used} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["table"]:
        print_table()
    else:
        json.dump([asdict(compile_case(Case(**each))) for each in json.load(sys.stdin)], sys.stdout)
