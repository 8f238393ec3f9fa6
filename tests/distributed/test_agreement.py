"""Ranks that disagree all raise the same error at once, and a rank that dies ends the others."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import skyformer.distributed as pieces
from skyformer.distributed.collectives import Ranks
from skyformer.errors import InputError, RankLostError, RanksDisagreeError, ShapeError, SkyformerError, UnsupportedError
from tests.distributed.world import World

SHAPE = (2, 2, 9, 4)


def call(group: dist.ProcessGroup, name: str, options: list[dict[str, Any]]) -> Any:
    """Rank r uses the r-th options; `shape`, `dtype`, `seed` and `grad` change its inputs."""
    chosen = dict(options[dist.get_rank(group)])
    if "seed" in chosen:
        torch.manual_seed(chosen.pop("seed"))
    dtype, grad = chosen.pop("dtype", torch.float32), chosen.pop("grad", False)
    x = torch.ones(chosen.pop("shape", SHAPE), dtype=dtype, requires_grad=grad)
    key = torch.ones(chosen.pop("key_shape", x.shape), dtype=dtype)
    function = getattr(pieces, chosen.pop("call", name))
    return function(x, key, key, group=group, **chosen)


DIFFERENT = {
    "the batch size": {"shape": (3, 2, 9, 4)},
    "the number of heads": {"shape": (2, 1, 9, 4)},
    "the head dim": {"shape": (2, 2, 9, 5)},
    "the dtype": {"dtype": torch.float64},
    "whether query, key and value need gradients": {"grad": True},
    "num_landmarks": {"num_landmarks": 7},
    "landmarks": {"landmarks": "uniform"},
    "gamma": {"gamma": 0.5},
    "solver": {"solver": "schulz"},
    "kernel": {"kernel": "matern"},
    "key_mask is given": {"key_mask": torch.ones(2, 9, dtype=torch.bool)},
    "the state of the random generator": {"seed": 1},
    "the operation": {"call": "kernelized_attention"},
}


@pytest.mark.parametrize("what", DIFFERENT)
@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_raises_the_same_error(world: World, what: str, size: int) -> None:
    errors = world.run(size, call, "skyformer_attention", [{}] * (size - 1) + [DIFFERENT[what]])
    assert len({str(error) for error in errors}) == 1
    assert all(type(error) is RanksDisagreeError for error in errors)
    assert str(errors[0]).startswith(what)
    assert "must be the same on all ranks; got" in str(errors[0])
    assert f"on rank {size - 1}" in str(errors[0])


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"key_shape": (2, 2, 9, 3)}, ShapeError, "on rank 1 of 2: key must have query's head dim 4; got 3"),
        ({"num_landmarks": 0}, InputError, "on rank 1 of 2: num_landmarks must be an integer of at least 1"),
        ({"landmarks": "leverage"}, UnsupportedError, "on rank 1 of 2: landmarks='leverage' is not supported"),
        ({"landmarks": "probe"}, UnsupportedError, "on rank 1 of 2: landmarks='probe' is not supported"),
        ({"is_causal": True}, UnsupportedError, "on rank 1 of 2: is_causal must be False"),
        ({"landmarks": "unifrom"}, InputError, "Did you mean 'uniform'?"),
    ],
)
def test_an_error_of_one_rank_is_raised_by_all(
    world: World, options: dict[str, Any], kind: type[SkyformerError], message: str
) -> None:
    errors = world.run(2, call, "skyformer_attention", [{}, options])
    assert len({str(error) for error in errors}) == 1
    assert all(isinstance(error, kind) for error in errors)
    assert message in str(errors[0])


def test_an_error_of_all_ranks_is_that_of_one_process(world: World) -> None:
    errors = world.run(2, call, "kernelized_attention", [{"kernel": "softmax"}] * 2)
    assert [str(error)[:36] for error in errors] == ["kernel='softmax' is not supported fo"] * 2


def test_seeds_do_not_matter_where_nothing_is_drawn(world: World) -> None:
    options: list[dict[str, Any]] = [{"seed": 1, "landmarks": "segment_means"}, {"landmarks": "segment_means"}]
    assert not any(isinstance(each, Exception) for each in world.run(2, call, "skyformer_attention", options))
    assert not any(
        isinstance(each, Exception) for each in world.run(2, call, "kernelized_attention", [{"seed": 3}, {}])
    )


def unequal_masks(group: dist.ProcessGroup) -> Any:
    lengths = ((3, 4), (4, 3))[dist.get_rank(group)]
    q, k = (torch.ones(1, 1, length, 2) for length in lengths)
    return pieces.skyformer_attention(q, k, k, group=group, key_mask=torch.ones(1, lengths[1], dtype=torch.bool))


def test_query_mask_is_needed_if_pieces_differ(world: World) -> None:
    errors = world.run(2, unequal_masks)
    assert [str(error)[:29] for error in errors] == ["query_mask must be given if q"] * 2


def groups_of_other_kinds(group: dist.ProcessGroup) -> list[str]:
    x = torch.ones(1, 1, 3, 2)
    expected = pieces.kernelized_attention(x, x, x, group=group)
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    assert torch.equal(pieces.kernelized_attention(x, x, x), expected)
    halves = pieces.kernelized_attention(x, x, x, group=mesh["sequence"])
    assert torch.allclose(halves, expected / 2)
    messages = []
    for wrong in (mesh, "all"):
        try:
            pieces.kernelized_attention(x, x, x, group=wrong)  # type: ignore[arg-type]
        except SkyformerError as error:
            messages.append(str(error))
    assert isinstance(mesh, DeviceMesh)
    return messages


def test_groups_and_meshes(world: World) -> None:
    [mesh, other] = world.check(4, groups_of_other_kinds)[0]
    assert "one dimension of a device mesh" in mesh
    assert "must be a ProcessGroup, a DeviceMesh or None; got str" in other


def test_without_a_group_the_error_says_what_to_do() -> None:
    x = torch.ones(1, 1, 3, 2)
    with pytest.raises(InputError, match="start the program with torchrun"):
        pieces.skyformer_attention(x, x, x)


def test_only_errors_about_another_rank_are_reported_as_such() -> None:
    ranks = Ranks(None, 0, 2)  # type: ignore[arg-type]
    with pytest.raises(RankLostError, match="lost another rank in the sum"), ranks.reaching("sum"):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:525] Connection closed by peer")
    with pytest.raises(torch.OutOfMemoryError), ranks.reaching("sum"):
        raise torch.OutOfMemoryError("out of memory")


def die_in_the_middle(group: dist.ProcessGroup, name: str, how: str) -> Any:
    x = torch.randn(1, 1, 2000, 8, requires_grad=True)
    out = getattr(pieces, name)(x, x, x, group=group)
    if dist.get_rank(group) == 1:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(5)
        return None
    started = time.monotonic()
    try:
        out.sum().backward()
    except RankLostError as lost:
        return str(lost), time.monotonic() - started
    return None


@pytest.mark.parametrize(("name", "how"), [("skyformer_attention", "dies"), ("kernelized_attention", "is stuck")])
def test_a_rank_that_is_gone_ends_the_others(name: str, how: str) -> None:
    world = World(2, timeout=3.0)
    try:
        message, seconds = world.run(2, die_in_the_middle, name, how)[0]
    finally:
        world.close()
    assert message.startswith("rank 0 of 2 lost another rank in the ")
    assert seconds < 20
