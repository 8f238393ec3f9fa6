"""Random numbers that depend on a seed and a position only, so that padding, batch and device do not change them."""

from __future__ import annotations

import torch
from torch import Tensor

from skyformer.ops.tracing import draw_now


def draw_seed(generator: torch.Generator | None) -> int:
    """A seed from `generator`, or from torch's global generator if it is None."""
    if generator is None:
        return int(torch.randint(2**62, (), device="cpu"))
    return draw_now(lambda: int(torch.randint(2**62, (), generator=generator, device=generator.device)))


def uniform_noise(seed: int, stream: int, count: int, device: torch.device) -> Tensor:
    """`count` uniform numbers in [0, 1): number i depends on (seed, stream, i) only.

    A counter after the mixing steps of splitmix64, in wrapping 64-bit arithmetic.
    """
    counter = torch.arange(count, device=device, dtype=torch.int64)
    mixed = _mix(_mix(counter * _GOLDEN + _as_int64(seed)) + _as_int64(stream * 0xD1342543DE82EF95))
    return _shift_right(mixed, 40).float() * 2.0**-24


_GOLDEN = -7046029254386353131
_FIRST = -4658895280553007687
_SECOND = -7723592293110705685


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift_right(z, 30)) * _FIRST
    z = (z ^ _shift_right(z, 27)) * _SECOND
    return z ^ _shift_right(z, 31)


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """A shift that fills with zeros; torch's own shift repeats the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _as_int64(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63
