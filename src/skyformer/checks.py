"""Checks of arguments. Each error names the argument, what was expected and what was given."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from skyformer.errors import InputError, MaskError, ShapeError

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

LARGEST_INTEGER = 2**31
"""The largest size, count or length allowed, so that the product of two fits into 64 bits."""


def check_points(name: str, x: Tensor) -> None:
    """`x` is a floating tensor (B, H, n, P)."""
    if not isinstance(x, Tensor):
        raise InputError(f"{name} must be a tensor (B, H, n, P); got {type(x).__name__}")
    if x.dim() != 4:
        advice = "; add the missing batch or head axis with unsqueeze" if x.dim() < 4 else ""
        raise ShapeError(f"{name} must have 4 dimensions (B, H, n, P); got shape {tuple(x.shape)}{advice}")
    if x.dtype not in FLOAT_DTYPES:
        raise InputError(f"{name} must be float16, bfloat16, float32 or float64; got {x.dtype}")
    if x.shape[-1] == 0:
        raise ShapeError(f"{name} must have at least one feature; got shape {tuple(x.shape)}")


def check_query_key_value(
    query: Tensor, key: Tensor, value: Tensor, names: tuple[str, str, str] = ("query", "key", "value")
) -> None:
    """query (B, H, L, P), key (B, H, S, P) and value (B, H, S, Pv) fit together; `names` are used in messages."""
    for name, x in zip(names, (query, key, value), strict=True):
        check_points(name, x)
    first, second, third = names
    for name, x in ((second, key), (third, value)):
        if x.shape[:2] != query.shape[:2]:
            raise ShapeError(
                f"{name} must have {first}'s batch and heads {tuple(query.shape[:2])}; got {tuple(x.shape[:2])}"
            )
        if x.dtype != query.dtype:
            raise InputError(f"{name} must have {first}'s dtype {query.dtype}; got {x.dtype}")
        if x.device != query.device:
            raise InputError(f"{name} must be on {first}'s device {query.device}; got {x.device}")
    if key.shape[-1] != query.shape[-1]:
        raise ShapeError(f"{second} must have {first}'s head dim {query.shape[-1]}; got {key.shape[-1]}")
    if value.shape[2] != key.shape[2]:
        raise ShapeError(f"{third} must have {second}'s length {key.shape[2]}; got {value.shape[2]}")


def check_mask(name: str, mask: Tensor | None, batch: int, length: int, *, floating: bool = False) -> Tensor | None:
    """The mask (batch, length) as bool, True where a token is real. Integers 0 and 1, as tokenizers make them, are
    accepted; they are looked at on the CPU only, because an accelerator would have to wait. Floating numbers are
    refused, because an additive mask of zeros means that every token is real, unless `floating` says that by
    convention they are 0 and 1 here."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        raise MaskError(f"{name} must be a tensor ({batch}, {length}) of bool; got {type(mask).__name__}")
    if mask.shape != (batch, length):
        raise MaskError(f"{name} must have shape ({batch}, {length}); got {tuple(mask.shape)}")
    if mask.dtype == torch.bool:
        return mask
    got = str(mask.dtype) if mask.is_floating_point() and not floating else None
    if got is None and mask.device.type == "cpu" and not torch.compiler.is_compiling():
        wrong = mask[(mask != 0) & (mask != 1)]
        got = f"{wrong[0].item()}" if wrong.numel() else None
    if got is not None:
        raise MaskError(
            f"{name} must be bool, or integers 0 and 1, 1 = a real token; got {got}. Convert an additive mask "
            f"(0 / -inf) with {name} == 0, and one of 0 and 1 with {name}.bool()"
        )
    return mask != 0


def as_bool(mask: Tensor | None) -> Tensor | None:
    """A mask that is checked elsewhere, as bool."""
    return mask.bool() if isinstance(mask, Tensor) else mask


def check_masks(
    query: Tensor, key: Tensor, key_mask: Tensor | None, query_mask: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Both masks as bool, key mask first; a missing query mask is the key mask if L == S."""
    key_mask = check_mask("key_mask", key_mask, key.shape[0], key.shape[2])
    if query_mask is None:
        return key_mask, key_mask if query.shape[2] == key.shape[2] else None
    return key_mask, check_mask("query_mask", query_mask, query.shape[0], query.shape[2])


def check_at_least(name: str, number: int, least: int, most: int = LARGEST_INTEGER) -> None:
    """`number` is an integer from `least` to `most`."""
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise InputError(f"{name} must be an integer of at least {least}; got {number!r}")
    if number > most:
        raise InputError(f"{name} must be an integer of at most {most}; got {number!r}")


def check_positive(name: str, number: float) -> None:
    """`number` is finite and above zero."""
    if not (isinstance(number, int | float) and math.isfinite(number) and number > 0):
        raise InputError(f"{name} must be a finite number above 0; got {number!r}")


def check_memory_budget(memory_budget: int) -> None:
    """`memory_budget` is a number of bytes, zero or more."""
    check_at_least("memory_budget", memory_budget, 0, most=2**62)


def check_scale(scale: float | None) -> None:
    """`scale` is a finite number above zero, or None for the default."""
    if scale is not None:
        check_positive("scale", scale)


def check_probability(name: str, number: float) -> None:
    """`number` lies in [0, 1)."""
    if not (isinstance(number, int | float) and 0 <= number < 1):
        raise InputError(f"{name} must be in [0, 1); got {number!r}")


def check_share(share: float) -> None:
    """`share` is a share of heads, above zero and at most one."""
    check_positive("share", share)
    if share > 1:
        raise InputError(f"share must be at most 1, which means all heads; got {share!r}")


def check_finite_inputs(**tensors: Tensor) -> None:
    """No NaN and no Inf. Takes a pass over the data and a device synchronisation, so callers make it optional."""
    for name, x in tensors.items():
        finite = torch.isfinite(x)
        if not bool(finite.all()):
            where = tuple(int(i) for i in (~finite).nonzero()[0])
            raise InputError(f"{name} must be finite; got {float(x[where])} at index {where}")
