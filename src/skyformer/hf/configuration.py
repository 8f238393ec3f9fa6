"""SkyformerConfig: every setting of a Skyformer model under its Hugging Face name, checked."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from transformers import PreTrainedConfig

from skyformer.attention import attention_options
from skyformer.checks import check_at_least, check_positive, check_probability
from skyformer.errors import InputError, UnknownNameError
from skyformer.model.config import ModelConfig

CONFIG_ATTENTION = "config"
"""The implementation that uses the attention named in the config; it is the default."""

_OTHER_NAMES = {
    "dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "max_length": "max_position_embeddings",
    "num_classes": "num_labels",
    "dropout": "hidden_dropout_prob",
    "attention_probs_dropout_prob": "attention_dropout",
}
"""Settings of `ModelConfig` and of BERT that have another name here."""

_AT_LEAST_ONE = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
    "num_labels",
)
_MOST_LABELS = 2**20
_SIMILARITY = 0.85
"""An unknown setting with at least this similarity (difflib's ratio) to one of ours is reported as a typo."""


class SkyformerConfig(PreTrainedConfig):
    """The settings of a `SkyformerModel` and of the models with heads.

    The defaults are the paper's: 2 layers, 2 heads, 64 features, 128 in the MLPs. A setting that is out of range,
    contradicts another or is misspelt raises an `InputError` that names it, here and again when a model is built or
    saved.

    Args:
        vocab_size: the number of different tokens. max_position_embeddings: the longest sequence, in tokens.
        hidden_size: features of a token. intermediate_size: features inside the MLPs.
        num_hidden_layers, num_attention_heads: hidden_size must be a multiple of the number of heads.
        attention: a name from `list_attentions()`. attention_options: its own options, such as num_landmarks.
        attention_dropout: dropout of the attention weights, for mechanisms that have weights.
        hidden_dropout_prob: dropout before each residual addition. embedding_dropout: dropout of the embeddings.
        mlp_hidden_dropout: dropout inside the MLPs of the layers. head_activation: "gelu" or "relu", in the classifier.
        seed: the seed of random attentions in `eval()`.
        type_vocab_size: the number of segments in `token_type_ids`; 0 for a model without segments.
        pad_token_id: the padding token, for tokenizers and pipelines; the model uses only the attention mask.
        initializer_range: standard deviation of the initial weights. layer_norm_eps: epsilon of every layer norm.
        tie_word_embeddings: whether `SkyformerForMaskedLM` scores tokens with their embeddings.
    """

    model_type = "skyformer"

    vocab_size: int = 30522
    hidden_size: int = 64
    num_hidden_layers: int = 2
    num_attention_heads: int = 2
    intermediate_size: int = 128
    max_position_embeddings: int = 4096
    attention: str = "skyformer"
    attention_options: dict[str, Any] | None = None
    attention_dropout: float = 0.0
    hidden_dropout_prob: float = 0.1
    embedding_dropout: float = 0.0
    mlp_hidden_dropout: float = 0.0
    head_activation: str = "gelu"
    seed: int = 0
    type_vocab_size: int = 0
    pad_token_id: int | None = None
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True

    def __post_init__(self, **others: Any) -> None:
        if not isinstance(self.attention_options, dict | None):
            raise InputError(f"attention_options must be a dict of options by name; got {self.attention_options!r}")
        self.attention_options = dict(self.attention_options or {})
        for name in others:
            self._refuse_misnamed(name)
        if "num_labels" in others:
            # Checked before the library uses it to name the labels.
            check_at_least("num_labels", others["num_labels"], 1, _MOST_LABELS)
        super().__post_init__(**others)
        self.validate()

    @property
    def output_attentions(self) -> bool | None:
        """Whether models return attention weights."""
        return self._output_attentions

    @output_attentions.setter
    def output_attentions(self, wanted: bool | None) -> None:
        # The library's own setter would silently change the attention to "eager".
        self._output_attentions = wanted

    def validate(self) -> None:
        """Raises an `InputError` if a setting cannot be used."""
        # The library's own check would accept weights from "eager" only.
        wanted, self._output_attentions = self._output_attentions, False
        try:
            super().validate()  # type: ignore[misc]
        finally:
            self._output_attentions = wanted
        for name in _AT_LEAST_ONE:
            check_at_least(name, getattr(self, name), 1)
        check_at_least("type_vocab_size", self.type_vocab_size, 0)
        check_at_least("seed", self.seed, 0, most=2**48 - 1)
        if self.pad_token_id is not None:
            check_at_least("pad_token_id", self.pad_token_id, 0, most=self.vocab_size - 1)
        for name in ("attention_dropout", "hidden_dropout_prob", "embedding_dropout", "mlp_hidden_dropout"):
            check_probability(name, getattr(self, name))
        for name in ("initializer_range", "layer_norm_eps"):
            check_positive(name, getattr(self, name))
        self._check_attention()

    def model_settings(self) -> ModelConfig:
        """The same settings for this package's own models, which also build the attention of each layer."""
        return ModelConfig(
            vocab_size=self.vocab_size,
            max_length=self.max_position_embeddings,
            num_classes=self.num_labels,  # type: ignore[arg-type]
            dim=self.hidden_size,
            hidden_dim=self.intermediate_size,
            num_layers=self.num_hidden_layers,
            num_heads=self.num_attention_heads,
            attention=self.attention,
            attention_options=self.attention_options or {},
            attention_dropout=self.attention_dropout,
            dropout=self.hidden_dropout_prob,
            embedding_dropout=self.embedding_dropout,
            mlp_hidden_dropout=self.mlp_hidden_dropout,
            head_activation=self.head_activation,  # type: ignore[arg-type]
            seed=self.seed,
        )

    def _check_attention(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise InputError(
                f"hidden_size must be a multiple of num_attention_heads; got {self.hidden_size} and "
                f"{self.num_attention_heads}"
            )
        if isinstance(self.attention_options, dict) and "max_length" in self.attention_options:
            raise InputError(
                "attention_options must not have 'max_length': the model's max_position_embeddings decides it"
            )
        self.model_settings()

    def _refuse_misnamed(self, name: str) -> None:
        """The library stores every setting that it does not know, so a misspelt one would have no effect."""
        if name in _OTHER_NAMES:
            raise InputError(f"{name} is called {_OTHER_NAMES[name]} in SkyformerConfig; use that name")
        if name in attention_options(self.attention):
            raise InputError(
                f"{name} is an option of {self.attention!r} attention; give it as attention_options={{{name!r}: ...}}"
            )
        ours = [field.name for field in dataclasses.fields(SkyformerConfig)]
        if difflib.get_close_matches(name, ours, n=1, cutoff=_SIMILARITY):
            raise UnknownNameError("setting of SkyformerConfig", name, ours)
