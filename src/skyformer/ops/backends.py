"""kernel_product, and which implementation computes it: the choice of the caller, and what runs where.

- "torch": the portable product in blocks, on every device and for every kernel.
- "fused": torch's fused attention for the CPU, for the Gaussian kernel.
- "triton": Triton kernels for GPUs, for the Gaussian kernel.
- "auto": "triton" on GPUs if Triton is installed, "fused" on CPUs, "torch" elsewhere.

A chosen backend computes what it can; other kernels, dropout, float64 and head dims beyond its limits take the portable
product. A backend that cannot run at all, on this machine or on the device of the tensors, is refused with the reason.
"""

from __future__ import annotations

import threading
from contextvars import ContextVar, Token
from dataclasses import dataclass
from importlib.util import find_spec
from types import TracebackType

import torch
from torch import Tensor

from skyformer.checks import (
    check_mask,
    check_memory_budget,
    check_positive,
    check_probability,
    check_query_key_value,
)
from skyformer.errors import UnknownNameError, UnsupportedError
from skyformer.ops.distances import accurate_points
from skyformer.ops.fused import FUSED_WORKS, fused_gaussian_attention, fused_gaussian_available
from skyformer.ops.kernels import GaussianKernel, Kernel, get_kernel
from skyformer.ops.precision import at_least_float32
from skyformer.ops.products import MEMORY_BUDGET, Plan, blocked_product
from skyformer.ops.softmax_dropout import gaussian_attention_with_dropout
from skyformer.ops.tracing import may_look_at_values, transforming
from skyformer.ops.triton_products import supports, triton_product

BACKENDS = ("auto", "torch", "fused", "triton")

_TRITON_INSTALLED = find_spec("triton") is not None
_GPUS = ("cuda", "xpu")


@dataclass(frozen=True)
class Choice:
    """A backend, and whether Triton may measure several launch settings at the first product of each shape."""

    backend: str = "auto"
    autotune: bool = False


_of_context: ContextVar[Choice | None] = ContextVar("skyformer_backend", default=None)
_in_force: list[use_backend] = []
_latest = Choice()
_lock = threading.Lock()


