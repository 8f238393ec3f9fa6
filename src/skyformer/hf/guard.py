"""The guard around every switch to one of our attentions: `set_attn_implementation`, `from_pretrained`, `from_config`.

transformers has no hook for this, so four of its methods are wrapped when `skyformer.hf` is imported. A model that
would ignore the switch is refused, a refused switch leaves the model as it was, and the first forward pass must have
called our attention. Before each pass the guard also looks for texts that are longer than the model's learned
positions, and warns once if weights trained with softmax attention are evaluated with an attention that does not
approximate it.
"""

from __future__ import annotations

import functools
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from skyformer.attention import list_attentions
from skyformer.errors import AttentionWarning, ShapeError, SkyformerError, UnsupportedError
from skyformer.hf.functions import RegisteredAttention, ours
from skyformer.hf.interface import register
from skyformer.hf.positions import learned_positions

TRAINED_WITH = "skyformer_attention"
"""The setting in which a config records the name of our attention that its weights were trained with."""

_OWN_LIST = "chooses its attention from a list of its own and never asks transformers' attention interface"

_state = threading.local()
_unverified: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()
"""Models whose next forward pass must call our attention."""
_warned: set[tuple[str, str]] = set()


def own_attention(model: type[PreTrainedModel]) -> str | None:
    """Why a class would ignore the switch; None if it uses the attention interface."""
    if model._can_set_attn_implementation():
        return None
    return f"{model.__name__} computes attention with its own code and never asks transformers' attention interface"


def install() -> None:
    """Wrap the methods, once."""
    if hasattr(PreTrainedModel.set_attn_implementation, "__wrapped__"):
        return
    adjust, switch = PreTrainedModel._check_and_adjust_attn_implementation, PreTrainedModel.set_attn_implementation

    @functools.wraps(adjust)
    def guarded_adjust(self: PreTrainedModel, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        register_by_name(attn_implementation)
        chosen: str = adjust(self, attn_implementation, *args, **kwargs)
        if ours(chosen) is not None:
            _refuse_own_attention(self, chosen)
            _watch(self)
        return chosen

    @functools.wraps(switch)
    def guarded_switch(self: PreTrainedModel, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        before = [(config, config._attn_implementation) for config in _configs(self)]
        try:
            for part, name in _requests(self, attn_implementation):
                register_by_name(name)
                if ours(name) is not None:
                    _refuse_own_attention(part, str(name))
            switch(self, attn_implementation, *args, **kwargs)
        except BaseException:
            for config, name in before:
                config._attn_implementation_internal = name
            raise
        for part in _parts(self):
            (_watch if ours(part.config._attn_implementation) is not None else _unwatch)(part)

    PreTrainedModel._from_config = _guarded_constructor(PreTrainedModel._from_config)  # type: ignore[method-assign]
    PreTrainedModel.from_pretrained = _guarded_constructor(PreTrainedModel.from_pretrained)  # type: ignore[method-assign]
    PreTrainedModel._check_and_adjust_attn_implementation = guarded_adjust  # type: ignore[method-assign]
    PreTrainedModel.set_attn_implementation = guarded_switch  # type: ignore[method-assign]


def _guarded_constructor(constructor: Any) -> Any:
    """A class method that refuses classes which look up their attention in a table of their own."""

    @functools.wraps(constructor.__func__)
    def guarded(cls: type[PreTrainedModel], *args: Any, **kwargs: Any) -> Any:
        try:
            return constructor.__func__(cls, *args, **kwargs)
        except KeyError as missing:
            name = missing.args[0] if missing.args else None
            if ours(name) is None:
                raise
            raise UnsupportedError(_without_effect(str(name), f"{cls.__name__} {_OWN_LIST}")) from missing

    return classmethod(guarded)


def register_by_name(name: object) -> None:
    """An attention that became known later needs no call of `register`; one with parameters raises its reason."""
    if ours(name) is None and isinstance(name, str) and name in list_attentions():
        register(name)


def _parts(model: nn.Module) -> Iterator[PreTrainedModel]:
    return (module for module in model.modules() if isinstance(module, PreTrainedModel))


def _configs(model: PreTrainedModel) -> Iterator[Any]:
    """The configs of all parts, and the configs inside them, each once."""
    waiting, seen = [part.config for part in _parts(model)], set()
    while waiting:
        config = waiting.pop()
        if id(config) not in seen:
            seen.add(id(config))
            yield config
            inside = (getattr(config, name, None) for name in config.sub_configs)
            waiting += [each for each in inside if each is not None]


def _requests(model: PreTrainedModel, requested: str | dict[str, Any]) -> Iterator[tuple[PreTrainedModel, object]]:
    """The parts of a model, each with the attention that is requested for it."""
    by_config: dict[int, object] = {}

    def read(config: Any, wanted: object) -> None:
        by_config[id(config)] = wanted.get("", config._attn_implementation) if isinstance(wanted, dict) else wanted
        for name in config.sub_configs:
            if (inside := getattr(config, name, None)) is not None:
                read(inside, wanted.get(name, inside._attn_implementation) if isinstance(wanted, dict) else wanted)

    read(model.config, requested)
    for part in _parts(model):
        yield part, by_config.get(id(part.config), by_config[id(model.config)])


def _refuse_own_attention(part: PreTrainedModel, name: str) -> None:
    reason = own_attention(type(part))
    if reason is None and any(type(module) in _listed_attentions(module.__module__) for module in _own_modules(part)):
        reason = f"{type(part).__name__} {_OWN_LIST}"
    if reason is not None:
        raise UnsupportedError(_without_effect(name, reason))


def _own_modules(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of a model without those of the models inside it."""
    for child in model.children():
        if not isinstance(child, PreTrainedModel):
            yield child
            yield from _own_modules(child)


@functools.cache
def _listed_attentions(file: str) -> frozenset[object]:
    """The attention classes from which the models of a Python module choose by `attn_implementation`."""
    names = vars(sys.modules[file])
    tables = [table for name, table in names.items() if name.endswith("ATTENTION_CLASSES") and isinstance(table, dict)]
    return frozenset(cls for table in tables for cls in table.values())


def _without_effect(name: str, reason: str) -> str:
    return (
        f"attn_implementation={name!r} would have no effect: {reason}. Use another family "
        "(skyformer.hf.supports(model) says whether one works), switch only the other parts of a model of several "
        f"parts (attn_implementation={{'text_config': {name!r}}}), or build skyformer.MultiheadAttention into a "
        "model of your own"
    )


def _watch(model: PreTrainedModel) -> None:
    if _before not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_before, with_kwargs=True)
        model.register_forward_hook(_after, always_call=True)
    _unverified.add(model)


def _unwatch(model: PreTrainedModel) -> None:
    for hooks, hook in ((model._forward_pre_hooks, _before), (model._forward_hooks, _after)):
        for number in [number for number, each in hooks.items() if each is hook]:
            del hooks[number]
    for extra in (model._forward_pre_hooks_with_kwargs, model._forward_hooks_always_called):
        for number in [number for number in extra if number not in model._forward_pre_hooks | model._forward_hooks]:
            del extra[number]


def _before(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if torch.compiler.is_compiling():
        return
    _state.depth = getattr(_state, "depth", 0) + 1
    if _state.depth > 1:
        return
    _state.calls = RegisteredAttention.calls
    try:
        _check_length(model, args, kwargs)
        _compare_with_training(model)
    except BaseException:
        _state.depth = 0
        raise


def _after(model: PreTrainedModel, args: tuple[Any, ...], output: Any) -> None:
    """Only the outermost model is judged: a part of it may have no attention at all."""
    if torch.compiler.is_compiling() or not getattr(_state, "depth", 0):
        return
    _state.depth -= 1
    if _state.depth or model not in _unverified:
        return
    name = model.config._attn_implementation
    if output is None:
        _explain(sys.exc_info()[1], type(model).__name__, name)
        return
    if RegisteredAttention.calls == _state.calls:
        raise UnsupportedError(
            f"{type(model).__name__} ran without calling attention {name!r}: it keeps its own attention, or has none, "
            "so attn_implementation has no effect. Use another family; skyformer.hf.supports(model) says if one works"
        )
    _unverified.difference_update(_parts(model))


def _explain(error: BaseException | None, model: str, name: str) -> None:
    """Adds to the error of a model's first pass that the attention may be its cause."""
    if error is not None and not isinstance(error, SkyformerError):
        error.add_note(
            f"{model} failed in its first forward pass with attention {name!r}. If it runs with "
            "attn_implementation='eager', its code expects masks or arguments that this attention does not have; use "
            "'sdpa' or 'eager' for this model"
        )


def _check_length(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    tokens = kwargs.get("input_ids", args[0] if args else None)
    embedded = kwargs.get("inputs_embeds")
    given = tokens if isinstance(tokens, Tensor) and tokens.dim() == 2 else embedded
    limit = getattr(model.config, "max_position_embeddings", None)
    if not isinstance(given, Tensor) or given.dim() < 2 or not isinstance(limit, int):
        return
    length = given.shape[1]
    # The limit of RoBERTa and its relatives includes reserved rows.
    if length > limit - 8 and (known := learned_positions(model)) is not None and length > known:
        raise ShapeError(
            f"the input is {length} tokens long, but {type(model).__name__} has learned positions for {known}; extend "
            f"them with skyformer.hf.extend_positions(model, {length}), or truncate the input"
        )


def _compare_with_training(model: PreTrainedModel) -> None:
    """Record what weights are trained with; warn if they are evaluated with another attention."""
    name = model.config._attn_implementation
    attention = ours(name)
    if attention is None or attention.approximates_softmax:
        return
    if model.training:
        setattr(model.config, TRAINED_WITH, name)
        return
    source = model.config.name_or_path
    if not source or getattr(model.config, TRAINED_WITH, None) is not None or (source, name) in _warned:
        return
    _warned.add((source, name))
    warnings.warn(
        f"the weights of {source} were not trained with attention {name!r}, which does not approximate softmax "
        "attention, so without training the outputs are unrelated to the model's own. attn_implementation='tilted' "
        "approximates the model's own attention",
        AttentionWarning,
        stacklevel=4,
    )
