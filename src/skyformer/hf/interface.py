"""Registration of attentions under names that transformers takes as `attn_implementation`."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from skyformer.attention import list_attentions
from skyformer.errors import InputError, ReplacedWarning, SkyformerError
from skyformer.hf.functions import (
    ExactAttention,
    ModuleAttention,
    RegisteredAttention,
    SkyformerAttention,
    TiltedAttention,
    ours,
)
from skyformer.hf.masks import mask_with_sdpa_windows, plain_mask
from skyformer.hf.options import (
    KernelizedOptions,
    ModuleOptions,
    Options,
    SkyformerOptions,
    TiltedOptions,
    read_options,
)

SOFTMAX = "skyformer-softmax"
"""The name of Skyformer with the softmax kernel."""

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

    Importing `skyformer.hf` registers every attention of `list_attentions()` that has no parameters under its own name,
    and "skyformer-softmax", Skyformer's approximation of softmax attention. Without arguments this is done again.

    Args:
        name: any name that transformers does not treat specially. The name of an attention stands for that attention
            only. If a name is registered again with other options, a `ReplacedWarning` says so, because models that
            already use it change.
        options: `attention`, a name from `list_attentions()`; by default the one that `name` names, or "skyformer". The
            others are the options of that attention; see `SkyformerOptions`, `TiltedOptions` and `KernelizedOptions`.

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
        for each in (*list_attentions(), SOFTMAX):
            if each == SOFTMAX or not _has_parameters(each):
                register(each)
        return
    name = "skyformer" if name is None else name
    _check_name(name)
    attention = options.pop("attention", None) or (name if name in list_attentions() else "skyformer")
    if name in list_attentions() and attention != name:
        raise InputError(
            f"the name {name!r} stands for the attention {name!r}; register attention {attention!r} under another name"
        )
    chosen = read_options(attention, {"kernel": "softmax", **options} if name == SOFTMAX else options)
    known = ours(name)
    if known is not None and known.options != chosen:
        warnings.warn(
            f"attn_implementation={name!r} has other options from now on, also in models that already use it; register "
            "them under another name to keep both",
            ReplacedWarning,
            stacklevel=2,
        )
    AttentionInterface.register(name, _attention_of(name, chosen))
    AttentionMaskInterface.register(name, mask_with_sdpa_windows if chosen.local_layers == "sdpa" else plain_mask)


@cache
def _has_parameters(attention: str) -> bool:
    try:
        read_options(attention, {})
    except SkyformerError:
        return True
    return False


def _attention_of(name: str, options: Options) -> RegisteredAttention:
    if isinstance(options, ModuleOptions):
        return ModuleAttention(name, options)
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
