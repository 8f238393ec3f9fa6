"""What every attention mechanism is: a module from (query, key, value) to (B, H, L, Pv), with its promises declared."""

from __future__ import annotations

import abc
import enum
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from skyformer.checks import check_at_least, check_mask, check_query_key_value
from skyformer.errors import ShapeError, UnsupportedError


class Promise(enum.Enum):
    """What the test suite asks of every mechanism; one that cannot keep a promise lists it in `cannot`."""

    CROSS_ATTENTION = "queries and keys of different lengths"
    CAUSAL = "is_causal"
    VALUE_DIM = "a value dim of its own"
    PADDING = "appending masked tokens changes nothing"
    BATCH = "an example gives the same alone and in a batch"
    GRADIENT = "gradients agree with finite differences"
    DROPOUT = "dropout of attention weights"
    WEIGHTS = "attention weights on request"
    ANY_LENGTH = "sequences of any length"
    LINEAR_MEMORY = "memory linear in length"
    FULLGRAPH = "torch.compile without graph breaks"


class Attention(nn.Module, abc.ABC):
    """Base of all mechanisms. Subclasses set `name`, say in `cannot` what they cannot do and why, and write `attend`.

    Args:
        num_heads: H. head_dim: P.
        max_length: the longest sequence to expect; only mechanisms with parameters of that size need it.
        seed: where random choices come from in `eval()`, so that two calls agree. In training they come from torch's
            global generator.
    """

    name: ClassVar[str]
    exact: ClassVar[bool] = False
    """Whether the mechanism computes what it defines, or approximates it."""
    cannot: ClassVar[Mapping[Promise, str]] = {}

    def __init__(self, num_heads: int, head_dim: int, *, max_length: int | None = None, seed: int = 0) -> None:
        super().__init__()
        check_at_least("num_heads", num_heads, 1)
        check_at_least("head_dim", head_dim, 1)
        check_at_least("seed", seed, 0, most=2**62)
        if max_length is not None:
            check_at_least("max_length", max_length, 1)
        self.num_heads, self.head_dim, self.max_length, self.seed = num_heads, head_dim, max_length, seed

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """query (B, H, L, P), key (B, H, S, P), value (B, H, S, Pv) to (B, H, L, Pv).

        key_mask (B, S) and query_mask (B, L) are bool, True = a real token; a missing query_mask is key_mask when
        L == S. What comes out at masked queries has no meaning.
        """
        check_query_key_value(query, key, value)
        if query.shape[1] != self.num_heads or query.shape[-1] != self.head_dim:
            raise ShapeError(
                f"this {self.name!r} attention has {self.num_heads} heads of {self.head_dim}; query has "
                f"{query.shape[1]} of {query.shape[-1]}"
            )
        if query_mask is None and query.shape[2] == key.shape[2]:
            query_mask = key_mask
        check_mask("key_mask", key_mask, key.shape[0], key.shape[2])
        check_mask("query_mask", query_mask, query.shape[0], query.shape[2])
        if is_causal:
            self.require(Promise.CAUSAL)
        if query.shape[2] != key.shape[2]:
            self.require(Promise.CROSS_ATTENTION)
        if value.shape[-1] != query.shape[-1]:
            self.require(Promise.VALUE_DIM)
        if query.shape[0] == 0:
            # Nothing to attend with, and no elements for a view to infer its sizes from.
            return value.new_zeros(*query.shape[:3], value.shape[-1])
        return self.attend(query, key, value, key_mask, query_mask, is_causal)

    @abc.abstractmethod
    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None,
        query_mask: Tensor | None,
        is_causal: bool,
    ) -> Tensor:
        """The mechanism itself, on checked input."""

    @classmethod
    def require(cls, promise: Promise) -> None:
        """Raise if the mechanism has said that it cannot keep `promise`."""
        if promise in cls.cannot:
            raise UnsupportedError(f"{cls.name!r} attention cannot do {promise.value}: {cls.cannot[promise]}")

    def generator(self) -> torch.Generator | None:
        """Where this call draws from: a fresh one of fixed seed in `eval()`, torch's own in training."""
        return None if self.training else torch.Generator().manual_seed(self.seed)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, head_dim={self.head_dim}"
