"""Code that must run as it is while torch traces a program, for `torch.compile` or for `torch.export`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import torch

Args = ParamSpec("Args")
Result = TypeVar("Result")


def draw_now(draw: Callable[[], Result]) -> Result:
    """The result of `draw`, which reads a generator of fixed seed. `torch.export` stores it as a constant.

    Without this, the exported program would draw other numbers in every run. The modes with which torch traces a
    program belong to one thread, so another thread computes with real numbers.
    """
    exporting = torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()
    if not exporting:
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
