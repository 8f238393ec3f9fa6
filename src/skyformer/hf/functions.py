"""The attention functions that transformers calls: Skyformer, exact Kernelized Attention, tilted attention, and others.

transformers calls such a function with the attention module, query (B, H, L, P), key and value (B, H or fewer, S, P),
a mask, and settings. It expects (B, L, H, P) and the attention weights (B, H, L, S) or None.
"""

from __future__ import annotations

import abc
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.utils import output_capturing

from skyformer.attention import Attention, Promise, attention_class, attention_options, build_attention
from skyformer.attention.tilted import tilted_attention
from skyformer.errors import IgnoredSettingWarning, UnsupportedError
from skyformer.functional import kernelized_attention, skyformer_attention
from skyformer.hf.layers import layer_generator, layer_seed
from skyformer.hf.masks import Pattern, attached_pattern, read_mask
from skyformer.hf.options import KernelizedOptions, ModuleOptions, Options, SkyformerOptions, TiltedOptions
from skyformer.ops.kernels import SoftmaxKernel, get_kernel

_HIDDEN_SCALING = ("Esm", "Evolla")
"""Models that scale their queries although their modules have a `scaling` of 1."""


@dataclass(frozen=True)
class Call:
    """One call after its arguments are resolved: as many key heads as query heads, a known pattern, a known scale."""

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    key_mask: Tensor | None
    pattern: Pattern
    dropout: float
    scale: float | None


