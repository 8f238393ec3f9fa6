"""Performer: softmax attention through positive orthogonal random features (FAVOR+), linear in length.

With rows w_1 ... w_m of a random projection, all norms and products multiplied by `scale`,

    exp(<q, k>) = E[phi(q) . phi(k)],    phi(x)_r = exp(<w_r, x> - |x|^2 / 2) / sqrt(m)
    softmax(Q K^T) V ~ D^-1 phi(Q) (phi(K)^T V),    D = diag(phi(Q) phi(K)^T 1)

A factor common to all features of a query cancels, and so does a factor by which a feature of the keys is divided and
that of the queries multiplied. So feature r of the keys is divided by its largest value over the keys of its head, the
queries' is multiplied by it, and every query is then divided by its largest feature: nothing overflows, and no row of D
is below one. In the causal form, the features of later keys may be far larger than the sums of early tokens, so the
softmax features and sums are float64 there: a token does not depend on what follows it, and row 0 is v_0, as long as
later keys are not larger by a factor of exp(500) in every feature that counts.
Choromanski et al., "Rethinking Attention with Performers", 2021.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from skyformer.attention.base import Attention, Inputs, Promise, computed_in_float32
from skyformer.attention.registry import register_attention
from skyformer.attention.rows import in_blocks
from skyformer.checks import check_at_least, check_scale
from skyformer.errors import ShapeError, UnknownNameError
from skyformer.ops.kernels import half_norms, scale_of
from skyformer.ops.noise import draw_seed
from skyformer.ops.tracing import recording, transforming, without_compiler

CHUNK = 128
"""Tokens per chunk of the causal form: scores are formed within chunks, and sums are carried from chunk to chunk."""

REMEMBERED = 256
"""Training calls before a redraw whose features are stored, because activation checkpointing may repeat them."""

RELU_FLOOR = 1e-3
"""Added to the ReLU features, so that every query gives every key some weight."""


def performer_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    is_causal: bool = False,
    num_features: int = 128,
    feature_map: str = "softmax",
    projection: Tensor | None = None,
    scale: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """D^-1 phi(Q) (phi(K)^T V) in O((L + S) m P) time and O((L + S) m) memory.

    Args:
        query: (B, H, L, P). key: (B, H, S, P). value: (B, H, S, Pv).
        key_mask: bool (B, S), True = attend. query_mask: has no effect, because no query depends on another.
        is_causal: query i attends to keys j <= i only. The softmax features are then float64 for inputs of any dtype:
            twice the memory, and rows whose sums are exp(500) or more below those of later keys become zeros.
        num_features: m, the number of rows of the projection.
        feature_map: "softmax" (positive features, unbiased for exp(<q, k>)) or "relu" (max(<w, x>, 0) + 1e-3).
        projection: the rows w (m, P), which override `num_features`; see `draw_projection`.
        scale: factor of the inner products; P ** -0.5 by default.
        generator: the source of the projection; torch's global generator by default.

    Returns:
        (B, H, L, Pv).
    """
    inputs = PerformerAttention.checked(Inputs(query, key, value, key_mask, query_mask, is_causal))
    check_feature_map(feature_map)
    check_scale(scale)
    if projection is None:
        projection = draw_projection(num_features, query.shape[-1], draw_seed(generator))
    _check_projection(projection, query.shape[-1])
    return _attend(inputs, projection, FEATURE_MAPS[feature_map], scale)


def draw_projection(num_features: int, head_dim: int, seed: int) -> Tensor:
    """m rows of P standard Gaussian numbers, (m, P), that are orthogonal within every run of P rows."""
    check_at_least("num_features", num_features, 1)
    generator = torch.Generator().manual_seed(seed)
    runs = -(-num_features // head_dim)
    directions, triangle = torch.linalg.qr(_gaussian((runs, head_dim, head_dim), generator))
    # QR fixes the signs of the diagonal of the triangle; undoing that makes the directions uniform.
    directions = directions * triangle.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    lengths = torch.linalg.vector_norm(_gaussian((num_features, head_dim), generator), dim=-1, keepdim=True)
    rows: Tensor = directions.mT.flatten(0, 1)[:num_features] * lengths
    return rows.float()


def _gaussian(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")


@computed_in_float32
def _attend(inputs: Inputs, projection: Tensor, feature_map: FeatureMap, scale: float | None) -> Tensor:
    query, key, value, key_mask = inputs.query, inputs.key, inputs.value, inputs.key_mask
    root = math.sqrt(scale_of(query, scale))
    # The MPS device has no float64.
    if inputs.is_causal and feature_map is softmax_features and query.device.type != "mps":
        query, key, value = query.double(), key.double(), value.double()
    if key_mask is not None:
        value = value.masked_fill(~key_mask[:, None, :, None], 0)
    phi_query, phi_key = feature_map(query, key, projection.to(query) * root, root, key_mask)
    with_ones = F.pad(value, (0, 1), value=1.0)
    product = _causal_product if inputs.is_causal else _product
    return _normalise(product(phi_query, phi_key, with_ones))


FeatureMap = Callable[[Tensor, Tensor, Tensor, float, Tensor | None], tuple[Tensor, Tensor]]
"""(query, key, sqrt(scale) W, sqrt(scale), key_mask) to phi(Q) (B, H, L, m) and phi(K) (B, H, S, m), which is zero at
masked keys."""


def softmax_features(
    query: Tensor, key: Tensor, projection: Tensor, root: float, key_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """exp(<w, q>) and exp(<w, k> - |k|^2 / 2), up to the factors that cancel."""
    key_log = F.linear(key, projection).sub_(half_norms(key, root**2))
    if key_mask is not None:
        key_log = key_log.masked_fill(~key_mask[:, None, :, None], -math.inf)
    key_peak = _peak(key_log, 2)
    query_log = F.linear(query, projection).add_(key_peak)
    return query_log.sub_(_peak(query_log, 3)).exp_(), key_log.sub_(key_peak).exp_()


def relu_features(
    query: Tensor, key: Tensor, projection: Tensor, root: float, key_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """max(<w, x>, 0) + RELU_FLOOR."""
    phi_query, phi_key = (F.linear(x, projection).relu_() + RELU_FLOOR for x in (query, key))
    if key_mask is not None:
        phi_key = phi_key.masked_fill(~key_mask[:, None, :, None], 0)
    return phi_query, phi_key


FEATURE_MAPS: dict[str, FeatureMap] = {"softmax": softmax_features, "relu": relu_features}


def check_feature_map(feature_map: str) -> None:
    if feature_map not in FEATURE_MAPS:
        raise UnknownNameError("feature map", feature_map, FEATURE_MAPS)


def _check_projection(projection: Tensor, head_dim: int) -> None:
    if projection.dim() != 2 or projection.shape[0] == 0 or projection.shape[1] != head_dim:
        raise ShapeError(f"projection must have shape (m, {head_dim}) with m >= 1; got {tuple(projection.shape)}")


def _peak(logits: Tensor, dim: int) -> Tensor:
    """The largest value along `dim`, without gradient; finite even if every value is -inf or there are no values."""
    if logits.shape[dim] == 0:
        return logits.new_zeros(()).expand(*logits.shape[:dim], 1, *logits.shape[dim + 1 :])
    return logits.detach().amax(dim, keepdim=True).clamp(min=torch.finfo(logits.dtype).min)


def _product(phi_query: Tensor, phi_key: Tensor, with_ones: Tensor) -> Tensor:
    """phi(Q) (phi(K)^T [V, 1])."""
    return phi_query @ (phi_key.mT @ with_ones)


def _causal_product(phi_query: Tensor, phi_key: Tensor, with_ones: Tensor) -> Tensor:
    """tril(phi(Q) phi(K)^T) [V, 1]: scores within the chunk of a token, sums over the chunks before it."""
    length = phi_query.shape[2]
    # Keys beyond the last query are never attended to; missing ones are zeros.
    phi_key, with_ones = (F.pad(x, (0, 0, 0, length - x.shape[2])) for x in (phi_key, with_ones))
    phi_query, phi_key, with_ones = (in_blocks(x, CHUNK) for x in (phi_query, phi_key, with_ones))
    sums = phi_key.mT @ with_ones
    before = F.pad(sums, (0, 0, 0, 0, 1, 0))[:, :, :-1].cumsum(2)
    inside = (phi_query @ phi_key.mT).tril() @ with_ones
    return (inside + phi_query @ before).flatten(2, 3)[:, :, :length]


def _normalise(product: Tensor) -> Tensor:
    """D^-1 A V from A [V, 1]; zeros for a query without any key to attend to."""
    total = product[..., -1:]
    floor: float = torch.finfo(total.dtype).tiny ** 0.75
    return product[..., :-1] / total.clamp(min=floor)


@register_attention
@dataclass(eq=False, repr=False, kw_only=True)
class PerformerAttention(Attention):
    """D^-1 phi(Q) (phi(K)^T V) with random features phi that all heads share.

    The projection is a buffer, drawn from `seed` at first. In training it is drawn again from torch's global generator
    every `redraw_interval` calls (0: never); in `eval()` it stays. Activation checkpointing repeats calls in the
    backward pass, perhaps after a redraw; a repeated call must use its old features. Each call draws a random number,
    which is the same again in the repetition (`preserve_rng_state=True`), and the features are stored by that number.
    """

    name = "performer"
    approximates_softmax = True
    cannot: ClassVar[Mapping[Promise, str]] = {
        Promise.DROPOUT: "the weights are never formed; put nn.Dropout after the attention instead",
        Promise.FULLGRAPH: "counting the calls until a redraw breaks the graph in training; eval() and "
        "redraw_interval=0 do not",
    }

    num_features: int = 128
    feature_map: str = "softmax"
    redraw_interval: int = 1000
    scale: float | None = None
    projection: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("num_features", self.num_features, 1)
        check_at_least("redraw_interval", self.redraw_interval, 0)
        check_feature_map(self.feature_map)
        self.calls_since_redraw = 0
        self._calls: deque[int] = deque(maxlen=REMEMBERED)
        self._earlier: dict[int, Tensor] = {}
        device = torch.get_default_device()
        if device.type == "meta":  # Tensors on this device have no data: nothing is drawn, however large they are.
            projection = torch.empty(self.num_features, self.head_dim, dtype=torch.float32)
        else:
            seed = draw_seed(torch.Generator().manual_seed(self.seed))
            projection = draw_projection(self.num_features, self.head_dim, seed)
        self.register_buffer("projection", projection.to(device))

    def attend(self, inputs: Inputs) -> Tensor:
        counts = self.training and self.redraw_interval > 0 and not (recording() or transforming())
        projection = self._count_call() if counts else self.projection
        return _attend(inputs, projection, FEATURE_MAPS[self.feature_map], self.scale)

    def reset_parameters(self) -> None:
        """Draw the features from `seed` again, as in the constructor."""
        self.redraw_projection(torch.Generator().manual_seed(self.seed))

    @torch.no_grad()
    def redraw_projection(self, generator: torch.Generator | None = None) -> None:
        """Draw new features, from torch's global generator by default."""
        self._earlier.update(dict.fromkeys(self._calls, self.projection.clone()))
        self._calls.clear()
        for forgotten in list(self._earlier)[:-REMEMBERED]:
            del self._earlier[forgotten]
        self.projection.copy_(draw_projection(self.num_features, self.head_dim, draw_seed(generator)))
        self.calls_since_redraw = 0

    @without_compiler  # The compiler would compile again for every new count.
    def _count_call(self) -> Tensor:
        """The projection for this call, or for the earlier call that this one repeats."""
        call = draw_seed(None)
        if call in self._earlier:
            return self._earlier[call]
        if call not in self._calls:
            if self.calls_since_redraw >= self.redraw_interval:
                self.redraw_projection()
            self.calls_since_redraw += 1
            self._calls.append(call)
        return self.projection
