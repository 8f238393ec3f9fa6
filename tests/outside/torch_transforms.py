"""What torch can do with every attention: derivatives of all kinds, `torch.vmap`, tracing and export.

Each check compares a transformed attention with the plain one. Run as a program, it tries every attention with every
check and writes results/torch_transforms.json, from which `make docs` makes the table in docs/transforms.md.
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from skyformer.attention import Attention, build_attention, list_attentions
from skyformer.errors import SkyformerError

OPTIONS: dict[str, dict[str, Any]] = {
    "skyformer": {"num_landmarks": 6},
    "linformer": {"num_features": 5, "max_length": 64},
    "nystromformer": {"num_landmarks": 4},
    "informer": {"num_features": 4},
    "bigbird": {"block_size": 4, "num_random_blocks": 1},
    "reformer": {"num_hashes": 2, "chunk_size": 4, "num_buckets": 4},
    "performer": {"num_features": 8},
    "tilted": {"num_blocks": 2, "num_exact": 3, "num_cells": 4},
}
REFUSED = "refused: "
BLOCKS = 4
"""The block or chunk size of the attentions whose exported lengths must be multiples of it."""

HEADS, HEAD_DIM, LENGTH = 2, 4, 14
Three = tuple[Tensor, Tensor, Tensor]


def build(name: str, dtype: torch.dtype = torch.float64) -> Attention:
    torch.manual_seed(0)
    return build_attention(name, HEADS, HEAD_DIM, **OPTIONS.get(name, {})).eval().to(dtype)


def draw(batch: int = 2, length: int = LENGTH, dtype: torch.dtype = torch.float64) -> Three:
    q, k, v = torch.randn(3, batch, HEADS, length, HEAD_DIM, dtype=dtype).unbind()
    return q, k, v


def key_mask(batch: int = 2, length: int = LENGTH) -> Tensor:
    """Padding in the last example, and a hole in the first."""
    mask = torch.arange(length).expand(batch, -1) < torch.tensor([length] * (batch - 1) + [length - 5])[:, None]
    return mask & (torch.arange(length) != 3)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def loss(attention: Attention, *inputs: Tensor, mask: Tensor | None) -> Tensor:
    return attention(*inputs, key_mask=mask).square().sum()


def gradients(attention: Attention, *inputs: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
    """By torch.autograd; zeros for an input that is not used."""
    leaves = tuple(x.detach().requires_grad_() for x in inputs)
    return torch.autograd.grad(loss(attention, *leaves, mask=mask), leaves, allow_unused=True, materialize_grads=True)


def check_grad(attention: Attention, mask: Tensor | None) -> None:
    inputs = draw()
    found = torch.func.grad(lambda *x: loss(attention, *x, mask=mask), argnums=(0, 1, 2))(*inputs)
    for actual, expected in zip(found, gradients(attention, *inputs, mask=mask), strict=True):
        assert_close(actual, expected)


def check_vmap(attention: Attention, mask: Tensor | None) -> None:
    samples = tuple(x.unflatten(0, (3, 2)) for x in draw(6))
    found = torch.vmap(lambda *x: attention(*x, key_mask=mask))(*samples)
    for number in range(3):
        assert_close(found[number], attention(*(x[number] for x in samples), key_mask=mask))


def check_gradients_per_sample(attention: Attention, mask: Tensor | None) -> None:
    mask = None if mask is None else mask[1:]
    samples = tuple(x.unsqueeze(1) for x in draw(3))
    found = torch.vmap(torch.func.grad(lambda *x: loss(attention, *x, mask=mask), argnums=(0, 1, 2)))(*samples)
    for number in range(3):
        expected = gradients(attention, *(x[number] for x in samples), mask=mask)
        for actual, each in zip(found, expected, strict=True):
            assert_close(actual[number], each)


def _row_sums(attention: Attention, mask: Tensor | None) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """A function of the queries with few outputs, and the queries."""
    query, key, value = draw(1)
    return lambda q: attention(q, key, value, key_mask=None if mask is None else mask[1:]).sum((0, 1, 3)), query


def check_jacrev(attention: Attention, mask: Tensor | None) -> None:
    function, query = _row_sums(attention, mask)
    assert_close(torch.func.jacrev(function)(query), torch.autograd.functional.jacobian(function, query))


def check_jacfwd(attention: Attention, mask: Tensor | None) -> None:
    function, query = _row_sums(attention, mask)
    assert_close(torch.func.jacfwd(function)(query), torch.autograd.functional.jacobian(function, query))


def check_jvp(attention: Attention, mask: Tensor | None) -> None:
    inputs, tangents, step = draw(), draw(), 1e-6
    _, found = torch.func.jvp(lambda *x: attention(*x, key_mask=mask), inputs, tangents)
    ahead, back = (
        attention(*(x + sign * step * t for x, t in zip(inputs, tangents, strict=True)), key_mask=mask)
        for sign in (1, -1)
    )
    assert_close(found, (ahead - back) / (2 * step), 1e-4)


def check_hessian(attention: Attention, mask: Tensor | None) -> None:
    """Forward over reverse mode, against differences of gradients in one direction."""
    query, key, value = draw(1, 9)
    mask = None if mask is None else mask[1:, :9]
    hessian = torch.func.hessian(lambda q: loss(attention, q, key, value, mask=mask))(query)
    direction, step = torch.randn_like(query), 1e-6
    ahead, back = (gradients(attention, query + sign * step * direction, key, value, mask=mask)[0] for sign in (1, -1))
    found = hessian.flatten(4).flatten(0, 3) @ direction.flatten()
    assert_close(found, ((ahead - back) / (2 * step)).flatten(), 1e-4)


def check_gradgradcheck(attention: Attention, mask: Tensor | None) -> None:
    """torch's fused softmax attention has no second derivatives and says so; its formula has."""
    inputs = tuple(x.requires_grad_() for x in draw(2, 8))
    mask = None if mask is None else mask[:, :8]
    with sdpa_kernel(SDPBackend.MATH):
        assert torch.autograd.gradgradcheck(
            lambda *x: attention(*x, key_mask=mask), inputs, atol=1e-4, rtol=1e-3, fast_mode=True
        )


