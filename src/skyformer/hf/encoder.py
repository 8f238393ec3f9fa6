"""The parts of a Skyformer model: embeddings, self-attention behind transformers' interface, and pre-norm layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bert.modeling_bert import eager_attention_forward

from skyformer.errors import InputError, ShapeError
from skyformer.hf.configuration import CONFIG_ATTENTION, SkyformerConfig
from skyformer.hf.functions import wants_weights, with_weights
from skyformer.model.encoder import forked_random_stream


class SkyformerEmbeddings(nn.Module):
    """The sum of a vector for each token, one for its position and, if the model has segments, one for its segment."""

    def __init__(self, config: SkyformerConfig) -> None:
        super().__init__()
        # No padding_idx: the mask alone decides what is padding.
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        segments = config.type_vocab_size
        self.token_type_embeddings = nn.Embedding(segments, config.hidden_size) if segments else None
        self.dropout = nn.Dropout(config.embedding_dropout)

    def forward(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        mask: Tensor | None,
        position_ids: Tensor | None,
        token_type_ids: Tensor | None,
    ) -> Tensor:
        """input_ids int64 (B, n), or inputs_embeds (B, n, hidden_size) instead, to (B, n, hidden_size)."""
        words = inputs_embeds if input_ids is None else self._words(input_ids, mask)
        assert words is not None
        self._check_size(words)
        if mask is not None:
            words = words.masked_fill(~mask.unsqueeze(-1), 0)
        if position_ids is None:
            position_ids = positions_from_first_token(mask, words.shape[1], words.device)
        check_range("position_ids", position_ids, self.position_embeddings.num_embeddings, "max_position_embeddings")
        x: Tensor = self.dropout(words + self.position_embeddings(position_ids) + self._segments(token_type_ids))
        return x

    def _words(self, input_ids: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            input_ids = input_ids.masked_fill(~mask, 0)
        check_range("input_ids", input_ids, self.word_embeddings.num_embeddings, "vocab_size")
        words: Tensor = self.word_embeddings(input_ids)
        return words

    def _segments(self, token_type_ids: Tensor | None) -> Tensor | float:
        """The vectors of the segments. Tokenizers also return token types for models without segments, as zeros."""
        table = self.token_type_embeddings
        segments = 1 if table is None else table.num_embeddings
        if token_type_ids is not None:
            check_range("token_type_ids", token_type_ids, segments, "type_vocab_size")
        if table is None:
            return 0.0
        return table.weight[0] if token_type_ids is None else table(token_type_ids)

    def _check_size(self, words: Tensor) -> None:
        longest, width = self.position_embeddings.weight.shape
        if words.shape[2] != width:
            raise ShapeError(f"inputs_embeds must have hidden_size = {width} features; got {words.shape[2]}")
        length = words.shape[1]
        if length > longest:
            raise ShapeError(
                f"the input must be at most max_position_embeddings = {longest} tokens long; got {length}. Truncate "
                "the text (truncation=True), or extend the model with skyformer.hf.extend_positions"
            )


def positions_from_first_token(mask: Tensor | None, length: int, device: torch.device) -> Tensor:
    """The distance of each token from the first real one, (B or 1, n): the same for left and right padding."""
    places = torch.arange(length, device=device).unsqueeze(0)
    if mask is None:
        return places
    first = mask.to(torch.uint8).argmax(1, keepdim=True)
    return (places - first).clamp(min=0)


def check_range(name: str, numbers: Tensor, bound: int, setting: str) -> None:
    """Only on the CPU: reading values makes other devices wait, and a traced graph has no values."""
    if numbers.device.type != "cpu" or torch.compiler.is_compiling() or numbers.numel() == 0:
        return
    low, high = (int(end) for end in numbers.aminmax())
    if low < 0 or high >= bound:
        raise InputError(f"{name} must be from 0 to {bound - 1} (set by {setting}); got {low} to {high}")


class SkyformerSelfAttention(nn.Module):
    """One projection to queries, keys and values, an attention, and a projection of its output.

    With the implementation "config" the attention is `mechanism`, whose parameters belong to the model. Any other name
    is looked up in transformers' interface, and `mechanism` is not used.
    """

    is_causal = False

    def __init__(self, config: SkyformerConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.num_heads, self.dropout = config.num_attention_heads, config.attention_dropout
        self.scaling = (config.hidden_size // config.num_attention_heads) ** -0.5
        self.project_in = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        with forked_random_stream():
            self.mechanism = config.model_settings().build_attention(layer_idx)
        self.project_out = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """x (B, n, hidden_size) to the same shape, and the attention weights (B, H, n, n) if they are requested."""
        sides = self.project_in(x).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        query, key, value = (side.transpose(1, 2).contiguous() for side in sides)
        wanted = wants_weights(self, kwargs)
        if self.config._attn_implementation == CONFIG_ATTENTION:
            out, weights = with_weights(lambda v: self.mechanism(query, key, v, key_mask=attention_mask), value, wanted)
        elif self.config._attn_implementation == "sdpa":
            kwargs.pop("output_attentions", None)
            out, weights = with_weights(
                lambda v: self._by_interface(query, key, v, attention_mask, **kwargs)[0], value, wanted
            )
        else:
            out, weights = self._by_interface(query, key, value, attention_mask, **kwargs)
        return self.project_out(out.transpose(1, 2).flatten(2)), weights

    def _by_interface(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """(B, H, n, head_dim) by transformers' interface, and the weights if the implementation returns them."""
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        dropout = self.dropout if self.training else 0.0
        out, weights = attend(self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs)
        return out.transpose(1, 2), weights


class SkyformerLayer(GradientCheckpointingLayer):
    """x + dropout(attention(norm(x))), then x + dropout(mlp(norm(x)))."""

    def __init__(self, config: SkyformerConfig, layer_idx: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attention = SkyformerSelfAttention(config, layer_idx)
        self.mlp_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = mlp(config, config.hidden_size, dropout=config.mlp_hidden_dropout)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        """x (B, n, hidden_size) to the same shape."""
        out, _ = self.attention(self.attention_norm(x), attention_mask, **kwargs)
        x = x + self.dropout(out)
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


def mlp(config: SkyformerConfig, outputs: int, activation: str = "gelu", dropout: float = 0.0) -> nn.Sequential:
    """hidden_size to intermediate_size to outputs."""
    return nn.Sequential(
        nn.Linear(config.hidden_size, config.intermediate_size),
        nn.Sequential(nn.ReLU() if activation == "relu" else nn.GELU(), nn.Dropout(dropout)),
        nn.Linear(config.intermediate_size, outputs),
    )
