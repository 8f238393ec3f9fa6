"""Attention over pieces: 1, 2, 3 and 4 ranks agree with one process, in outputs and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import skyformer
import skyformer.distributed as pieces
from skyformer.landmarks import StratifiedSampler
from tests.distributed.world import World

BATCH, HEADS, LENGTH, DIM = 3, 2, 37, 8
CUTS = {1: (37,), 2: (20, 17), 3: (5, 0, 32), 4: (0, 11, 25, 1)}
"""Lengths of the pieces: uneven, some empty."""


def inputs(shift: float = 0.0, scale: float = 1.0, length: int = LENGTH) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    q, k = (shift + scale * torch.randn(BATCH, HEADS, length, DIM, generator=generator) for _ in range(2))
    v, grad = (torch.randn(BATCH, HEADS, length, width, generator=generator) for width in (5, 5))
    return [q, k, v, grad]


def holes(length: int = LENGTH) -> Tensor:
    """Masks with holes; the third example has only four tokens, fewer than landmarks."""
    mask = torch.rand(BATCH, length, generator=torch.Generator().manual_seed(5)) < 0.7
    mask[2] = False
    mask[:, [1, 6, 30, 36]] = True
    return mask


def cut(x: Tensor, sizes: tuple[int, ...], rank: int, dim: int) -> Tensor:
    return x.split(list(sizes), dim)[rank].clone()


def attend(name: str, tensors: list[Tensor], group: Any, options: dict[str, Any]) -> list[Tensor]:
    """Output and gradients; over `group`, or in one process if it is None."""
    q, k, v = (x.clone().requires_grad_() for x in tensors[:3])
    if group is None:
        out = getattr(skyformer, name)(q, k, v, **options)
    else:
        out = getattr(pieces, name)(q, k, v, group=group, **options)
    (out * tensors[3]).sum().backward()
    return [x.detach() for x in (out, q.grad, k.grad, v.grad)]


def on_rank(group: dist.ProcessGroup, name: str, tensors: list[Tensor], masks: dict[str, Tensor], options: Any) -> Any:
    rank, sizes = dist.get_rank(group), CUTS[dist.get_world_size(group)]
    mine = [cut(x, sizes, rank, 2) for x in tensors]
    return attend(name, mine, group, {**options, **{key: cut(m, sizes, rank, 1) for key, m in masks.items()}})


def compare(
    world: World, name: str, size: int, tensors: list[Tensor], masks: dict[str, Tensor] | None = None, **options: Any
) -> None:
    torch.manual_seed(0)
    expected = attend(name, tensors, None, {**options, **(masks or {})})
    parts = world.check(size, on_rank, name, tensors, masks or {}, options)
    for each, whole in zip(zip(*parts, strict=True), expected, strict=True):
        joined = torch.cat(each, 2)
        # Outputs at masked queries have no meaning, but here both are defined by the same formula.
        torch.testing.assert_close(joined, whole, rtol=1e-5, atol=1e-5 * max(1.0, float(whole.abs().max())))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("masked", [False, True])
def test_skyformer(world: World, size: int, masked: bool) -> None:
    compare(world, "skyformer_attention", size, inputs(), {"key_mask": holes()} if masked else {}, num_landmarks=16)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("masked", [False, True])
def test_kernelized(world: World, size: int, masked: bool) -> None:
    compare(world, "kernelized_attention", size, inputs(), {"key_mask": holes()} if masked else {})


@pytest.mark.parametrize(
    "options",
    [
        {"landmarks": "uniform"},
        {"landmarks": "paper"},
        {"landmarks": "queries"},
        {"landmarks": StratifiedSampler(per_head=True)},
        {"landmarks": "segment_means"},
        {"landmarks": torch.tensor([[6, 30, 36, 38, 73, -1]]).expand(BATCH, -1)},
        {"kernel": "softmax"},
        {"kernel": "softmax", "landmarks": "segment_means", "scale": 0.1},
        {"kernel": "matern", "solver": "schulz"},
        {"num_landmarks": 128},
        {"kernel": "softmax", "num_landmarks": 128},
    ],
    ids=str,
)
@pytest.mark.parametrize("masked", [False, True])
def test_options_of_skyformer(world: World, masked: bool, options: dict[str, Any]) -> None:
    masks = {"key_mask": holes()} if masked else {}
    compare(world, "skyformer_attention", 3, inputs(), masks, **{"num_landmarks": 12, **options})


@pytest.mark.parametrize("size", [2, 3])
def test_large_norms(world: World, size: int) -> None:
    for shift in (30.0, 300.0):
        compare(world, "skyformer_attention", size, inputs(shift), {"key_mask": holes()}, num_landmarks=12)
        compare(world, "kernelized_attention", size, inputs(shift))
    compare(world, "kernelized_attention", size, inputs(scale=200.0))


@pytest.mark.parametrize("kernel", ["gaussian", "laplacian"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_causal_ring(world: World, size: int, kernel: str) -> None:
    compare(world, "kernelized_attention", size, inputs(), is_causal=True, kernel=kernel)


def cross_on_rank(group: dist.ProcessGroup, name: str, tensors: list[Tensor], sizes: Any, options: Any) -> Any:
    rank = dist.get_rank(group)
    mine = [cut(x, sizes[side], rank, 2) for x, side in zip(tensors, (0, 1, 1, 0), strict=True)]
    return attend(name, mine, group, options)


@pytest.mark.parametrize("name", ["skyformer_attention", "kernelized_attention", "causal"])
def test_queries_and_keys_divided_differently(world: World, name: str) -> None:
    options = {"is_causal": True} if name == "causal" else {}
    name = "kernelized_attention" if name == "causal" else name
    (q, _, _, grad), (_, k, v, _) = inputs(length=20), inputs(length=29)
    torch.manual_seed(0)
    expected = attend(name, [q, k, v, grad], None, options)
    for sizes in (((2, 18, 0), (9, 9, 11)), ((15, 1, 4), (0, 4, 25))):
        parts = world.check(3, cross_on_rank, name, [q, k, v, grad], sizes, options)
        for each, whole in zip(zip(*parts, strict=True), expected, strict=True):
            torch.testing.assert_close(torch.cat(each, 2), whole, rtol=1e-5, atol=1e-5)


def dropped_on_rank(group: dist.ProcessGroup, tensors: list[Tensor]) -> Any:
    mine = [x.tensor_split(dist.get_world_size(group), 2)[dist.get_rank(group)] for x in tensors]
    return [attend("kernelized_attention", mine, group, {"dropout_p": 0.5})[0] for _ in range(2)]


def test_dropout_of_the_ring_has_the_right_mean_and_never_repeats(world: World) -> None:
    q, k, v, grad = (x[:1, :1] for x in inputs(length=36))
    first, second = (torch.cat(each, 2) for each in zip(*world.check(3, dropped_on_rank, [q, q, v, grad]), strict=True))
    assert not torch.equal(first, second)
    # With equal rows, equal pieces of keys and one value, only the dropped entries differ between ranks.
    same = [torch.zeros_like(q), torch.zeros_like(k), torch.ones_like(v), grad]
    outs = world.check(3, dropped_on_rank, same)
    pieces_of = [out[0] for out in outs]
    assert not torch.equal(pieces_of[0], pieces_of[1])
    assert float(torch.cat(pieces_of, 2).mean()) == pytest.approx(36, rel=0.2)


def drawn_rows(group: dist.ProcessGroup, name: str, mask: Tensor | None) -> Any:
    """The row numbers that a sampler draws on this rank."""
    from skyformer.distributed import skyformer as module
    from skyformer.landmarks import SAMPLERS

    seen = []
    original = module.Pieces.landmark_rows

    def spy(self: Any, query: Tensor, key: Tensor, rows: Tensor) -> Any:
        seen.append(rows)
        return original(self, query, key, rows)

    module.Pieces.landmark_rows = spy  # type: ignore[method-assign]
    try:
        masks = {} if mask is None else {"key_mask": mask}
        on_rank(group, "skyformer_attention", inputs(), masks, {"landmarks": SAMPLERS.get(name), "num_landmarks": 9})
    finally:
        module.Pieces.landmark_rows = original  # type: ignore[method-assign]
    return seen[0]


@pytest.mark.parametrize("name", ["stratified", "uniform", "paper", "queries"])
def test_all_ranks_draw_the_rows_of_one_process(world: World, name: str) -> None:
    for mask in (None, holes()):
        rows = [found for size in (1, 2, 3, 4) for found in world.check(size, drawn_rows, name, mask)]
        assert all(torch.equal(each, rows[0]) for each in rows)


def half_on_rank(group: dist.ProcessGroup, tensors: list[Tensor]) -> Any:
    return on_rank(group, "skyformer_attention", [x.bfloat16() for x in tensors], {}, {"num_landmarks": 12})


def test_half_precision(world: World) -> None:
    torch.manual_seed(0)
    expected = attend("skyformer_attention", [x.bfloat16() for x in inputs()], None, {"num_landmarks": 12})
    for each, whole in zip(zip(*world.check(2, half_on_rank, inputs()), strict=True), expected, strict=True):
        assert each[0].dtype == torch.bfloat16
        torch.testing.assert_close(torch.cat(each, 2).float(), whole.float(), rtol=0.05, atol=0.05)
