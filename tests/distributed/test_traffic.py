"""What travels: bytes that each rank writes to its sockets, and what it keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import skyformer.distributed as pieces
from skyformer.processes import written_bytes
from tests.distributed.world import World

HEADS, DIM, LANDMARKS = 2, 16, 32

pytestmark = pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the system does not report bytes written")


def traffic(group: dist.ProcessGroup, name: str, tokens: int, options: dict[str, Any]) -> tuple[int, int]:
    """Bytes written in the forward and in the backward pass."""
    length = tokens // dist.get_world_size(group)
    x = torch.randn(1, HEADS, length, DIM, requires_grad=True)
    dist.barrier(group)
    start = written_bytes()
    out = getattr(pieces, name)(x, x, x, group=group, **options)
    middle = written_bytes()
    out.sum().backward()
    return middle - start, written_bytes() - middle


@pytest.mark.parametrize("size", [2, 3])
def test_traffic_of_skyformer_does_not_grow_with_the_length(world: World, size: int) -> None:
    found = [world.check(size, traffic, "skyformer_attention", n, {"num_landmarks": LANDMARKS}) for n in (384, 6144)]
    assert found[0] == found[1]
    # Two all-reduces of (H, d, P) in each pass; the rest are headers and the exchange of shapes.
    tensors = 2 * 2 * (size - 1) / size * HEADS * LANDMARKS * DIM * 4
    for forward, backward in found[0]:
        assert tensors < forward < 1.3 * tensors + 3000
        assert tensors < backward < 1.1 * tensors + 3000


@pytest.mark.parametrize("size", [2, 3])
def test_traffic_of_the_ring_is_linear(world: World, size: int) -> None:
    piece = 2 * HEADS * DIM * 4
    for tokens in (384, 1536):
        for forward, backward in world.check(size, traffic, "kernelized_attention", tokens, {}):
            once = piece * tokens // size
            assert (size - 1) * once < forward < (size - 1) * once + 3000
            assert (2 * size - 1) * once < backward < (2 * size - 1) * once + 3000


def saved_sizes(group: dist.ProcessGroup, name: str) -> tuple[int, int]:
    """The largest tensor that a pass keeps for its backward pass, and the size of one input."""
    x = torch.randn(1, 1, 60, DIM, requires_grad=True)
    kept: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        getattr(pieces, name)(x, x, x, group=group)
    return max(kept), x.numel()


def test_the_ring_keeps_nothing_but_its_own_piece(world: World) -> None:
    for largest, own in world.check(4, saved_sizes, "kernelized_attention"):
        assert largest == own
