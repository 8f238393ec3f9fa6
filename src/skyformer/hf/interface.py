"""Registration: Skyformer and Kernelized Attention under a name that transformers takes as `attn_implementation`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from skyformer.errors import InputError
from skyformer.hf.functions import ApproximateAttention, ExactAttention, RegisteredAttention
from skyformer.hf.masks import mask_with_sdpa_windows, plain_mask
from skyformer.hf.options import Options, SkyformerOptions, read_options

_PRESETS: Mapping[str, Mapping[str, str]] = {
    "skyformer": {"attention": "skyformer"},
    "kernelized": {"attention": "kernelized"},
    "skyformer-softmax": {"attention": "skyformer", "kernel": "softmax"},
}

_SPECIAL = {
    "sdpa": "transformers takes it for a kind of sdpa",
    "flex_attention": "transformers takes it for a kind of flex attention",
    "flash": "transformers takes it for a kind of flash attention",
    "paged|": "transformers strips this prefix",
    "/": "transformers would look for a kernel on the hub",
    "eager": "the models' own attention goes by it",
}


def register(name: str | None = None, **options: Any) -> None:
    """Make an attention known to transformers, for `attn_implementation=name` and `set_attn_implementation(name)`.

    Without arguments: "skyformer", "kernelized" (exact) and "skyformer-softmax" (approximates the softmax attention a
    model was trained with).

    Args:
        name: any name but those that transformers treats specially. Registering it again replaces its options, also
            for models that already use it.
        options: `attention`, "skyformer" (the default, but for the names above) or "kernelized"; for the rest see
            `SkyformerOptions` and `KernelizedOptions`.
    """
    if name is None and not options:
        for preset in _PRESETS:
            register(preset)
        return
    name = "skyformer" if name is None else name
    _check_name(name)
    settings = {**_PRESETS.get(name, _PRESETS["skyformer"]), **options}
    chosen = read_options(settings.pop("attention"), settings)
    AttentionInterface.register(name, _build(name, chosen))
    AttentionMaskInterface.register(name, mask_with_sdpa_windows if chosen.local_layers == "sdpa" else plain_mask)


def uses_interface(model: PreTrainedModel | type[PreTrainedModel]) -> bool:
    """Whether a model asks transformers' attention interface, so that `attn_implementation` has an effect. The others
    accept the name and go on with their own attention."""
    return bool(model._can_set_attn_implementation())


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not name:
        raise InputError(f"name must be a string that is not empty; got {name!r}")
    for special, reason in _SPECIAL.items():
        if special in name:
            raise InputError(f"name must not contain {special!r}, for {reason}; got {name!r}")
    known = AttentionInterface._global_mapping.get(name)
    if known is not None and not isinstance(known, RegisteredAttention):
        raise InputError(f"the name {name!r} belongs to another attention function; register under another")


def _build(name: str, options: Options) -> RegisteredAttention:
    if isinstance(options, SkyformerOptions):
        return ApproximateAttention(name, options)
    return ExactAttention(name, options)
