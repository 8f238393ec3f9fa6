"""Skyformer in Hugging Face transformers: an attention for the library's models, and models of its own, which the Auto
classes know once this is imported; needs the extra [hf].

skyformer.hf.register()
model = AutoModel.from_pretrained("bert-base-cased", attn_implementation="skyformer")
model = AutoModel.from_config(skyformer.hf.SkyformerConfig(vocab_size=30522))
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from skyformer.errors import MissingExtraError

if TYPE_CHECKING:
    from skyformer.hf.configuration import SkyformerConfig as SkyformerConfig
    from skyformer.hf.interface import register as register
    from skyformer.hf.interface import uses_interface as uses_interface
    from skyformer.hf.modeling import SkyformerForMaskedLM as SkyformerForMaskedLM
    from skyformer.hf.modeling import SkyformerForSequenceClassification as SkyformerForSequenceClassification
    from skyformer.hf.modeling import SkyformerModel as SkyformerModel
    from skyformer.hf.positions import extend_positions as extend_positions

_HOMES = {
    "register": "skyformer.hf.interface",
    "uses_interface": "skyformer.hf.interface",
    "extend_positions": "skyformer.hf.positions",
    "SkyformerConfig": "skyformer.hf.configuration",
    "SkyformerModel": "skyformer.hf.modeling",
    "SkyformerForSequenceClassification": "skyformer.hf.modeling",
    "SkyformerForMaskedLM": "skyformer.hf.modeling",
}


def __getattr__(name: str) -> Any:
    """The exports, imported when first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if find_spec("transformers") is None:
        raise MissingExtraError("transformers", "hf")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])


if find_spec("transformers") is not None:
    import_module("skyformer.hf.modeling").register_models()
