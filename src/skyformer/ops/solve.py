"""The solve between Skyformer's two products, u = (M + gamma I)^-1 r: by Cholesky or the paper's Schulz iteration.

Both are differentiated implicitly, not through their steps: with u = A^-1 r and A symmetric,

    g = A^-1 du,        dr = g,        dA = -g u^T

so the factorisation of the forward pass is used again in the backward pass.
"""

from __future__ import annotations

import abc
import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from skyformer.checks import check_at_least, check_positive
from skyformer.errors import JitterWarning, SolveError
from skyformer.ops.differentiable import call, differentiated_again
from skyformer.ops.precision import autocast_off, without_autocast
from skyformer.ops.tracing import may_look_at_values
from skyformer.registry import Registry

GAMMA = 1e-2
"""Default regularisation of the kernel matrix of the landmarks; the paper's experiments use 0.1."""


@dataclass(frozen=True)
class Solver(abc.ABC):
    """How a symmetric positive definite A (..., d, d) is inverted: prepared once, applied in both passes."""

    name: ClassVar[str]

    @abc.abstractmethod
    def prepare(self, matrix: Tensor) -> Tensor:
        """The tensor that `apply` needs, computed from A."""

    @abc.abstractmethod
    def apply(self, prepared: Tensor, rhs: Tensor) -> Tensor:
        """A^-1 rhs."""


@dataclass(frozen=True)
class CholeskySolver(Solver):
    """A = L L^T, stored as L^-1. If A is indefinite because of rounding, its diagonal is raised by `jitter` times its
    mean, then by ten times as much, and so on, at most `retries` times. A `JitterWarning` is issued when one of these
    attempts succeeds, a `SolveError` is raised if none does. On an accelerator there is no warning, and the result of
    a matrix for which all attempts failed is NaN, because the host would have to wait for an error."""

    name = "cholesky"
    jitter: float = 1e-6
    retries: int = 6

    def __post_init__(self) -> None:
        check_positive("jitter", self.jitter)
        check_at_least("retries", self.retries, 0)

    def prepare(self, matrix: Tensor) -> Tensor:
        # Calling an operator takes about 20 microseconds longer, which matters for short sequences.
        function = _inverse_factor if may_look_at_values(matrix) else _inverse_factor_operator
        factor: Tensor = function(matrix, self.jitter, self.retries)
        return factor

    def apply(self, prepared: Tensor, rhs: Tensor) -> Tensor:
        return prepared.mT @ (prepared @ rhs)


@dataclass(frozen=True)
class SchulzSolver(Solver):
    """The paper's section 4.4, which uses matrix products only. Each matrix is preconditioned by its own row sums
    D = diag(A 1), so that the spectrum of N = D^(-1/2) A D^(-1/2) lies in (0, 1], and inverted by

        X <- X (13 I - N X (15 I - N X (7 I - N X))) / 4,        X_0 = I

    which turns the residual R = I - N X into (3 R^3 + R^4) / 4 in every step. The gradient uses the approximate inverse
    in place of the true one, so choose enough steps to make `schulz_residual` small."""

    name = "schulz"
    num_iterations: int = 8

    def __post_init__(self) -> None:
        check_at_least("num_iterations", self.num_iterations, 1)

    def prepare(self, matrix: Tensor) -> Tensor:
        normalised, root = schulz_precondition(matrix)
        return schulz_inverse(normalised, self.num_iterations) / (root * root.mT)

    def apply(self, prepared: Tensor, rhs: Tensor) -> Tensor:
        return prepared @ rhs


SOLVERS: Registry[Solver] = Registry("solver")

for _solver in (CholeskySolver, SchulzSolver):
    SOLVERS.add(_solver.name, _solver())


def get_solver(solver: str | Solver) -> Solver:
    """The solver of this name with its default settings, or the given solver itself."""
    return solver if isinstance(solver, Solver) else SOLVERS.get(solver)


def regularized_solve(gram: Tensor, rhs: Tensor, gamma: float, solver: str | Solver = "cholesky") -> Tensor:
    """(M + gamma I)^-1 r for M (..., d, d), r (..., d, Pv) and gamma > 0."""
    check_positive("gamma", gamma)
    solver = get_solver(solver)
    with torch.no_grad(), autocast_off(gram.device.type):
        matrix = gram.detach().clone()
        matrix.diagonal(dim1=-2, dim2=-1).add_(gamma)
        if isinstance(solver, CholeskySolver) and gram.device.type != "cpu":
            prepared = inverse_factor_unseen(matrix, solver.jitter, solver.retries, gamma)
        else:
            prepared = solver.prepare(matrix)
    if torch.compiler.is_compiling():
        return _ImplicitSolve.apply(gram, rhs, prepared, solver)
    out: Tensor = call(_SolveWithTangents, gram, rhs, prepared, solver)
    return out


