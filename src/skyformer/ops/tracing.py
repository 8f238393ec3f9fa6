"""Code that must run as it is while torch traces a program, for `torch.compile` or for `torch.export`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

Args = ParamSpec("Args")
Result = TypeVar("Result")


def exporting() -> bool:
    """Whether `torch.export` is tracing this call."""
    return torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()


def is_variable(size: int) -> bool:
    """Whether a size is a variable of the program that torch traces, not a number."""
    if not torch.compiler.is_compiling():
        return isinstance(size, torch.SymInt)
    from torch.fx.experimental.symbolic_shapes import has_static_value  # Loads sympy.

    return not has_static_value(size)


def transforming() -> bool:
    """Whether a transform of `torch.func` or forward-mode differentiation is at work."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def needs_plain_operations() -> bool:
    """Whether forward mode or `torch.vmap` is at work, for which torch's fused attention has no rules."""
    if torch.compiler.is_compiling() or not transforming():
        return False
    stack = torch._C._functorch.get_interpreter_stack() or ()
    vmap = torch._C._functorch.TransformType.Vmap
    return forward_ad._current_level >= 0 or any(interpreter.key() == vmap for interpreter in stack)


def recording() -> bool:
    """Whether tensors have no values, or operations are recorded, by `FakeTensorMode`, `make_fx` or `torch.export`."""
    return any(torch._C._get_dispatch_mode(key) is not None for key in _RECORDERS)


_RECORDERS = (torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY)


def may_look_at_values(x: Tensor) -> bool:
    """Whether a decision may depend on the values of x: on the CPU, and not while torch traces or transforms a program.
    On an accelerator the host would have to wait for all work that was submitted before."""
    if torch.compiler.is_compiling() or x.device.type != "cpu":
        return False
    if torch.jit.is_tracing():  # type: ignore[attr-defined]
        return False
    return not (recording() or transforming() or isinstance(x, FakeTensor))


def constant_for_compiler(function: Callable[Args, Result]) -> Callable[Args, Result]:
    """`torch.compiler.assume_constant_result`, without loading the compiler: `torch.compile` calls the function and
    takes its result as a constant."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def draw_now(draw: Callable[[], Result]) -> Result:
    """The result of `draw`, which reads a generator of fixed seed. `torch.export` stores it as a constant.

    Without this, the exported program would draw other numbers in every run. The modes with which torch traces a
    program belong to one thread, so another thread computes with real numbers.
    """
    if not exporting():
        return draw()
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(draw).result()


def without_compiler(function: Callable[Args, Result]) -> Callable[Args, Result]:
    """`torch.compiler.disable`, applied at the first call, because it loads the whole compiler."""
    disabled: Callable[Args, Result] | None = None

    @functools.wraps(function)
    def wrapper(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        nonlocal disabled
        if disabled is None:
            disabled = torch.compiler.disable(function)
        return disabled(*args, **kwargs)

    return wrapper
