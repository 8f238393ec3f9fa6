"""Seeds of everything random in a run, mixed from the run's seed, what it is for, and the place in the run."""

from __future__ import annotations

import hashlib


def mixed_seed(purpose: str, *numbers: int) -> int:
    """63 bits that change altogether with any of the numbers: neighbouring seeds or steps have nothing in common."""
    text = ":".join([purpose, *map(str, numbers)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def step_seed(seed: int, number: int, rank: int = 0) -> int:
    """Of all that a process draws in one backward pass of a run."""
    return mixed_seed("step", seed, number, rank)
