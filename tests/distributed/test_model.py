"""Models over pieces: logits, losses and every gradient are those of one process; also with data parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from skyformer.distributed import parallelize, piece_of
from skyformer.errors import InputError, RanksDisagreeError, ShapeError, UnsupportedError
from skyformer.model import PairClassifier, SequenceClassifier, SkyformerEncoder
from tests.distributed.world import World

LENGTH, BATCH = 23, 4
SIZES = {2: (9, 14), 3: (0, 16, 7)}
KINDS = {"encoder": SkyformerEncoder, "sequence": SequenceClassifier, "pair": PairClassifier}


def build(kind: str, **settings: Any) -> nn.Module:
    torch.manual_seed(1)
    defaults = {"attention_options": {"num_landmarks": 8}, "dropout": 0.0}
    return KINDS[kind](vocab_size=11, max_length=LENGTH, dim=8, hidden_dim=12, **{**defaults, **settings})


def batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    mask = torch.rand(BATCH, LENGTH, generator=generator) < 0.8
    mask[1, 5:] = False
    tokens = torch.randint(11, (BATCH, LENGTH), generator=generator)
    return tokens, mask, torch.randint(2, (BATCH,), generator=generator)


def loss_of(model: Any, kind: str, tokens: Tensor, mask: Tensor | None, label: Tensor) -> tuple[Tensor, Tensor]:
    """What the model returns, and its loss."""
    if kind == "pair":
        logits = model(tokens, tokens.roll(1, 0), mask, None if mask is None else mask.roll(1, 0))
        return logits, F.cross_entropy(logits, label)
    out = model(tokens, mask)
    if kind == "sequence":
        return out, F.cross_entropy(out, label)
    real = out if mask is None else out.masked_fill(~mask[..., None], 0)
    return out, real.pow(3).sum()


def step(model: nn.Module, kind: str, tokens: Tensor, mask: Tensor | None, label: Tensor) -> dict[str, Tensor]:
    """The output, the loss and all gradients of one backward pass after torch.manual_seed(7)."""
    torch.manual_seed(7)
    out, loss = loss_of(model, kind, tokens, mask, label)
    loss.backward()
    module = model.module if isinstance(model, DistributedDataParallel) else model
    grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {"out": out.detach(), "loss": loss.detach(), **grads}


def on_rank(group: dist.ProcessGroup, kind: str, masked: bool, settings: dict[str, Any], training: bool = True) -> Any:
    tokens, mask, label = batch()
    rank, sizes = dist.get_rank(group), list(SIZES[dist.get_world_size(group)])
    model = parallelize(build(kind, **settings), group).train(training)
    return step(model, kind, tokens.split(sizes, 1)[rank], mask.split(sizes, 1)[rank] if masked else None, label)


def assert_near(actual: Tensor, expected: Tensor, what: str) -> None:
    """Within 1e-5 of the largest entry."""
    error = float((actual - expected).abs().max())
    assert error <= 1e-5 * max(1.0, float(expected.abs().max())), f"{what}: {error}"


def assert_like_one_process(found: list[dict[str, Tensor]], expected: dict[str, Tensor], kind: str) -> None:
    for each in found:
        assert each.keys() == expected.keys()
        for name in expected.keys() - ({"out", "loss"} if kind == "encoder" else set()):
            assert_near(each[name], expected[name], name)
    if kind == "encoder":
        assert_near(torch.cat([each["out"] for each in found], 1), expected["out"], "out")
        assert_near(sum(each["loss"] for each in found), expected["loss"], "loss")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("size", "masked", "settings"),
    [
        (2, True, {}),
        (3, False, {}),
        (3, True, {"attention": "kernelized", "attention_options": {}}),
        (2, True, {"checkpoint_activations": True}),
    ],
    ids=str,
)
def test_models(world: World, kind: str, size: int, masked: bool, settings: dict[str, Any]) -> None:
    tokens, mask, label = batch()
    expected = step(build(kind, **settings), kind, tokens, mask if masked else None, label)
    assert_like_one_process(world.check(size, on_rank, kind, masked, settings), expected, kind)


def test_evaluation(world: World) -> None:
    tokens, mask, label = batch()
    expected = step(build("sequence", dropout=0.3).eval(), "sequence", tokens, mask, label)
    assert_like_one_process(world.check(3, on_rank, "sequence", True, {"dropout": 0.3}, False), expected, "sequence")


def on_mesh(group: dist.ProcessGroup, over_all: bool) -> Any:
    """Two sequence groups of two ranks, each with half of the batch."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    model = parallelize(build("sequence"), mesh["sequence"], reduce_gradients=not over_all)
    wrapped = DistributedDataParallel(model, process_group=None if over_all else mesh["data"].get_group())
    half = mesh["data"].get_local_rank()
    mine = [x.chunk(2)[half] for x in batch()]
    tokens, mask = (piece_of(x, mesh["sequence"]) for x in mine[:2])
    found = step(wrapped, "sequence", tokens, mask, mine[2])
    return {name: x for name, x in found.items() if name not in ("out", "loss")}


