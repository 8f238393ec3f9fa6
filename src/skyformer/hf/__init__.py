"""Skyformer in Hugging Face transformers; needs the extra [hf].

Importing this package is enough: it registers the attentions that the library's own models can run with, makes the
Skyformer models known to the Auto classes, and refuses models that would ignore the choice of an attention.

    model = AutoModel.from_pretrained("bert-base-cased", attn_implementation="tilted")
    model = AutoModel.from_config(skyformer.hf.SkyformerConfig(vocab_size=30522))
"""

from skyformer.errors import MissingExtraError

try:
    import transformers as transformers
except ModuleNotFoundError as missing:
    raise MissingExtraError("transformers", "hf") from missing

from skyformer.hf.configuration import SkyformerConfig
from skyformer.hf.conversion import from_huggingface, to_huggingface
from skyformer.hf.families import Support, supports
from skyformer.hf.guard import install
from skyformer.hf.interface import register, uses_interface
from skyformer.hf.modeling import (
    SkyformerForMaskedLM,
    SkyformerForQuestionAnswering,
    SkyformerForSequenceClassification,
    SkyformerForTokenClassification,
    SkyformerModel,
    register_models,
)
from skyformer.hf.positions import extend_positions

__all__ = [
    "SkyformerConfig",
    "SkyformerForMaskedLM",
    "SkyformerForQuestionAnswering",
    "SkyformerForSequenceClassification",
    "SkyformerForTokenClassification",
    "SkyformerModel",
    "Support",
    "extend_positions",
    "from_huggingface",
    "register",
    "supports",
    "to_huggingface",
    "uses_interface",
]

install()
register()
register_models()