class RegisteredAttention(abc.ABC):
    """An attention registered under a name. Subclasses write `attend`."""

    calls: ClassVar[int] = 0
    """How often any of them was called, by which `skyformer.hf.guard` sees whether a model uses it."""

    def __init__(self, name: str, options: Options) -> None:
        self.name, self.local_layers, self.options = name, options.local_layers, options

    @property
    @abc.abstractmethod
    def approximates_softmax(self) -> bool:
        """Whether it approximates, or is, the softmax attention that pretrained weights were trained with."""

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if not torch.compiler.is_compiling():
            RegisteredAttention.calls += 1
        if self._is_local(attention_mask, others):
            by_sdpa: tuple[Tensor, None] = sdpa_attention_forward(
                module, query, key, value, attention_mask, dropout, scaling, is_causal, **others
            )
            return by_sdpa
        self._refuse_score_terms(module, others)
        # Groups of heads may share their keys and values.
        key, value = (repeat_kv(x, query.shape[1] // x.shape[1]) for x in (key, value))
        visible = read_mask(attention_mask, query.shape[0], key.shape[2])
        pattern = visible.pattern or _pattern_of_module(module, is_causal, query.shape[2], key.shape[2])
        self._refuse_pattern(module, pattern)
        query, scale = _unscaled(module, query, scaling)
        call = Call(module, query, key, value, visible.key_mask, pattern, dropout, scale)
        out, weights = with_weights(
            lambda values: self.attend(replace(call, value=values)), value, wants_weights(module, others)
        )
        return out.transpose(1, 2).contiguous(), weights

    @abc.abstractmethod
    def attend(self, call: Call) -> Tensor:
        """(B, H, L, Pv)."""

    def _is_local(self, mask: Tensor | None, others: Mapping[str, Any]) -> bool:
        """Whether the layer has a sliding window; raises if such layers are refused."""
        pattern, window = attached_pattern(mask), others.get("sliding_window")
        if window is None and (pattern is None or not pattern.local):
            return False
        if self.local_layers == "sdpa":
            return True
        raise UnsupportedError(
            f"attention {self.name!r} attends to the whole sequence, but this layer has a sliding window. Keep the "
            f"softmax attention of such layers with register({self.name!r}, local_layers='sdpa'), or load the model "
            "without windows (ModernBERT: layer_types=['full_attention'] * num_hidden_layers)"
        )

    def _refuse_score_terms(self, module: nn.Module, others: Mapping[str, Any]) -> None:
        for term, meaning in _SCORE_TERMS.items():
            if others.get(term) is not None:
                raise UnsupportedError(
                    f"attention {self.name!r} never computes the scores, but {type(module).__name__} passes {term}: "
                    f"{meaning}. Use attn_implementation='sdpa' or 'eager' for this model"
                )

    def _refuse_pattern(self, module: nn.Module, pattern: Pattern) -> None:
        if pattern.other is not None:
            raise UnsupportedError(
                f"attention {self.name!r} supports padding masks only, but {type(module).__name__} uses "
                f"{pattern.other}. Use attn_implementation='sdpa' or 'eager' for this model"
            )


_SCORE_TERMS = {
    "position_bias": "a bias for every pair of positions",
    "softcap": "a bound on the scores",
    "s_aux": "scores of attention sinks",
    "indices": "a choice of keys for every query",
    "block_indices": "a choice of keys for every query",
    "cu_seq_lens_q": "several sequences packed into one row",
    "cache": "a paged cache",
}
"""Arguments of some models that change the scores, and what they mean."""


def ours(name: object) -> RegisteredAttention | None:
    """The attention that is registered under this name, if it is one of ours."""
    found = AttentionInterface._global_mapping.get(name) if isinstance(name, str) else None
    return found if isinstance(found, RegisteredAttention) else None


class ApproximateAttention(RegisteredAttention):
    """An approximation: causal models are refused, and dropout of weights has no effect."""

    def __init__(self, name: str, options: Options) -> None:
        super().__init__(name, options)
        self._warned_about_dropout = False

    def refuse_causal(self, call: Call, reason: str, instead: str) -> None:
        if call.pattern.causal:
            raise UnsupportedError(
                f"attention {self.name!r} does not support {type(call.module).__name__}, which is causal: {reason}. "
                f"{instead}"
            )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def warn_about_dropout(self, call: Call) -> None:
        if not self._warned_about_dropout:
            self._warned_about_dropout = True
            _warn_about_dropout(self.name, call)


class TiltedAttention(ApproximateAttention):
    """Tilted attention, which approximates the model's own softmax attention."""

    def __init__(self, name: str, options: TiltedOptions) -> None:
        super().__init__(name, options)
        self._options = {each.name: getattr(options, each.name) for each in fields(options)}
        self._options.pop("local_layers")

    @property
    def approximates_softmax(self) -> bool:
        return bool(self._options["kernel"] == "softmax")

    def attend(self, call: Call) -> Tensor:
        self.refuse_causal(
            call,
            "a block of queries shares its keys, which may come later than a query",
            "Use attn_implementation='sdpa' for this model",
        )
        if call.dropout > 0:
            self.warn_about_dropout(call)
        return tilted_attention(
            call.query, call.key, call.value, key_mask=call.key_mask, scale=call.scale, **self._options
        )


class SkyformerAttention(ApproximateAttention):
    """Skyformer. Every layer draws its own landmarks."""

    options: SkyformerOptions

    @property
    def approximates_softmax(self) -> bool:
        return isinstance(get_kernel(self.options.kernel), SoftmaxKernel)

    # Drawing landmarks breaks a compiled graph anyway; disabled here, it breaks only once per layer.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend(self, call: Call) -> Tensor:
        self.refuse_causal(
            call,
            "every output depends on landmarks from the whole sequence",
            "The exact attention does: skyformer.hf.register('kernelized') and attn_implementation='kernelized'",
        )
        if call.dropout > 0:
            self.warn_about_dropout(call)
        options = self.options
        return skyformer_attention(
            call.query,
            call.key,
            call.value,
            num_landmarks=options.num_landmarks,
            landmarks=options.sampler,
            key_mask=call.key_mask,
            gamma=options.gamma,
            solver=options.solver,
            scale=call.scale,
            kernel=options.kernel,
            generator=layer_generator(call.module, options.seed),
            memory_budget=options.memory_budget,
        )


def _warn_about_dropout(name: str, call: Call) -> None:
    settings = vars(call.module.config) if hasattr(call.module, "config") else {}
    names = [each for each, value in settings.items() if "att" in each and "drop" in each and value == call.dropout]
    warnings.warn(
        f"attention {name!r} computes no attention weights to drop, so the model's attention dropout of "
        f"{call.dropout:g} has no effect; its other dropout has. To silence this warning, set "
        f"{' or '.join(names) or 'the attention dropout'} to 0 in the config",
        IgnoredSettingWarning,
        stacklevel=3,
    )


class ExactAttention(RegisteredAttention):
    """Kernelized Attention, causal or not."""

    options: KernelizedOptions

    @property
    def approximates_softmax(self) -> bool:
        return isinstance(get_kernel(self.options.kernel), SoftmaxKernel)

    def attend(self, call: Call) -> Tensor:
        if not call.pattern.causal:
            return self._attend(call, is_causal=False)
        # With a cache the queries start at a later position than the keys, and the cache may have unused room.
        first, length = call.pattern.first_query, call.query.shape[2]
        call = _first_keys(call, first + length)
        if length == 1:
            return self._attend(call, is_causal=False)
        call = replace(call, query=F.pad(call.query, (0, 0, first, 0)))
        return self._attend(call, is_causal=True)[:, :, first:]

    def _attend(self, call: Call, is_causal: bool) -> Tensor:
        return kernelized_attention(
            call.query,
            call.key,
            call.value,
            key_mask=call.key_mask,
            is_causal=is_causal,
            scale=call.scale,
            kernel=self.options.kernel,
            dropout_p=call.dropout,
            memory_budget=self.options.memory_budget,
        )


class ModuleAttention(ApproximateAttention):
    """Any other attention of `list_attentions()` without parameters: one module for each layer of a model."""

    options: ModuleOptions

    def __init__(self, name: str, options: ModuleOptions) -> None:
        super().__init__(name, options)
        self._modules: weakref.WeakKeyDictionary[nn.Module, tuple[object, Attention]] = weakref.WeakKeyDictionary()

    @property
    def approximates_softmax(self) -> bool:
        return attention_class(self.options.attention).approximates_softmax

    # The look-up by module cannot be traced; disabled here, the graph breaks only once per layer.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend(self, call: Call) -> Tensor:
        cls = attention_class(self.options.attention)
        if call.pattern.causal:
            self._refuse_causal_call(cls, call)
        if call.dropout > 0 and Promise.DROPOUT in cls.cannot:
            self.warn_about_dropout(call)
        module = self._module_of(cls, call).to(call.query.device).train(call.module.training)
        out: Tensor = module(call.query, call.key, call.value, key_mask=call.key_mask, is_causal=call.pattern.causal)
        return out

    def _refuse_causal_call(self, cls: type[Attention], call: Call) -> None:
        reason = cls.cannot.get(Promise.CAUSAL)
        if reason is None and (call.pattern.first_query or call.query.shape[2] != call.key.shape[2]):
            reason = "with a cache the queries start at a later position than the keys; use_cache=False avoids it"
        if reason is not None:
            self.refuse_causal(call, reason, "Use attn_implementation='kernelized' or 'sdpa' for this model")

    def _module_of(self, cls: type[Attention], call: Call) -> Attention:
        """The module of a layer, built when it is first called. Copies of a model get modules of the same seeds."""
        shape = (call.query.shape[1], call.query.shape[3])
        settings = dict(self.options.settings)
        settings["seed"] = layer_seed(call.module, int(settings.get("seed", 0)))
        known = attention_options(cls.name)
        if "scale" in known:
            settings["scale"] = call.scale
        if "dropout" in known and call.dropout > 0:
            settings["dropout"] = call.dropout
        wanted = (shape, tuple(settings.items()))
        kept, module = self._modules.get(call.module, (None, None))
        if module is None or kept != wanted:
            module = build_attention(cls.name, *shape, **settings)
            self._modules[call.module] = wanted, module
        return module


def _first_keys(call: Call, count: int) -> Call:
    key_mask = None if call.key_mask is None else call.key_mask[:, :count]
    return replace(call, key=call.key[:, :, :count], value=call.value[:, :, :count], key_mask=key_mask)


def _pattern_of_module(module: nn.Module, is_causal: bool | None, num_queries: int, num_keys: int) -> Pattern:
    """The pattern that the module's attributes declare, for masks without one."""
    if is_causal is None:
        by_config = getattr(getattr(module, "config", None), "is_causal", True)
        is_causal = bool(getattr(module, "is_causal", False) and by_config)
    return Pattern(causal=is_causal, first_query=max(0, num_keys - num_queries) if is_causal else 0)


def _unscaled(module: nn.Module, query: Tensor, scaling: float | None) -> tuple[Tensor, float | None]:
    """The queries before scaling, and the scale.

    Some models (Whisper, OPT, ESM) multiply the queries by head_dim ** -0.5 themselves and pass a scale of 1. A kernel
    of distances needs queries and keys on the same scale, so this undoes it.
    """
    own = getattr(module, "scaling", None)
    if type(module).__name__.startswith(_HIDDEN_SCALING):
        own = query.shape[-1] ** -0.5
    if scaling != 1.0 or not isinstance(own, float) or own != query.shape[-1] ** -0.5:
        return query, scaling
    return query / own, own


def wants_weights(module: nn.Module, others: Mapping[str, Any]) -> bool:
    """Whether the weights are requested: in the call, in the config, or (for models that do not pass the argument on)
    by the library's recording of outputs."""
    by_config = getattr(getattr(module, "config", None), "output_attentions", False)
    return bool(others.get("output_attentions") or by_config or _records_weights())


def _records_weights() -> bool:
    collector = getattr(output_capturing, "_active_collector", None)
    recorded = collector.get() if collector is not None else None
    return recorded is not None and any("attentions" in kind for kind in recorded)


def with_weights(
    attend: Callable[[Tensor], Tensor], value: Tensor, wanted: bool = True
) -> tuple[Tensor, Tensor | None]:
    """The output (B, H, L, Pv) of an attention for values (B, H, S, Pv), and its weights (B, H, L, S) if wanted.

    The weights are the matrix that multiplies the values, so the identity as further values returns them.
    """
    if not wanted:
        return attend(value), None
    size, num_keys = value.shape[-1], value.shape[2]
    identity = torch.eye(num_keys, dtype=value.dtype, device=value.device).expand(*value.shape[:2], num_keys, num_keys)
    out = attend(torch.cat([value, identity], -1))
    return out[..., :size], out[..., size:]