@pytest.mark.parametrize("over_all", [False, True])
def test_with_data_parallelism_on_a_mesh(world: World, over_all: bool) -> None:
    expected = step(build("sequence"), "sequence", *batch())
    for found in world.check(4, on_mesh, over_all):
        for name, grad in found.items():
            assert_near(grad, expected[name], name)


def dropped(group: dist.ProcessGroup, checkpointed: bool) -> Any:
    """What dropout makes of equal inputs, and the next number of the global generator, on ranks of unequal pieces."""
    model = parallelize(
        build("sequence", dropout=0.5, embedding_dropout=0.5, checkpoint_activations=checkpointed), group
    )
    torch.manual_seed(3)
    first, second = (model.encoder.embedding_dropout(torch.ones(8, 16)) for _ in range(2))
    torch.manual_seed(4)
    tokens = torch.ones(2, 3 + dist.get_rank(group), dtype=torch.int64)
    model(tokens).sum().backward()
    return first, second, torch.rand(()), [p.grad for p in model.parameters()]


def test_dropout_does_not_repeat_across_ranks(world: World) -> None:
    found = world.check(3, dropped, False)
    masks = [mask for first, second, *_ in found for mask in (first, second)]
    assert all(not torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])
    assert 0.3 < float(torch.cat(masks).eq(0).float().mean()) < 0.7
    assert len({float(number) for _, _, number, _ in found}) == 1
    # Recomputing the layers in the backward pass drops the same entries.
    for plain, recomputed in zip(found, world.check(3, dropped, True), strict=True):
        for a, b in zip(plain[3], recomputed[3], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def wrong(group: dist.ProcessGroup, case: str) -> Any:
    rank = dist.get_rank(group)
    if case == "weights":
        model = build("sequence")
        if rank:
            nn.init.zeros_(model.head[0].weight)
        return parallelize(model, group)
    if case == "another module":
        return parallelize(nn.Linear(2, 2), group)
    if case in ("tilted", "softmax", "linformer"):
        return parallelize(build("sequence", attention=case, attention_options={}), group)
    model = parallelize(build("sequence"), group)
    if case == "twice":
        return parallelize(model, group)
    tokens = torch.zeros(2, 12, dtype=torch.int64)
    if case == "token":
        return model(tokens + 50 * rank)
    if case == "mode":
        return model.train(rank == 0)(tokens)
    assert case == "too long"
    return model(tokens)


@pytest.mark.parametrize(
    ("case", "kind", "message"),
    [
        ("weights", RanksDisagreeError, "the weight 'head.0.weight' must be the same on all ranks"),
        ("another module", InputError, "model must be a SkyformerEncoder, a SequenceClassifier or a PairClassifier"),
        ("tilted", UnsupportedError, "'tilted' attention is not supported for a sequence in pieces: every block of"),
        ("softmax", UnsupportedError, "'softmax' attention is not supported for a sequence in pieces"),
        ("linformer", UnsupportedError, "Use 'skyformer' or 'kernelized'"),
        ("twice", InputError, "model must not be parallelized twice"),
        (
            "token",
            InputError,
            "on rank 1 of 2: tokens must be from 0 to vocab_size - 1 = 10; got numbers from 50 to 50",
        ),
        ("mode", RanksDisagreeError, "whether the model is in training mode must be the same on all ranks"),
        ("too long", ShapeError, "at most max_length = 23 long; got pieces of (12, 12), 24 in all"),
    ],
)
def test_every_rank_raises_the_same_error(world: World, case: str, kind: type[Exception], message: str) -> None:
    errors = world.run(2, wrong, case)
    assert len({str(error) for error in errors}) == 1
    assert all(isinstance(error, kind) for error in errors)
    assert message in str(errors[0])


def saved(group: dist.ProcessGroup, folder: str) -> Any:
    model = parallelize(build("pair"), group)
    if dist.get_rank(group) == 0:
        model.save_pretrained(folder)
    return sorted(model.state_dict())


def test_a_parallel_model_is_saved_like_any_other(world: World, tmp_path: Any) -> None:
    model = build("pair")
    assert world.check(2, saved, str(tmp_path))[1] == sorted(model.state_dict())
    loaded = PairClassifier.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))