class _ImplicitSolve(torch.autograd.Function):
    """u = A^-1 r for what the solver prepared from A. Its gradients are solves with the same A."""

    generate_vmap_rule = True

    @staticmethod
    @without_autocast
    def forward(gram: Tensor, rhs: Tensor, prepared: Tensor, solver: Solver) -> Tensor:
        return solver.apply(prepared, rhs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        gram, _, prepared, ctx.solver = inputs
        ctx.save_for_backward(gram, prepared, output)
        ctx.save_for_forward(gram, prepared, output)

    @staticmethod
    @without_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gram, prepared, solution = ctx.saved_tensors
        if differentiated_again():
            g = call(_SolveWithTangents, gram, grad, prepared, ctx.solver)
        else:
            g = ctx.solver.apply(prepared, grad)
        return -g @ solution.mT, g, None, None


class _SolveWithTangents(_ImplicitSolve):
    """The same with a forward mode, which torch.compile does not support: du = A^-1 (dr - dA u)."""

    generate_vmap_rule = True

    @staticmethod
    @without_autocast
    def jvp(ctx: Any, dgram: Tensor | None, drhs: Tensor | None, *_: Any) -> Tensor:
        gram, prepared, solution = ctx.saved_tensors
        change = torch.zeros_like(solution) if drhs is None else drhs
        if dgram is not None:
            change = change - dgram @ solution
        out: Tensor = call(_SolveWithTangents, gram, change, prepared, ctx.solver)
        return out


def schulz_precondition(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """N = D^(-1/2) A D^(-1/2) with D = diag(A 1), and the root of D as a column (..., d, 1)."""
    root = matrix.sum(-1, keepdim=True).sqrt()
    return matrix / (root * root.mT), root


def schulz_inverse(matrix: Tensor, num_iterations: int) -> Tensor:
    """The 13-15-7 iteration for a symmetric N whose eigenvalues lie in (0, 2)."""
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    inverse = identity.expand_as(matrix)
    for _ in range(num_iterations):
        product = matrix @ inverse
        inverse = inverse @ (13 * identity - product @ (15 * identity - product @ (7 * identity - product))) / 4
    return (inverse + inverse.mT) / 2


def schulz_residual(matrix: Tensor, num_iterations: int) -> Tensor:
    """The Frobenius norm of I - N X for A (..., d, d) after that many steps, for each matrix."""
    normalised, _ = schulz_precondition(matrix)
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    return torch.linalg.matrix_norm(identity - normalised @ schulz_inverse(normalised, num_iterations))


_WHOLE_UP_TO = 32
"""Largest size that is left to LAPACK on the CPU, one matrix at a time; larger ones are built by batched products."""


def inverse_cholesky(matrix: Tensor, whole_up_to: int = _WHOLE_UP_TO) -> tuple[Tensor, Tensor]:
    """L^-1 for A = L L^T (..., d, d), and which matrices (...) are not positive definite. Computed by halves:

    A = [[A1, .], [A2, A3]]:    L1 L1^T = A1,    L2 = A2 L1^-T,    L3 L3^T = A3 - L2 L2^T

    L^-1 = [[L1^-1, 0], [-L3^-1 L2 L1^-1, L3^-1]]
    """
    size = matrix.shape[-1]
    # Three dimensions, which `torch.bmm` needs; `@` takes twice as long for small matrices.
    inverse, failed = _inverse_cholesky_by_halves(matrix.reshape(-1, size, size), whole_up_to)
    return inverse.reshape(matrix.shape), failed.reshape(matrix.shape[:-2])


def _inverse_cholesky_by_halves(matrix: Tensor, whole_up_to: int) -> tuple[Tensor, Tensor]:
    """The same for matrices (N, d, d)."""
    size = matrix.shape[-1]
    if size <= whole_up_to:
        factor, info = torch.linalg.cholesky_ex(matrix)
        identity = torch.eye(size, dtype=matrix.dtype, device=matrix.device)
        return torch.linalg.solve_triangular(factor, identity.expand_as(matrix), upper=False), info > 0
    half = size // 2
    first, first_failed = _inverse_cholesky_by_halves(matrix[:, :half, :half], whole_up_to)
    below = torch.bmm(matrix[:, half:, :half], first.mT)
    rest = torch.baddbmm(matrix[:, half:, half:], below, below.mT, alpha=-1)
    last, last_failed = _inverse_cholesky_by_halves(rest, whole_up_to)
    inverse = torch.zeros_like(matrix, memory_format=torch.contiguous_format)
    inverse[:, :half, :half] = first
    inverse[:, half:, half:] = last
    inverse[:, half:, :half] = torch.bmm(torch.bmm(last, below), first).neg_()
    return inverse, first_failed | last_failed


def _inverse_factor(matrix: Tensor, jitter: float, retries: int) -> Tensor:
    """`inverse_cholesky` with retries."""
    size = matrix.shape[-1]
    whole_up_to = _WHOLE_UP_TO if matrix.device.type == "cpu" else size
    factor, failed = inverse_cholesky(matrix, whole_up_to)
    if size > whole_up_to:
        # Factorising whole matrices tolerates a larger condition number than computing by halves.
        delicate = failed | _has_tiny_pivot(factor, matrix)
        if not bool(delicate.any()):
            return factor
        factor, failed = _replace_failed(factor, delicate, matrix)
    if not bool(failed.any()):
        return factor.contiguous()
    first_failed = failed
    mean_diagonal = matrix.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None].expand(matrix.shape[:-1])
    added = 0.0
    for attempt in range(retries):
        added = jitter * 10**attempt
        factor, failed = _replace_failed(factor, failed, matrix + torch.diag_embed(added * mean_diagonal))
        if not bool(failed.any()):
            warnings.warn(
                f"{int(first_failed.sum())} of {failed.numel()} matrices were not positive definite; up to "
                f"{added:.0e} of their mean diagonal was added. Use a larger gamma to avoid this",
                JitterWarning,
                stacklevel=2,
            )
            return factor.contiguous()
    raise SolveError(
        f"{int(failed.sum())} of {failed.numel()} matrices of size {size} are not positive definite, even after "
        f"{added:.0e} of their mean diagonal was added; are the inputs finite? "
        "If they are, use a larger gamma or solver='schulz'"
    )


@torch.library.custom_op("skyformer::inverse_factor", mutates_args=())
def _inverse_factor_operator(matrix: Tensor, jitter: float, retries: int) -> Tensor:
    """The same as one operator, because torch.compile cannot trace the retries."""
    return _inverse_factor(matrix, jitter, retries)


def inverse_factor_unseen(matrix: Tensor, jitter: float, retries: int, gamma: float) -> Tensor:
    """The same on an accelerator, where the host would have to wait to see which matrices failed.

    The eigenvalues of A = M + gamma I are at least gamma, up to the rounding error of M. If gamma is above that error,
    A is factorised once. Otherwise every attempt is made, and each matrix takes the first that succeeded; a matrix for
    which none did has a factor of NaN.
    """
    size = matrix.shape[-1]
    factor, failed = inverse_cholesky(matrix, size)
    if gamma <= 30 * size * torch.finfo(matrix.dtype).eps:
        mean_diagonal = matrix.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None].expand(matrix.shape[:-1])
        for attempt in range(retries):
            raised = matrix + torch.diag_embed(jitter * 10**attempt * mean_diagonal)
            factor, failed = _replace_failed(factor, failed, raised)
    return torch.where(failed[..., None, None], torch.nan, factor)


def _has_tiny_pivot(inverse: Tensor, matrix: Tensor) -> Tensor:
    """Which matrices (...) have a pivot L_ii^2 not far above the rounding error of their entries."""
    largest = inverse.diagonal(dim1=-2, dim2=-1).amax(-1).square()
    rounding = 30 * matrix.shape[-1] * torch.finfo(matrix.dtype).eps * matrix.diagonal(dim1=-2, dim2=-1).amax(-1)
    return largest * rounding > 1


def _replace_failed(factor: Tensor, failed: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Factorise whole matrices where it failed. The others are not changed, so no example depends on its batch."""
    whole, again = inverse_cholesky(matrix, matrix.shape[-1])
    return torch.where(failed[..., None, None], whole, factor), failed & again


@_inverse_factor_operator.register_fake
def _(matrix: Tensor, jitter: float, retries: int) -> Tensor:
    return torch.empty_like(matrix, memory_format=torch.contiguous_format)


@_inverse_factor_operator.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], matrix: Tensor, jitter: float, retries: int) -> tuple[Tensor, int]:
    assert in_dims[0] is not None
    return _inverse_factor_operator(matrix.movedim(in_dims[0], 0), jitter, retries), 0
