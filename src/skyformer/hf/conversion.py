"""Between this package's own models and the Hugging Face classes: the same weights, the same outputs.

| here | there |
|---|---|
| `SkyformerEncoder` | `SkyformerModel` |
| `SequenceClassifier` | `SkyformerForSequenceClassification` |
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from skyformer.errors import DataError, InputError, UnsupportedError
from skyformer.files import read_json
from skyformer.hf.configuration import CONFIG_ATTENTION, SkyformerConfig
from skyformer.hf.modeling import SkyformerForSequenceClassification, SkyformerModel
from skyformer.model import ModelConfig, PairClassifier, SequenceClassifier, SkyformerEncoder
from skyformer.model.storage import CONFIG_FILE, FORMAT, StoredModel

_RENAMED = (
    (r"^encoder\.", "skyformer."),
    (r"^head\.", "classifier."),
    (r"embeddings\.token$", "embeddings.word_embeddings.weight"),
    (r"embeddings\.position$", "embeddings.position_embeddings.weight"),
    (r"(layers\.\d+\.attention)\.attention\.", r"\1.mechanism."),
)
"""The names of weights here, as patterns, and there."""

_OWN = {model.__name__: model for model in (SequenceClassifier, SkyformerEncoder, PairClassifier)}
Own = SequenceClassifier | SkyformerEncoder
Theirs = SkyformerForSequenceClassification | SkyformerModel


def to_huggingface(source: StoredModel | str | os.PathLike[str], labels: Sequence[str] | None = None) -> Theirs:
    """The Hugging Face model with the weights of one of ours, in `eval()`.

    Args:
        source: a `SequenceClassifier`, a `SkyformerEncoder`, or the folder of one, such as `model/` of a run.
        labels: the names of the classes, for `id2label`.
    """
    model = source if isinstance(source, StoredModel) else _load_own(Path(source))
    if isinstance(model, PairClassifier):
        raise UnsupportedError(
            "a PairClassifier reads two texts, for which transformers has no class; convert its encoder instead: "
            "to_huggingface(model.encoder)"
        )
    config = _their_config(model.config, labels)
    theirs: Theirs
    if isinstance(model, SequenceClassifier):
        theirs = _build(SkyformerForSequenceClassification, config)
    else:
        theirs = _build(SkyformerModel, config)
    theirs.load_state_dict({_renamed(name): weight for name, weight in model.state_dict().items()})
    dtype: Any = _dtype(model)
    return theirs.to(dtype).eval()


def from_huggingface(source: Theirs | str | os.PathLike[str]) -> Own:
    """One of our models with the weights of a `SkyformerForSequenceClassification` or a `SkyformerModel`, or of the
    folder of one, in `eval()`."""
    model = source if isinstance(source, torch.nn.Module) else _load_theirs(source)
    if not isinstance(model, SkyformerForSequenceClassification | SkyformerModel):
        raise UnsupportedError(f"{type(model).__name__} has no counterpart among this package's own models")
    if model.config.type_vocab_size:
        raise UnsupportedError("this package's own models have no segments; type_vocab_size must be 0")
    if model.config.layer_norm_eps != SkyformerConfig.layer_norm_eps:
        raise UnsupportedError(
            f"layer_norm_eps must be {SkyformerConfig.layer_norm_eps}, as in this package's own models; got "
            f"{model.config.layer_norm_eps}"
        )
    if model.config._attn_implementation != CONFIG_ATTENTION:
        raise UnsupportedError(
            f"attn_implementation must be {CONFIG_ATTENTION!r}, the attention that the config names; got "
            f"{model.config._attn_implementation!r}"
        )
    own = (SequenceClassifier if isinstance(model, SkyformerForSequenceClassification) else SkyformerEncoder)(
        model.config.model_settings()
    )
    weights = model.state_dict()
    missing = [name for name in own.state_dict() if _renamed(name) not in weights]
    if missing:
        raise DataError(f"the Hugging Face model has no weights for {', '.join(missing)}")
    own.load_state_dict({name: weights[_renamed(name)] for name in own.state_dict()})
    return own.to(model.dtype).eval()


def is_own_folder(folder: Path) -> bool:
    """Whether a folder has one of this package's own models; False for a Hugging Face model."""
    content: Mapping[str, Any] = read_json(folder / CONFIG_FILE)
    return content.get("format") == FORMAT


def _load_own(folder: Path) -> StoredModel:
    if not is_own_folder(folder):
        raise DataError(f"{folder / CONFIG_FILE} does not describe a model of this package")
    kind = read_json(folder / CONFIG_FILE).get("model")
    if kind not in _OWN:
        raise DataError(f"{folder / CONFIG_FILE} describes a {kind!r}; known: {', '.join(_OWN)}")
    return _OWN[kind].from_pretrained(folder)


def _load_theirs(source: str | os.PathLike[str]) -> Theirs:
    config = AutoConfig.from_pretrained(source)
    if not isinstance(config, SkyformerConfig):
        raise UnsupportedError(f"{source} has a {config.model_type} model; only Skyformer models can be converted")
    kinds = {cls.__name__: cls for cls in (SkyformerForSequenceClassification, SkyformerModel)}
    named = (config.architectures or ["SkyformerModel"])[0]
    if named not in kinds:
        raise UnsupportedError(f"{named} has no counterpart among this package's own models")
    loaded: Theirs = kinds[named].from_pretrained(source)
    return loaded


def _their_config(config: ModelConfig, labels: Sequence[str] | None) -> SkyformerConfig:
    if labels is not None and len(labels) != config.num_classes:
        raise InputError(f"labels must have {config.num_classes} names, one for each class; got {len(labels)}")
    after_attention, after_mlp = (
        config.dropout_or(each) for each in (config.attention_output_dropout, config.mlp_output_dropout)
    )
    if after_attention != after_mlp:
        raise UnsupportedError(
            "the Hugging Face model has one dropout before residual additions (hidden_dropout_prob); got "
            f"attention_output_dropout {after_attention} and mlp_output_dropout {after_mlp}. Make them equal with "
            "config.replace(...); in eval() they have no effect"
        )
    names: dict[str, Any] = {"num_labels": config.num_classes}
    if labels is not None:
        names = {"id2label": dict(enumerate(labels)), "label2id": {name: i for i, name in enumerate(labels)}}
    return SkyformerConfig(
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_length,
        hidden_size=config.dim,
        intermediate_size=config.hidden_dim,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        attention=config.attention,
        attention_options=dict(config.attention_options),
        attention_dropout=config.dropout_or(config.attention_dropout),
        hidden_dropout_prob=after_attention,
        embedding_dropout=config.dropout_or(config.embedding_dropout),
        mlp_hidden_dropout=config.dropout_or(config.mlp_hidden_dropout),
        head_activation=config.head_activation,
        seed=config.seed,
        **names,
    )


def _build(cls: Any, config: SkyformerConfig) -> Any:
    """A model whose initial weights, which are replaced, do not change the random state of the caller."""
    with torch.random.fork_rng(devices=[]):
        return cls(config)


def _renamed(name: str) -> str:
    for pattern, replacement in _RENAMED:
        name = re.sub(pattern, replacement, name)
    return name


def _dtype(model: torch.nn.Module) -> torch.dtype:
    first: Tensor = next(model.parameters())
    return first.dtype
