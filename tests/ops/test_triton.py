"""The Triton kernels in Triton's interpreter, forward and all gradients, against the dense product in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

import skyformer
from skyformer.ops import triton_launches
from skyformer.ops.products import dense_kernel_product
from skyformer.ops.triton_products import triton_product
from skyformer.testing.suite import backward, relative_error
from tests.helpers import authors_outputs, reference_error, scattered_mask

pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot be tested")

from skyformer.ops import triton_kernels

SCALE = 0.2
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}


def draw(
    shape: tuple[int, int, int, int, int, int], dtype: torch.dtype, std: float = 1.0, heads_last: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """x, y and v for (B, H, L, S, P, Pv); with `heads_last` stored in the order (B, n, H, P)."""
    batch, heads, length, size, features, values = shape
    x, y, v = (
        (torch.randn(batch, n, heads, p) * std).to(dtype).transpose(1, 2)
        for n, p in ((length, features), (size, features), (size, values))
    )
    if not heads_last:
        x, y, v = (t.contiguous() for t in (x, y, v))
    return x.requires_grad_(), y.requires_grad_(), v.requires_grad_()


def errors(inputs: tuple[Tensor, ...], mask: Tensor | None, causal: bool, float32_out: bool = False) -> list[float]:
    """Relative errors of the output and of the gradients."""
    out = triton_product(*inputs, mask, causal, SCALE, float32_out)  # type: ignore[misc]
    grad = torch.randn_like(out)
    exact = tuple(t.detach().double().requires_grad_() for t in inputs)
    expected = dense_kernel_product(*exact, scale=SCALE, key_mask=mask, is_causal=causal)  # type: ignore[misc]
    found = (out, *backward(out, inputs, grad))
    return [
        relative_error(f, e) for f, e in zip(found, (expected, *backward(expected, exact, grad.double())), strict=True)
    ]


SHAPES = [
    (1, 2, 33, 65, 16, 16),  # just above a block
    (2, 1, 40, 300, 24, 40),  # head dims that are no powers of two, columns in two splits
    (1, 1, 130, 17, 48, 8),  # more rows than columns
    (1, 1, 1, 1, 16, 16),
]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_agrees_with_the_dense_product(shape: tuple[int, int, int, int, int, int], dtype: torch.dtype) -> None:
    assert max(errors(draw(shape, dtype), None, False)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_masks_with_holes_and_strided_inputs(causal: bool, dtype: torch.dtype) -> None:
    inputs = draw((2, 1, 40, 290, 16, 16), dtype, heads_last=True)
    assert max(errors(inputs, scattered_mask(2, 290), causal)) < TOLERANCE[dtype]


@pytest.mark.parametrize(("length", "size"), [(300, 40), (40, 300), (129, 129)])
def test_causal(length: int, size: int) -> None:
    assert max(errors(draw((1, 1, length, size, 16, 16), torch.float32), None, True)) < 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("features", [16, 33, 64, 80, 128, 192, 256])
def test_full_grid(features: int, masked: bool, causal: bool, dtype: torch.dtype) -> None:
    for length, size, values, heads_last in ((1, 300, 16, True), (63, 65, 100, False), (257, 128, 64, True)):
        # Distances as at a head dim of 16: with larger ones a lone kernel value is below the normal range of float16.
        inputs = draw((2, 2, length, size, features, values), dtype, (16 / features) ** 0.5, heads_last)
        mask = scattered_mask(2, size) if masked else None
        assert max(errors(inputs, mask, causal)) < TOLERANCE[dtype], (length, size, values, heads_last)


def test_float32_in_parts_of_the_features() -> None:
    assert max(errors(draw((1, 1, 20, 40, 200, 70), torch.float32, 0.3), None, False)) < 2e-6
    assert max(errors(draw((1, 2, 40, 35, 20, 130), torch.float32), scattered_mask(1, 35), True)) < 2e-6


def recorded_launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that are launched from here on."""
    names: list[str] = []
    start = triton_launches.launch

    def launch(kernel: Any, *args: Any) -> None:
        names.append(kernel.__name__)
        start(kernel, *args)

    monkeypatch.setattr(triton_launches, "launch", launch)
    return names


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_one_launch_computes_all_gradients(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    names = recorded_launches(monkeypatch)
    for length, size in ((20, 150), (150, 20)):
        assert max(errors(draw((1, 1, length, size, 16, 24), dtype), scattered_mask(1, size), False)) < TOLERANCE[dtype]
    assert names == ["gaussian_rows", "gaussian_gradients"] * 2


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_two_long_sides_take_two_launches(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    names = recorded_launches(monkeypatch)
    monkeypatch.setattr(triton_launches, "LARGEST_THIN_SIDE", 30)
    assert max(errors(draw((1, 1, 40, 35, 16, 24), dtype), scattered_mask(1, 35), False)) < TOLERANCE[dtype]
    assert names == ["gaussian_rows"] * 3


def test_skyformer_launches_two_kernels_in_each_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    names = recorded_launches(monkeypatch)
    inputs = draw((1, 2, 60, 60, 16, 16), torch.bfloat16)
    out = skyformer_by_triton(*inputs)
    assert names == ["gaussian_rows"] * 2
    backward(out, inputs)
    assert names[2:] == ["gaussian_gradients"] * 2


def test_autotune_takes_the_fastest_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = draw((1, 1, 20, 24, 16, 16), torch.float32)
    expected = triton_product(*inputs, None, False, SCALE)
    gradients = backward(expected, inputs)
    monkeypatch.setattr(triton_launches, "measures", lambda autotune: autotune)
    fastest = {triton_kernels.gaussian_rows: 30, triton_kernels.gaussian_gradients: 50}
    tuners = {kernel: triton_kernels.tuned(kernel) for kernel in fastest}
    calls = dict.fromkeys(fastest, 0)
    for kernel, tuner in tuners.items():

        def benchmark(run: Callable[[], None], quantiles: object, kernel: Any = kernel) -> list[float]:
            run()
            calls[kernel] += 1
            return [float(calls[kernel] != fastest[kernel])] * 3

        monkeypatch.setitem(tuner.__dict__, "do_bench", benchmark)
        monkeypatch.setattr(tuner, "cache", {})
    for _ in range(2):
        out = triton_product(*inputs, None, False, SCALE, autotune=True)
        for found, wanted in zip((out, *backward(out, inputs)), (expected, *gradients), strict=True):
            torch.testing.assert_close(found, wanted)
    for kernel, tuner in tuners.items():
        assert calls[kernel] == len(tuner.configs)
        assert tuner.best_config is tuner.configs[fastest[kernel] - 1]


def test_outputs_and_gradients_are_stored_as_their_inputs() -> None:
    inputs = draw((1, 3, 40, 50, 16, 24), torch.float32, heads_last=True)
    out = triton_product(*inputs, None, False, SCALE)
    assert out.transpose(1, 2).is_contiguous()
    assert all(g.transpose(1, 2).is_contiguous() for g in backward(out, inputs))


def test_repeats_bit_for_bit() -> None:
    inputs = draw((1, 1, 40, 300, 16, 16), torch.bfloat16)

    def run() -> list[Tensor]:
        out = triton_product(*inputs, None, False, SCALE)
        return [out, *backward(out, inputs)]

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_float32_matrix_may_exceed_the_range_of_half_precision(dtype: torch.dtype) -> None:
    x, y, v = (t.detach() for t in draw((1, 2, 64, 40, 16, 16), dtype))
    large = (v.float() * 1e6).requires_grad_()
    out = triton_product(x, y, large, None, False, SCALE, True)
    expected = dense_kernel_product(x.double(), y.double(), large.double(), scale=SCALE)
    assert out.dtype == torch.float32
    assert relative_error(out, expected) < TOLERANCE[dtype]
    (grad,) = backward(out, (large,))
    assert grad.dtype == torch.float32
    assert relative_error(grad, backward(expected, (large,))[0]) < TOLERANCE[dtype]


def test_far_from_the_origin() -> None:
    x, y, v = draw((1, 1, 40, 50, 16, 16), torch.float32, std=0.1)
    x, y = ((t.detach() + 250).requires_grad_() for t in (x, y))
    assert max(errors((x, y, v), None, False)) < 1e-4


def test_large_norms_are_finite() -> None:
    for dtype, std in itertools.product(TOLERANCE, (0.0, 1e3)):
        inputs = draw((1, 1, 20, 30, 16, 16), dtype, std)
        out = triton_product(*inputs, None, False, SCALE)
        assert all(t.isfinite().all() for t in (out, *backward(out, inputs)))


def test_fully_masked_and_empty() -> None:
    mask = torch.tensor([[False] * 9, [True] * 9])
    inputs = draw((2, 1, 5, 9, 16, 16), torch.float32)
    out = triton_product(*inputs, mask, False, SCALE)
    dx, dy, dv = backward(out, inputs)
    assert all((t[0] == 0).all() and t[1].any() for t in (out, dx, dy, dv))
    for shape in ((0, 2, 5, 9, 16, 16), (2, 2, 0, 9, 16, 16), (2, 2, 5, 0, 16, 16)):
        inputs = draw(shape, torch.float32)
        out = triton_product(*inputs, None, False, SCALE)
        assert out.shape == (*shape[:3], 16)
        assert all((t == 0).all() for t in (out, *backward(out, inputs)))


def test_only_requested_gradients_are_computed() -> None:
    x, y, v = draw((1, 1, 20, 30, 16, 16), torch.float32)
    everything = backward(triton_product(x, y, v, None, False, SCALE), (x, y, v))
    for wanted, expected in zip((x, y, v), everything, strict=True):
        inputs = [t if t is wanted else t.detach() for t in (x, y, v)]
        found = torch.autograd.grad(triton_product(*inputs, None, False, SCALE).sum(), wanted)[0]
        torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("ignore:.*double precision")
def test_gradcheck_in_float32() -> None:
    inputs = draw((1, 1, 5, 6, 3, 2), torch.float32)
    assert torch.autograd.gradcheck(
        lambda x, y, v: triton_product(x, y, v, None, False, SCALE), inputs, eps=1e-2, atol=2e-3, rtol=1e-2
    )


def test_operators_pass_the_checks_of_torch() -> None:
    inputs = draw((1, 2, 20, 30, 16, 24), torch.bfloat16, heads_last=True)
    args = (*inputs, scattered_mask(1, 30), False, SCALE, False, False)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.skyformer.gaussian_product.default, args, test_utils=tests)


def test_tf32_is_used_only_on_request() -> None:
    inputs = tuple(t.detach() for t in draw((1, 1, 40, 50, 16, 16), torch.float32))
    expected = dense_kernel_product(*(t.double() for t in inputs), scale=SCALE)
    exact = relative_error(triton_product(*inputs, None, False, SCALE), expected)
    try:
        torch.set_float32_matmul_precision("high")
        rounded = relative_error(triton_product(*inputs, None, False, SCALE), expected)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert exact < 1e-6
    assert 1e-5 < rounded < 1e-2


def skyformer_by_triton(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows = torch.arange(0, 60, 5)[None]
    with skyformer.use_backend("triton"):
        return skyformer.skyformer_attention(q, k, v, landmarks=rows, gamma=0.1)


@pytest.mark.filterwarnings("ignore")
def test_compiled_checkpointed_and_exported() -> None:
    inputs = draw((1, 2, 30, 30, 16, 16), torch.bfloat16)
    expected = skyformer_by_triton(*inputs)
    gradients = backward(expected, inputs)

    class Module(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return skyformer.skyformer_attention(q, k, v, landmarks=torch.arange(0, 60, 5)[None], gamma=0.1)

    torch._dynamo.reset()
    with skyformer.use_backend("triton"):
        compiled = torch.compile(Module(), backend="aot_eager", fullgraph=True)(*inputs)
        compiled_gradients = backward(compiled, inputs)
        exported = torch.export.export(Module(), tuple(x.detach() for x in inputs))
    checkpointed = torch.utils.checkpoint.checkpoint(skyformer_by_triton, *inputs, use_reentrant=False)
    torch.testing.assert_close(compiled, expected)
    torch.testing.assert_close(checkpointed, expected)
    assert any("gaussian_product" in str(node.target) for node in exported.graph.nodes)
    torch.testing.assert_close(exported.module()(*(x.detach() for x in inputs)), expected)
    for found in (compiled_gradients, backward(checkpointed, inputs)):
        for a, e in zip(found, gradients, strict=True):
            torch.testing.assert_close(a, e)


@pytest.mark.parametrize("case", ["full", "padded"])
def test_agrees_with_the_authors(case: str) -> None:
    tensors = authors_outputs(case)[0]

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with skyformer.use_backend("triton"):
            return skyformer.kernelized_attention(q, k, v, key_mask=tensors["key_mask"].bool())

    assert reference_error(tensors, "kernelized", attention) < 1e-4


def sequence(length: int, std: float) -> Tensor:
    """A smooth random sequence with noise, (1, 2, n, 16)."""
    walk = torch.randn(1, 2, length, 16).cumsum(2)
    return std * (0.8 * walk / walk.std() + 0.6 * torch.randn(1, 2, length, 16))


def half_precision_errors(dtype: torch.dtype, std: float, gamma: float, near_duplicates: bool) -> list[float]:
    """Relative errors of Skyformer's output and gradients against float64 on the same rounded inputs."""
    query = sequence(192, std)
    key = query + 0.3 * std * torch.randn_like(query)
    rows = torch.arange(0, 384, 12)[None]
    if near_duplicates:
        key[:, :, 1::2] = key[:, :, ::2] + 1e-3 * std * torch.randn_like(key[:, :, ::2])
        rows[:, 1::2] = rows[:, ::2] + 1
    rounded = [x.to(dtype) for x in (query, key, torch.randn_like(query))]
    grad = torch.randn_like(query).to(dtype)

    def run(backend: str, dtype: torch.dtype) -> list[Tensor]:
        inputs = tuple(x.to(dtype).requires_grad_() for x in rounded)
        with skyformer.use_backend(backend):
            out = skyformer.skyformer_attention(*inputs, landmarks=rows, gamma=gamma)
        return [out, *backward(out, inputs, grad.to(dtype))]

    return [relative_error(a, e) for a, e in zip(run("triton", dtype), run("torch", torch.float64), strict=True)]


EXTREMES = [(0.05, 0.01, True), (0.5, 0.01, False), (1.0, 0.1, True), (4.0, 0.01, True)]
GRID = list(itertools.product([0.05, 0.2, 0.5, 1.0, 2.0, 4.0], [0.01, 0.1], [False, True]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("std", "gamma", "near_duplicates"),
    [*EXTREMES, *(pytest.param(*case, marks=pytest.mark.slow) for case in GRID if case not in EXTREMES)],
)
def test_half_precision_of_skyformer(dtype: torch.dtype, std: float, gamma: float, near_duplicates: bool) -> None:
    out, *grads = half_precision_errors(dtype, std, gamma, near_duplicates)
    assert out <= 4e-3
    assert max(grads) <= 1e-2


def test_second_derivatives_and_transforms() -> None:
    inputs = draw((2, 2, 9, 12, 16, 16), torch.float32)
    mask = scattered_mask(2, 12)

    def product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return skyformer.kernel_product(q, k, v, key_mask=mask, scale=0.25)

    def second(backend: str) -> tuple[Tensor, ...]:
        with skyformer.use_backend(backend):
            grads = torch.autograd.grad(product(*inputs).square().sum(), inputs, create_graph=True)
            return torch.autograd.grad(sum((g.square().sum() for g in grads), torch.tensor(0.0)), inputs)

    for actual, expected in zip(second("triton"), second("torch"), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    samples = tuple(torch.stack([x.detach(), 2 * x.detach()]) for x in inputs)
    with skyformer.use_backend("triton"):
        found = torch.vmap(torch.func.grad(lambda *x: product(*x).square().sum(), argnums=(0, 1)))(*samples)
        expected = torch.func.grad(lambda *x: product(*x).square().sum(), argnums=(0, 1))(*(x[1] for x in samples))
    for actual, each in zip(found, expected, strict=True):
        torch.testing.assert_close(actual[1], each)
