"""The contenders of the attention benchmarks: this package's attentions, PyTorch's, and those of other packages.

Functions start from q, k, v (B, H, n, P); layers, which have projections of their own, start from x (B, n, H P).
"""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skyformer.attention import attention_class, attention_options, build_attention, list_attentions
from skyformer.attention.multihead import MultiheadAttention
from skyformer.errors import EXTRA_OF_MODULE, MissingExtraError, UnknownNameError, install_command
from skyformer.studies.benchmarks.authors import HEAD_DIM, AuthorsSkyformer, load_class
from skyformer.studies.benchmarks.inputs import make_tokens

DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "bfloat16", "float16")}


@dataclass(frozen=True)
class Shape:
    """The size of one measurement: n, B, H, P, the number of features d, the dtype and the kind of input."""

    length: int
    batch: int = 1
    heads: int = 2
    head_dim: int = 32
    landmarks: int = 128
    dtype: str = "float32"
    data: str = "walk"
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UnknownNameError("dtype", self.dtype, DTYPES)

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    def draw(self) -> list[Tensor]:
        """q, k, v (B, H, n, P)."""
        size = (self.batch, self.heads, self.length, self.head_dim)
        tokens = make_tokens(self.data, size, torch.Generator().manual_seed(self.seed))
        return [each.to(self.device, DTYPES[self.dtype]) for each in tokens]

    def draw_layer_input(self) -> list[Tensor]:
        """x (B, n, H P)."""
        generator = torch.Generator().manual_seed(self.seed)
        drawn = torch.randn(self.batch, self.length, self.width, generator=generator)
        return [drawn.to(self.device, DTYPES[self.dtype])]


