"""The check before any timing: each contender against a dense float64 computation, forward and backward."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from skyformer.attention import list_attentions
from skyformer.errors import SkyformerError
from skyformer.functional import GAMMA, skyformer_attention
from skyformer.landmarks import StratifiedSampler
from skyformer.landmarks.base import Candidates
from skyformer.ops.kernels import GaussianKernel
from skyformer.ops.products import dense_kernel_product
from skyformer.studies.benchmarks import authors
from skyformer.studies.benchmarks.authors import AuthorsSkyformer
from skyformer.studies.benchmarks.contenders import Contender, Shape, Workload

TOLERANCE = {"float32": 1e-4, "float64": 1e-9, "bfloat16": 5e-2, "float16": 2e-2}

ITERATION_TOLERANCE = 0.05
"""For the authors' code: four times the 1.3 % that were found at 768 tokens of the benchmark's inputs."""


class IncorrectError(SkyformerError):
    """A contender gave wrong numbers, so its speed is not measured."""


def check_contender(contender: Contender, shape: Shape) -> None:
    """Raise `IncorrectError` if the contender is wrong on a short sequence."""
    short = contender.short(shape)
    work = Workload(contender, short)
    torch.manual_seed(short.seed)
    out = work.forward()
    out.backward(work.grad)
    if out.shape != work.grad.shape or not out.isfinite().all():
        raise IncorrectError(f"{contender.name}: the output has a wrong shape {tuple(out.shape)} or is not finite")
    if any(x.grad is None or not x.grad.isfinite().all() for x in work.inputs if contender.name != "reformer"):
        raise IncorrectError(f"{contender.name}: a gradient is missing or not finite")
    if contender.name in REFERENCES:
        _compare(contender.name, short, work, out)
    elif isinstance(work.run, AuthorsSkyformer):
        _compare_on_its_rows(contender.name, work.run, work, out)
    elif contender.name in list_attentions():
        _compare_with_itself(contender.name, short, work)


def _compare(name: str, shape: Shape, work: Workload, out: Tensor) -> None:
    inputs = [x.detach().double().requires_grad_() for x in work.inputs]
    torch.manual_seed(shape.seed)
    expected = REFERENCES[name](*inputs, shape)
    gradients = torch.autograd.grad(expected, inputs, work.grad.double())
    actual = [out, *(x.grad for x in work.inputs if x.grad is not None)]
    for what, a, e in zip(("output", "dq", "dk", "dv"), actual, (expected, *gradients), strict=True):
        error = relative_error(a, e)
        if not error < TOLERANCE[shape.dtype]:
            raise IncorrectError(f"{name}: {what} differs from a dense float64 computation by {error:.1e}")


@torch.no_grad()
def _compare_on_its_rows(name: str, module: AuthorsSkyformer, work: Workload, out: Tensor) -> None:
    """The authors' code inverts by six steps of an iteration, so it comes only near the dense computation."""
    q, k, v = (x.detach().double() for x in work.inputs)
    error = relative_error(out, _dense_on_rows(q, k, v, module.rows[:, None], authors.GAMMA))
    if not error < ITERATION_TOLERANCE:
        raise IncorrectError(f"{name}: output differs from a dense float64 computation by {error:.1e}")


@torch.no_grad()
def _compare_with_itself(name: str, shape: Shape, work: Workload) -> None:
    """For mechanisms whose dense references are in the tests: compare with the same module in float64."""
    assert isinstance(work.run, nn.Module)
    low, high = work.run.eval(), copy.deepcopy(work.run).double()
    error = relative_error(low(*work.inputs), high(*(x.double() for x in work.inputs)))
    if not error < 10 * TOLERANCE[shape.dtype]:
        raise IncorrectError(f"{name}: differs from the same module in float64 by {error:.1e}")


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected| in the Frobenius norm."""
    return float((actual.detach().double() - expected.detach()).norm() / expected.detach().norm())


def _dense_softmax(q: Tensor, k: Tensor, v: Tensor, shape: Shape) -> Tensor:
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v


def _dense_kernelized(q: Tensor, k: Tensor, v: Tensor, shape: Shape) -> Tensor:
    return dense_kernel_product(q, k, v, scale=q.shape[-1] ** -0.5)


def _dense_skyformer(q: Tensor, k: Tensor, v: Tensor, shape: Shape) -> Tensor:
    """Equations (4) to (6) with every matrix written out, on the landmarks that the fast form draws from this seed."""
    if q.shape[2] + k.shape[2] <= shape.landmarks:
        return _dense_kernelized(q, k, v, shape)
    return _dense_on_rows(q, k, v, _drawn_rows(q, k, shape), GAMMA)


def _dense_on_rows(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, gamma: float) -> Tensor:
    """Skyformer with the landmarks `rows` (B, 1, d) of [Q; K]."""
    both = torch.cat([q, k], 2)
    landmarks = both.gather(2, rows[..., None].expand(-1, q.shape[1], -1, q.shape[-1]))
    kappa, scale = GaussianKernel(), q.shape[-1] ** -0.5
    identity = torch.eye(rows.shape[-1], dtype=q.dtype, device=q.device)
    middle = kappa.matrix(landmarks, landmarks, scale) + gamma * identity
    thin = torch.linalg.solve(middle, kappa.matrix(landmarks, k, scale) @ v)
    return kappa.matrix(q, landmarks, scale) @ thin


def _drawn_rows(q: Tensor, k: Tensor, shape: Shape) -> Tensor:
    seen: list[Tensor] = []

    def spy(candidates: Candidates, count: int, generator: torch.Generator | None) -> Tensor:
        seen.append(StratifiedSampler()(candidates, count, generator))
        return seen[-1]

    with torch.no_grad():
        skyformer_attention(q, k, k, num_landmarks=shape.landmarks, landmarks=spy)
    return seen[0][:, None]


REFERENCES: dict[str, Callable[..., Tensor]] = {
    "sdpa": _dense_softmax,
    "xformers": _dense_softmax,
    "kernelized": _dense_kernelized,
    "skyformer": _dense_skyformer,
}
