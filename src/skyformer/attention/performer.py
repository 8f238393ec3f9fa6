"""Performer: softmax attention through positive orthogonal random features (FAVOR+), linear in length.

With rows w_1 ... w_m of a random projection, all norms and products multiplied by `scale`,

    exp(<q, k>) = E[phi(q) . phi(k)],    phi(x)_r = exp(<w_r, x> - |x|^2 / 2) / sqrt(m)
    softmax(Q K^T) V ~ D^-1 phi(Q) (phi(K)^T V),    D = diag(phi(Q) phi(K)^T 1)

Any factor that a query shares among its features, or that a feature takes from the keys and gives to the
queries, cancels. So feature r of the keys is divided by its largest value over the keys of its head, that of
the queries is multiplied by it, and every query is then divided by its largest feature: nothing overflows, no
row of D falls below one. In the causal form later keys may dwarf the sums of early tokens, so the softmax features
and sums are float64 there: a token is blind to what follows it, and row 0 is v_0, as long as later keys are not
larger by a factor of exp(500) in every feature that counts.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from skyformer.attention.base import Attention, Promise
from skyformer.attention.registry import register
from skyformer.checks import check_at_least, check_mask, check_positive, check_query_key_value
from skyformer.errors import ShapeError, UnknownNameError
from skyformer.ops.kernels import half_norms
from skyformer.ops.noise import draw_seed
from skyformer.ops.precision import at_least_float32, without_autocast

CHUNK = 128
"""Tokens in a chunk of the causal form: inside it scores are formed, from chunk to chunk sums are carried."""

REMEMBERED = 256
"""Training calls from before the latest redraws whose features are kept, in case checkpointing repeats them."""

RELU_FLOOR = 1e-3
"""What the ReLU features stay above, so that every query gives every key some weight."""


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
        key_mask: bool (B, S), True = attend. query_mask: accepted as everywhere; no query depends on another.
        is_causal: query i attends to keys j <= i only. The softmax features are then float64, whatever the inputs:
            twice the memory, and rows whose sums lie exp(500) or more below what later keys bring become zeros.
        num_features: m, the rows of the projection to draw.
        feature_map: "softmax" (positive features, unbiased for exp(<q, k>)) or "relu" (max(<w, x>, 0) plus a
            little).
        projection: the rows w themselves (m, P), which override `num_features`; see `draw_projection`.
        scale: what the inner products are multiplied by; P ** -0.5 by default.
        generator: where the projection is drawn from; torch's own by default.

    Returns:
        (B, H, L, Pv).
    """
    check_query_key_value(query, key, value)
    check_mask("key_mask", key_mask, key.shape[0], key.shape[2])
    check_mask("query_mask", query_mask, query.shape[0], query.shape[2])
    check_feature_map(feature_map)
    if scale is not None:
        check_positive("scale", scale)
    if projection is None:
        projection = draw_projection(num_features, query.shape[-1], draw_seed(generator))
    _check_projection(projection, query.shape[-1])
    root = math.sqrt(query.shape[-1] ** -0.5 if scale is None else scale)
    q, k, v = (at_least_float32(t) for t in (query, key, value))
    return _attend(q, k, v, projection, key_mask, is_causal, FEATURE_MAPS[feature_map], root).to(query.dtype)


