"""parallelize: the encoder and the classifiers with each rank holding a piece of every sequence.

Embeddings take positions of the whole sequence, attention and pooling reach over the ranks, everything else is computed
token by token. The head sees the same pooled features on all ranks, so all ranks compute the same logits and loss. The
sum of the losses of all R ranks, which the collectives differentiate, is R times that loss; so the mean over the ranks
of each parameter's gradient is its gradient in one process, for the encoder (a sum of R parts, each R times as large)
and for the head (R equal gradients) alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from skyformer.attention.base import Attention, Inputs
from skyformer.attention.kernelized import KernelizedAttention
from skyformer.attention.skyformer import SkyformerAttention
from skyformer.checks import check_finite_inputs
from skyformer.distributed.agreement import Statement, agree, digest
from skyformer.distributed.collectives import Group, Ranks
from skyformer.distributed.ring import attend_ring, refuse_softmax
from skyformer.distributed.skyformer import attend_pieces, check_sampler
from skyformer.errors import InputError, ShapeError, UnsupportedError
from skyformer.functional import SkyformerSettings
from skyformer.ops.kernels import get_kernel, scale_of
from skyformer.ops.products import Plan

if TYPE_CHECKING:
    from skyformer.model import ModelConfig
    from skyformer.model.embeddings import Embeddings

ModelT = TypeVar("ModelT", bound=nn.Module)

_REASONS = {
    "tilted": "every block of queries has exact keys and tilted cells of its own, from all keys. num_blocks "
    "(num_exact + num_cells) (P + Pv) numbers per head would travel, 88 times the d (P + Pv) of Skyformer at both "
    "defaults, and each level of the tree of cells needs medians over the keys of all ranks"
}
_OTHERWISE = "only Skyformer and Kernelized Attention are known to need little of the other ranks"


def parallelize(model: ModelT, group: Group = None, *, reduce_gradients: bool = True) -> ModelT:
    """Change a model in place so that each rank gives it a piece of every sequence; returns the model.

    Each rank passes its tokens (B, n_r) and mask (B, n_r), such as `piece_of(tokens, group)`; pieces may differ in
    length, and be empty. A classifier returns the same logits on all ranks. Losses and gradients are those of one
    process with the whole sequence, except for dropout, where each rank draws masks of its own. All ranks must call
    forward and backward together.

    Args:
        model: a `SkyformerEncoder`, `SequenceClassifier` or `PairClassifier` with skyformer or kernelized attention,
            with the same weights on all ranks.
        group: the ranks that share each sequence: a ProcessGroup, one dimension of a DeviceMesh, or None for all.
        reduce_gradients: in every backward pass, replace each parameter's gradient by its mean over the ranks, which
            all compute the same loss of a classifier; by its sum for an encoder, whose output and loss each rank has
            for its own tokens. Leave it on with `DistributedDataParallel` over the other dimension of a mesh. Pass
            False if that averages the gradients of a classifier over all processes anyway.
    """
    from skyformer.model import PairClassifier, SequenceClassifier, SkyformerEncoder
    from skyformer.model.dropout import Dropout
    from skyformer.model.encoder import EncoderLayer

    ranks = Ranks.of(group)

    def state() -> Statement:
        if not isinstance(model, SkyformerEncoder | SequenceClassifier | PairClassifier):
            raise InputError(
                "model must be a SkyformerEncoder, a SequenceClassifier or a PairClassifier; got "
                f"{type(model).__name__}. Wrap it in other modules afterwards"
            )
        check_config(model.config)
        if any(isinstance(module, PieceAttention) for module in model.modules()):
            raise InputError("model must not be parallelized twice")
        trained = tuple(name for name, parameter in model.named_parameters() if parameter.requires_grad)
        weights = {f"the weight {name!r}": digest(tensor) for name, tensor in model.state_dict().items()}
        return Statement({"the config of the model": str(model.config), "the trained weights": trained, **weights})

    agree(ranks, "parallelize", state, next(model.parameters()).device)
    assert isinstance(model, SkyformerEncoder | SequenceClassifier | PairClassifier)
    encoder = model if isinstance(model, SkyformerEncoder) else model.encoder
    for layer in encoder.layers:
        assert isinstance(layer, EncoderLayer)
        local = layer.attention.attention
        assert isinstance(local, SkyformerAttention | KernelizedAttention)
        layer.attention.attention = PieceAttention(local, ranks)
    encoder.embeddings.register_forward_pre_hook(_GlobalPositions(ranks), with_kwargs=True)
    if not isinstance(model, SkyformerEncoder):
        model.pool = _MeanOverRanks(ranks)
    for module in model.modules():
        if isinstance(module, Dropout):
            module.stream = ranks.rank
    if reduce_gradients:
        divisor = 1 if isinstance(model, SkyformerEncoder) else ranks.size
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda grad: ranks.sum(grad, "sum of the weights' gradients") / divisor)
    return model


def check_config(config: ModelConfig) -> None:
    """Raise an error if a model with this config cannot be parallelized."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        check_attention(config.build_attention(layer=0))


