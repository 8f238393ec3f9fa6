"""MultiheadAttention: `torch.nn.MultiheadAttention` with any attention of `list_attentions()` inside."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skyformer.attention.base import Attention, Promise
from skyformer.attention.registry import attention_class, build_attention
from skyformer.checks import check_probability
from skyformer.errors import InputError, MaskError, ShapeError, UnsupportedError
from skyformer.ops.flash import softmax_product


class MultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` (same constructor, forward and state dict) with another attention inside.

    Args:
        embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype:
            as in `torch.nn.MultiheadAttention`. Attentions that never form the weights do not support `dropout`.
        attention: a name from `list_attentions()`.
        options: options of the attention, such as `num_landmarks=64` for Skyformer.

    There are two differences. `need_weights` defaults to None, which means True for the exact attentions, as in torch,
    and False for the approximations; with True, these return the (L, S) matrix that multiplies the values (for
    Skyformer with kernel="softmax", before the output is clamped to the range of the values). An `attn_mask` that is
    not causal needs `attention="softmax"`.

    >>> import torch
    >>> layer = MultiheadAttention(64, num_heads=4, batch_first=True, attention="skyformer", num_landmarks=32)
    >>> x = torch.randn(2, 500, 64)
    >>> padding = torch.arange(500) >= torch.tensor([[500], [300]])
    >>> out, weights = layer(x, x, x, key_padding_mask=padding)
    >>> out.shape
    torch.Size([2, 500, 64])
    """

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
        if embed_dim <= 0 or num_heads <= 0 or embed_dim % num_heads:
            raise InputError(f"embed_dim must be a positive multiple of num_heads; got {embed_dim} and {num_heads}")
        check_probability("dropout", dropout)
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        # nn.TransformerEncoderLayer would otherwise bypass this module in eval() and compute softmax attention instead.
        self._qkv_same_embed_dim = False
        if dropout > 0:
            attention_class(attention).require(Promise.DROPOUT)
            options["dropout"] = dropout
        built = build_attention(attention, num_heads, self.head_dim, **options)
        self.attention: Attention = built.to(device=device, dtype=dtype)

    def _reset_parameters(self) -> None:
        # torch's method decides by this flag which weights there are.
        flag, self._qkv_same_embed_dim = self._qkv_same_embed_dim, self.in_proj_weight is not None
        super()._reset_parameters()
        self._qkv_same_embed_dim = flag

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
        """query (L, B, E), key (S, B, kdim), value (S, B, vdim); (B, L, E) ... with `batch_first`; or without a batch.

        key_padding_mask: (B, S), True = ignore. Returns the output in the layout of query, and the weights (B, L, S),
        or (B, H, L, S) without averaging, or None.
        """
        self._check_layout(query, key, value)
        unbatched, is_self_attention = query.dim() == 2, query is key and key is value
        if unbatched:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
            key_padding_mask = (
                key_padding_mask.unsqueeze(0) if isinstance(key_padding_mask, Tensor) else key_padding_mask
            )
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        key_mask = _as_key_mask(key_padding_mask, key.shape[0], key.shape[1])
        query_mask = key_mask if query.shape[1] == key.shape[1] else None
        attn_mask, is_causal = self._resolve_attn_mask(attn_mask, is_causal, query, key)
        q, k, v = self._project(query, key, value, is_self_attention)
        k, v, key_mask = self._append_keys(k, v, key_mask)
        q, k, v = (x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for x in (q, k, v))
        need_weights = self.attention.exact if need_weights is None else need_weights
        if need_weights:
            self.attention.require(Promise.WEIGHTS)
            # The weights multiply the values, so attending to the values and the identity side by side gives both.
            identity = torch.eye(k.shape[2], dtype=v.dtype, device=v.device).expand(*k.shape[:2], -1, -1)
            v = torch.cat([v, identity], -1)
        if attn_mask is None:
            out = self.attention(q, k, v, key_mask=key_mask, query_mask=query_mask, is_causal=is_causal)
        else:
            out = self._masked_softmax(q, k, v, key_mask, attn_mask)
        out, weights = out[..., : self.head_dim], out[..., self.head_dim :] if need_weights else None
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        if unbatched:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return (out if self.batch_first else out.transpose(0, 1)), weights

    def _check_layout(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        inputs = {"query": (query, self.embed_dim), "key": (key, self.kdim), "value": (value, self.vdim)}
        for name, (x, _) in inputs.items():
            if not isinstance(x, Tensor):
                raise InputError(f"{name} must be a tensor; got {type(x).__name__}")
        if query.dim() not in (2, 3) or key.dim() != query.dim() or value.dim() != query.dim():
            raise ShapeError(
                "query, key and value must all have 3 dimensions, or 2 without a batch; got "
                f"{query.dim()}, {key.dim()} and {value.dim()}"
            )
        batch_axis = 0 if self.batch_first else 1
        for name, (x, size) in inputs.items():
            if x.shape[-1] != size:
                raise ShapeError(f"{name} must have {size} features; got shape {tuple(x.shape)}")
            if x.dim() == 3 and x.shape[batch_axis] != query.shape[batch_axis]:
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
        """A checked mask for softmax attention, or None and whether the attention is causal, which needs no mask."""
        batch, length, size = *query.shape[:2], key.shape[1]
        if attn_mask is not None:
            _check_attn_mask(attn_mask, batch * self.num_heads, length, size)
            is_causal = is_causal or _is_causal_mask(attn_mask, length, size)
        if is_causal and not self._num_appended():
            return None, True
        if attn_mask is None and not is_causal:
            return None, False
        if self.attention.name != "softmax":
            can_be_causal = Promise.CAUSAL not in self.attention.cannot
            causal = " is_causal=True (without add_bias_kv and add_zero_attn) for causality," if can_be_causal else ""
            raise UnsupportedError(
                f"attention {self.attention.name!r} never forms the (L, S) scores that attn_mask would change; pass "
                f"key_padding_mask for padding,{causal} or use attention='softmax'"
            )
        if attn_mask is None:
            attn_mask = torch.ones(length, size, dtype=torch.bool, device=query.device).triu(1)
        return attn_mask, False

    def _project(
        self, query: Tensor, key: Tensor, value: Tensor, is_self_attention: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (B, n, E) each; self-attention needs only one product."""
        together: Tensor | None = self.in_proj_weight
        if together is not None and is_self_attention:
            q, k, v = F.linear(query, together, self.in_proj_bias).chunk(3, -1)
            return q, k, v
        separate = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        weights = separate if together is None else together.chunk(3)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
        return q, k, v

    def _append_keys(self, k: Tensor, v: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Adds the rows of `add_bias_kv` and `add_zero_attn` to keys and values."""
        if self.bias_k is not None and self.bias_v is not None:
            # Under autocast, k and v do not have the dtype of the parameters.
            k = torch.cat([k, self.bias_k.to(k.dtype).expand(k.shape[0], -1, -1)], 1)
            v = torch.cat([v, self.bias_v.to(v.dtype).expand(v.shape[0], -1, -1)], 1)
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        if key_mask is not None:
            key_mask = F.pad(key_mask, (0, self._num_appended()), value=True)
        return k, v, key_mask

    def _num_appended(self) -> int:
        """How many keys `add_bias_kv` and `add_zero_attn` add."""
        return int(self.bias_k is not None) + int(self.add_zero_attn)

    def _masked_softmax(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, attn_mask: Tensor) -> Tensor:
        """Softmax attention with a mask (L, S) or (B H, L, S); appended keys are never masked."""
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill(attn_mask, -math.inf)
        mask = attn_mask.unflatten(0, q.shape[:2]) if attn_mask.dim() == 3 else attn_mask[None, None]
        mask = F.pad(mask, (0, self._num_appended())).to(q.dtype)
        if key_mask is not None:
            mask = mask.masked_fill(~key_mask[:, None, None, :], -math.inf)
        scale = getattr(self.attention, "scale", None)
        return softmax_product(q, k, v, attn_mask=mask, dropout_p=self.attention.dropout_p, scale=scale)


def _as_key_mask(key_padding_mask: Tensor | None, batch: int, size: int) -> Tensor | None:
    """True = attend, from torch's True = ignore or from an additive mask of 0 and -inf."""
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


def _check_attn_mask(attn_mask: Tensor, batch_heads: int, length: int, size: int) -> None:
    if not isinstance(attn_mask, Tensor) or attn_mask.shape not in ((length, size), (batch_heads, length, size)):
        given = tuple(attn_mask.shape) if isinstance(attn_mask, Tensor) else type(attn_mask).__name__
        raise MaskError(
            f"attn_mask must be a tensor ({length}, {size}) or ({batch_heads}, {length}, {size}), with one matrix for "
            f"each example and head; got {given}"
        )
    if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        raise MaskError(
            f"attn_mask must be bool, True = ignore, or float to be added to the scores; got {attn_mask.dtype}. "
            "Convert a 1 = ignore mask with attn_mask.bool(), a 1 = attend mask with attn_mask == 0"
        )


def _is_causal_mask(attn_mask: Tensor, length: int, size: int) -> bool:
    if attn_mask.shape != (length, size) or attn_mask.is_meta:
        return False
    hidden = attn_mask if attn_mask.dtype == torch.bool else attn_mask.isneginf()
    visible_is_zero = attn_mask.dtype == torch.bool or bool((attn_mask[~hidden] == 0).all())
    return visible_is_zero and bool((hidden == torch.ones_like(hidden).triu(1)).all())
