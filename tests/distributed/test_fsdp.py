"""FSDP (`fully_shard`) and activation checkpointing over the operators: gradients are those of the plain model."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import skyformer
from skyformer.model import SequenceClassifier
from tests.distributed.world import World

RANKS, LENGTH, BATCH = 2, 24, 2


def build(attention: str) -> SequenceClassifier:
    torch.manual_seed(1)
    options = {"num_landmarks": 8} if attention == "skyformer" else {}
    return SequenceClassifier(
        vocab_size=11,
        max_length=LENGTH,
        dim=16,
        hidden_dim=24,
        num_layers=2,
        attention=attention,
        attention_options=options,
        dropout=0.0,
    )


def batch(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    mask = torch.rand(BATCH, LENGTH, generator=generator) < 0.8
    tokens = torch.randint(11, (BATCH, LENGTH), generator=generator)
    return tokens, mask, torch.randint(2, (BATCH,), generator=generator)


def gradients(model: nn.Module, rank: int) -> dict[str, Tensor]:
    """All gradients of one step on the batch of this rank, with landmarks drawn from the same seed."""
    tokens, mask, label = batch(rank)
    torch.manual_seed(7)
    model.zero_grad()
    F.cross_entropy(model(tokens, mask).float(), label).backward()
    # checkpoint_wrapper adds a level to the names.
    found = {name.replace("_checkpoint_wrapped_module.", ""): p.grad for name, p in model.named_parameters()}
    return {name: grad for name, grad in found.items() if grad is not None}


def errors_on_rank(group: dist.ProcessGroup, attention: str, backend: str, half: bool) -> dict[str, float]:
    """The relative error of every gradient of the sharded model against the mean over the batches of all ranks."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = build(attention)
    sharded = copy.deepcopy(model)
    mesh = DeviceMesh.from_group(group, "cpu")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if half else None
    options = {} if policy is None else {"mp_policy": policy}
    layers = sharded.encoder.layers
    for index, layer in enumerate(layers):
        layers[index] = checkpoint_wrapper(layer)
        fully_shard(layers[index], mesh=mesh, **options)
    fully_shard(sharded, mesh=mesh, **options)
    with skyformer.use_backend("torch"):
        every = [gradients(model, rank) for rank in range(RANKS)]
        means = {name: sum(each[name] for each in every) / RANKS for name in every[0]}
    with skyformer.use_backend(backend):
        found = {name: grad.full_tensor() for name, grad in gradients(sharded, dist.get_rank(group)).items()}
    assert found.keys() == means.keys()
    largest = max(float(mean.norm()) for mean in means.values())
    return {name: float((found[name].float() - means[name]).norm()) / largest for name in means}


@pytest.mark.parametrize(
    ("attention", "backend"), [("skyformer", "triton"), ("kernelized", "triton"), ("skyformer", "torch")]
)
@pytest.mark.parametrize("half", [False, True])
def test_sharded_and_checkpointed(world: World, attention: str, backend: str, half: bool) -> None:
    if backend == "triton":
        pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot be tested")
    for errors in world.check(RANKS, errors_on_rank, attention, backend, half):
        assert max(errors.values()) < (3e-2 if half else 1e-5), errors