def draw_projection(num_features: int, head_dim: int, seed: int) -> Tensor:
    """Rows (m, P) that are standard Gaussian each, and orthogonal within every run of P of them."""
    check_at_least("num_features", num_features, 1)
    generator = torch.Generator().manual_seed(seed)
    runs = -(-num_features // head_dim)
    directions, triangle = torch.linalg.qr(_gaussian((runs, head_dim, head_dim), generator))
    # QR fixes the signs of the triangle's diagonal; undoing that makes the directions uniform.
    directions = directions * triangle.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    lengths = torch.linalg.vector_norm(_gaussian((num_features, head_dim), generator), dim=-1, keepdim=True)
    rows: Tensor = directions.mT.flatten(0, 1)[:num_features] * lengths
    return rows.float()


def _gaussian(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")


@without_autocast
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    projection: Tensor,
    key_mask: Tensor | None,
    is_causal: bool,
    feature_map: FeatureMap,
    root: float,
) -> Tensor:
    if is_causal and feature_map is softmax_features and query.device.type != "mps":  # which has no float64
        query, key, value = query.double(), key.double(), value.double()
    if key_mask is not None:
        value = value.masked_fill(~key_mask[:, None, :, None], 0)
    phi_query, phi_key = feature_map(query, key, projection.to(query) * root, root, key_mask)
    both = F.pad(value, (0, 1), value=1.0)
    product = _causal_product if is_causal else _product
    return _normalise(product(phi_query, phi_key, both))


FeatureMap = Callable[[Tensor, Tensor, Tensor, float, Tensor | None], tuple[Tensor, Tensor]]
"""(query, key, sqrt(scale) W, sqrt(scale), key_mask) to phi(Q) (B, H, L, m) and phi(K) (B, H, S, m), the
latter zero where masked."""


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
    """max(<w, x>, 0) + a little."""
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
    """The largest value along `dim`, as a constant; finite even if every value is -inf, or there is none."""
    if logits.shape[dim] == 0:
        return logits.new_zeros(()).expand(*logits.shape[:dim], 1, *logits.shape[dim + 1 :])
    return logits.detach().amax(dim, keepdim=True).clamp(min=torch.finfo(logits.dtype).min)


def _product(phi_query: Tensor, phi_key: Tensor, both: Tensor) -> Tensor:
    """phi(Q) (phi(K)^T [V, 1])."""
    return phi_query @ (phi_key.mT @ both)


def _causal_product(phi_query: Tensor, phi_key: Tensor, both: Tensor) -> Tensor:
    """tril(phi(Q) phi(K)^T) [V, 1]: a token's own chunk through scores, those before through their sums."""
    length = phi_query.shape[2]
    phi_query, phi_key, both = (_in_chunks(x, length) for x in (phi_query, phi_key, both))
    sums = phi_key.mT @ both
    before = F.pad(sums, (0, 0, 0, 0, 1, 0))[:, :, :-1].cumsum(2)
    inside = (phi_query @ phi_key.mT).tril() @ both
    return (inside + phi_query @ before).flatten(2, 3)[:, :, :length]


def _in_chunks(x: Tensor, length: int) -> Tensor:
    """x (B, H, n, c), cut or filled with zeros to `length` and then to whole chunks: (B, H, T, CHUNK, c)."""
    chunks = -(-length // CHUNK)
    x = x[:, :, :length]
    filled = F.pad(x, (0, 0, 0, chunks * CHUNK - x.shape[2]))
    return filled.view(*x.shape[:2], chunks, CHUNK, x.shape[-1])


def _normalise(both: Tensor) -> Tensor:
    """D^-1 A V from A [V, 1]; a query with no key to attend to gives zeros."""
    total = both[..., -1:]
    floor: float = torch.finfo(total.dtype).tiny ** 0.75
    return both[..., :-1] / total.clamp(min=floor)


@register
class PerformerAttention(Attention):
    """D^-1 phi(Q) (phi(K)^T V) with random features phi that every head shares.

    The projection is a buffer, first drawn from `seed`. In training it is drawn anew from torch's global
    generator every `redraw_interval` calls (0: never), in `eval()` it stays. Activation checkpointing repeats a
    call in the backward, where it finds the features it had, were they redrawn since: each call draws a number,
    which the restored random numbers (`preserve_rng_state=True`) bring back, and goes by it.
    """

    name = "performer"
    cannot: ClassVar[Mapping[Promise, str]] = {
        Promise.DROPOUT: "the weights are never formed; put nn.Dropout after the attention instead",
        Promise.FULLGRAPH: "counting the calls up to a redraw breaks the graph in training; eval() and "
        "redraw_interval=0 do not",
    }
    projection: Tensor

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        max_length: int | None = None,
        seed: int = 0,
        num_features: int = 128,
        feature_map: str = "softmax",
        redraw_interval: int = 1000,
        scale: float | None = None,
    ) -> None:
        super().__init__(num_heads, head_dim, max_length=max_length, seed=seed)
        check_at_least("num_features", num_features, 1)
        check_at_least("redraw_interval", redraw_interval, 0)
        check_feature_map(feature_map)
        self.num_features, self.feature_map, self.scale = num_features, feature_map, scale
        self.redraw_interval, self.calls_since_redraw = redraw_interval, 0
        self._calls: deque[int] = deque(maxlen=REMEMBERED)
        self._earlier: dict[int, Tensor] = {}
        device = torch.get_default_device()
        if device.type == "meta":  # Which has shapes and no numbers: nothing is drawn, however large they are.
            projection = torch.empty(num_features, head_dim, dtype=torch.float32)
        else:
            projection = draw_projection(num_features, head_dim, draw_seed(torch.Generator().manual_seed(seed)))
        self.register_buffer("projection", projection.to(device))

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None,
        query_mask: Tensor | None,
        is_causal: bool,
    ) -> Tensor:
        projection = self._count_call() if self.training and self.redraw_interval > 0 else self.projection
        return performer_attention(
            query,
            key,
            value,
            key_mask=key_mask,
            query_mask=query_mask,
            is_causal=is_causal,
            feature_map=self.feature_map,
            projection=projection,
            scale=self.scale,
        )

    def reset_parameters(self) -> None:
        """The features that `seed` draws, as at the start."""
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

    @torch._disable_dynamo  # type: ignore[untyped-decorator, attr-defined]
    def _count_call(self) -> Tensor:
        """The projection of this call, or of the call that this one repeats."""
        # Out of the compiler's sight: a number that changes with every call would compile every call anew. This is
        # `torch.compiler.disable` without its import, which would load the whole compiler along with the attentions.
        call = draw_seed(None)
        if torch._C._current_graph_task_id() != -1:
            return self._earlier.get(call, self.projection)
        if self.calls_since_redraw >= self.redraw_interval:
            self.redraw_projection()
        self.calls_since_redraw += 1
        self._calls.append(call)
        return self.projection