class use_backend:  # noqa: N801 (used like a function)
    """Choose the backend of all kernel products from here on, or, in a `with` statement, of its block.

    The choice belongs to the current thread (or asyncio task). Threads without a choice of their own, such as those in
    which torch runs backward passes, and `torch.compile`, which compiles again for another backend, use the latest.

    Args:
        backend: "auto", "torch", "fused" or "triton"; see `skyformer.ops.backends`.
        autotune: let Triton measure several launch settings once for each kind of product, instead of taking them from
            a table. The first steps then take many seconds.

    Example:
        >>> import torch, skyformer
        >>> query, key, value = torch.randn(3, 1, 4, 100, 32).unbind()
        >>> with skyformer.use_backend("torch"):
        ...     out = skyformer.kernelized_attention(query, key, value)
        >>> torch.allclose(out, skyformer.kernelized_attention(query, key, value), atol=1e-5)
        True
    """

    def __init__(self, backend: str, *, autotune: bool = False) -> None:
        _check_available(backend)
        self.choice = Choice(backend, autotune)
        self._entered = False
        self._token: Token[Choice | None] | None = _of_context.set(self.choice)
        with _lock:
            # A statement outside of `with` replaces the one before.
            _in_force[:] = [each for each in _in_force if each._entered]
            _follow(self)

    def __enter__(self) -> use_backend:
        if self._entered:
            raise UnsupportedError("this use_backend object is in a with statement already; make a second one")
        if self._token is None:  # It had a block before.
            self._token = _of_context.set(self.choice)
        with _lock:
            self._entered = True
            if self not in _in_force:
                _follow(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with _lock:
            _in_force.remove(self)
            _set_latest()
        token, self._token, self._entered = self._token, None, False
        assert token is not None
        _of_context.reset(token)


def _follow(choice: use_backend) -> None:
    _in_force.append(choice)
    _set_latest()


def _set_latest() -> None:
    global _latest
    _latest = _in_force[-1].choice if _in_force else Choice()


def _check_available(backend: str) -> None:
    if backend not in BACKENDS:
        raise UnknownNameError("backend", backend, BACKENDS)
    if backend == "triton" and not _TRITON_INSTALLED:
        raise UnsupportedError("backend 'triton' is not available: the package triton is not installed")
    if backend == "fused" and not FUSED_WORKS:
        raise UnsupportedError(
            f"backend 'fused' is not available: the fused CPU attention of torch {torch.__version__} failed its test"
        )


def chosen_backend() -> Choice:
    """What `use_backend` chose for this thread."""
    # torch.compile can guard a global variable, but not a context variable.
    if torch.compiler.is_compiling():
        return _latest
    return _of_context.get() or _latest


def backend_of(device: torch.device) -> str:
    """The backend for tensors on this device: "torch", "fused" or "triton"."""
    chosen = chosen_backend().backend
    if chosen == "fused" and device.type not in ("cpu", "meta"):
        raise UnsupportedError(f"backend 'fused' runs on CPU tensors only; got tensors on {device}")
    if chosen == "triton" and device.type not in ("cpu", "meta", *_GPUS):
        raise UnsupportedError(f"backend 'triton' runs on GPUs only; got tensors on {device}")
    if chosen != "auto":
        return chosen
    if device.type == "cpu":
        return "fused"
    return "triton" if _TRITON_INSTALLED and device.type in _GPUS else "torch"


def kernel_product(
    x: Tensor,
    y: Tensor,
    v: Tensor,
    *,
    kernel: str | Kernel = "gaussian",
    scale: float = 1.0,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    memory_budget: int = MEMORY_BUDGET,
) -> Tensor:
    """kappa(sqrt(scale) x, sqrt(scale) y) v in O((L + S) P) memory.

    Args:
        x: (B, H, L, P). y: (B, H, S, P). v: (B, H, S, Pv).
        kernel: a name ("gaussian", "laplacian", "matern", "rational_quadratic", "softmax") or a `Kernel`.
        key_mask: bool (B, S), True = use; the columns of the other keys are set to zero.
        is_causal: set entry (i, j) of the kernel matrix to zero if j > i.
        dropout_p: the probability of setting an entry of the kernel matrix to zero; the others are divided by 1 - p.
        generator: source of the dropout; by default torch's global generator.
        memory_budget: bytes of kernel values that the portable product may store for the backward pass instead of
            computing them again.

    Returns:
        (B, H, L, Pv), in the dtype of `x`; float16 and bfloat16 are computed in float32, on a GPU with Triton in
        products of their own dtype with float32 sums.

    Example:
        >>> import torch, skyformer
        >>> x, y, v = (torch.randn(1, 2, n, 8) for n in (100, 300, 300))
        >>> out = skyformer.kernel_product(x, y, v, kernel="gaussian")
        >>> out.shape
        torch.Size([1, 2, 100, 8])
        >>> matrix = torch.exp(-torch.cdist(x, y).square() / 2)
        >>> torch.allclose(out, matrix @ v, atol=1e-4)
        True
    """
    check_query_key_value(x, y, v, ("x", "y", "v"))
    key_mask = check_mask("key_mask", key_mask, y.shape[0], y.shape[2])
    check_probability("dropout_p", dropout_p)
    check_positive("scale", scale)
    check_memory_budget(memory_budget)
    plan = Plan(get_kernel(kernel), scale, is_causal, dropout_p, generator, memory_budget)
    return accurate_product(x, y, v, key_mask, plan)


def accurate_product(x: Tensor, y: Tensor, v: Tensor, key_mask: Tensor | None, plan: Plan) -> Tensor:
    """`kernel_product` on checked arguments; on a CPU accurate also for points far from zero."""
    if not plan.kernel.radial or triton_computes(x, v, plan.kernel):
        return product_by_backend(x, y, v, key_mask, plan)
    points, keys = accurate_points(x, y, key_mask, plan.scale)
    return product_by_backend(points, keys, v.to(points.dtype), key_mask, plan).to(v.dtype)


def triton_computes(x: Tensor, v: Tensor, kernel: Kernel) -> bool:
    """Whether Triton computes products of these tensors: in their own dtype and with any strides. Its operators do not
    know the transforms of `torch.func`, for which the portable product is used."""
    chosen = isinstance(kernel, GaussianKernel) and backend_of(x.device) == "triton"
    return chosen and supports(x, v) and not transforming()


def product_by_backend(
    x: Tensor, y: Tensor, v: Tensor, key_mask: Tensor | None, plan: Plan, float32_out: bool = False
) -> Tensor:
    """kappa(x, y) v by the chosen backend, in the dtype of x, or in float32 if x is in half precision and
    `float32_out` is set. v may be float32 while x and y are in half precision."""
    out_dtype = at_least_float32(x).dtype if float32_out else x.dtype
    if isinstance(plan.kernel, GaussianKernel) and plan.dropout_p == 0:
        # In float64, which large norms need, the fused kernel's gradient is inaccurate: it computes kernel values again
        # with other rounding errors than those in the output, and the difference is multiplied by the norm.
        if backend_of(x.device) == "fused" and x.dtype != torch.float64 and fused_gaussian_available(x, v):
            x, y, v = (at_least_float32(t) for t in (x, y, v))
            return fused_gaussian_attention(x, y, v, key_mask, plan.is_causal, plan.scale).to(out_dtype)
        if triton_computes(x, v, plan.kernel):
            wide = float32_out and x.dtype != torch.float32
            return triton_product(x, y, v, key_mask, plan.is_causal, plan.scale, wide, chosen_backend().autotune)
    x, y, v = (at_least_float32(t) for t in (x, y, v))
    if plan.dropout_p > 0 and isinstance(plan.kernel, GaussianKernel) and _drops_on_cpu(x, plan):
        return gaussian_attention_with_dropout(x, y, v, key_mask, plan.scale, plan.dropout_p, plan.generator).to(
            out_dtype
        )
    return blocked_product(x, y, v, key_mask, plan).to(out_dtype)


def _drops_on_cpu(x: Tensor, plan: Plan) -> bool:
    return may_look_at_values(x) and backend_of(x.device) == "fused" and not plan.is_causal
