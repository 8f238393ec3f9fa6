"""Precision: half precision inputs are computed in float32, and autocast does not apply inside the operations."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

Args = ParamSpec("Args")
Result = TypeVar("Result")


def at_least_float32(x: Tensor) -> Tensor:
    """float16 and bfloat16 converted to float32; other types unchanged."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def without_autocast(function: Callable[Args, Result]) -> Callable[Args, Result]:
    """Runs `function` with autocast off on the device of its first tensor argument."""

    @functools.wraps(function)
    def wrapper(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        tensor = next(a for a in args if isinstance(a, Tensor))
        with autocast_off(tensor.device.type):
            return function(*args, **kwargs)

    return wrapper


def autocast_off(device_type: str) -> AbstractContextManager[object]:
    """A context in which operations on `device_type` keep the dtypes of their inputs."""
    # The meta device has no autocast, and asking about it is an error.
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return contextlib.nullcontext()
    return torch.autocast(device_type, enabled=False)
