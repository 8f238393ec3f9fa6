"""Agreement before anything large travels: all ranks call the same operation, with inputs that fit together.

A rank that raised an error alone would leave the others waiting for it. So every rank first says, in four integers, how
long its pieces are, whether its inputs are valid, and a hash of what must be equal everywhere. If anything is wrong,
all ranks see it, exchange the details, and raise the same error.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass

import torch
from torch import Tensor

from skyformer.distributed.collectives import Ranks
from skyformer.errors import RanksDisagreeError, SkyformerError
from skyformer.ops.noise import FixedSeed, RandomSource

RANDOM_STATE = (
    "the state of the random generator (call torch.manual_seed with one seed on all ranks, or pass generators of one "
    "seed)"
)


@dataclass(frozen=True)
class Statement:
    """What a rank says about its call: what must be the same on all ranks, and the lengths of its pieces."""

    same: Mapping[str, object]
    lengths: tuple[int, int] = (0, 0)


def agree(
    ranks: Ranks, operation: str, state: Callable[[], Statement], device: torch.device
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The lengths of the pieces of all ranks, if all agree; else the same error on every rank.

    Args:
        state: checks the arguments of this rank and describes them; it may raise errors of this package.
    """
    problem: SkyformerError | None = None
    statement = Statement({})
    try:
        statement = state()
    except SkyformerError as invalid:
        problem = invalid
    same = {"the operation": operation, **{name: spell(value) for name, value in statement.same.items()}}
    own = (int(problem is not None), _fingerprint(same), *statement.lengths)
    heard = ranks.gather_numbers(own, device)
    if any(failed for failed, *_ in heard) or len({fingerprint for _, fingerprint, *_ in heard}) > 1:
        _raise_alike(ranks, problem, same)
    firsts, seconds = zip(*((first, second) for *_, first, second in heard), strict=True)
    return firsts, seconds


def _raise_alike(ranks: Ranks, problem: SkyformerError | None, same: Mapping[str, str]) -> None:
    """The error of all ranks: that of the first rank with invalid arguments, or else the first difference."""
    heard: list[tuple[SkyformerError | None, Mapping[str, str]]] = ranks.gather_objects((problem, same))
    invalid = {rank: error for rank, (error, _) in enumerate(heard) if error is not None}
    if invalid:
        rank, error = next(iter(invalid.items()))
        if len(invalid) < ranks.size or len({str(each) for each in invalid.values()}) > 1:
            error.args = (f"on rank {rank} of {ranks.size}: {error}",)
        raise error
    for name in dict.fromkeys(name for _, said in heard for name in said):
        values = [said.get(name, "nothing") for _, said in heard]
        if len(set(values)) > 1:
            raise RanksDisagreeError(f"{name} must be the same on all ranks; got {_by_rank(values)}")


def _by_rank(values: list[str]) -> str:
    """Such as "2 on ranks 0, 2; 3 on rank 1"."""
    ranks_of = defaultdict(list)
    for rank, value in enumerate(values):
        ranks_of[value].append(str(rank))
    return "; ".join(
        f"{value} on rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}" for value, ranks in ranks_of.items()
    )


def _fingerprint(same: Mapping[str, str]) -> int:
    text = "\n".join(f"{name}={value}" for name, value in same.items())
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def spell(value: object) -> str:
    """A value as text that is equal on two ranks if the values are; tensors and long texts are hashed."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)} with hash {digest(value)}"
    if value is None or isinstance(value, str | int | float | tuple | torch.dtype) or is_dataclass(value):
        return str(value)
    # The default text of an object has its address in memory, which differs between processes.
    return f"{type(value).__module__}.{type(value).__qualname__}"


def digest(x: Tensor) -> str:
    """Eight hexadecimal digits of a hash of the bytes of x."""
    x = x.detach().cpu().contiguous()
    # Not through numpy, which torch does not need.
    content = ctypes.string_at(x.data_ptr(), x.nbytes) if x.nbytes else b""
    return hashlib.blake2b(content, digest_size=4).hexdigest()


def random_state(source: RandomSource) -> str:
    """A text that is equal on two ranks if they would draw the same random numbers."""
    if isinstance(source, FixedSeed):
        return f"seed {source.seed}"
    state = torch.get_rng_state() if source is None else source.get_state()
    return digest(state)
