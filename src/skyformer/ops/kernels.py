"""Kernels: positive semidefinite functions kappa(x, y). Each is a small object with its formula and its slope.

A kernel depends on points only through three numbers, all multiplied by the same `scale` (so that kappa acts on
sqrt(scale) x and sqrt(scale) y, a bandwidth of scale^(-1/2)):

    inner  = scale <x, y>        half_x = scale |x|^2 / 2        half_y = scale |y|^2 / 2

A radial kernel is a function phi of s = scale |x - y|^2 = 2 (half_x + half_y - inner). Its gradient is

    d kappa / d x = scale psi(s) (y - x),        psi = -2 phi'

and `psi` is called the slope in the code. The softmax kernel exp(inner) is not radial but a function of `inner` alone:
d kappa / d x = scale psi y with psi = d kappa / d inner. Since inner enters s with the factor -2, the slope is
d kappa / d inner in both cases, which is how a kernel that defines its value only gets it.
"""

from __future__ import annotations

import abc
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from skyformer.errors import InputError, ShapeError
from skyformer.registry import Class, Registry


@dataclass(frozen=True)
class Kernel(abc.ABC):
    """kappa(x, y). A subclass defines the value, and may define the slope, where a formula is cheaper than autograd.

    A subclass is a frozen dataclass whose fields are its parameters, numbers that get no gradient. `register_kernel`
    makes it known by its `name`.
    """

    name: ClassVar[str]
    radial: ClassVar[bool] = True
    """Whether the value is a function of s alone; otherwise it is a function of `inner` alone."""
    slope_is_value: ClassVar[bool] = False
    """Whether psi equals kappa, as for the exponentials; the backward pass then needs one matrix instead of two."""

    @abc.abstractmethod
    def value(self, inner: Tensor, half_x: Tensor, half_y: Tensor) -> Tensor:
        """kappa from inner (..., a, b), half_x (..., a, 1) and half_y (..., 1, b). May overwrite `inner`."""

    def value_and_slope(self, inner: Tensor, half_x: Tensor, half_y: Tensor) -> tuple[Tensor, Tensor]:
        """kappa and psi = d kappa / d inner, both (..., a, b). May overwrite `inner`."""
        if self.slope_is_value:
            value = self.value(inner, half_x, half_y)
            return value, value
        # A copy, because `value` may overwrite its argument.
        value, pull_back, *_ = torch.func.vjp(lambda inner: self.value(inner.clone(), half_x, half_y), inner)
        return value, pull_back(torch.ones_like(value))[0]

    def value_at_zero(self, like: Tensor) -> Tensor:
        """kappa of a point and itself, (1,), for a radial kernel; in the dtype and on the device of `like`."""
        zero, half_x, half_y = torch.zeros(3, 1, 1, dtype=like.dtype, device=like.device)
        return self.value(zero, half_x, half_y)[0]

    def matrix(self, x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
        """The dense kernel matrix, x (..., a, P) and y (..., b, P) to (..., a, b); differentiable."""
        inner = scale * (x @ y.mT)
        return self.value(inner, half_norms(x, scale), half_norms(y, scale).mT)


EXPONENT_FLOOR = {torch.float64: -700.0, torch.float32: -80.0, torch.bfloat16: -80.0, torch.float16: -9.0}


def scale_of(x: Tensor, scale: float | None) -> float:
    """`scale`, or if it is None the default P ** -0.5 for x (..., P)."""
    return float(x.shape[-1] ** -0.5 if scale is None else scale)


def half_norms(x: Tensor, scale: float) -> Tensor:
    """scale |x|^2 / 2, x (..., n, P) to (..., n, 1), without a temporary tensor of the size of x."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() * (scale / 2)


@dataclass(frozen=True)
class GaussianKernel(Kernel):
    """exp(-s / 2): the standard Gaussian kernel of the paper."""

    name = "gaussian"
    slope_is_value = True

    def value(self, inner: Tensor, half_x: Tensor, half_y: Tensor) -> Tensor:
        # Rounding can push the exponent above zero, for large norms far above it. Below the floor the results are
        # denormal numbers, which are thirty times slower on a CPU.
        return inner.sub_(half_x).sub_(half_y).clamp_(min=EXPONENT_FLOOR[inner.dtype], max=0).exp_()

    def value_at_zero(self, like: Tensor) -> Tensor:
        return like.new_ones(1)


@dataclass(frozen=True)
class SoftmaxKernel(Kernel):
    """SM(x, y) = exp(scale <x, y>): the un-normalised attention score."""

    name = "softmax"
    radial = False
    slope_is_value = True

    def value(self, inner: Tensor, half_x: Tensor, half_y: Tensor) -> Tensor:
        return inner.exp_()


@dataclass(frozen=True)
class LaplacianKernel(Kernel):
    """exp(-sqrt(s)), in the Euclidean distance. Not differentiable at x = y, where the slope is set to zero."""

    name = "laplacian"

    def value(self, inner: Tensor, half_x: Tensor, half_y: Tensor) -> Tensor:
        return torch.exp(-_distance(inner, half_x, half_y))

    def value_and_slope(self, inner: Tensor, half_x: Tensor, half_y: Tensor) -> tuple[Tensor, Tensor]:
        distance = _distance(inner, half_x, half_y)
        value = torch.exp(-distance)
        return value, torch.where(distance > 0, value / distance, 0.0)


@dataclass(frozen=True)
class MaternKernel(Kernel):
    """Matern with nu = 3/2, (1 + r) exp(-r) at r = sqrt(3 s), or 5/2, (1 + r + r^2/3) exp(-r) at r = sqrt(5 s)."""

    name = "matern"
    nu: float = 1.5

    def __post_init__(self) -> None:
        if self.nu not in (1.5, 2.5):
            raise InputError(f"nu of the Matern kernel must be 1.5 or 2.5 (0.5 is 'laplacian'); got {self.nu!r}")

    def value(self, inner: Tensor, half_x: Tensor, half_y: Tensor) -> Tensor:
        return self._polynomial_and_slope(inner, half_x, half_y)[0]

    def value_and_slope(self, inner: Tensor, half_x: Tensor, half_y: Tensor) -> tuple[Tensor, Tensor]:
        return self._polynomial_and_slope(inner, half_x, half_y)

    def _polynomial_and_slope(self, inner: Tensor, half_x: Tensor, half_y: Tensor) -> tuple[Tensor, Tensor]:
        r = _distance(inner, half_x, half_y) * math.sqrt(2 * self.nu)
        decay = torch.exp(-r)
        if self.nu == 1.5:
            return (1 + r) * decay, 3 * decay
        return (1 + r + r.square() / 3) * decay, (5 / 3) * (1 + r) * decay


@dataclass(frozen=True)
class RationalQuadraticKernel(Kernel):
    """(1 + s / (2 alpha))^(-alpha): a mixture of Gaussian kernels of all widths, with a heavy tail."""

    name = "rational_quadratic"
    alpha: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise InputError(f"alpha of the rational quadratic kernel must be above 0; got {self.alpha!r}")

    def value(self, inner: Tensor, half_x: Tensor, half_y: Tensor) -> Tensor:
        return self._base(inner, half_x, half_y).pow(-self.alpha)

    def value_and_slope(self, inner: Tensor, half_x: Tensor, half_y: Tensor) -> tuple[Tensor, Tensor]:
        base = self._base(inner, half_x, half_y)
        value = base.pow(-self.alpha)
        return value, value / base

    def _base(self, inner: Tensor, half_x: Tensor, half_y: Tensor) -> Tensor:
        return 1 + _squared_distance(inner, half_x, half_y) / (2 * self.alpha)


def _squared_distance(inner: Tensor, half_x: Tensor, half_y: Tensor) -> Tensor:
    return (2 * (half_x + half_y - inner)).clamp(min=0)


def _distance(inner: Tensor, half_x: Tensor, half_y: Tensor) -> Tensor:
    """sqrt(s) with a gradient of zero, not of infinity, where the points coincide."""
    squared = _squared_distance(inner, half_x, half_y)
    apart = squared > 0
    return torch.where(apart, torch.where(apart, squared, 1.0).sqrt(), 0.0)


_BUILTIN = (GaussianKernel, SoftmaxKernel, LaplacianKernel, MaternKernel, RationalQuadraticKernel)
_WITH_FAST_CODE = (GaussianKernel, SoftmaxKernel)
_checked: set[type[Kernel]] = set()

KERNELS: Registry[Kernel] = Registry(
    "kernel", base=Kernel, make=lambda cls: _verified(cls()), entry_points="skyformer.kernels"
)


def register_kernel(cls: Class) -> Class:
    """Class decorator: makes a `Kernel`, with its default parameters, known by its `name`."""
    return KERNELS.register(cls)


def list_kernels() -> list[str]:
    """The names of all kernels, in alphabetical order.

    >>> list_kernels()
    ['gaussian', 'laplacian', 'matern', 'rational_quadratic', 'softmax']
    """
    return KERNELS.names()


def get_kernel(kernel: str | Kernel) -> Kernel:
    """The kernel of this name with its default parameters, or the given kernel itself."""
    return _verified(kernel) if isinstance(kernel, Kernel) else KERNELS.get(kernel)


def _verified(kernel: Kernel) -> Kernel:
    """The kernel itself; the first of each class from outside is compared with autograd, so that no wrong slope goes
    unnoticed."""
    known = type(kernel) in _BUILTIN or type(kernel) in _checked
    if not known and not torch.compiler.is_compiling():
        # Another thread, because the modes that replace tensors (meta, fake) belong to one thread.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(_check_formulas, kernel).result()
        _checked.add(type(kernel))
    return kernel


def _check_formulas(kernel: Kernel) -> None:
    """Compares `radial`, `slope_is_value` and `value_and_slope` with the derivatives of `value` at some points."""
    who = type(kernel).__name__
    if isinstance(kernel, _WITH_FAST_CODE):
        raise InputError(
            f"{who} must inherit Kernel itself: the Gaussian and the softmax kernel have code of their own"
        )
    x, y = (
        torch.randn(1, n, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(n), device="cpu")
        for n in (4, 5)
    )
    inner, half_x, half_y = torch.broadcast_tensors(x @ y.mT, half_norms(x, 1.0), half_norms(y, 1.0).mT)

    def value_at(inner: Tensor, half_x: Tensor, half_y: Tensor) -> Tensor:
        return kernel.value(inner.clone(), half_x, half_y)

    value, pull_back, *_ = torch.func.vjp(value_at, inner, half_x, half_y)
    if value.shape != inner.shape:
        raise ShapeError(
            f"value of the kernel {who} must return one number for each pair, {tuple(inner.shape)}; "
            f"got {tuple(value.shape)}"
        )
    by_inner, *by_norms = pull_back(torch.ones_like(value))
    expected = -by_inner if kernel.radial else torch.zeros_like(by_inner)
    if not all(torch.allclose(each, expected, rtol=1e-6, atol=1e-9) for each in by_norms):
        raise InputError(
            f"the kernel {who} has radial = {kernel.radial}, so its value must be a function of "
            + (
                "s = 2 (half_x + half_y - inner) alone, which it is not; set radial = False for a function of inner"
                if kernel.radial
                else "inner alone, which it is not; leave radial = True for a function of the distance"
            )
        )
    given, slope = kernel.value_and_slope(inner.clone(), half_x, half_y)
    if not torch.allclose(given, value, rtol=1e-6, atol=1e-9):
        raise InputError(f"value_and_slope of the kernel {who} returns another value than its method value")
    if not torch.allclose(slope, by_inner, rtol=1e-6, atol=1e-9):
        cause = "slope_is_value = True" if kernel.slope_is_value else "its value_and_slope"
        raise InputError(
            f"the slope of the kernel {who} must be the derivative of value with respect to inner, but {cause} differs "
            "from it; leave it out to have the slope from autograd"
        )


for _kernel in _BUILTIN:
    register_kernel(_kernel)
