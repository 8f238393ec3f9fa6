"""The d x d solve: both solvers against torch, their implicit gradient, jitter, and the paper's Lemma 2."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from skyformer.errors import InputError, JitterWarning, SolveError, UnknownNameError
from skyformer.ops.kernels import KERNELS, GaussianKernel, Kernel
from skyformer.ops.solve import (
    SOLVERS,
    CholeskySolver,
    SchulzSolver,
    Solver,
    _inverse_factor,
    _inverse_factor_operator,
    get_solver,
    inverse_cholesky,
    regularized_solve,
    schulz_inverse,
    schulz_precondition,
    schulz_residual,
)
from tests.helpers import assert_same_with_gradients, refused

ACCURATE = [CholeskySolver(), SchulzSolver(16)]


def kernel_gram(
    size: int, batch: tuple[int, ...] = (2, 2), kernel: Kernel | None = None, std: float = 1.0, seed: int = 0
) -> Tensor:
    """M = kappa(W, W) of random landmarks, (*batch, d, d)."""
    generator = torch.Generator().manual_seed(seed)
    w = std * torch.randn(*batch, size, 4, dtype=torch.float64, generator=generator)
    return (kernel or GaussianKernel()).matrix(w, w, 0.5)


def with_eigenvalues(*values: float) -> Tensor:
    """A symmetric matrix with these eigenvalues."""
    generator = torch.Generator().manual_seed(1)
    basis, _ = torch.linalg.qr(torch.randn(len(values), len(values), dtype=torch.float64, generator=generator))
    matrix = basis * torch.tensor(values, dtype=torch.float64) @ basis.mT
    return (matrix + matrix.mT) / 2


GOOD = with_eigenvalues(1.0, 2.0, 3.0)
BARELY_BAD = with_eigenvalues(-1e-8, 2.0, 3.0)
WORSE = with_eigenvalues(-1e-4, 2.0, 3.0)
HOPELESS = with_eigenvalues(-1.0, 2.0, 3.0)


@pytest.mark.parametrize("solver", ACCURATE, ids=str)
@pytest.mark.parametrize(("gamma", "size"), [(1e-2, 1), (1e-2, 24), (0.1, 5), (1.0, 24)])
def test_agrees_with_torch_forward_and_backward(solver: Solver, gamma: float, size: int) -> None:
    gram, rhs = kernel_gram(size).requires_grad_(), torch.randn(2, 2, size, 3, dtype=torch.float64).requires_grad_()
    identity = torch.eye(size, dtype=torch.float64)
    assert_same_with_gradients(
        lambda m, r: regularized_solve(m, r, gamma, solver),
        lambda m, r: torch.linalg.solve(m + gamma * identity, r),
        (gram, rhs),
        rtol=1e-7,
        atol=1e-8,
    )


@pytest.mark.parametrize("solver", ACCURATE, ids=str)
def test_implicit_gradient_agrees_with_finite_differences(solver: Solver) -> None:
    root = torch.rand(4, 4, dtype=torch.float64, requires_grad=True)
    rhs = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, r: regularized_solve(a @ a.mT, r, 0.5, solver), (root, rhs))


@pytest.mark.parametrize("solver", ACCURATE, ids=str)
def test_factorised_once_for_both_passes(solver: Solver, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    prepare = type(solver).prepare
    monkeypatch.setattr(type(solver), "prepare", lambda self, matrix: calls.append(1) or prepare(self, matrix))
    gram = kernel_gram(5).requires_grad_()
    regularized_solve(gram, torch.ones(2, 2, 5, 1, dtype=torch.float64), 0.1, solver).sum().backward()
    assert len(calls) == 1


@pytest.mark.parametrize("solver", SOLVERS.names())
def test_a_result_does_not_depend_on_the_rest_of_the_batch(solver: str) -> None:
    # Matrices of other magnitudes would change an iteration that is scaled over the whole batch.
    gram = torch.cat([kernel_gram(8, (1,)), 50 * kernel_gram(8, (1,), seed=1), kernel_gram(8, (1,), std=0.01)])
    rhs = torch.randn(3, 8, 2, dtype=torch.float64)
    together = regularized_solve(gram, rhs, 0.1, solver)
    for b in range(3):
        torch.testing.assert_close(together[b], regularized_solve(gram[b], rhs[b], 0.1, solver))


@pytest.mark.parametrize("size", [1, 31, 32, 33, 67, 128])
def test_the_inverse_factor_is_that_of_cholesky(size: int) -> None:
    matrix = kernel_gram(size) + 0.1 * torch.eye(size, dtype=torch.float64)
    inverse, failed = inverse_cholesky(matrix)
    assert not failed.any()
    torch.testing.assert_close(inverse, torch.linalg.inv(torch.linalg.cholesky(matrix)))


@pytest.mark.parametrize("row", [0, 20, 40, 69])
def test_an_indefinite_matrix_is_found_for_every_position_of_the_negative_entry(row: int) -> None:
    matrices = torch.eye(70).repeat(2, 3, 1, 1)
    matrices[1, 2, row, row] = -1
    _, failed = inverse_cholesky(matrices)
    assert failed.nonzero().tolist() == [[1, 2]]


def test_matrices_that_lapack_can_factorise_get_no_jitter() -> None:
    generator = torch.Generator().manual_seed(0)
    points = 0.3 * torch.randn(200, 96, 4, dtype=torch.float64, generator=generator)
    matrices = GaussianKernel().matrix(points, points, 0.5).float() + 3e-7 * torch.eye(96)
    info = torch.linalg.cholesky_ex(matrices).info
    matrices = matrices[info == 0]
    assert inverse_cholesky(matrices)[1].any(), "no matrix needs a factorisation as a whole"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert CholeskySolver().prepare(matrices).isfinite().all()


@pytest.mark.parametrize("gamma", [1e-4, 1e-2])
def test_in_float32_the_inverse_factor_is_nearly_as_exact_as_substitution(gamma: float) -> None:
    gram, rhs = kernel_gram(128, std=0.5), torch.randn(2, 2, 128, 8, dtype=torch.float64)
    matrix = gram + gamma * torch.eye(128, dtype=torch.float64)
    exact = torch.linalg.solve(matrix, rhs)
    solver, single = CholeskySolver(), matrix.float()
    by_inverse = solver.apply(solver.prepare(single), rhs.float())
    by_substitution = torch.cholesky_solve(rhs.float(), torch.linalg.cholesky(single))
    assert (by_inverse - exact).norm() < 10 * (by_substitution - exact).norm()


def test_positive_definite_matrices_get_no_jitter() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        inverse = CholeskySolver().prepare(GOOD)
    torch.testing.assert_close(inverse @ GOOD @ inverse.mT, torch.eye(3, dtype=torch.float64))


def test_jitter_gives_a_warning() -> None:
    with pytest.warns(JitterWarning, match="1 of 2 matrices .* larger gamma"):
        CholeskySolver().prepare(torch.stack([GOOD, BARELY_BAD]))


def test_each_matrix_gets_the_jitter_it_needs_and_no_more() -> None:
    matrices = torch.stack([GOOD, BARELY_BAD, WORSE])
    with pytest.warns(JitterWarning):
        factor = torch.linalg.inv(CholeskySolver().prepare(matrices))
    added = (factor @ factor.mT - matrices).diagonal(dim1=-2, dim2=-1)
    mean = matrices.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)
    expected = torch.tensor([[0.0], [1e-6], [1e-4]], dtype=torch.float64) * mean
    torch.testing.assert_close(added, expected.expand(-1, 3), rtol=1e-6, atol=1e-12)


def test_more_jitter_is_not_tried_than_asked_for() -> None:
    with pytest.raises(SolveError):
        CholeskySolver(retries=2).prepare(WORSE)
    with pytest.raises(SolveError):
        CholeskySolver(retries=0).prepare(BARELY_BAD)
    with pytest.warns(JitterWarning):
        CholeskySolver(jitter=1e-4, retries=1).prepare(WORSE)


@pytest.mark.filterwarnings("ignore::skyformer.errors.JitterWarning")
@pytest.mark.parametrize(
    "matrices", [torch.stack([GOOD, GOOD]), torch.stack([GOOD, BARELY_BAD]), GOOD[:1, :1], kernel_gram(40)]
)
def test_the_fake_implementation_for_the_compiler_agrees(matrices: Tensor) -> None:
    # The strides too, which generated code checks.
    torch.library.opcheck(_inverse_factor_operator, (matrices, 1e-6, 4), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.filterwarnings("ignore::skyformer.errors.JitterWarning")
@pytest.mark.parametrize("matrices", [torch.stack([GOOD, BARELY_BAD]), kernel_gram(40)])
def test_the_operator_returns_what_the_function_returns(matrices: Tensor) -> None:
    by_operator, by_function = (each(matrices, 1e-6, 4) for each in (_inverse_factor_operator, _inverse_factor))
    torch.testing.assert_close(by_operator, by_function, rtol=0, atol=0)
    assert by_operator.stride() == by_function.stride()


@pytest.mark.filterwarnings("ignore::skyformer.errors.JitterWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_a_traced_program_still_retries() -> None:
    solver = CholeskySolver()
    traced = torch.jit.trace(solver.prepare, (torch.stack([GOOD, GOOD]),), check_trace=False)
    needs_jitter = torch.stack([GOOD, BARELY_BAD])
    torch.testing.assert_close(traced(needs_jitter), solver.prepare(needs_jitter))


def test_an_indefinite_matrix_is_an_error() -> None:
    with refused(SolveError, "1 of 3 matrices of size 3", "1e-01", "gamma"):
        CholeskySolver().prepare(torch.stack([HOPELESS, GOOD, BARELY_BAD]))


def test_nan_is_an_error_that_asks_about_the_inputs() -> None:
    matrix = GOOD.clone()
    matrix[1, 1] = float("nan")
    with refused(SolveError, "are the inputs finite?"):
        CholeskySolver().prepare(matrix)


@pytest.mark.parametrize("kernel", KERNELS.names())
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 20),
    gamma=st.sampled_from([1e-4, 1e-2, 0.1, 1.0]),
    std=st.sampled_from([0.0, 0.1, 1.0, 3.0]),
)
def test_lemma_2_preconditioned_spectrum_lies_between_zero_and_one(
    kernel: str, seed: int, size: int, gamma: float, std: float
) -> None:
    gram = kernel_gram(size, (), KERNELS.get(kernel), std, seed)
    normalised, _ = schulz_precondition(gram + gamma * torch.eye(size, dtype=torch.float64))
    torch.testing.assert_close(normalised, normalised.mT)
    eigenvalues = torch.linalg.eigvalsh(normalised)
    assert eigenvalues.min() > 0
    # The eigenvalue of D^(1/2) 1 is one.
    assert eigenvalues.max() <= 1 + 1e-9


def test_preconditioner_is_the_row_sums_of_the_regularised_matrix() -> None:
    matrix = kernel_gram(6) + 0.1 * torch.eye(6, dtype=torch.float64)
    normalised, root = schulz_precondition(matrix)
    D = torch.diag_embed(matrix.sum(-1) ** -0.5)
    torch.testing.assert_close(normalised, D @ matrix @ D)
    torch.testing.assert_close(root.squeeze(-1), matrix.sum(-1).sqrt())


def test_one_step_is_the_13_15_7_iteration() -> None:
    normalised, _ = schulz_precondition(kernel_gram(6, ()) + 0.1 * torch.eye(6, dtype=torch.float64))
    identity = torch.eye(6, dtype=torch.float64)
    residual = identity - normalised
    cube = residual @ residual @ residual
    torch.testing.assert_close(identity - normalised @ schulz_inverse(normalised, 1), (3 * cube + cube @ residual) / 4)


def test_residual_falls_with_every_iteration_for_every_matrix() -> None:
    matrix = kernel_gram(24) + 0.05 * torch.eye(24, dtype=torch.float64)
    residuals = torch.stack([schulz_residual(matrix, count) for count in range(1, 10)])
    assert residuals.shape == (9, 2, 2)
    rounding = 1e-12
    assert ((residuals[1:] < residuals[:-1]) | (residuals[1:] < rounding)).all()
    assert (residuals[-1] < rounding).all()


def test_schulz_inverse_is_symmetric() -> None:
    normalised, _ = schulz_precondition(kernel_gram(24).float() + 0.01 * torch.eye(24))
    inverse = schulz_inverse(normalised, 3)
    assert torch.equal(inverse, inverse.mT)


@pytest.mark.parametrize("solver", SOLVERS.names())
def test_autocast_stays_outside(solver: str) -> None:
    gram, rhs = kernel_gram(8).float(), torch.randn(2, 2, 8, 3)
    expected = regularized_solve(gram, rhs, 0.1, solver)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(regularized_solve(gram, rhs, 0.1, solver), expected)


@pytest.mark.parametrize("gamma", [0.0, -1.0, float("nan"), float("inf"), "0.1", None])
def test_gamma_must_be_positive(gamma: object) -> None:
    with refused(InputError, "gamma must", "above 0", repr(gamma)):
        regularized_solve(GOOD, GOOD, gamma)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["lu", None, ["cholesky"]])
def test_unknown_solver_lists_the_known_ones(name: object) -> None:
    with refused(UnknownNameError, "solver", repr(name), *SOLVERS.names()):
        get_solver(name)  # type: ignore[arg-type]


def test_bad_settings_are_refused() -> None:
    with refused(InputError, "num_iterations", "at least 1", "0"):
        SchulzSolver(0)
    with refused(InputError, "jitter", "above 0", "0.0"):
        CholeskySolver(jitter=0.0)
    with refused(InputError, "retries", "at least 0", "-1"):
        CholeskySolver(retries=-1)
