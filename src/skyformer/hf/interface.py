"""Registration of attentions under names that transformers takes as `attn_implementation`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from skyformer.errors import InputError
from skyformer.hf.functions import ExactAttention, RegisteredAttention, SkyformerAttention, TiltedAttention
from skyformer.hf.masks import mask_with_sdpa_windows, plain_mask
from skyformer.hf.options import KernelizedOptions, Options, SkyformerOptions, TiltedOptions, read_options

_PRESETS: Mapping[str, Mapping[str, str]] = {
    "tilted": {"attention": "tilted"},
    "skyformer": {"attention": "skyformer"},
    "kernelized": {"attention": "kernelized"},
    "skyformer-softmax": {"attention": "skyformer", "kernel": "softmax"},
}

_RESERVED = {
    "sdpa": "transformers treats such names as a kind of sdpa",
    "flex_attention": "transformers treats such names as a kind of flex attention",
    "flash": "transformers treats such names as a kind of flash attention",
    "paged|": "transformers strips this prefix",
    "/": "transformers would look for a kernel on the hub",
    "eager": "it is the name of the models' own attention",
}


def register(name: str | None = None, **options: Any) -> None:
    """Makes an attention known to transformers, for `attn_implementation=name` and `set_attn_implementation(name)`.

    Without arguments it registers "tilted" (approximates the softmax attention that a model was trained with),
    "skyformer", "kernelized" (exact) and "skyformer-softmax" (a coarser approximation of softmax attention).

    Args:
        name: any name that transformers does not treat specially. Registering a name again replaces its options, also
            for models that already use it.
        options: `attention`, which is "skyformer" (the default, except for the names above), "tilted" or
            "kernelized"; for the others see `SkyformerOptions`, `TiltedOptions` and `KernelizedOptions`.

    Example:
        >>> import torch, skyformer.hf
        >>> from transformers import BertConfig, BertModel
        >>> skyformer.hf.register("skyformer-64", num_landmarks=64)
        >>> config = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
        >>> model = BertModel(config).eval()
        >>> model.set_attn_implementation("skyformer-64")
        >>> model(torch.arange(200)[None]).last_hidden_state.shape
        torch.Size([1, 200, 32])
    """
    if name is None and not options:
        for preset in _PRESETS:
            register(preset)
        return
    name = "skyformer" if name is None else name
    _check_name(name)
    settings = {**_PRESETS.get(name, _PRESETS["skyformer"]), **options}
    chosen = read_options(settings.pop("attention"), settings)
    AttentionInterface.register(name, _attention_of(name, chosen))
    AttentionMaskInterface.register(name, mask_with_sdpa_windows if chosen.local_layers == "sdpa" else plain_mask)


def _attention_of(name: str, options: Options) -> RegisteredAttention:
    if isinstance(options, TiltedOptions):
        return TiltedAttention(name, options)
    if isinstance(options, SkyformerOptions):
        return SkyformerAttention(name, options)
    assert isinstance(options, KernelizedOptions)
    return ExactAttention(name, options)


def uses_interface(model: PreTrainedModel | type[PreTrainedModel]) -> bool:
    """Whether a model uses transformers' attention interface, so that `attn_implementation` has an effect. Other models
    accept the name and keep their own attention."""
    return bool(model._can_set_attn_implementation())


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not name:
        raise InputError(f"name must be a string that is not empty; got {name!r}")
    for reserved, reason in _RESERVED.items():
        if reserved in name:
            raise InputError(f"name must not contain {reserved!r}: {reason}; got {name!r}")
    known = AttentionInterface._global_mapping.get(name)
    if known is not None and not isinstance(known, RegisteredAttention):
        raise InputError(f"the name {name!r} belongs to another attention function; use another name")
