"""SkyformerConfig: every setting of a Skyformer model under the names that Hugging Face has for them, checked."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from transformers import PreTrainedConfig

from skyformer.attention import attention_options
from skyformer.checks import check_at_least, check_positive, check_probability
from skyformer.errors import InputError, UnknownNameError, UnsupportedError
from skyformer.model.config import ModelConfig

CONFIG_ATTENTION = "config"
"""The attention implementation that means: the one that the config names as `attention`. It is the default."""

_CALLED_HERE = {
    "dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "max_length": "max_position_embeddings",
    "num_classes": "num_labels",
    "dropout": "hidden_dropout_prob",
    "attention_probs_dropout_prob": "attention_dropout",
}
"""Settings of `ModelConfig` and of BERT that go by another name here."""

_AT_LEAST_ONE = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
    "num_labels",
)
_ALIKE = 0.85
"""How alike (difflib's ratio) an unknown setting and one of ours must be for it to pass as misspelt."""


class SkyformerConfig(PreTrainedConfig):
    """What a `SkyformerModel` and the models with heads are built from.

    The defaults are the paper's: 2 layers, 2 heads, 64 features, 128 in the MLPs. A setting that is out of range, at
    odds with another or misspelt is an `InputError` that names it, here and again when a model is built or saved.

    Args:
        vocab_size: how many different tokens there are. max_position_embeddings: the longest sequence, in tokens.
        hidden_size: features of a token. intermediate_size: features inside the MLPs.
        num_hidden_layers, num_attention_heads: the heads must divide hidden_size.
        attention: a name from `list_attentions()`. attention_options: its own options, such as num_landmarks.
        attention_dropout: dropout of the attention weights, where the mechanism has any.
        hidden_dropout_prob: dropout before each residual addition.
        seed: what random attentions draw from in `eval()`.
        type_vocab_size: kinds of segments, as `token_type_ids` number them; 0 for a model that knows none.
        pad_token_id: what padding looks like, for those who ask; the model goes by the attention mask alone.
        initializer_range: standard deviation of the first weights. layer_norm_eps: of every layer norm.
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
            self._refuse_if_meant_for_us(name)
        if "num_labels" in others:
            # The library counts up to it at once.
            check_at_least("num_labels", others["num_labels"], 1)
        super().__post_init__(**others)
        self.validate()

    @property
    def output_attentions(self) -> bool | None:
        """Whether models return attention weights, as `attn_implementation="eager"` forms them."""
        return self._output_attentions

    @output_attentions.setter
    def output_attentions(self, wanted: bool | None) -> None:
        # The library's own setter would silently change the attention to "eager".
        check_weights_exist(wanted, self._attn_implementation)
        self._output_attentions = wanted

    def validate(self) -> None:
        """Raises if a setting cannot be used."""
        check_weights_exist(self.output_attentions, self._attn_implementation)
        super().validate()  # type: ignore[misc]
        for name in _AT_LEAST_ONE:
            check_at_least(name, getattr(self, name), 1)
        check_at_least("type_vocab_size", self.type_vocab_size, 0)
        check_at_least("seed", self.seed, 0, most=2**48 - 1)
        if self.pad_token_id is not None:
            check_at_least("pad_token_id", self.pad_token_id, 0, most=self.vocab_size - 1)
        for name in ("attention_dropout", "hidden_dropout_prob"):
            check_probability(name, getattr(self, name))
        for name in ("initializer_range", "layer_norm_eps"):
            check_positive(name, getattr(self, name))
        self._check_attention()

    def model_settings(self) -> ModelConfig:
        """The same settings for this package's own models; builds the attention of a layer, too."""
        return ModelConfig(
            vocab_size=self.vocab_size,
            max_length=self.max_position_embeddings,
            num_classes=self.num_labels,
            dim=self.hidden_size,
            hidden_dim=self.intermediate_size,
            num_layers=self.num_hidden_layers,
            num_heads=self.num_attention_heads,
            attention=self.attention,
            attention_options=self.attention_options,
            attention_dropout=self.attention_dropout,
            dropout=self.hidden_dropout_prob,
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

    def _refuse_if_meant_for_us(self, name: str) -> None:
        """The library keeps whatever it does not know, which would leave a misspelt setting without effect."""
        if name in _CALLED_HERE:
            raise InputError(f"{name} is called {_CALLED_HERE[name]} in SkyformerConfig; give it by that name")
        if name in attention_options(self.attention):
            raise InputError(
                f"{name} is an option of {self.attention!r} attention; give it as attention_options={{{name!r}: ...}}"
            )
        ours = [field.name for field in dataclasses.fields(SkyformerConfig)]
        if difflib.get_close_matches(name, ours, n=1, cutoff=_ALIKE):
            raise UnknownNameError("setting of SkyformerConfig", name, ours)


def check_weights_exist(wanted: bool | None, implementation: str | None) -> None:
    """Attention weights can be asked for where the implementation forms them."""
    if wanted and implementation in (None, CONFIG_ATTENTION, "sdpa"):
        raise UnsupportedError(
            f"output_attentions must be False with attn_implementation={implementation or CONFIG_ATTENTION!r}, which "
            "never forms the weights; set_attn_implementation('eager') gives those of softmax attention instead"
        )
