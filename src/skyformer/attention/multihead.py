"""MultiheadAttention: a drop-in for `torch.nn.MultiheadAttention` with any attention of the registry inside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skyformer.attention.base import Attention, Promise
from skyformer.attention.registry import attention_class, build_attention
from skyformer.checks import check_probability
from skyformer.errors import InputError, MaskError, ShapeError, UnsupportedError


class MultiheadAttention(nn.Module):
    """`torch.nn.MultiheadAttention` (its constructor, its forward, its state dict) with another attention inside.

    Args:
        embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype:
            as in `torch.nn.MultiheadAttention`. Mechanisms that never form the attention weights refuse `dropout`.
        attention: a name from `list_attentions()`.
        options: the mechanism's own, such as `num_landmarks=64` for Skyformer.

    What differs: `need_weights` defaults to None, which means yes for the exact kinds, as in torch, and no for the
    approximations; asked for with True, these return the (L, S) matrix that multiplies the values (of Skyformer with
    kernel="softmax", before the output is cut to their range). An `attn_mask` other than a causal one is for
    `attention="softmax"` only.
    """

    # nn.TransformerEncoderLayer would otherwise bypass this module in eval() and compute softmax attention instead.
    _qkv_same_embed_dim = False

    in_proj_weight: nn.Parameter | None
    q_proj_weight: nn.Parameter | None
    k_proj_weight: nn.Parameter | None
    v_proj_weight: nn.Parameter | None
    in_proj_bias: nn.Parameter | None
    bias_k: nn.Parameter | None
    bias_v: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        attention: str = "skyformer",
        **options: Any,
    ) -> None:
        super().__init__()
        if embed_dim <= 0 or num_heads <= 0 or embed_dim % num_heads:
            raise InputError(f"embed_dim must be a positive multiple of num_heads; got {embed_dim} and {num_heads}")
        check_probability("dropout", dropout)
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.dropout, self.batch_first, self.add_zero_attn = dropout, batch_first, add_zero_attn
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self._add_projections(bias, add_bias_kv, place)
        if dropout > 0:
            attention_class(attention).require(Promise.DROPOUT)
            options["dropout"] = dropout
        self.attention: Attention = build_attention(attention, num_heads, self.head_dim, **options).to(**place)
        self._reset_parameters()

    def _add_projections(self, bias: bool, add_bias_kv: bool, place: dict[str, Any]) -> None:
        E = self.embed_dim
        if self.kdim == E and self.vdim == E:
            self.in_proj_weight = nn.Parameter(torch.empty(3 * E, E, **place))
            for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
                self.register_parameter(name, None)
        else:
            self.q_proj_weight = nn.Parameter(torch.empty(E, E, **place))
            self.k_proj_weight = nn.Parameter(torch.empty(E, self.kdim, **place))
            self.v_proj_weight = nn.Parameter(torch.empty(E, self.vdim, **place))
            self.register_parameter("in_proj_weight", None)
        self.register_parameter("in_proj_bias", nn.Parameter(torch.empty(3 * E, **place)) if bias else None)
        self.out_proj = nn.Linear(E, E, bias=bias, **place)
        for name in ("bias_k", "bias_v"):
            self.register_parameter(name, nn.Parameter(torch.empty(1, 1, E, **place)) if add_bias_kv else None)

    def _reset_parameters(self) -> None:
        for weight in (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        for bias in (self.in_proj_bias, self.out_proj.bias):
            if bias is not None:
                nn.init.zeros_(bias)
        for bias in (self.bias_k, self.bias_v):
            if bias is not None:
                nn.init.xavier_normal_(bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool | None = None,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """query (L, B, E), key (S, B, kdim), value (S, B, vdim), the batch first with `batch_first`, or without one.

        key_padding_mask: (B, S), True = ignore. Returns the output in query's layout, and the weights (B, L, S), or
        (B, H, L, S) if they are not to be averaged, or None.
        """
        self._check_layout(query, key, value)
        unbatched = query.dim() == 2
        query, key, value = self._batch_first(query, key, value)
        if unbatched and isinstance(key_padding_mask, Tensor):
            key_padding_mask = key_padding_mask.unsqueeze(0)
        key_mask = _as_key_mask(key_padding_mask, key.shape[0], key.shape[1])
        attn_mask, is_causal = self._resolve_attn_mask(attn_mask, is_causal, query, key)
        q, k, v, query_mask, key_mask = self._append_rows(*self._project(query, key, value), key_mask)
        need_weights = self.attention.exact if need_weights is None else need_weights
        if need_weights:
            self.attention.require(Promise.WEIGHTS)
            # The weights are what multiplies the values, so attending to the identity beside them yields both.
            identity = torch.eye(k.shape[2], dtype=v.dtype, device=v.device).expand(*k.shape[:2], -1, -1)
            v = torch.cat([v, identity], -1)
        out = self._attend(q, k, v, key_mask, query_mask, is_causal, attn_mask)
        out, weights = out[..., : self.head_dim], out[..., self.head_dim :] if need_weights else None
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        if unbatched:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return (out if self.batch_first else out.transpose(0, 1)), weights

    def _batch_first(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, n, E) each; what came as one tensor stays one, so that `_project` can do it in one product."""
        given = {id(x): x for x in (query, key, value)}
        if query.dim() == 2:
            turned = {i: x.unsqueeze(0) for i, x in given.items()}
        else:
            turned = {i: x if self.batch_first else x.transpose(0, 1) for i, x in given.items()}
        return turned[id(query)], turned[id(key)], turned[id(value)]

    def _check_layout(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        for name, x in (("query", query), ("key", key), ("value", value)):
            if not isinstance(x, Tensor):
                raise InputError(f"{name} must be a tensor; got {type(x).__name__}")
        if query.dim() not in (2, 3) or key.dim() != query.dim() or value.dim() != query.dim():
            raise ShapeError(
                "query, key and value must all have 3 dimensions, or 2 without a batch; got "
                f"{query.dim()}, {key.dim()} and {value.dim()}"
            )
        for name, x, size in (
            ("query", query, self.embed_dim),
            ("key", key, self.kdim),
            ("value", value, self.vdim),
        ):
            if x.shape[-1] != size:
                raise ShapeError(f"{name} must have {size} features; got shape {tuple(x.shape)}")
        if query.dim() == 3:
            batch_axis = 0 if self.batch_first else 1
            for name, x in (("key", key), ("value", value)):
                if x.shape[batch_axis] != query.shape[batch_axis]:
                    raise ShapeError(
                        f"{name} must have query's batch size {query.shape[batch_axis]} in dimension {batch_axis} "
                        f"(batch_first={self.batch_first}); got shape {tuple(x.shape)}"
                    )
        if value.shape[:-1] != key.shape[:-1]:
            raise ShapeError(
                f"value must have key's length, shape {(*key.shape[:-1], self.vdim)}; got {tuple(value.shape)}"
            )

    def _resolve_attn_mask(
        self, attn_mask: Tensor | None, is_causal: bool, query: Tensor, key: Tensor
    ) -> tuple[Tensor | None, bool]:
        """A causal mask is recognised and needs no matrix; any other is for softmax alone."""
        length, size = query.shape[1], key.shape[1]
        if attn_mask is not None and (not isinstance(attn_mask, Tensor) or attn_mask.shape[-2:] != (length, size)):
            came = tuple(attn_mask.shape) if isinstance(attn_mask, Tensor) else type(attn_mask).__name__
            shapes = f"({length}, {size}) or ({query.shape[0] * self.num_heads}, {length}, {size})"
            raise MaskError(f"attn_mask must be a tensor {shapes}; got {came}")
        causal = is_causal or (attn_mask is not None and _is_causal_mask(attn_mask, length, size))
        if causal and not self._num_appended():
            return None, True
        if attn_mask is None and not causal:
            return None, False
        if self.attention.name != "softmax":
            can_be_causal = Promise.CAUSAL not in self.attention.cannot
            causality = (
                " is_causal=True (without add_bias_kv and add_zero_attn) for causality," if can_be_causal else ""
            )
            raise UnsupportedError(
                f"attention {self.attention.name!r} never forms the (L, S) scores that attn_mask would change; pass "
                f"key_padding_mask for padding,{causality} or use attention='softmax'"
            )
        if attn_mask is None:
            attn_mask = torch.ones(length, size, dtype=torch.bool, device=query.device).triu(1)
        return attn_mask, False

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, n, E) each."""
        if self.in_proj_weight is not None and query is key and key is value:
            q, k, v = F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
            return q, k, v
        weights = self._projection_weights()
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
        return q, k, v

    def _projection_weights(self) -> Sequence[Tensor]:
        if self.in_proj_weight is not None:
            return self.in_proj_weight.chunk(3)
        separate = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        return [weight for weight in separate if weight is not None]

    def _append_rows(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """Splits the heads, and adds the rows of `add_bias_kv` and `add_zero_attn` to keys and values."""
        query_mask = key_mask if q.shape[1] == k.shape[1] else None
        extra = 0
        if self.bias_k is not None and self.bias_v is not None:
            # Under autocast k and v are not of the parameters' dtype.
            k = torch.cat([k, self.bias_k.to(k.dtype).expand(k.shape[0], -1, -1)], 1)
            v = torch.cat([v, self.bias_v.to(v.dtype).expand(v.shape[0], -1, -1)], 1)
            extra += 1
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
            extra += 1
        if key_mask is not None and extra:
            key_mask = F.pad(key_mask, (0, extra), value=True)
        q, k, v = (t.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for t in (q, k, v))
        return q, k, v, query_mask, key_mask

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        query_mask: Tensor | None,
        is_causal: bool,
        attn_mask: Tensor | None,
    ) -> Tensor:
        if attn_mask is None:
            out: Tensor = self.attention(q, k, v, key_mask=key_mask, query_mask=query_mask, is_causal=is_causal)
            return out
        mask = _additive_mask(attn_mask, q, k.shape[2], self._num_appended())
        if key_mask is not None:
            mask = mask.masked_fill(~key_mask[:, None, None, :], float("-inf"))
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            scale=getattr(self.attention, "scale", None),
        )

    def _num_appended(self) -> int:
        """How many keys `add_bias_kv` and `add_zero_attn` add."""
        return int(self.bias_k is not None) + int(self.add_zero_attn)


def _as_key_mask(key_padding_mask: Tensor | None, batch: int, size: int) -> Tensor | None:
    """True = attend, from torch's True = ignore; an additive mask of zeros and -inf is understood too."""
    if key_padding_mask is None:
        return None
    if not isinstance(key_padding_mask, Tensor):
        raise MaskError(
            f"key_padding_mask must be a bool tensor ({batch}, {size}); got {type(key_padding_mask).__name__}"
        )
    if key_padding_mask.shape != (batch, size):
        raise MaskError(f"key_padding_mask must have shape ({batch}, {size}); got {tuple(key_padding_mask.shape)}")
    if key_padding_mask.dtype == torch.bool:
        return ~key_padding_mask
    if key_padding_mask.is_floating_point() and bool(((key_padding_mask == 0) | key_padding_mask.isneginf()).all()):
        return key_padding_mask == 0
    raise MaskError(
        f"key_padding_mask must be bool, True = ignore, or float with 0 and -inf; got {key_padding_mask.dtype}. "
        "Convert a 1 = ignore mask with key_padding_mask.bool(), a 1 = attend mask with key_padding_mask == 0"
    )


