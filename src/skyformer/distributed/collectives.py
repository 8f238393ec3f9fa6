"""The processes that share a sequence, and what travels between them, in both passes.

The loss that is differentiated is the sum of the losses of all ranks. With that, every collective has a transpose:

    forward                                              backward
    y = sum_r x_r on every rank (all-reduce)             dx_r = sum_s dy_s on every rank (all-reduce)
    W: each row from the rank that owns it               the sum above, of rows that are zero on all ranks but one;
                                                         backward: the owner keeps its rows of the sum
    y_r = x_(r-1) (ring)                                 dx_r = dy_(r+1), the same ring with the gradients on board

Whatever fails inside a collective because another rank is gone becomes a `RankLostError`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from skyformer.errors import InputError, RankLostError, ShapeError

Group = dist.ProcessGroup | DeviceMesh | None
"""The processes that share a sequence: a process group, one dimension of a device mesh, or None for all processes."""

_CPU_BACKENDS = ("gloo", "mpi", "ucc")


@dataclass(frozen=True)
class Ranks:
    """A group, this process' number in it, and the group's size."""

    group: dist.ProcessGroup
    rank: int
    size: int

    @staticmethod
    def of(group: Group) -> Ranks:
        if not (dist.is_available() and dist.is_initialized()):
            raise InputError(
                "torch.distributed is not initialised: start the program with torchrun, and call "
                'torch.distributed.init_process_group("gloo") (or "nccl") first'
            )
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ShapeError(
                    f"group must be one dimension of a device mesh, such as mesh['sequence']; got a mesh with "
                    f"{group.ndim} dimensions {group.mesh_dim_names or ''}"
                )
            group = group.get_group()
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise InputError(f"group must be a ProcessGroup, a DeviceMesh or None; got {type(group).__name__}")
        rank, members = dist.get_rank(group), group or dist.group.WORLD
        if rank < 0 or members is None:
            raise InputError("group must contain this process; it is not one of its ranks")
        return Ranks(members, rank, dist.get_world_size(group))

    @contextmanager
    def reaching(self, what: str) -> Iterator[None]:
        """Turn the backend's error about a rank that is gone into ours."""
        try:
            yield
        except RuntimeError as lost:
            if reason_for_lost_rank(lost) is None:
                raise
            raise RankLostError(
                f"rank {self.rank} of {self.size} lost another rank in the {what}: {_first_line(lost)}. What was "
                "written so far is intact; start all processes again"
            ) from lost

    def reduce(self, x: Tensor, op: Any, what: str) -> Tensor:
        """x reduced over all ranks, without a gradient."""
        total = x.detach().clone(memory_format=torch.contiguous_format)
        if self.size > 1:
            with self.reaching(what):
                dist.all_reduce(total, op, group=self.group)
        return total

    def sum(self, x: Tensor, what: str = "sum") -> Tensor:
        """The sum of x over all ranks, with its gradient."""
        total: Tensor = _Sum.apply(x, self, what)
        return total

    def largest(self, x: Tensor) -> Tensor:
        """The largest value of each entry over all ranks, without a gradient."""
        return self.reduce(x, dist.ReduceOp.MAX, "search for the largest value")

    def gather(self, x: Tensor, what: str) -> list[Tensor]:
        """The tensors of all ranks, which have one shape and no gradient."""
        found = [torch.empty_like(x) for _ in range(self.size)]
        with self.reaching(what):
            dist.all_gather(found, x, group=self.group)
        return found

    def gather_numbers(self, numbers: Sequence[int], device: torch.device) -> list[list[int]]:
        """Equally many integers from each rank. They travel on the CPU if the group can do that, because reading them
        from a device would make it wait."""
        on_cpu = any(name in dist.get_backend(self.group) for name in _CPU_BACKENDS)
        own = torch.tensor(numbers, device="cpu" if on_cpu else device)
        return [each.tolist() for each in self.gather(own, "exchange of shapes and options")]

    def gather_objects(self, own: Any) -> list[Any]:
        """Small Python objects from all ranks."""
        found: list[Any] = [None] * self.size
        with self.reaching("exchange of error messages"):
            dist.all_gather_object(found, own, group=self.group)
        return found

    def start_shift(self, sent: Sequence[Tensor], received: Sequence[Tensor], tag: int) -> Shift:
        """Start sending to the next rank of the ring and receiving from the previous one; tensors may be empty, and use
        the tags from `tag` on."""
        following, previous = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        moves = [(dist.isend, sent, following), (dist.irecv, received, previous)]
        operations = [
            dist.P2POp(op, tensor, group=self.group, tag=tag + number, group_peer=peer)
            for op, tensors, peer in moves
            for number, tensor in enumerate(tensors)
            if tensor.numel()
        ]
        with self.reaching("ring"):
            return Shift(self, sent, received, dist.batch_isend_irecv(operations) if operations else [])


@dataclass(frozen=True)
class Shift:
    """A step of the ring under way; what is sent must stay unchanged, and alive, until it has ended."""

    ranks: Ranks
    sent: Sequence[Tensor]
    received: Sequence[Tensor]
    works: list[Any]

    def wait(self) -> Sequence[Tensor]:
        """What has arrived."""
        with self.ranks.reaching("ring"):
            for work in self.works:
                work.wait()
        return self.received


class _Sum(torch.autograd.Function):
    """Its own transpose."""

    @staticmethod
    def forward(x: Tensor, ranks: Ranks, what: str) -> Tensor:
        return ranks.reduce(x, dist.ReduceOp.SUM, what)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Ranks, str], output: Tensor) -> None:
        _, ctx.ranks, ctx.what = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.ranks.sum(grad, f"{ctx.what} of gradients"), None, None


def reason_for_lost_rank(error: BaseException) -> str | None:
    """The backend's words, if an error says that another process ended or did not answer; else None."""
    if isinstance(error, RankLostError):
        return _first_line(error.__cause__ or error)
    backend = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
    return _first_line(error) if backend else None


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def piece_of(x: Tensor, group: Group = None, *, dim: int = 1) -> Tensor:
    """This rank's piece of a tensor that all ranks hold, such as tokens (B, n): as in `torch.tensor_split`, the lengths
    of the pieces differ by at most one."""
    ranks = Ranks.of(group)
    return x.tensor_split(ranks.size, dim)[ranks.rank]
