"""Attention, the base class of all mechanisms: it checks the inputs once and declares what a mechanism can do."""

from __future__ import annotations

import abc
import enum
import functools
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, ClassVar, Concatenate, ParamSpec, Self

import torch
from torch import Tensor, nn

from skyformer.checks import (
    check_at_least,
    check_masks,
    check_probability,
    check_query_key_value,
    check_scale,
)
from skyformer.errors import ShapeError, UnsupportedError
from skyformer.ops.noise import FixedSeed
from skyformer.ops.precision import at_least_float32, autocast_off

Options = ParamSpec("Options")


class Promise(enum.Enum):
    """What the test suite checks for every mechanism; a mechanism lists in `cannot` what it does not support."""

    CROSS_ATTENTION = "queries and keys of different lengths"
    CAUSAL = "is_causal"
    VALUE_DIM = "values with another dimension than the queries"
    PADDING = "padding does not change the output"
    BATCH = "the rest of the batch does not change the output"
    GRADIENT = "gradients agree with finite differences"
    DROPOUT = "dropout of attention weights"
    WEIGHTS = "returning the attention weights"
    ANY_LENGTH = "sequences of any length"
    LINEAR_MEMORY = "memory linear in the length"
    FULLGRAPH = "torch.compile without graph breaks"


@dataclass(frozen=True)
class Inputs:
    """The inputs of one call: query (B, H, L, P), key (B, H, S, P), value (B, H, S, Pv).

    key_mask (B, S) and query_mask (B, L) are bool, True = a real token. `Attention.checked` checks them, and uses
    `key_mask` as `query_mask` if that is None and L == S.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    key_mask: Tensor | None = None
    query_mask: Tensor | None = None
    is_causal: bool = False

    def token_mask(self) -> Tensor | None:
        """bool (B, n), True where the query or the key is real, for mechanisms with L == S == n; None: everywhere."""
        if self.key_mask is None or self.query_mask is None:
            return self.key_mask
        return self.key_mask | self.query_mask

    @property
    def is_empty(self) -> bool:
        """Whether there are no examples or no heads, and so no elements from which a view could infer its sizes."""
        return self.query.shape[0] == 0 or self.query.shape[1] == 0

    def zeros(self) -> Tensor:
        """An output (B, H, L, Pv) of zeros."""
        return self.value.new_zeros(*self.query.shape[:3], self.value.shape[-1])


def computed_in_float32(
    attend: Callable[Concatenate[Inputs, Options], Tensor],
) -> Callable[Concatenate[Inputs, Options], Tensor]:
    """Decorator: half precision is computed in float32 with autocast off; the output has the dtype of the query."""

    @functools.wraps(attend)
    def wrapper(inputs: Inputs, /, *args: Options.args, **kwargs: Options.kwargs) -> Tensor:
        query, key, value = (at_least_float32(x) for x in (inputs.query, inputs.key, inputs.value))
        full = Inputs(query, key, value, inputs.key_mask, inputs.query_mask, inputs.is_causal)
        with autocast_off(query.device.type):
            return attend(full, *args, **kwargs).to(inputs.query.dtype)

    return wrapper


@dataclass(eq=False, repr=False)
class Attention(nn.Module, abc.ABC):
    """Base class of all mechanisms. A subclass is a dataclass whose fields are its options; it sets `name`, lists in
    `cannot` what it does not support and why, and implements `attend`.

    Args:
        num_heads: H.
        head_dim: P.
        max_length: the length of the longest sequence; only mechanisms with parameters of that size need it.
        seed: the seed of random choices in `eval()`, where two calls give the same result. In training, random choices
            come from torch's global generator.
    """

    name: ClassVar[str]
    exact: ClassVar[bool] = False
    """Whether the mechanism is computed exactly, without approximation."""
    approximates_softmax: ClassVar[bool] = False
    """Whether it approximates, or is, softmax attention with the same queries and keys, so that weights trained with
    softmax attention can use it without training."""
    cannot: ClassVar[Mapping[Promise, str]] = {}

    num_heads: int
    head_dim: int
    _: KW_ONLY
    max_length: int | None = None
    seed: int = 0

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        # nn.Module must be initialised before the generated __init__ assigns the fields, which may be modules.
        module = super().__new__(cls)
        nn.Module.__init__(module)
        return module

    def __post_init__(self) -> None:
        """Check the options that several mechanisms share; subclasses check their own."""
        check_at_least("num_heads", self.num_heads, 1)
        check_at_least("head_dim", self.head_dim, 1)
        check_at_least("seed", self.seed, 0, most=2**62)
        if self.max_length is not None:
            check_at_least("max_length", self.max_length, 1)
        check_scale(getattr(self, "scale", None))
        check_probability("dropout", getattr(self, "dropout", 0.0))

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
        L == S. The output at masked queries has no meaning.
        """
        inputs = self.checked(Inputs(query, key, value, key_mask, query_mask, is_causal))
        if query.shape[1] != self.num_heads or query.shape[-1] != self.head_dim:
            raise ShapeError(
                f"query must have {self.num_heads} heads of {self.head_dim} features, as this {self.name!r} attention "
                f"was built; got {query.shape[1]} heads of {query.shape[-1]}"
            )
        return inputs.zeros() if inputs.is_empty else self.attend(inputs)

    @abc.abstractmethod
    def attend(self, inputs: Inputs) -> Tensor:
        """The mechanism itself, on checked inputs: (B, H, L, Pv)."""

    @classmethod
    def checked(cls, inputs: Inputs) -> Inputs:
        """The inputs with the default query mask; an error if they do not fit each other or this mechanism."""
        query, key, value = inputs.query, inputs.key, inputs.value
        check_query_key_value(query, key, value)
        key_mask, query_mask = check_masks(query, key, inputs.key_mask, inputs.query_mask)
        if inputs.is_causal:
            cls.require(Promise.CAUSAL)
        if query.shape[2] != key.shape[2]:
            cls.require(Promise.CROSS_ATTENTION)
        if value.shape[-1] != query.shape[-1]:
            cls.require(Promise.VALUE_DIM)
        return Inputs(query, key, value, key_mask, query_mask, inputs.is_causal)

    @classmethod
    def require(cls, promise: Promise) -> None:
        """Raise an `UnsupportedError` if the mechanism does not support `promise`."""
        if promise in cls.cannot:
            raise UnsupportedError(f"{cls.name!r} attention does not support {promise.value}: {cls.cannot[promise]}")

    @property
    def dropout_p(self) -> float:
        """The dropout probability of this call: zero in `eval()`."""
        return getattr(self, "dropout", 0.0) if self.training else 0.0

    def generator(self) -> torch.Generator | None:
        """The source of random numbers of this call: a new generator of fixed seed in `eval()`, torch's in training."""
        return None if self.training else torch.Generator().manual_seed(self.seed)

    def random_source(self) -> FixedSeed | None:
        """The same source in a form that `torch.compile` can trace."""
        return None if self.training else FixedSeed(self.seed)

    def extra_repr(self) -> str:
        return ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in fields(self) if field.repr)