def check_fake_tensors(attention: Attention, mask: Tensor | None) -> None:
    for training in (False, True):
        attention.train(training)
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        inputs = tuple(mode.from_tensor(x).requires_grad_() for x in draw())
        with mode:
            out = attention(*inputs, key_mask=None if mask is None else mode.from_tensor(mask))
            torch.autograd.grad(out.sum(), inputs, allow_unused=True)
        assert out.shape == (2, HEADS, LENGTH, HEAD_DIM)


def check_make_fx(attention: Attention, mask: Tensor | None) -> None:
    state = {**dict(attention.named_parameters()), **dict(attention.named_buffers())}

    def run(state: dict[str, Tensor], mask: Tensor | None, *inputs: Tensor) -> Tensor:
        return torch.func.functional_call(attention, state, inputs, {"key_mask": mask})

    for mode in ("real", "fake", "symbolic"):
        graph = make_fx(run, tracing_mode=mode)(state, mask, *draw())
        inputs = draw()
        assert_close(graph(state, mask, *inputs), attention(*inputs, key_mask=mask))


def check_meta(attention: Attention, mask: Tensor | None) -> None:
    attention = attention.to("meta")
    inputs = tuple(x.to("meta").requires_grad_() for x in draw())
    out = attention(*inputs, key_mask=None if mask is None else mask.to("meta"))
    torch.autograd.grad(out.sum(), inputs, allow_unused=True)