def _is_causal_mask(attn_mask: Tensor, length: int, size: int) -> bool:
    if attn_mask.shape != (length, size) or attn_mask.is_meta:
        return False
    hidden = attn_mask if attn_mask.dtype == torch.bool else attn_mask.isneginf()
    visible_is_zero = attn_mask.dtype == torch.bool or bool((attn_mask[~hidden] == 0).all())
    return visible_is_zero and bool((hidden == torch.ones_like(hidden).triu(1)).all())


def _additive_mask(attn_mask: Tensor, q: Tensor, size: int, appended: int) -> Tensor:
    """torch's (L, S) or (B H, L, S) mask as an additive (B or 1, H or 1, L, S), open for appended keys."""
    if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        raise MaskError(
            f"attn_mask must be bool, True = ignore, or float to be added to the scores; got {attn_mask.dtype}. "
            "Convert a 1 = ignore mask with attn_mask.bool(), a 1 = attend mask with attn_mask == 0"
        )
    B, H, L, _ = q.shape
    S = size - appended
    if attn_mask.shape not in ((L, S), (B * H, L, S)):
        raise MaskError(
            f"attn_mask must have shape ({L}, {S}) or ({B * H}, {L}, {S}), with one matrix an example and head; "
            f"got {tuple(attn_mask.shape)}"
        )
    if attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill(attn_mask, float("-inf"))
    attn_mask = attn_mask.unflatten(0, (B, H)) if attn_mask.dim() == 3 else attn_mask[None, None]
    return F.pad(attn_mask, (0, appended)).to(q.dtype)
