"""The check before any speed is printed: each contender against a dense float64 computation, forward and backward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from skyformer.attention import list_attentions
from skyformer.bench.contenders import Contender, Setting
from skyformer.bench.measure import relative_error
from skyformer.errors import SkyformerError
from skyformer.functional import GAMMA, skyformer_attention
from skyformer.ops.kernels import GaussianKernel
from skyformer.ops.products import dense_kernel_product

TOLERANCE = {"float32": 1e-4, "float64": 1e-9, "bfloat16": 5e-2, "float16": 2e-2}


class IncorrectError(SkyformerError):
    """A contender gave wrong numbers, so its speed is of no interest."""


def check_contender(contender: Contender, setting: Setting) -> None:
    """Raises `IncorrectError` unless the contender is right on a short sequence."""
    # Ours must take any length; other packages may ask for a multiple of the landmarks, or for many blocks.
    length = 301 if contender.requires is None else 8 * setting.landmarks
    short = replace(setting, length=min(setting.length, length), batch=1)
    job = contender.job(short)
    out = job.forward()
    out.backward(job.grad)
    if out.shape != job.grad.shape or not out.isfinite().all():
        raise IncorrectError(f"{contender.name}: output of shape {tuple(out.shape)} with a value that is not finite")
    if any(x.grad is None or not x.grad.isfinite().all() for x in job.inputs if contender.name != "reformer"):
        raise IncorrectError(f"{contender.name}: a gradient is missing or not finite")
    if contender.name in REFERENCES:
        _compare(contender, short, REFERENCES[contender.name])
    elif contender.name in list_attentions():
        _compare_with_itself(contender, short)


def _compare(contender: Contender, setting: Setting, reference: Callable[..., Tensor]) -> None:
    actual = _outputs(contender.build(setting), setting, getattr(torch, setting.dtype))
    expected = _outputs(lambda q, k, v: reference(q, k, v, setting), setting, torch.float64)
    for name, a, e in zip(("output", "dq", "dk", "dv"), actual, expected, strict=True):
        error = float((a.double() - e).norm() / e.norm())
        if not error < TOLERANCE[setting.dtype]:
            raise IncorrectError(f"{contender.name}: {name} is off by {error:.1e} of a dense float64 computation")


def _compare_with_itself(contender: Contender, setting: Setting) -> None:
    """For mechanisms whose dense references live in the tests: the same module in float64 must agree."""
    module = contender.build(setting)
    assert isinstance(module, nn.Module)
    low, high = module.eval(), copy.deepcopy(module).double()
    inputs = [x.detach() for x in setting.draw()]
    with torch.no_grad():
        error = relative_error(low(*inputs), high(*(x.double() for x in inputs)))
    if not error < 10 * TOLERANCE[setting.dtype]:
        raise IncorrectError(f"{contender.name}: off by {error:.1e} of itself in float64")


def _outputs(run: Callable[..., Tensor], setting: Setting, dtype: torch.dtype) -> list[Tensor]:
    inputs = [x.to(dtype).requires_grad_() for x in setting.draw()]
    torch.manual_seed(setting.seed)
    out = run(*inputs)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def _dense_softmax(q: Tensor, k: Tensor, v: Tensor, setting: Setting) -> Tensor:
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v


def _dense_kernelized(q: Tensor, k: Tensor, v: Tensor, setting: Setting) -> Tensor:
    return dense_kernel_product(q, k, v, scale=q.shape[-1] ** -0.5)


def _dense_skyformer(q: Tensor, k: Tensor, v: Tensor, setting: Setting) -> Tensor:
    """Equations (4) to (6) with every matrix written out, on the landmarks that the fast form draws from this seed."""
    if q.shape[2] + k.shape[2] <= setting.landmarks:
        return _dense_kernelized(q, k, v, setting)
    rows = _drawn_rows(q, k, setting)
    both = torch.cat([q, k], 2)
    landmarks = both.gather(2, rows[..., None].expand(-1, q.shape[1], -1, q.shape[-1]))
    kappa, scale = GaussianKernel(), q.shape[-1] ** -0.5
    middle = kappa.matrix(landmarks, landmarks, scale) + GAMMA * torch.eye(setting.landmarks, dtype=q.dtype)
    thin = torch.linalg.solve(middle, kappa.matrix(landmarks, k, scale) @ v)
    return kappa.matrix(q, landmarks, scale) @ thin


def _drawn_rows(q: Tensor, k: Tensor, setting: Setting) -> Tensor:
    seen: list[Tensor] = []

    def spy(candidates: object, count: int, generator: torch.Generator | None) -> Tensor:
        from skyformer.landmarks import StratifiedSampler

        seen.append(StratifiedSampler()(candidates, count, generator))  # type: ignore[arg-type]
        return seen[-1]

    with torch.no_grad():
        skyformer_attention(q, k, k, num_landmarks=setting.landmarks, landmarks=spy)
    return seen[0][:, None]


REFERENCES: dict[str, Callable[..., Tensor]] = {
    "sdpa": _dense_softmax,
    "kernelized": _dense_kernelized,
    "skyformer": _dense_skyformer,
}