class _Positional(nn.Module):
    """torch.export names the arguments of `forward`."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None) -> Tensor:
        return self.attention(query, key, value, key_mask=key_mask)


def check_program(attention: Attention, masked: bool, strict: bool, any_length: bool = True) -> None:
    """One program for every batch size and, with `any_length`, every length; with blocks, every number of blocks."""
    torch._dynamo.reset()
    attention = attention.float()
    in_blocks = attention.name in ("bigbird", "reformer")
    length = BLOCKS * Dim("blocks", min=3, max=16) if in_blocks else Dim("length", min=10, max=64)
    batch = Dim("batch", min=2, max=64)
    sizes, of_mask = {0: batch, 2: length}, {0: batch, 1: length}
    if not any_length:
        sizes, of_mask = {0: batch}, {0: batch}
    shapes = {"query": sizes, "key": sizes, "value": sizes, "key_mask": of_mask if masked else None}
    examples = [
        (*draw(count, size, torch.float32), key_mask(count, size) if masked else None)
        for count, size in ((2, 16), (3, 24 if any_length else 16), (5, 40 if any_length else 16))
    ]
    program = torch.export.export(_Positional(attention), examples[0], dynamic_shapes=shapes, strict=strict).module()
    for *inputs, mask in examples:
        assert_close(program(*inputs, mask), attention(*inputs, key_mask=mask), 1e-4)


def check_export(attention: Attention, mask: Tensor | None) -> None:
    check_program(attention, mask is not None, strict=False)


def check_strict_export(attention: Attention, mask: Tensor | None) -> None:
    check_program(attention, mask is not None, strict=True)


def check_batch_export(attention: Attention, mask: Tensor | None) -> None:
    for strict in (False, True):
        check_program(attention, mask is not None, strict=strict, any_length=False)


Check = Callable[[Attention, Tensor | None], None]

CHECKS: dict[str, Check] = {
    "`torch.func.grad`": check_grad,
    "`torch.vmap`": check_vmap,
    "gradients per sample, `vmap(grad)`": check_gradients_per_sample,
    "`jacrev`": check_jacrev,
    "`jvp`": check_jvp,
    "`jacfwd`": check_jacfwd,
    "`hessian`": check_hessian,
    "`gradgradcheck`": check_gradgradcheck,
    "`FakeTensorMode`, with gradients": check_fake_tensors,
    "`make_fx`, all three modes": check_make_fx,
    "the meta device, with gradients": check_meta,
    "`torch.export`, any batch, also `strict=True`": check_batch_export,
    "`torch.export`, any batch and length": check_export,
    "the same, `strict=True`": check_strict_export,
}


def outcome(name: str, check: Check) -> str:
    """ "yes", "refused" with the package's own reason, or the first line of any other error."""
    try:
        for mask in (None, key_mask()):
            check(build(name), mask)
    except SkyformerError as refused:
        return f"{REFUSED}{refused}"
    except Exception as error:
        text = str(error).strip() or type(error).__name__
        # Within the report of `strict=True` about what it found while it traced.
        inner = re.search(r"raised exception UnsupportedError\([\"'](.*)[\"']\)", text)
        return f"{REFUSED}{inner[1]}" if inner else text.splitlines()[0]
    return "yes"


def main() -> None:
    warnings.simplefilter("ignore")
    from skyformer.environment import describe_environment
    from skyformer.files import dump_json, write_atomic
    from tests.outside.matrix import record

    cells = {}
    for title, check in CHECKS.items():
        cells[title] = {name: outcome(name, check) for name in list_attentions()}
        print(title, json.dumps(cells[title]), file=sys.stderr, flush=True)
    answers = {f"{name}: {title}": answer for title, row in cells.items() for name, answer in row.items()}
    refused = sum(answer.startswith(REFUSED) for answer in answers.values())
    failed = [name for name, answer in answers.items() if answer != "yes" and not answer.startswith(REFUSED)]
    record("transforms of torch", len(answers) - refused - len(failed), refused, failed)
    path = Path(__file__).parents[2] / "results" / "torch_transforms.json"
    write_atomic(path, dump_json({"environment": asdict(describe_environment()), "outcomes": cells}))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
