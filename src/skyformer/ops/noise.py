"""Random numbers that depend on a seed and a position only, so that padding, batch and device do not change them."""

from __future__ import annotations

import functools
import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from skyformer.ops.tracing import constant_for_compiler, draw_now, exporting, recording, transforming


@dataclass(frozen=True)
class FixedSeed:
    """Takes the place of a generator that was just seeded with `seed`. Unlike that, the compiler can trace it."""

    seed: int

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)


RandomSource: TypeAlias = torch.Generator | FixedSeed | None
"""Where random numbers come from; None is torch's global generator."""

Seed: TypeAlias = int | Tensor


def draw_seed(generator: torch.Generator | None) -> int:
    """A seed from `generator`, or from torch's global generator if it is None."""
    if generator is None:
        return int(_random_integer(None))
    return draw_now(lambda: int(_random_integer(generator)))


def draw_seed_unseen(source: RandomSource) -> Seed:
    """The same seed, as a tensor where it would otherwise have to be read from a device or while torch traces."""
    if isinstance(source, FixedSeed):
        return first_seed(source.seed)
    if source is not None and exporting():
        return draw_seed(source)
    return _random_integer(source)


def dropout_seed(generator: torch.Generator | None) -> Seed:
    """A seed for dropout: a number, or a tensor where each sample of `torch.vmap` has its own or torch traces."""
    if torch.compiler.is_compiling():
        return draw_seed_unseen(generator)
    if recording() or transforming():
        return _random_integer(generator)
    return draw_seed(generator)


def _random_integer(generator: torch.Generator | None) -> Tensor:
    return torch.randint(2**62, (), generator=generator, device="cpu" if generator is None else generator.device)


@constant_for_compiler
def first_seed(seed: int) -> int:
    """What `draw_seed` returns for a new generator with this seed."""
    return _first_seed(seed)


@functools.cache
def _first_seed(seed: int) -> int:
    # In another thread, because a mode of torch that traces or fakes operations belongs to one thread.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(draw_seed, torch.Generator().manual_seed(seed)).result()


def mixed_seed(purpose: str, *numbers: int) -> int:
    """A seed of 63 bits, hashed from its purpose and numbers, so that neighbouring seeds or steps share nothing."""
    text = ":".join([purpose, *map(str, numbers)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def normal_noise(source: RandomSource, shape: tuple[int, ...]) -> Tensor:
    """Standard normal numbers in float32 on the CPU."""
    if isinstance(source, FixedSeed):
        drawn = _fixed_normal(source.seed, shape)
        # A tensor from outside becomes a constant of the program that is recorded.
        return torch.ops.aten.lift_fresh_copy(drawn) if not torch.compiler.is_compiling() and recording() else drawn
    if source is None:
        return torch.randn(shape, dtype=torch.float32, device="cpu")
    return draw_now(functools.partial(_draw_normal, draw_seed(source), shape))


def _draw_normal(seed: int, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


@constant_for_compiler
def _fixed_normal(seed: int, shape: tuple[int, ...]) -> Tensor:
    return _cached_normal(seed, shape)


@functools.lru_cache(64)
def _cached_normal(seed: int, shape: tuple[int, ...]) -> Tensor:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_draw_normal, _first_seed(seed), shape).result()


def uniform_noise(seed: Seed, stream: int, count: int, device: torch.device) -> Tensor:
    """`count` uniform numbers in [0, 1): number i depends on (seed, stream, i) only.

    A counter after the mixing steps of splitmix64, in wrapping 64-bit arithmetic.
    """
    counter = torch.arange(count, device=device, dtype=torch.int64)
    if isinstance(seed, Tensor):
        # A number on the CPU may be added to a tensor on any device.
        start = seed if seed.device.type == "cpu" else seed.to(device)
        first = counter * _GOLDEN + start
    else:
        first = counter * _GOLDEN + _as_int64(seed)
    mixed = _mix(_mix(first) + _as_int64(stream * 0xD1342543DE82EF95))
    return _shift_right(mixed, 40).float() * 2.0**-24


class RandomWords:
    """Random 64-bit words for one block after another, each known by its number, which is below 2^32.

    Many blocks are filled from tables, four times as fast as by drawing. Word i of a block is then
    T1[a + i] ^ T2[b + i] ^ T3[c + i], where the tables of random words T1, T2, T3 belong to the seed, and their offsets
    a, b, c to the block. This is tabulation hashing: the words of one block are independent, and so are any three words
    of all blocks, unless two blocks have the same differences between their offsets. The probability of that is about
    1 / OFFSETS^2 for each pair of blocks.
    """

    OFFSETS = 2**14

    def __init__(self, seed: int, length: int, tables: bool) -> None:
        """length: the largest number of words in a block. tables: whether there are many blocks."""
        self._seed = seed
        # A seed for each, so that longer tables begin with the same words.
        self._tables = [
            _draw_words(torch.empty(length + self.OFFSETS, dtype=torch.int64), mixed_seed("table", seed, number))
            for number in range(3 if tables else 0)
        ]

    def write(self, block: int, out: Tensor) -> Tensor:
        """Fill out (length,), int64, with the first words of a block."""
        if not self._tables:
            return _draw_words(out, self._seed + block)
        starts = (mixed_seed("offset", self._seed, block, number) % self.OFFSETS for number in range(3))
        first, second, third = (
            table[start : start + len(out)] for table, start in zip(self._tables, starts, strict=True)
        )
        return torch.bitwise_xor(first, second, out=out).bitwise_xor_(third)


def _draw_words(out: Tensor, seed: int) -> Tensor:
    return out.random_(-(2**63), None, generator=torch.Generator().manual_seed(seed))


def keep_mask(x: Tensor, p: float, generator: torch.Generator | None = None) -> Tensor:
    """A mask for dropout: bool, of the shape of x and on its device, False with probability `rounded_probability(p)`.

    64 random bits give four entries, which on the CPU is several times faster than a random number for each.
    """
    words = torch.empty(-(-x.numel() // 4), dtype=torch.int64, device=x.device)
    bits = words.random_(-(2**63), None, generator=generator).view(torch.int16)
    return bits[: x.numel()].view(x.shape) >= round(rounded_probability(p) * _LEVELS) - _LEVELS // 2


def rounded_probability(p: float) -> float:
    """p as a multiple of 2^-16 below 1."""
    return min(round(p * _LEVELS), _LEVELS - 1) / _LEVELS


_LEVELS = 2**16
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