@dataclass(frozen=True)
class Contender:
    """`make` returns a function of q, k, v or, for a layer, of x."""

    name: str
    layer: bool
    make: Callable[[Shape], Callable[..., Tensor]]
    requires: str | None = None
    """The package it comes from, if not this one."""
    rival: str | None = None
    """The attention of this package that is the same mechanism."""
    limit: Callable[[Shape], str | None] = lambda shape: None
    """Why it cannot compute a shape, or None."""

    def available(self) -> bool:
        return self.requires is None or importlib.util.find_spec(self.requires) is not None

    def short(self, shape: Shape) -> Shape:
        """A shape of one short sequence, or of the given one if it is shorter. Ours must accept any length."""
        unit = math.lcm(_BIGBIRD_BLOCK, shape.landmarks)
        length = 301 if self.requires is None else unit * (1 + _BIGBIRD_FULL // unit)
        return replace(shape, length=min(shape.length, length), batch=1)

    def build(self, shape: Shape) -> Callable[..., Tensor]:
        torch.manual_seed(shape.seed)
        made = self.make(shape)
        return made.to(shape.device, DTYPES[shape.dtype]) if isinstance(made, nn.Module) else made


class Workload:
    """A forward and backward pass of a contender that can be repeated."""

    def __init__(self, contender: Contender, shape: Shape) -> None:
        self.run = contender.build(shape)
        drawn = shape.draw_layer_input() if contender.layer else shape.draw()
        self.inputs = [x.requires_grad_() for x in drawn]
        self.grad = torch.randn(drawn[-1].shape, generator=torch.Generator().manual_seed(1)).to(drawn[-1])

    def forward(self) -> Tensor:
        return self.run(*self.inputs)

    def step(self) -> tuple[float, float]:
        """Seconds of the forward pass, and of forward and backward together."""
        parameters = self.run.parameters() if isinstance(self.run, nn.Module) else ()
        for x in (*self.inputs, *parameters):
            x.grad = None
        self._wait()
        start = time.perf_counter()
        out = self.forward()
        self._wait()
        middle = time.perf_counter()
        out.backward(self.grad)
        self._wait()
        return middle - start, time.perf_counter() - start

    def _wait(self) -> None:
        """Wait until the device has done all work, which on a GPU continues after a call returns."""
        if self.grad.device.type != "cpu":
            torch.accelerator.synchronize(self.grad.device)


class _FirstOutput(nn.Module):
    """A layer that returns a tuple; `call` passes x to it."""

    def __init__(self, layer: nn.Module, call: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.call(self.layer, x)[0]
        return out


def attention_contender(name: str) -> Contender:
    """An attention of the registry, with d features if it has such an option."""
    attention_class(name)

    def make(shape: Shape) -> nn.Module:
        options = _feature_options(name, shape)
        return build_attention(name, shape.heads, shape.head_dim, max_length=shape.length, **options)

    return Contender(name, False, make)


def layer_contender(name: str) -> Contender:
    """The same inside `MultiheadAttention`, for a comparison with packages that include projections."""

    def make(shape: Shape) -> nn.Module:
        options = _feature_options(name, shape)
        if name == "linformer":
            options["max_length"] = shape.length
        layer = MultiheadAttention(shape.width, shape.heads, batch_first=True, attention=name, **options)
        return _FirstOutput(layer, lambda layer, x: layer(x, x, x, need_weights=False))

    return Contender(f"{name} layer", True, make)


def _feature_options(name: str, shape: Shape) -> dict[str, Any]:
    known = attention_options(name)
    return {option: shape.landmarks for option in ("num_landmarks", "num_features", "budget") if option in known}


class _PlainLinformer(nn.Module):
    """softmax(Q (E K)^T) (E V), written out: the cheapest attention with d features."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        size = (shape.heads, shape.landmarks, shape.length)
        self.projection = nn.Parameter(torch.randn(size) * shape.length**-0.5)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.projection @ k, self.projection @ v
        return torch.softmax(q @ keys.mT * q.shape[-1] ** -0.5, -1) @ values


def authors_contender(clone: str) -> Contender:
    """Skyformer of the authors, from a clone of their repository."""
    return Contender(
        AUTHORS,
        False,
        lambda shape: AuthorsSkyformer(clone, shape.length, shape.landmarks, shape.device),
        rival="skyformer",
        limit=_authors_limit,
    )


def _authors_limit(shape: Shape) -> str | None:
    if shape.head_dim != HEAD_DIM:
        return f"computes heads of {HEAD_DIM} only"
    return None if shape.dtype == "float32" else "computes float32 only"


def _xformers(shape: Shape) -> Callable[..., Tensor]:
    from xformers.ops import memory_efficient_attention

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = memory_efficient_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
        return out

    return attend


def _nystrom_attention(shape: Shape) -> Any:
    from nystrom_attention import NystromAttention

    sizes = {"dim_head": shape.head_dim, "heads": shape.heads, "num_landmarks": shape.landmarks}
    return NystromAttention(shape.width, **sizes)


def _performer(shape: Shape) -> Any:
    from performer_pytorch import FastAttention

    return FastAttention(dim_heads=shape.head_dim, nb_features=shape.landmarks)


def _linformer(shape: Shape) -> Any:
    from linformer import LinformerSelfAttention

    return LinformerSelfAttention(shape.width, shape.length, k=shape.landmarks, heads=shape.heads)


def _transformers_nystromformer(shape: Shape) -> nn.Module:
    from transformers import NystromformerConfig
    from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention

    config = NystromformerConfig(
        hidden_size=shape.width,
        num_attention_heads=shape.heads,
        num_landmarks=shape.landmarks,
        segment_means_seq_len=shape.length,
        attention_probs_dropout_prob=0.0,
    )
    return _FirstOutput(NystromformerSelfAttention(config), lambda layer, x: layer(x))


def _transformers_bigbird(shape: Shape) -> nn.Module:
    from transformers import BigBirdConfig
    from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel

    config = BigBirdConfig(hidden_size=shape.width, num_attention_heads=shape.heads, attention_probs_dropout_prob=0.0)
    no_padding = torch.ones(shape.batch, shape.length)
    blocked, band, start, end = BigBirdModel.create_masks_for_block_sparse_attn(no_padding, config.block_size)
    layer = BigBirdBlockSparseAttention(config, seed=shape.seed)
    return _FirstOutput(layer, lambda layer, x: layer(x, band, start, end, blocked, blocked))


def _transformers_reformer(shape: Shape) -> nn.Module:
    from transformers import ReformerConfig
    from transformers.models.reformer.modeling_reformer import LSHSelfAttention

    config = ReformerConfig(
        hidden_size=shape.width,
        num_attention_heads=shape.heads,
        attention_head_size=shape.head_dim,
        lsh_attn_chunk_length=_REFORMER_CHUNK,
        num_hashes=2,
        num_buckets=64,
        lsh_attention_probs_dropout_prob=0.0,
        is_decoder=False,
    )
    return _FirstOutput(LSHSelfAttention(config), lambda layer, x: layer(x))


_BIGBIRD_BLOCK, _BIGBIRD_FULL, _REFORMER_CHUNK = 64, 704, 32


def _multiple_of(unit: int, what: str, shape: Shape) -> str | None:
    return f"needs a multiple of {unit} tokens ({what})" if shape.length % unit else None


def _bigbird_limit(shape: Shape) -> str | None:
    if shape.length <= _BIGBIRD_FULL:
        return f"is block-sparse above {_BIGBIRD_FULL} tokens only"
    return _multiple_of(_BIGBIRD_BLOCK, "its block size", shape)


SDPA = Contender("sdpa", False, lambda shape: F.scaled_dot_product_attention)
AUTHORS = "skyformer of the authors"
PLAIN_LINFORMER = Contender("plain linformer", False, _PlainLinformer)
PEERS = (
    Contender("nystrom-attention", True, _nystrom_attention, "nystrom_attention", "nystromformer"),
    Contender("performer-pytorch", False, _performer, "performer_pytorch", "performer"),
    Contender("linformer package", True, _linformer, "linformer", "linformer"),
    Contender(
        "transformers Nystromformer",
        True,
        _transformers_nystromformer,
        "transformers",
        "nystromformer",
        lambda shape: _multiple_of(shape.landmarks, "its landmarks", shape),
    ),
    Contender("transformers BigBird", True, _transformers_bigbird, "transformers", "bigbird", _bigbird_limit),
    Contender(
        "transformers Reformer",
        True,
        _transformers_reformer,
        "transformers",
        "reformer",
        lambda shape: _multiple_of(_REFORMER_CHUNK, "its chunk length", shape),
    ),
    Contender(
        "xformers",
        False,
        _xformers,
        "xformers",
        "softmax",
        lambda shape: "runs on GPUs only" if shape.device == "cpu" else None,
    ),
)


def find_contender(name: str, authors: str | None = None) -> Contender:
    """A contender by the name it is listed under; `authors` is the clone of the authors' code."""
    if name == AUTHORS and authors is not None:
        return authors_contender(authors)
    known = {each.name: each for each in (SDPA, PLAIN_LINFORMER, *PEERS)}
    if name in known:
        return known[name]
    if name.endswith(" layer"):
        return layer_contender(name.removesuffix(" layer"))
    return attention_contender(name)


def choose_contenders(
    attentions: Sequence[str], peers: bool, shape: Shape, authors: str | None = None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of sdpa, of the given attentions ("all" means every one), and of others; and who is left out, why.

    Peers that are layers are compared with layers: Skyformer, and the same mechanism if it is among the attentions.

    Args:
        authors: a clone of the authors' code, to be measured too.
    """
    everything = tuple(attentions) == ("all",)
    names = list_attentions() if everything else attentions
    chosen = [SDPA.name, *(attention_contender(name).name for name in names if name != "softmax")]
    others: list[Contender] = []
    if peers:
        if not any(peer.available() for peer in PEERS):
            raise MissingExtraError("nystrom_attention")
        others = [peer for peer in PEERS if peer.rival in names or not everything]
    if authors is not None:
        load_class(authors)
        others.append(authors_contender(authors))
    reasons = {other: other.limit(shape) or _not_installed(other) for other in others}
    fitting = [other for other, reason in reasons.items() if not reason]
    if peers:
        rivals = [other.rival for other in fitting if other.layer and other.rival in names]
        chosen += [PLAIN_LINFORMER.name, *(f"{name} layer" for name in dict.fromkeys(["skyformer", *rivals]))]
    chosen += [other.name for other in fitting]
    return tuple(chosen), tuple(f"{other.name} {reason}" for other, reason in reasons.items() if reason)


def _not_installed(other: Contender) -> str | None:
    if other.available():
        return None
    extra = EXTRA_OF_MODULE.get(str(other.requires))
    return f"is not installed: {install_command(extra) if extra else f'pip install {other.requires}'}"
