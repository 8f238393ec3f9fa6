"""kernel_product in blocks: agreement with the dense matrix, forward and backward, and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from skyformer import kernel_product, use_backend
from skyformer.errors import InputError, MaskError, ShapeError, UnknownNameError
from skyformer.ops import products
from skyformer.ops.kernels import KERNELS, MaternKernel, RationalQuadraticKernel
from skyformer.ops.products import block_shape, dense_kernel_product, subtract_dots
from skyformer.testing.suite import LargestStorage, backward, draw
from tests.helpers import assert_same_with_gradients, refused, scattered_mask

KERNELS_AND_VARIANTS = [*map(KERNELS.get, KERNELS.names()), MaternKernel(2.5), RationalQuadraticKernel(0.5)]
EDGES = [(1, 1), (7, 64), (8, 65), (9, 63), (64, 8), (65, 7), (63, 130), (130, 65), (1, 130), (130, 1)]
KEEP_ALL = 2**40


@pytest.fixture(autouse=True)
def _portable_product() -> Iterator[None]:
    with use_backend("torch"):
        yield


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 8 by 64, so that small matrices have many of them."""
    monkeypatch.setattr(products, "SHORT_SIDE", 8)
    monkeypatch.setattr(products, "BLOCK_ELEMENTS", 1)


