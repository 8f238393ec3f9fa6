"""The paper's two attentions: the authors' outputs, exactness, convergence, compilation, and bad input."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from skyformer import (
    bigbird_attention,
    kernelized_attention,
    reformer_attention,
    skyformer_attention,
    softmax_attention,
)
from skyformer.errors import InputError, MaskError, ShapeError, UnknownNameError, UnsupportedError
from skyformer.landmarks import SAMPLERS
from skyformer.ops.kernels import KERNELS
from skyformer.ops.products import dense_kernel_product
from skyformer.ops.solve import SOLVERS, SchulzSolver
from skyformer.testing.suite import backward, draw, relative_error
from tests.helpers import assert_same_with_gradients, authors_outputs, reference_error, refused, scattered_mask


@pytest.mark.parametrize("case", ["full", "padded"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("softmax", {}),
        ("kernelized", {}),
        ("skyformer", {"solver": "cholesky"}),
        ("skyformer", {"solver": "schulz"}),
        ("skyformer_exact_inverse", {"solver": "cholesky"}),
        ("skyformer_exact_inverse", {"solver": "schulz"}),
    ],
    ids=str,
)
def test_agrees_with_the_authors_implementation(case: str, name: str, options: dict[str, str]) -> None:
    for tensors in authors_outputs(case):
        mask, rows = tensors["key_mask"], tensors["skyformer.landmark_index"]
        attention = {
            "softmax": partial(softmax_attention, key_mask=mask),
            "kernelized": partial(kernelized_attention, key_mask=mask),
        }.get(name, partial(skyformer_attention, key_mask=mask, landmarks=rows, gamma=0.1, **options))
        assert reference_error(tensors, name, attention) < 1e-5


def every_row(batch: int, length: int, size: int) -> Tensor:
    return torch.arange(length + size).expand(batch, -1)


def test_kernelized_attention_is_the_gaussian_of_scaled_inputs() -> None:
    q, k, v = draw(2, 5, 7, 16, 3)
    difference = (q[:, :, :, None] - k[:, :, None]) / 16**0.25
    torch.testing.assert_close(kernelized_attention(q, k, v), torch.exp(-difference.square().sum(-1) / 2) @ v)


def test_skyformer_attention_is_equations_4_to_6() -> None:
    q, k, v = draw(1, 9, 9, 4, 3)
    both, n = torch.cat([q, k], 2) / 4**0.25, 9
    c_bar = torch.exp(-torch.cdist(both, both).square() / 2)
    rows = torch.tensor([0, 4, 9, 13, 17])
    S = torch.eye(2 * n, dtype=torch.float64)[:, rows]
    middle = torch.linalg.inv(S.T @ c_bar @ S + 0.1 * torch.eye(5, dtype=torch.float64))
    approximation = (c_bar @ S @ middle @ S.T @ c_bar)[..., :n, n:]
    torch.testing.assert_close(skyformer_attention(q, k, v, landmarks=rows[None], gamma=0.1), approximation @ v)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("solver", ["cholesky", SchulzSolver(40)], ids=str)
def test_nystrom_is_exact_when_every_row_is_a_landmark(masked: bool, solver: Any) -> None:
    # A steep kernel keeps the matrix of all rows well conditioned.
    mask = scattered_mask(2, 12) if masked else None

    def approximate(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = every_row(2, 9, 12)
        return skyformer_attention(q, k, v, landmarks=rows, gamma=1e-12, key_mask=mask, solver=solver, scale=2.0)

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return kernelized_attention(q, k, v, key_mask=mask, scale=2.0)

    assert_same_with_gradients(approximate, exact, draw(2, 9, 12, 6, 3), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("sampler", SAMPLERS.names())
@pytest.mark.parametrize("gamma", [1e-3, 10.0])
def test_more_landmarks_than_rows_is_exact_at_any_gamma(sampler: str, gamma: float) -> None:
    options: dict[str, Any] = {"landmarks": sampler, "gamma": gamma, "num_landmarks": 21}
    for length, size in ((9, 12), (12, 9), (20, 1), (1, 20)):
        assert_same_with_gradients(
            lambda q, k, v: skyformer_attention(q, k, v, **options),
            kernelized_attention,
            draw(2, length, size, 4, 3),
        )


@pytest.mark.parametrize("sampler", SAMPLERS.names())
@pytest.mark.parametrize("kernel", ["gaussian", "softmax"])
def test_one_short_example_in_a_batch_is_exact(sampler: str, kernel: str) -> None:
    mask = torch.ones(3, 40, dtype=torch.bool)
    mask[1] = False
    mask[1, [3, 4, 17, 30, 39]] = True
    inputs = draw(3, 40, 40, 4, 3)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return skyformer_attention(
            q, k, v, landmarks=sampler, key_mask=mask, num_landmarks=10, gamma=1.0, kernel=kernel
        )[1]

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return kernelized_attention(q, k, v, key_mask=mask, kernel=kernel)[1]

    assert_same_with_gradients(attend, exact, inputs)
    assert relative_error(attend(*inputs), exact(*inputs)) < 1e-12
    everything = skyformer_attention(*inputs, landmarks=sampler, key_mask=mask, num_landmarks=10, gamma=1.0)
    assert relative_error(everything[0], kernelized_attention(*inputs)[0]) > 1e-3


def mean_error(count: int, sampler: str, kernel: str = "gaussian") -> float:
    torch.manual_seed(0)
    inputs = tuple(x.detach() for x in draw(1, 64, 64, 4, 4))
    options: dict[str, Any] = {"num_landmarks": count, "landmarks": sampler, "gamma": 1e-6, "kernel": kernel}
    exact = kernelized_attention(*inputs, kernel=kernel)
    outputs = [skyformer_attention(*inputs, generator=torch.Generator().manual_seed(s), **options) for s in range(8)]
    return sum(relative_error(out, exact) for out in outputs) / len(outputs)


@pytest.mark.parametrize("sampler", SAMPLERS.names())
def test_error_falls_as_landmarks_are_added(sampler: str) -> None:
    errors = [mean_error(count, sampler) for count in (8, 24, 72, 128)]
    assert errors[0] > errors[1] > errors[2] > errors[3]
    assert errors[3] < 1e-10


@pytest.mark.parametrize("sampler", ["stratified", "uniform", "probe", "leverage"])
def test_approximation_of_softmax_converges_to_softmax(sampler: str) -> None:
    errors = [mean_error(count, sampler, "softmax") for count in (16, 72, 128)]
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 1e-10


@pytest.mark.parametrize("kernel", [name for name in KERNELS.names() if KERNELS.get(name).radial])
@pytest.mark.parametrize("landmarks", ["stratified", "uniform", "explicit"])
def test_approximation_never_exceeds_the_kernel_matrix(kernel: str, landmarks: str) -> None:
    # Theorem 1: C-bar minus its approximation is positive semidefinite. The values are the identity, so that the
    # outputs are the matrices.
    points = torch.randn(1, 1, 30, 4, dtype=torch.float64)
    identity = torch.eye(30, dtype=torch.float64)[None, None]
    exact = kernelized_attention(points, points, identity, kernel=kernel)
    chosen: Any = torch.randint(60, (1, 12)) if landmarks == "explicit" else landmarks
    approximation = skyformer_attention(
        points, points, identity, num_landmarks=12, landmarks=chosen, gamma=1e-3, kernel=kernel
    )
    torch.testing.assert_close(approximation, approximation.mT)
    # A distance of zero rounds to about 1e-8, which changes the kernels that use the distance itself.
    assert torch.linalg.eigvalsh(approximation).min() > -1e-7
    assert torch.linalg.eigvalsh(exact - approximation).min() > -1e-7


@pytest.mark.parametrize("std", [10.0, 1e2, 1e4])
@pytest.mark.parametrize("masked", [False, True])
def test_approximation_of_softmax_never_overflows(std: float, masked: bool) -> None:
    q, k, v = (x.detach() for x in draw(2, 40, 40, 8, 8, torch.float32))
    inputs = q.requires_grad_(), (k * std).requires_grad_(), v.requires_grad_()
    mask = scattered_mask(2, 40) if masked else None
    out = skyformer_attention(*inputs, kernel="softmax", num_landmarks=16, key_mask=mask)
    assert out.isfinite().all()
    assert all(g.isfinite().all() for g in backward(out, inputs))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("landmarks", ["stratified", "probe"])
def test_approximation_of_softmax_does_not_depend_on_a_shift_of_the_keys(masked: bool, landmarks: str) -> None:
    q, k, v = draw(2, 60, 60, 8, 8)
    options: dict[str, Any] = {"kernel": "softmax", "num_landmarks": 24, "landmarks": landmarks}
    options["key_mask"] = scattered_mask(2, 60) if masked else None
    near, far = (
        skyformer_attention(q, keys, v, generator=torch.Generator().manual_seed(0), **options)
        for keys in (k, k + torch.linspace(-6, 6, 8, dtype=k.dtype))
    )
    torch.testing.assert_close(far, near)


@pytest.mark.parametrize("std", [1.0, 10.0, 100.0])
def test_covering_every_row_gives_softmax_itself_at_any_norm(std: float) -> None:
    inputs = draw(2, 20, 25, 8, 8, torch.float32, std)
    mask = scattered_mask(2, 25)
    out = skyformer_attention(*inputs, kernel="softmax", num_landmarks=64, key_mask=mask)
    assert relative_error(out, softmax_attention(*inputs, key_mask=mask)) < 1e-5


@pytest.mark.parametrize(("length", "size"), [(5, 90), (90, 5), (1, 64), (64, 1)])
@pytest.mark.parametrize("kernel", ["gaussian", "softmax"])
def test_cross_attention_with_masks_of_its_own(length: int, size: int, kernel: str) -> None:
    q, k, v = draw(2, length, size, 8, 3)
    key_mask, query_mask = scattered_mask(2, size), scattered_mask(2, length)
    out = skyformer_attention(
        q, k, v, key_mask=key_mask, query_mask=query_mask, num_landmarks=48, gamma=1e-6, kernel=kernel
    )
    assert out.shape == (2, 2, length, 3)
    exact = kernelized_attention(q, k, v, key_mask=key_mask, kernel=kernel)
    assert relative_error(out, exact) < 0.5


def test_query_mask_decides_which_queries_may_be_landmarks_and_nothing_else() -> None:
    q, k, v = draw(1, 30, 30, 4, 4)
    hidden = torch.ones(1, 30, dtype=torch.bool)
    hidden[:, 10:] = False
    junk = q.detach().clone()
    junk[:, :, 10:] = 50
    masks = {"query_mask": hidden, "key_mask": torch.ones_like(hidden), "num_landmarks": 12}

    def visible(query: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return skyformer_attention(query, k, v, generator=generator, **masks)[:, :, :10]

    torch.testing.assert_close(visible(q), visible(junk))
    assert (skyformer_attention(q, k, v, **masks)[:, :, 10:] != 0).all()


def test_missing_query_mask_is_the_key_mask_when_lengths_agree() -> None:
    inputs, mask = draw(2, 30, 30, 4, 4), scattered_mask(2, 30)

    def attend(**masks: Tensor) -> Tensor:
        return skyformer_attention(*inputs, num_landmarks=8, generator=torch.Generator().manual_seed(1), **masks)

    assert torch.equal(attend(key_mask=mask), attend(key_mask=mask, query_mask=mask))


@pytest.mark.parametrize("attention", [kernelized_attention, skyformer_attention, softmax_attention])
@pytest.mark.parametrize(("length", "size"), [(0, 5), (5, 0), (0, 0)])
def test_empty_sequences(attention: Callable[..., Tensor], length: int, size: int) -> None:
    out = attention(*draw(2, length, size, 4, 3))
    assert torch.equal(out, torch.zeros(2, 2, length, 3, dtype=torch.float64))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("attend", [skyformer_attention, kernelized_attention, reformer_attention, bigbird_attention])
@pytest.mark.parametrize("shape", [(0, 2), (2, 0)])
def test_no_examples_or_no_heads(attend: Callable[..., Tensor], shape: tuple[int, int], masked: bool) -> None:
    x = torch.zeros(*shape, 5, 4)
    mask = torch.ones(shape[0], 5, dtype=torch.bool) if masked else None
    assert attend(x, x, x[..., :3], key_mask=mask).shape == (*shape, 5, 3)


@pytest.mark.parametrize("sampler", SAMPLERS.names())
@pytest.mark.parametrize(("length", "size"), [(0, 9), (9, 0)])
def test_every_sampler_accepts_an_empty_side(sampler: str, length: int, size: int) -> None:
    out = skyformer_attention(*draw(2, length, size, 4, 3), landmarks=sampler, num_landmarks=4)
    assert out.shape == (2, 2, length, 3)
    assert (out == 0).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("value_dim", [8, 3])
def test_kernelized_attention_agrees_with_the_dense_form(causal: bool, value_dim: int) -> None:
    mask = scattered_mask(2, 20)
    assert_same_with_gradients(
        lambda q, k, v: kernelized_attention(q, k, v, key_mask=mask, is_causal=causal, scale=0.2),
        lambda q, k, v: dense_kernel_product(q, k, v, key_mask=mask, is_causal=causal, scale=0.2),
        draw(2, 15, 20, 8, value_dim),
    )


def test_softmax_attention_gives_zeros_where_there_is_nothing_to_attend_to() -> None:
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[0] = False
    mask[1, :2] = False
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        q, k, v = (x.detach().to(dtype) for x in draw(2, 6, 6, 4, 4))
        assert (softmax_attention(q, k, v, key_mask=mask)[0] == 0).all()
        causal = softmax_attention(q, k, v, key_mask=mask, is_causal=True)
        assert (causal[1, :, :2] == 0).all()
        assert causal.isfinite().all()


@pytest.mark.parametrize("kernel", ["gaussian", "matern", "softmax"])
def test_dropout_keeps_the_mean_and_drops_something(kernel: str) -> None:
    q, k, v = (x.detach().expand(3000, -1, -1, -1) for x in draw(1, 3, 4, 3, 3))
    out = kernelized_attention(q, k, v, kernel=kernel, dropout_p=0.3)
    exact = kernelized_attention(q[:1], k[:1], v[:1], kernel=kernel)[0]
    assert relative_error(out.mean(0), exact) < 0.1
    assert out.std(0).min() > 0


def compiled_agrees(backend: str, **options: Any) -> None:
    torch._dynamo.reset()
    inputs, rows, mask = draw(2, 24, 24, 8, 8), torch.randint(48, (2, 10)), scattered_mask(2, 24)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return skyformer_attention(q, k, v, landmarks=rows, key_mask=mask, gamma=0.1, **options)

    compiled = torch.compile(attend, backend=backend, fullgraph=True)
    assert_same_with_gradients(compiled, attend, inputs, rtol=1e-8, atol=1e-9)


# The tracer of torch warns about its own code.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{}, {"solver": "schulz", "kernel": "softmax"}, {"kernel": "matern"}], ids=str)
def test_explicit_landmarks_compile_to_one_graph(options: dict[str, Any]) -> None:
    compiled_agrees("aot_eager", **options)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{}, {"kernel": "softmax"}], ids=str)
def test_explicit_landmarks_compile_with_inductor(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An empty cache: a stored graph could hide a change in this package.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    compiled_agrees("inductor", **options)


X = torch.randn(2, 3, 8, 5, generator=torch.Generator().manual_seed(0))
NAN = X.clone()
NAN[1, 2, 3, 4] = float("nan")
INF = X.clone()
INF[0, 0, 0, 1] = float("-inf")
ONES = torch.ones(2, 8)

BadCase = tuple[dict[str, Any], type[Exception], tuple[str, ...]]
BAD_FOR_ALL: list[BadCase] = [
    ({"query": X[0]}, ShapeError, ("query must", "4 dimensions (B, H, n, P)", "(3, 8, 5)", "unsqueeze")),
    ({"key": X[None]}, ShapeError, ("key must", "4 dimensions", "(1, 2, 3, 8, 5)")),
    ({"value": X[0, 0]}, ShapeError, ("value must", "4 dimensions", "(8, 5)")),
    ({"key": X[:1]}, ShapeError, ("key must", "query's batch and heads (2, 3)", "(1, 3)")),
    ({"value": X[:, :2]}, ShapeError, ("value must", "query's batch and heads (2, 3)", "(2, 2)")),
    ({"key": X[..., :4]}, ShapeError, ("key must", "query's head dim 5", "4")),
    ({"value": X[:, :, :7]}, ShapeError, ("value must", "key's length 8", "7")),
    ({"query": X.int()}, InputError, ("query must", "float32", "torch.int32")),
    ({"query": None}, InputError, ("query must", "tensor", "NoneType")),
    ({"key": X.double()}, InputError, ("key must", "query's dtype torch.float32", "torch.float64")),
    ({"value": X.to("meta")}, InputError, ("value must", "query's device cpu", "meta")),
    ({"key_mask": -1e9 * ONES}, MaskError, ("key_mask must", "bool", "torch.float32", "key_mask == 0")),
    ({"key_mask": 2 * ONES.long()}, MaskError, ("key_mask must", "integers 0 and 1", "2")),
    ({"key_mask": ONES[:, :7].bool()}, MaskError, ("key_mask must", "(2, 8)", "(2, 7)")),
    ({"key_mask": ONES[:, None].bool()}, MaskError, ("key_mask must", "(2, 8)", "(2, 1, 8)")),
    ({"key_mask": [[True] * 8] * 2}, MaskError, ("key_mask must", "tensor (2, 8)", "list")),
    ({"scale": 0.0}, InputError, ("scale must", "above 0", "0.0")),
    ({"scale": float("inf")}, InputError, ("scale must", "finite", "inf")),
]
BAD_FOR_KERNELS: list[BadCase] = [
    ({"kernel": "rbf"}, UnknownNameError, ("kernel", "'rbf'", *KERNELS.names())),
    ({"query": NAN, "check_finite": True}, InputError, ("query must", "finite", "nan at index (1, 2, 3, 4)")),
    ({"key": INF, "check_finite": True}, InputError, ("key must", "finite", "-inf at index (0, 0, 0, 1)")),
    ({"value": NAN, "check_finite": True}, InputError, ("value must", "finite", "nan")),
    ({"memory_budget": -1}, InputError, ("memory_budget must", "at least 0", "-1")),
]
BAD_DROPOUT: list[BadCase] = [
    ({"dropout_p": p}, InputError, ("dropout_p must", "[0, 1)", repr(p))) for p in (1.0, -0.5, float("nan"))
]
BAD_FOR_SKYFORMER: list[BadCase] = [
    ({"query_mask": -ONES}, MaskError, ("query_mask must", "bool", "torch.float32", "query_mask == 0")),
    ({"query_mask": ONES[:1].bool()}, MaskError, ("query_mask must", "(2, 8)", "(1, 8)")),
    ({"num_landmarks": 0}, InputError, ("num_landmarks must", "at least 1", "0")),
    ({"num_landmarks": -3}, InputError, ("num_landmarks must", "at least 1", "-3")),
    ({"num_landmarks": 4.0}, InputError, ("num_landmarks must", "integer", "4.0")),
    ({"gamma": 0.0}, InputError, ("gamma must", "above 0", "0.0")),
    ({"gamma": -0.1}, InputError, ("gamma must", "above 0", "-0.1")),
    ({"gamma": float("nan")}, InputError, ("gamma must", "finite", "nan")),
    ({"landmarks": "random"}, UnknownNameError, ("sampler", "'random'", *SAMPLERS.names())),
    ({"solver": "lu"}, UnknownNameError, ("solver", "'lu'", *SOLVERS.names())),
    ({"is_causal": True}, UnsupportedError, ("is_causal must", "False", "True", "kernelized_attention")),
]


def call(attention: Callable[..., Tensor], change: dict[str, Any]) -> Tensor:
    return attention(**{"query": X, "key": X, "value": X, **change})


@pytest.mark.parametrize(
    ("attention", "cases"),
    [
        (softmax_attention, [*BAD_FOR_ALL, *BAD_DROPOUT]),
        (kernelized_attention, [*BAD_FOR_ALL, *BAD_FOR_KERNELS, *BAD_DROPOUT]),
        (skyformer_attention, [*BAD_FOR_ALL, *BAD_FOR_KERNELS, *BAD_FOR_SKYFORMER]),
    ],
)
def test_bad_input_is_refused(attention: Callable[..., Tensor], cases: list[BadCase]) -> None:
    for change, error, words in cases:
        with refused(error, *words):
            call(attention, change)


@pytest.mark.parametrize("attention", [kernelized_attention, skyformer_attention])
def test_finite_inputs_pass_the_finite_check(attention: Callable[..., Tensor]) -> None:
    assert call(attention, {"check_finite": True}).isfinite().all()


@pytest.mark.parametrize("count", [16, 17, 1000])
def test_more_landmarks_than_rows_is_no_error(count: int) -> None:
    torch.testing.assert_close(call(skyformer_attention, {"num_landmarks": count}), call(kernelized_attention, {}))


@pytest.mark.parametrize("kernel", ["gaussian", "laplacian", "matern", "rational_quadratic", "softmax"])
@pytest.mark.parametrize("offset", [200.0, 1000.0])
def test_near_duplicates_far_from_the_origin_are_solved_without_jitter(kernel: str, offset: float) -> None:
    centre = torch.randn(1, 1, 1, 32)
    centre = offset * centre / centre.norm()
    q, k = (centre + 0.1 * torch.randn(1, 1, 300, 32) for _ in range(2))
    assert skyformer_attention(q, k, torch.randn(1, 1, 300, 32), kernel=kernel, num_landmarks=64).isfinite().all()
