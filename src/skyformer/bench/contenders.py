"""What is measured: the attentions of this package, what they replace, and the packages users would pick instead.

A contender turns a `Setting` into a `Job`: a closure that runs the forward pass, the tensors that get gradients, and
a gradient for the output. Function contenders start from q, k, v (B, H, n, P); layer contenders, which bring
projections of their own, from x (B, n, H P).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skyformer.attention import attention_class, attention_options, build_attention, list_attentions
from skyformer.attention.multihead import MultiheadAttention
from skyformer.bench.inputs import make_tokens
from skyformer.errors import InputError, UnknownNameError

DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "bfloat16", "float16")}


@dataclass(frozen=True)
class Setting:
    """The shapes of one measurement: B, H, n, P, the number of features d, and the kind of input."""

    length: int
    batch: int = 1
    heads: int = 2
    head_dim: int = 32
    landmarks: int = 128
    dtype: str = "float32"
    data: str = "walk"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("length", "batch", "heads", "head_dim", "landmarks"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1; got {getattr(self, name)}")
        if self.dtype not in DTYPES:
            raise UnknownNameError("dtype", self.dtype, DTYPES)

    def draw(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v (B, H, n, P)."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.batch, self.heads, self.length, self.head_dim)
        q, k, v = make_tokens(self.data, shape, generator)
        dtype = DTYPES[self.dtype]
        return q.to(dtype), k.to(dtype), v.to(dtype)

    def draw_layer_input(self) -> Tensor:
        """x (B, n, H P)."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(self.batch, self.length, self.heads * self.head_dim, generator=generator).to(
            DTYPES[self.dtype]
        )


@dataclass(frozen=True)
class Job:
    """One measurable piece of work."""

    forward: Callable[[], Tensor]
    inputs: tuple[Tensor, ...]
    parameters: tuple[Tensor, ...]
    grad: Tensor

    def clear(self) -> None:
        for x in (*self.inputs, *self.parameters):
            x.grad = None


@dataclass(frozen=True)
class Contender:
    """`build` makes the callable: from q, k, v for a function, from x for a layer."""

    name: str
    layer: bool
    build: Callable[[Setting], Callable[..., Tensor]]
    requires: str | None = None
    """The package it comes from, if not this one."""
    rival: str | None = None
    """The attention of this package that is of the same kind."""

    def available(self) -> bool:
        return self.requires is None or importlib.util.find_spec(self.requires) is not None

    def job(self, setting: Setting) -> Job:
        torch.manual_seed(setting.seed)
        run = self.build(setting)
        drawn = (setting.draw_layer_input(),) if self.layer else setting.draw()
        inputs = tuple(x.requires_grad_() for x in drawn)
        parameters = tuple(run.parameters()) if isinstance(run, nn.Module) else ()
        grad = torch.randn(inputs[-1].shape, generator=torch.Generator().manual_seed(1)).to(inputs[0].dtype)
        return Job(lambda: run(*inputs), inputs, parameters, grad)


def attention_contender(name: str) -> Contender:
    """An attention of the registry, given d features where it has such an option."""
    attention_class(name)
    return Contender(name, False, lambda setting: _registered(name, setting))


def layer_contender(name: str) -> Contender:
    """The same inside `MultiheadAttention`, to stand beside packages that bring projections."""

    def build(setting: Setting) -> Callable[..., Tensor]:
        options = _feature_options(name, setting)
        if name == "linformer":
            options["max_length"] = setting.length
        width = setting.heads * setting.head_dim
        layer = MultiheadAttention(width, setting.heads, batch_first=True, attention=name, **options)
        return _FirstOutput(layer.to(DTYPES[setting.dtype]))

    return Contender(f"{name} layer", True, build)


def _registered(name: str, setting: Setting) -> nn.Module:
    options = _feature_options(name, setting)
    module = build_attention(name, setting.heads, setting.head_dim, max_length=setting.length, **options)
    return module.to(DTYPES[setting.dtype])


def _feature_options(name: str, setting: Setting) -> dict[str, Any]:
    known = attention_options(name)
    return {option: setting.landmarks for option in ("num_landmarks", "num_features") if option in known}


class _FirstOutput(nn.Module):
    """Self-attention of a layer that takes query, key and value and returns a tuple."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x, x, x, need_weights=False)[0]
        return out


class _PlainLinformer(nn.Module):
    """softmax(Q (E K)^T) (E V), written out: the cheapest attention with d features there is."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        shape = (setting.heads, setting.landmarks, setting.length)
        self.projection = nn.Parameter(torch.randn(shape) * setting.length**-0.5)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.projection @ k, self.projection @ v
        return torch.softmax(q @ keys.mT * q.shape[-1] ** -0.5, -1) @ values