def generator(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def dropped(p: float, seed: int = 3, **options: object) -> Callable[..., Tensor]:
    """kernel_product whose dropout draws the same entries in every call."""
    return lambda x, y, v: kernel_product(x, y, v, dropout_p=p, generator=generator(seed), **options)  # type: ignore[arg-type]


def dropout_matrix(rows: int, columns: int, p: float, seed: int = 3, **options: object) -> Tensor:
    """The factors of dropout (1, 1, L, S): at x = y = 0 every kernel value is 1."""
    x, y = torch.zeros(1, 1, rows, 1), torch.zeros(1, 1, columns, 1)
    return dropped(p, seed, **options)(x, y, torch.eye(columns)[None, None])


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("kernel", KERNELS_AND_VARIANTS, ids=str)
@pytest.mark.parametrize(("causal", "masked"), [(False, False), (True, True)])
def test_blocks_agree_with_the_dense_matrix(kernel: products.Kernel, causal: bool, masked: bool) -> None:
    for length, size in EDGES:
        mask = scattered_mask(2, size) if masked else None
        options = {"kernel": kernel, "scale": 0.4, "key_mask": mask, "is_causal": causal}
        assert_same_with_gradients(
            lambda x, y, v: kernel_product(x, y, v, **options),  # noqa: B023
            lambda x, y, v: dense_kernel_product(x, y, v, **options),  # noqa: B023
            draw(2, length, size, 3, 2),
        )


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("kernel", KERNELS.names())
@pytest.mark.parametrize("causal", [False, True])
def test_kept_and_recomputed_blocks_agree(kernel: str, causal: bool) -> None:
    def product(budget: int) -> Callable[..., Tensor]:
        return dropped(0.3, kernel=kernel, scale=0.4, is_causal=causal, memory_budget=budget)

    assert_same_with_gradients(product(KEEP_ALL), product(0), draw(2, 70, 20, 3, 2), rtol=1e-12, atol=1e-12)


def test_default_blocks_agree_with_the_dense_matrix_in_float32() -> None:
    inputs = draw(1, 700, 1100, 16, 5, torch.float32)
    assert_same_with_gradients(
        lambda x, y, v: kernel_product(x, y, v, scale=0.25),
        lambda x, y, v: dense_kernel_product(x, y, v, scale=0.25),
        inputs,
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.parametrize("kernel", KERNELS_AND_VARIANTS, ids=str)
def test_gradients_agree_with_finite_differences(kernel: products.Kernel) -> None:
    mask = torch.tensor([[True, False, True, True]])
    assert torch.autograd.gradcheck(
        lambda x, y, v: kernel_product(x, y, v, kernel=kernel, scale=0.7, key_mask=mask), draw(1, 3, 4, 2, 2)
    )


def test_a_masked_key_gets_no_gradient() -> None:
    mask = scattered_mask(2, 9)
    inputs = draw(2, 5, 9, 3, 2)
    _, dy, dv = backward(kernel_product(*inputs, key_mask=mask), inputs)
    hidden = ~mask[:, None, :, None].expand(-1, 2, -1, -1)
    for grad in (dy, dv):
        assert (grad[hidden.expand_as(grad)] == 0).all()


def test_a_masked_key_may_overflow_the_softmax_kernel() -> None:
    x, y = torch.full((1, 1, 3, 4), 100.0), torch.zeros(1, 1, 4, 4)
    y[:, :, -1] = 100
    inputs = x.requires_grad_(), y.requires_grad_(), torch.ones(1, 1, 4, 2, requires_grad=True)
    out = kernel_product(*inputs, kernel="softmax", key_mask=torch.tensor([[True, True, True, False]]))
    torch.testing.assert_close(out, torch.full_like(out, 3))
    assert all(g.isfinite().all() for g in backward(out, inputs))


def test_only_inputs_that_require_gradients_get_them() -> None:
    x, y, v = (t.detach() for t in draw(1, 4, 5, 3, 2))
    kernel_product(x, y, v.requires_grad_()).sum().backward()
    assert v.grad is not None
    assert x.grad is None
    assert y.grad is None
    assert not kernel_product(x, y, v.detach()).requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    inputs = tuple(t.detach().to(dtype) for t in draw(1, 40, 50, 8, 8, torch.float32))
    out = kernel_product(*inputs, scale=0.3)
    assert out.dtype == dtype
    torch.testing.assert_close(out, kernel_product(*(t.float() for t in inputs), scale=0.3).to(dtype))


@pytest.mark.parametrize("transposed", [0, 1, 2])
def test_strides_do_not_matter(transposed: int) -> None:
    inputs = [t.detach() for t in draw(2, 20, 30, 4, 4)]
    expected = kernel_product(*inputs)
    inputs[transposed] = inputs[transposed].mT.contiguous().mT
    torch.testing.assert_close(kernel_product(*inputs), expected)


@pytest.mark.parametrize("kernel", KERNELS.names())
@pytest.mark.parametrize(("length", "size"), [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("causal", [False, True])
def test_empty_sequences_give_empty_sums(kernel: str, length: int, size: int, causal: bool) -> None:
    inputs = draw(2, length, size, 3, 2)
    out = kernel_product(*inputs, kernel=kernel, is_causal=causal)
    assert torch.equal(out, torch.zeros(2, 2, length, 2, dtype=torch.float64))
    assert all((g == 0).all() for g in backward(out, inputs))


def test_an_empty_batch_gives_an_empty_batch() -> None:
    inputs = draw(0, 4, 5, 3, 2)
    out = kernel_product(*inputs)
    assert out.shape == (0, 2, 4, 2)
    assert backward(out, inputs)[0].shape == (0, 2, 4, 3)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("kernel", KERNELS.names())
@pytest.mark.parametrize("budget", [0, KEEP_ALL])
def test_backward_uses_the_dropout_of_forward(kernel: str, budget: int) -> None:
    # 65 columns make two blocks, each with its own dropout.
    product = dropped(0.4, kernel=kernel, scale=0.5, memory_budget=budget)
    assert torch.autograd.gradcheck(product, draw(1, 2, 65, 2, 1), fast_mode=True)


@pytest.mark.usefixtures("small_blocks")
def test_dropout_multiplies_the_kernel_matrix() -> None:
    x, y, v = (t[:, :1].float() for t in draw(1, 20, 70, 3, 2))
    factor = dropout_matrix(20, 70, 0.3)
    matrix = KERNELS.get("gaussian").matrix(x, y)
    torch.testing.assert_close(dropped(0.3)(x, y, v), (matrix * factor) @ v)


@pytest.mark.usefixtures("small_blocks")
def test_dropout_keeps_its_share_and_scales_it_up() -> None:
    factor = dropout_matrix(200, 300, 0.3)
    kept = factor != 0
    torch.testing.assert_close(factor[kept], torch.full_like(factor[kept], 1 / 0.7))
    # 60,000 entries: the standard deviation of the share is 0.0019.
    assert abs(float(kept.double().mean()) - 0.7) < 0.01


@pytest.mark.usefixtures("small_blocks")
def test_dropout_differs_between_blocks() -> None:
    kept = (dropout_matrix(64, 128, 0.5)[0, 0] != 0).double()
    strips = kept.view(8, 8, 2, 64).permute(0, 2, 1, 3).flatten(0, 1).flatten(1)
    correlations = torch.corrcoef(strips) - torch.eye(len(strips), dtype=torch.float64)
    # 512 numbers per block: five standard deviations are 0.22.
    assert correlations.abs().max() < 0.25


def test_mean_over_many_dropouts_is_the_undropped_product() -> None:
    x, y, v = (t.detach().expand(500, -1, -1, -1) for t in draw(1, 4, 5, 3, 2))
    mean = torch.stack([dropped(0.4, seed)(x, y, v).mean(0) for seed in range(40)]).mean(0)
    matrix = KERNELS.get("gaussian").matrix(x[0], y[0])
    # Each entry varies by p / (1 - p) of its square; 20,000 draws, five standard deviations.
    bound = 5 * ((0.4 / 0.6) * matrix.square() @ v[0].square() / 20_000).sqrt()
    assert ((mean - matrix @ v[0]).abs() < bound).all()


def test_dropout_depends_on_the_generator() -> None:
    inputs = draw(1, 6, 7, 3, 2)
    assert torch.equal(dropped(0.5, seed=1)(*inputs), dropped(0.5, seed=1)(*inputs))
    assert not torch.equal(dropped(0.5, seed=1)(*inputs), dropped(0.5, seed=2)(*inputs))
    shared = generator()
    assert not torch.equal(*(kernel_product(*inputs, dropout_p=0.5, generator=shared) for _ in range(2)))


def test_without_a_generator_dropout_follows_the_global_seed() -> None:
    inputs = draw(1, 6, 7, 3, 2)
    torch.manual_seed(8)
    first = kernel_product(*inputs, dropout_p=0.5)
    torch.manual_seed(8)
    assert torch.equal(kernel_product(*inputs, dropout_p=0.5), first)


def test_without_dropout_no_random_number_is_drawn() -> None:
    before = torch.get_rng_state()
    x = torch.linspace(-1, 1, 24).view(1, 1, 8, 3)
    kernel_product(x, x, x)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kernel", ["gaussian", "laplacian"])
def test_no_tensor_of_the_size_of_the_kernel_matrix_appears(kernel: str) -> None:
    length = 4096
    inputs = tuple(torch.randn(1, 1, length, 4, requires_grad=True) for _ in range(3))
    with LargestStorage() as largest:
        kernel_product(*inputs, kernel=kernel, scale=0.5).sum().backward()
    assert largest.bytes <= products.BLOCK_ELEMENTS * 4
    assert largest.bytes < length * length * 4 / 16


def saved_bytes(budget: int) -> int:
    """Bytes that the product of 200 by 300 points stores for its backward pass."""
    held = 0

    def pack(x: Tensor) -> Tensor:
        nonlocal held
        held += x.numel() * x.element_size()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        kernel_product(*draw(1, 200, 300, 4, 4, torch.float32), memory_budget=budget)
    return held


def test_blocks_are_stored_if_they_fit_the_memory_budget() -> None:
    matrix = 2 * 200 * 300 * 4
    assert saved_bytes(matrix - 1) < matrix / 4
    assert saved_bytes(matrix) >= matrix
    assert saved_bytes(0) == saved_bytes(matrix - 1)


@pytest.mark.parametrize("count", [1, 8, 10**6])
@pytest.mark.parametrize(("rows", "columns"), [(0, 0), (0, 5), (1, 10**6), (10**6, 1), (128, 4096), (10**5, 10**5)])
def test_blocks_are_never_empty_and_leave_a_short_side_whole(count: int, rows: int, columns: int) -> None:
    height, width = block_shape(count, rows, columns)
    assert min(height, width) >= 1
    cut, short = (height, rows) if rows <= columns else (width, columns)
    assert cut == max(1, min(short, products.SHORT_SIDE))


def test_subtract_dots_in_pieces_agrees_with_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    grad, x, a, b = (torch.randn(2, 13, 3, dtype=torch.float64) for _ in range(4))
    expected = grad - 0.7 * (a * b).sum(-1, keepdim=True) * x
    monkeypatch.setattr(products, "BLOCK_ELEMENTS", 24)
    subtract_dots(grad, x, a, b, 0.7)
    torch.testing.assert_close(grad, expected)


X = torch.zeros(2, 3, 4, 5)
BAD = [
    ({"x": X[0]}, ShapeError, ("x must", "(B, H, n, P)", "(3, 4, 5)")),
    ({"y": X[:1]}, ShapeError, ("y must", "x's batch and heads (2, 3)", "(1, 3)")),
    ({"v": X[:, :1]}, ShapeError, ("v must", "x's batch and heads (2, 3)", "(2, 1)")),
    ({"y": X[..., :4]}, ShapeError, ("y must", "x's head dim 5", "4")),
    ({"v": X[:, :, :3]}, ShapeError, ("v must", "y's length 4", "3")),
    ({"v": X.double()}, InputError, ("v must", "x's dtype torch.float32", "torch.float64")),
    ({"y": X.to("meta")}, InputError, ("y must", "x's device cpu", "meta")),
    ({"x": X.long()}, InputError, ("x must", "float32", "torch.int64")),
    ({"v": [1.0]}, InputError, ("v must", "tensor", "list")),
    ({"x": X[..., :0], "y": X[..., :0]}, ShapeError, ("x must", "at least one feature", "(2, 3, 4, 0)")),
    ({"key_mask": torch.ones(2, 5).bool()}, MaskError, ("key_mask must", "(2, 4)", "(2, 5)")),
    ({"key_mask": torch.ones(2, 4)}, MaskError, ("key_mask must", "bool", "torch.float32", "key_mask.bool()")),
    ({"kernel": "rbf"}, UnknownNameError, ("kernel", "gaussian", "'rbf'")),
    ({"scale": -1.0}, InputError, ("scale must", "above 0", "-1.0")),
    ({"scale": float("nan")}, InputError, ("scale must", "finite", "nan")),
    ({"dropout_p": 1.0}, InputError, ("dropout_p must", "[0, 1)", "1.0")),
    ({"dropout_p": -0.1}, InputError, ("dropout_p must", "[0, 1)", "-0.1")),
    ({"memory_budget": -1}, InputError, ("memory_budget must", "at least 0", "-1")),
    ({"memory_budget": None}, InputError, ("memory_budget must", "integer", "None")),
]


@pytest.mark.parametrize(("change", "error", "words"), BAD)
def test_bad_input_is_refused(change: dict[str, object], error: type[Exception], words: tuple[str, ...]) -> None:
    with refused(error, *words):
        kernel_product(**{"x": X, "y": X, "v": X, **change})  # type: ignore[arg-type]


# torch's tracer warns about its own code.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("memory_budget", [0, 2**25])
def test_dropout_compiles_to_one_graph(memory_budget: int) -> None:
    def product(x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        return kernel_product(x, y, v, scale=0.3, dropout_p=0.4, memory_budget=memory_budget)

    compiled = torch.compile(product, backend="aot_eager", fullgraph=True)
    q, k, v = draw(1, 30, 40, 8, 40)
    # With v = I the output is the kernel matrix after dropout, and its product with any v uses the same entries.
    identity = torch.eye(40, dtype=q.dtype).expand(1, 2, -1, -1)
    torch.manual_seed(1)
    matrix = compiled(q, k, identity).detach()
    torch.manual_seed(1)
    out = compiled(q, k, v)
    torch.testing.assert_close(out, matrix @ v)
    assert 0.3 < float((matrix == 0).float().mean()) < 0.5
    grad = torch.randn_like(out)
    torch.testing.assert_close(backward(out, (v,), grad)[0], matrix.mT @ grad)
    assert not torch.equal(compiled(q, k, v), out)