def check_attention(attention: nn.Module) -> None:
    """Raise an error that names the attention if it has no form for pieces."""
    if isinstance(attention, SkyformerAttention):
        check_sampler(attention.settings.landmarks)
    elif isinstance(attention, KernelizedAttention):
        refuse_softmax(get_kernel(attention.kernel))
    else:
        name = attention.name if isinstance(attention, Attention) else type(attention).__name__
        raise UnsupportedError(
            f"{name!r} attention is not supported for a sequence in pieces: {_REASONS.get(name, _OTHERWISE)}. Use "
            "'skyformer' or 'kernelized'"
        )


class PieceAttention(nn.Module):
    """An attention of which each rank computes its piece. It has the options, mode and seeds of the local one."""

    def __init__(self, local: SkyformerAttention | KernelizedAttention, ranks: Ranks) -> None:
        super().__init__()
        self.local, self.ranks = local, ranks

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """As `Attention.forward`, on this rank's piece."""
        local = self.local

        def check() -> None:
            local.checked(Inputs(query, key, value, key_mask))
            if local.check_finite:
                check_finite_inputs(query=query, key=key, value=value)

        def settings() -> SkyformerSettings:
            check()
            assert isinstance(local, SkyformerAttention)
            return local.settings

        def plan() -> Plan:
            check()
            assert isinstance(local, KernelizedAttention)
            scale, kernel = scale_of(query, local.scale), get_kernel(local.kernel)
            return Plan(kernel, scale, dropout_p=local.dropout_p, memory_budget=local.memory_budget)

        if isinstance(local, KernelizedAttention):
            return attend_ring(self.ranks, query, key, value, key_mask, plan)
        source = local.random_source()
        return attend_pieces(self.ranks, query, key, value, key_mask, None, settings, source)


@dataclass(frozen=True)
class _GlobalPositions:
    """Before the embeddings: where in its sequence the piece of this rank starts."""

    ranks: Ranks

    def __call__(
        self, embeddings: Embeddings, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tokens: Tensor = arguments[0]
        mask: Tensor | None = arguments[1] if len(arguments) > 1 else named.get("mask")

        def state() -> Statement:
            embeddings.checked(tokens, mask)
            same = {
                "the batch size": tokens.shape[0],
                "mask is given": mask is not None,
                "whether the model is in training mode": embeddings.training,
            }
            return Statement(same, (tokens.shape[1], 0))

        lengths, _ = agree(self.ranks, "the model", state, embeddings.token.device)
        longest = embeddings.position.shape[0]
        if sum(lengths) > longest:
            raise ShapeError(
                f"tokens must be at most max_length = {longest} long; got pieces of {lengths}, {sum(lengths)} in all"
            )
        return arguments, {**named, "start": sum(lengths[: self.ranks.rank])}


class _MeanOverRanks(nn.Module):
    """`masked_mean` over the pieces of all ranks: the same on every rank."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        from skyformer.model.classifier import masked_sum

        total, count = masked_sum(x, mask)
        both = self.ranks.sum(torch.cat([total, count.to(total.dtype)], -1), "pooling")
        return (both[:, :-1] / both[:, -1:].clamp(min=1)).to(x.dtype)
