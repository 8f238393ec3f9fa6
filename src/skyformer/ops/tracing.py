"""Code that must run as it is while torch traces a program, for `torch.compile` or for `torch.export`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

Args = ParamSpec("Args")
Result = TypeVar("Result")


def exporting() -> bool:
    """Whether `torch.export` is tracing this call."""
    return torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()


def may_look_at_values(x: Tensor) -> bool:
    """Whether a decision may depend on the values of x: on the CPU, and not while torch traces a program. On an
    accelerator the host would have to wait for all work that was submitted before."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


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