def _nystrom_attention(setting: Setting) -> nn.Module:
    from nystrom_attention import NystromAttention

    return NystromAttention(
        dim=setting.heads * setting.head_dim,
        dim_head=setting.head_dim,
        heads=setting.heads,
        num_landmarks=setting.landmarks,
    ).to(DTYPES[setting.dtype])


def _performer(setting: Setting) -> nn.Module:
    from performer_pytorch import FastAttention

    return FastAttention(dim_heads=setting.head_dim, nb_features=setting.landmarks).to(DTYPES[setting.dtype])


def _linformer(setting: Setting) -> nn.Module:
    from linformer import LinformerSelfAttention

    width = setting.heads * setting.head_dim
    layer = LinformerSelfAttention(width, setting.length, k=setting.landmarks, heads=setting.heads)
    return layer.to(DTYPES[setting.dtype])


def _transformers_nystromformer(setting: Setting) -> nn.Module:
    from transformers import NystromformerConfig
    from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention

    config = NystromformerConfig(
        hidden_size=setting.heads * setting.head_dim,
        num_attention_heads=setting.heads,
        num_landmarks=setting.landmarks,
        segment_means_seq_len=setting.length,
        attention_probs_dropout_prob=0.0,
    )
    return _Positional(NystromformerSelfAttention(config).to(DTYPES[setting.dtype]))


def _transformers_bigbird(setting: Setting) -> nn.Module:
    from transformers import BigBirdConfig
    from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel

    config = BigBirdConfig(
        hidden_size=setting.heads * setting.head_dim,
        num_attention_heads=setting.heads,
        attention_probs_dropout_prob=0.0,
    )
    layer = BigBirdBlockSparseAttention(config, seed=setting.seed).to(DTYPES[setting.dtype])
    everything = torch.ones(setting.batch, setting.length)
    blocked, band, start, end = BigBirdModel.create_masks_for_block_sparse_attn(everything, config.block_size)
    return _Positional(layer, (band, start, end, blocked, blocked))


def _transformers_reformer(setting: Setting) -> nn.Module:
    from transformers import ReformerConfig
    from transformers.models.reformer.modeling_reformer import LSHSelfAttention

    config = ReformerConfig(
        hidden_size=setting.heads * setting.head_dim,
        num_attention_heads=setting.heads,
        attention_head_size=setting.head_dim,
        lsh_attn_chunk_length=32,
        num_hashes=2,
        num_buckets=64,
        lsh_attention_probs_dropout_prob=0.0,
        is_decoder=False,
    )
    return _Positional(LSHSelfAttention(config).to(DTYPES[setting.dtype]))


class _Positional(nn.Module):
    """A layer that takes x and a few masks, and returns its output first."""

    def __init__(self, layer: nn.Module, masks: tuple[Tensor, ...] = ()) -> None:
        super().__init__()
        self.layer, self.masks = layer, masks

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x, *self.masks)[0]
        return out


SDPA = Contender("sdpa", False, lambda setting: F.scaled_dot_product_attention)
PLAIN_LINFORMER = Contender("plain linformer", False, _PlainLinformer)
PEERS = (
    Contender("nystrom-attention", True, _nystrom_attention, "nystrom_attention", "nystromformer"),
    Contender("performer-pytorch", False, _performer, "performer_pytorch", "performer"),
    Contender("linformer package", True, _linformer, "linformer", "linformer"),
    Contender("transformers Nystromformer", True, _transformers_nystromformer, "transformers", "nystromformer"),
    Contender("transformers BigBird", True, _transformers_bigbird, "transformers", "bigbird"),
    Contender("transformers Reformer", True, _transformers_reformer, "transformers", "reformer"),
)


def choose_contenders(attentions: list[str], peers: bool) -> list[Contender]:
    """`F.scaled_dot_product_attention` first, then the attentions asked for; then the peers, and as layers what they
    face: Skyformer, and the attention of their own kind if it was asked for."""
    names = list_attentions() if attentions == ["all"] else attentions
    chosen = [SDPA] + [attention_contender(name) for name in names if name != "softmax"]
    if not peers:
        return chosen
    faced = [peer for peer in PEERS if peer.available() and (peer.rival in names or attentions != ["all"])]
    rivals = [peer.rival for peer in faced if peer.layer and peer.rival in names]
    layers = dict.fromkeys(["skyformer", *(rival for rival in rivals if rival is not None)])
    return [*chosen, PLAIN_LINFORMER, *(layer_contender(name) for name in layers), *faced]


def missing_peers() -> list[str]:
    return [peer.name for peer in PEERS if not peer.available()]
