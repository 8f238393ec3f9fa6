"""SkyformerEncoder: embeddings, pre-norm layers with any attention of `list_attentions()`, and a final norm."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from skyformer.checks import as_bool
from skyformer.model.config import ModelConfig, as_config
from skyformer.model.dropout import Dropout
from skyformer.model.embeddings import Embeddings
from skyformer.model.storage import StoredModel
from skyformer.ops.noise import draw_seed


class SelfAttention(nn.Module):
    """One projection to queries, keys and values, the attention, and a projection of its output."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.project_in = nn.Linear(config.dim, 3 * config.dim)
        with forked_random_stream():
            self.attention: nn.Module = config.build_attention(layer)
        self.project_out = nn.Linear(config.dim, config.dim)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """x (B, n, dim) to (B, n, dim)."""
        sides = self.project_in(x).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        # Copied once here: attentions need contiguous (B, H, n, P) and would otherwise copy, some of them twice. Split
        # before the copy, so that the backward collects the three gradients in one pass instead of two.
        query, key, value = (side.transpose(1, 2).contiguous() for side in sides)
        out: Tensor = self.attention(query, key, value, key_mask=mask)
        return self.project_out(out.transpose(1, 2).flatten(2))


class EncoderLayer(nn.Module):
    """x + dropout(attention(norm(x))), then x + dropout(mlp(norm(x))), with another dropout inside the MLP."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.dim)
        self.attention = SelfAttention(config, layer)
        self.mlp_norm = nn.LayerNorm(config.dim)
        hidden_dropout = Dropout(config.dropout_or(config.mlp_hidden_dropout))
        self.mlp = nn.Sequential(
            nn.Linear(config.dim, config.hidden_dim),
            # One module, so that the weights of the second layer keep the name that they have in saved models.
            nn.Sequential(nn.GELU(), hidden_dropout),
            nn.Linear(config.hidden_dim, config.dim),
        )
        self.attention_dropout = Dropout(config.dropout_or(config.attention_output_dropout))
        self.mlp_dropout = Dropout(config.dropout_or(config.mlp_output_dropout))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """x (B, n, dim) to (B, n, dim); mask bool (B, n), True = a real token."""
        x = x + self.attention_dropout(self.attention(self.attention_norm(x), mask))
        return x + self.mlp_dropout(self.mlp(self.mlp_norm(x)))


class SkyformerEncoder(StoredModel):
    """Tokens to features, with the paper's attention or any other of `list_attentions()`.

    Args:
        config: a `ModelConfig`.
        settings: the settings of a `ModelConfig` instead, such as `vocab_size=256, max_length=4096`.

    >>> import torch
    >>> encoder = SkyformerEncoder(vocab_size=256, max_length=4096, attention_options={"num_landmarks": 64})
    >>> encoder(torch.randint(256, (2, 1000))).shape
    torch.Size([2, 1000, 64])
    """

    def __init__(self, config: ModelConfig | None = None, **settings: Any) -> None:
        super().__init__(as_config(config, settings))
        config = self.config
        self.embeddings = Embeddings(config.vocab_size, config.max_length, config.dim)
        self.embedding_dropout = Dropout(config.dropout_or(config.embedding_dropout))
        self.layers = nn.ModuleList(EncoderLayer(config, layer) for layer in range(config.num_layers))
        self.norm = nn.LayerNorm(config.dim)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """tokens int64 (B, n), mask (B, n) of bool or 0 and 1, True = a real token, to (B, n, dim).

        The output at masked positions has no meaning.
        """
        x: Tensor = self.embedding_dropout(self.embeddings(tokens, mask))
        mask = as_bool(mask)
        for layer in self.layers:
            if self.config.checkpoint_activations and torch.is_grad_enabled():
                x = checkpoint(layer, x, mask, use_reentrant=False)
            else:
                x = layer(x, mask)
        out: Tensor = self.norm(x)
        return out


@contextmanager
def forked_random_stream() -> Iterator[None]:
    """Random numbers drawn inside do not change those drawn afterwards, so that two models of one seed differ only in
    their attention."""
    seed = draw_seed(None)
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield
