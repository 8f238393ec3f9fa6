"""One model class of transformers with our attentions: what happens on each way in, and after switching back."""

from __future__ import annotations

import copy
import importlib
import random
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import skyformer.hf
from skyformer.errors import SkyformerError
from skyformer.hf.families import KINDS

AS_SOFTMAX = dict(zip(KINDS, ("every-key-of-softmax", "exact-softmax-kernel"), strict=True))
"""Names under which they are softmax attention: the approximation with every row as a landmark, and the exact one."""
TOLERANCE = 2e-3
UNCHANGED = "works, but the outputs of the small model do not depend on it"
Outputs = list[Tensor]


def register_softmax() -> None:
    approximate, exact = AS_SOFTMAX.values()
    skyformer.hf.register(approximate, kernel="softmax", num_landmarks=100_000)
    skyformer.hf.register(exact, attention="kernelized", kernel="softmax")


SMALL: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 80,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Settings of a small model of texts that most configs have."""


def record_of_text_model(cls: type[PreTrainedModel]) -> dict[str, str]:
    """For a class without tests, as a model of texts."""
    known = {field.name for field in fields(cls.config_class)}
    config = cls.config_class(**{name: value for name, value in SMALL.items() if name in known})
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, 13:] = 0
    return record_of(cls, config, {"input_ids": torch.randint(3, 99, (2, 20)), "attention_mask": mask})


def record_of_case(case: Any, cls: type[PreTrainedModel]) -> dict[str, str]:
    """For a class of one of transformers' tests, with the same inputs in every run."""
    random.seed(0)
    torch.manual_seed(0)
    importlib.import_module("tests.test_modeling_common").global_rng.seed(0)
    config, inputs = case.model_tester.prepare_config_and_inputs_for_common()
    if hasattr(case, "_prepare_for_class"):
        inputs = case._prepare_for_class(inputs, cls)
    return record_of(cls, config, inputs)


def record_of(cls: type[PreTrainedModel], config: Any, inputs: Mapping[str, Any]) -> dict[str, str]:
    """The verdict for each attention, and whether softmax attention by our interface equals the model's own."""
    model = build(cls, config)
    own = outputs(model, inputs)
    if not own:
        raise TypeError("its outputs are not tensors of floating point, so they cannot be compared")
    result = {name: tried(model, inputs, own, name) for name in KINDS}
    for way, verdict in other_ways_in(model, inputs, KINDS[0]).items():
        if verdict[:5] != result[KINDS[0]][:5]:
            result[way] = verdict
    parts = {type(part).__name__ for part in model.modules() if isinstance(part, PreTrainedModel)} - {cls.__name__}
    if parts:
        result["parts"] = ", ".join(sorted(parts))
    working = next((kind for kind in KINDS if result[kind] == "works"), None)
    if working is not None:
        equal = agrees(model, inputs, AS_SOFTMAX[working])
        if equal is not None:
            result["equal to eager"] = "yes" if equal else "no"
    return result


def build(cls: type[PreTrainedModel], config: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model = cls(copy.deepcopy(config)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "duration" in name:
                # A random duration of every sound makes sequences of any length.
                continue
            # The initial weights are so small that all keys have the same weight, and some layers are scaled by 0.
            if parameter.dim() == 2 and parameter.is_floating_point():
                parameter.normal_(0, 0.2)
            elif parameter.dim() == 1 and parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def outputs(model: PreTrainedModel, inputs: Mapping[str, Any]) -> Outputs:
    """All floating point tensors that the model returns."""
    torch.manual_seed(0)
    with torch.no_grad():
        result = model(**copy.deepcopy(dict(inputs)))
    # Some models always return their attention weights, of which ours has none.
    items = result.items() if isinstance(result, Mapping) else [("", result)]
    found: Outputs = []
    _collect([value for name, value in items if "attentions" not in name], found)
    return found


def _collect(value: object, found: Outputs) -> None:
    if isinstance(value, Tensor):
        found += [value] if value.is_floating_point() else []
    elif isinstance(value, tuple | list | Mapping):
        for each in value.values() if isinstance(value, Mapping) else value:
            _collect(each, found)


def same(a: Outputs, b: Outputs, tolerance: float = 0.0) -> bool:
    """With a tolerance relative to the largest number of each output, or to 1 if that is larger."""
    return len(a) == len(b) and all(
        x.shape == y.shape and torch.allclose(x, y, rtol=0, atol=tolerance * largest(y), equal_nan=True)
        for x, y in zip(a, b, strict=True)
    )


def largest(x: Tensor) -> float:
    finite = x[x.isfinite()]
    return max(1.0, float(finite.abs().max())) if finite.numel() else 1.0


def first_line(error: BaseException) -> str:
    """The first sentence of an error."""
    return (str(error).strip().splitlines() or [""])[0].partition(". ")[0][:300]


def implementations(model: PreTrainedModel) -> dict[str, Any]:
    """The attention of each part of a model that has one, as `set_attn_implementation` takes it."""

    def of(config: Any) -> dict[str, Any]:
        parts = {name: getattr(config, name, None) for name in config.sub_configs}
        inside = {name: of(part) for name, part in parts.items() if part is not None}
        own = config._attn_implementation
        return {**({"": own} if own is not None else {}), **{name: part for name, part in inside.items() if part}}

    return of(model.config)


def verdict_of(run: Callable[[], str]) -> str:
    try:
        return run()
    except SkyformerError as refused:
        return f"refused: {first_line(refused)}"
    except TimeoutError:
        raise
    except Exception as error:
        return f"fault: {type(error).__name__}: {first_line(error)}"


def tried(model: PreTrainedModel, inputs: Mapping[str, Any], own: Outputs, name: str) -> str:
    """What happens with this attention: "works", a refusal with its reason, or a fault."""
    first, repeats = implementations(model), same(own, outputs(model, inputs))

    def switch() -> str:
        model.set_attn_implementation(name)
        found = outputs(model, inputs)
        if len(found) != len(own):
            return f"fault: {len(found)} outputs instead of {len(own)}"
        if not all(x.isfinite().all() for x, y in zip(found, own, strict=True) if y.isfinite().all()):
            return "fault: outputs that are not finite"
        if repeats and same(found, own) and same(*(with_hidden_states(model, inputs, each) for each in (name, first))):
            return UNCHANGED
        return "works"

    verdict = verdict_of(switch)
    model.set_attn_implementation(first)
    if repeats and not same(outputs(model, inputs), own):
        return f"fault: not restored after: {verdict}"
    return verdict


def with_hidden_states(model: PreTrainedModel, inputs: Mapping[str, Any], implementation: Any) -> Outputs:
    """The outputs of all layers: the outputs alone may come from an early one."""
    model.set_attn_implementation(implementation)
    try:
        return outputs(model, {**inputs, "output_hidden_states": True})
    except TypeError:
        return []


def other_ways_in(model: PreTrainedModel, inputs: Mapping[str, Any], name: str) -> dict[str, str]:
    """The verdicts of a model made with the attention from the start, from its config and from its saved weights."""

    def from_config() -> str:
        made = type(model)._from_config(copy.deepcopy(model.config), attn_implementation=name)
        outputs(made.eval(), inputs)
        return "works"

    def from_pretrained() -> str:
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            loaded = type(model).from_pretrained(folder, attn_implementation=name).eval()
        outputs(loaded, inputs)
        return "works"

    return {"from_config": verdict_of(from_config), "from_pretrained": verdict_of(from_pretrained)}


def agrees(model: PreTrainedModel, inputs: Mapping[str, Any], name: str) -> bool | None:
    """Whether softmax attention by our interface equals the model's own; None if that cannot be told."""
    model.set_attn_implementation("eager")
    own = outputs(model, inputs)
    if not same(own, outputs(model, inputs), 1e-5) or not all(x.isfinite().all() for x in own):
        return None
    model.set_attn_implementation(name)
    found = outputs(model, inputs)
    for name, mask in inputs.items():
        if name.endswith("attention_mask") and isinstance(mask, Tensor) and mask.dim() == 2:
            # The outputs at padding have no meaning.
            found, own = ([x[mask.bool()] if x.shape[:2] == mask.shape else x for x in each] for each in (found, own))
    return same(found, own, TOLERANCE)
