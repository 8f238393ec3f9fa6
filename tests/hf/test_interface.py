"""The registered attentions: names and options, landmarks per layer and head, and errors for what is not supported."""

from __future__ import annotations

import copy
import itertools
import runpy
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    BertConfig,
    BertModel,
    CLIPConfig,
    CLIPModel,
    Gemma2Config,
    Gemma2Model,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    ModernBertConfig,
    ModernBertModel,
    MPNetConfig,
    MPNetModel,
    ViTConfig,
    ViTModel,
)

import skyformer.hf
from skyformer import kernelized_attention, list_attentions, skyformer_attention, softmax_attention
from skyformer.attention.tilted import tilted_attention
from skyformer.errors import (
    IgnoredSettingWarning,
    InputError,
    MissingExtraError,
    ReplacedWarning,
    UnknownNameError,
    UnsupportedError,
    install_command,
)
from skyformer.hf.functions import RegisteredAttention
from skyformer.hf.layers import layer_generator, layer_number
from skyformer.landmarks import StratifiedSampler
from tests.helpers import refused
from tests.hf.families import (
    BERT,
    BERT_FAMILY,
    IDS,
    LENGTH,
    MODERN,
    PICTURE,
    SHORT,
    TEXT,
    VIT_FAMILY,
    left_padded,
    model_of,
    pixels,
    tokens,
)
from tests.hf.own_models import enable_checkpointing


class Layer(nn.Module):
    """The attributes that an attention function reads from its module."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.is_causal, self.layer_idx = False, 0
        for name, attribute in attributes.items():
            setattr(self, name, attribute)
        self.eval()


def function(name: str) -> RegisteredAttention:
    registered = AttentionInterface()[name]
    assert isinstance(registered, RegisteredAttention)
    return registered


def some_heads(heads: int = 4, length: int = LENGTH, seed: int = 0) -> Tensor:
    return torch.randn(2, heads, length, 8, generator=torch.Generator().manual_seed(seed))


def attend(name: str, module: nn.Module | None = None, **arguments: Any) -> Tensor:
    """(B, H, L, P) of a registered attention, on random points unless others are given."""
    given = {"query": some_heads(seed=0), "key": some_heads(seed=1), "value": some_heads(seed=2), **arguments}
    mask = given.pop("attention_mask", None)
    qkv = [given.pop(part) for part in ("query", "key", "value")]
    out, _ = function(name)(Layer() if module is None else module, *qkv, mask, **given)
    return out.transpose(1, 2)


def test_importing_registers_every_attention_without_parameters() -> None:
    for name in {*list_attentions(), "skyformer-softmax"} - {"linformer"}:
        assert function(name).name == name
        assert name in AttentionMaskInterface().valid_keys()


MEANS: dict[str, Any] = {"landmarks": "segment_means", "num_landmarks": 16, "gamma": 0.1, "solver": "schulz"}


@pytest.mark.parametrize(
    ("name", "options", "direct"),
    [
        ("skyformer", {}, kernelized_attention),
        ("kernelized", {}, kernelized_attention),
        ("tilted", {}, softmax_attention),
        ("tilted-16", {"attention": "tilted", "budget": 16}, partial(tilted_attention, budget=16)),
        ("means", MEANS, partial(skyformer_attention, **MEANS)),
        (
            "laplacian",
            {"attention": "kernelized", "kernel": "laplacian"},
            partial(kernelized_attention, kernel="laplacian"),
        ),
    ],
)
def test_options_reach_the_functions(name: str, options: dict[str, Any], direct: Callable[..., Tensor]) -> None:
    skyformer.hf.register(name, **options)
    torch.testing.assert_close(attend(name), direct(*(some_heads(seed=seed) for seed in range(3))))


# Other options under a name that is taken are a warning, see below.
@pytest.mark.filterwarnings("ignore::skyformer.errors.ReplacedWarning")
def test_presets_can_be_changed_and_options_without_a_name_are_for_skyformer() -> None:
    try:
        skyformer.hf.register("skyformer-softmax", num_landmarks=200)
        skyformer.hf.register(num_landmarks=8)
        expected = softmax_attention(some_heads(seed=0), some_heads(seed=1), some_heads(seed=2))
        torch.testing.assert_close(attend("skyformer-softmax"), expected)
        assert torch.equal(attend("skyformer"), attend("few"))
    finally:
        skyformer.hf.register()


def test_options_under_a_taken_name() -> None:
    skyformer.hf.register("taken", num_landmarks=8)
    skyformer.hf.register("taken", num_landmarks=8)
    with pytest.warns(ReplacedWarning, match="'taken' has other options from now on, also in models"):
        skyformer.hf.register("taken", num_landmarks=9)
    with refused(InputError, "'performer' stands for the attention 'performer'", "'skyformer' under another name"):
        skyformer.hf.register("performer", attention="skyformer")


@pytest.mark.parametrize(
    ("name", "options", "error", "words"),
    [
        ("a", {"num_landmark": 3}, UnknownNameError, ("'num_landmark'", "Did you mean 'num_landmarks'")),
        ("a", {"attention": "kernelized", "num_landmarks": 3}, UnknownNameError, ("'kernelized'", "'num_landmarks'")),
        ("a", {"attention": "perfomer"}, UnknownNameError, ("'perfomer'", "Did you mean 'performer'")),
        ("a", {"attention": "performer", "num_landmarks": 3}, UnknownNameError, ("'performer'", "num_features")),
        ("a", {"attention": "performer", "num_features": 0}, InputError, ("num_features", "at least 1", "0")),
        ("a", {"attention": "reformer", "max_length": 3}, InputError, ("max_length", "the inputs of the model")),
        ("linformer", {}, InputError, ("max_length",)),
        (
            "a",
            {"attention": "nystromformer", "conv_kernel_size": 3},
            UnsupportedError,
            ("'nystromformer'", "convolution"),
        ),
        ("a", {"attention": "tilted", "num_landmarks": 3}, UnknownNameError, ("'tilted'", "'num_landmarks'", "budget")),
        ("a", {"attention": "tilted", "budget": 3}, InputError, ("budget", "at least 8", "3")),
        ("a", {"attention": "tilted", "num_cells": 16}, InputError, ("either budget or all of", "num_cells=16")),
        ("a", {"scale": 0.1}, InputError, ("scale", "comes from the model")),
        ("a", {"dropout": 0.1}, InputError, ("dropout", "comes from the model")),
        ("a", {"num_landmarks": 0}, InputError, ("num_landmarks", "at least 1", "0")),
        ("a", {"gamma": -1.0}, InputError, ("gamma", "above 0", "-1.0")),
        ("a", {"landmarks": "random"}, UnknownNameError, ("'random'", "stratified")),
        ("a", {"kernel": "gausian"}, UnknownNameError, ("'gausian'", "Did you mean 'gaussian'")),
        ("a", {"solver": "lu"}, UnknownNameError, ("'lu'", "cholesky")),
        ("a", {"seed": -1}, InputError, ("seed", "-1")),
        ("a", {"local_layers": "drop"}, UnknownNameError, ("'drop'", "refuse, sdpa")),
        ("my-sdpa", {}, InputError, ("'sdpa'", "'my-sdpa'", "a kind of sdpa")),
        ("flex_attention_sky", {}, InputError, ("'flex_attention'",)),
        ("sky-flash", {}, InputError, ("'flash'",)),
        ("sky/former", {}, InputError, ("'/'", "hub")),
        ("eager", {}, InputError, ("'eager'", "own attention")),
        ("other-function", {}, InputError, ("'other-function'", "belongs to another")),
        ("", {}, InputError, ("name", "not empty")),
    ],
)
def test_bad_registrations_are_refused(
    name: str, options: dict[str, Any], error: type[Exception], words: tuple[str, ...]
) -> None:
    AttentionInterface.register("other-function", lambda *_: None)
    with refused(error, *words):
        skyformer.hf.register(name, **options)
    assert not isinstance(AttentionInterface().get(name), RegisteredAttention)


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with refused(MissingExtraError, "'transformers'", install_command("hf")):
        runpy.run_path(skyformer.hf.__file__)


class EsmLayer(Layer):
    """By its name, a layer that scales its queries although its `scaling` is 1."""


def test_the_models_scale_is_used_and_its_scaling_of_queries_undone() -> None:
    q, k, v = (some_heads(seed=seed) for seed in range(3))
    torch.testing.assert_close(attend("kernelized", scaling=0.7), kernelized_attention(q, k, v, scale=0.7))
    scale = 8**-0.5
    for module in (Layer(scaling=scale), EsmLayer(scaling=1.0)):
        scaled = attend("kernelized", module, query=q * scale, scaling=1.0)
        torch.testing.assert_close(scaled, kernelized_attention(q, k, v))
    unscaled = attend("kernelized", Layer(scaling=1.0), scaling=1.0)
    torch.testing.assert_close(unscaled, kernelized_attention(q, k, v, scale=1.0))


@pytest.mark.parametrize("name", ["few", "few-tilted", "kernelized"])
def test_keys_and_values_can_be_shared_by_groups_of_heads(name: str) -> None:
    key, value = some_heads(heads=2, seed=1), some_heads(heads=2, seed=2)
    grouped = attend(name, Layer(num_key_value_groups=2), key=key, value=value)
    torch.testing.assert_close(
        grouped, attend(name, key=key.repeat_interleave(2, 1), value=value.repeat_interleave(2, 1))
    )


@pytest.mark.parametrize("name", ["exact-softmax", "all-of-softmax"])
@pytest.mark.parametrize("length", [13, LENGTH, 60])
def test_queries_may_come_from_another_sequence(name: str, length: int) -> None:
    query = some_heads(length=length)
    mask = tokens()["attention_mask"].bool()
    expected = softmax_attention(query, some_heads(seed=1), some_heads(seed=2), key_mask=mask)
    torch.testing.assert_close(attend(name, query=query, attention_mask=mask), expected, rtol=1e-4, atol=1e-5)


def test_every_layer_has_its_own_random_stream() -> None:
    draws = [int(torch.randint(2**40, (), generator=layer_generator(Layer(layer_idx=i), 0))) for i in range(12)]
    assert len(set(draws)) == 12
    again = int(torch.randint(2**40, (), generator=layer_generator(Layer(layer_idx=3), 0)))
    assert again == draws[3]
    other = int(torch.randint(2**40, (), generator=layer_generator(Layer(layer_idx=3), 1)))
    assert other not in draws
    assert layer_generator(Layer().train(), 0) is None


def test_heads_draw_their_own_landmarks_unless_a_sampler_is_given() -> None:
    skyformer.hf.register("shared-rows", num_landmarks=8, landmarks=StratifiedSampler())
    skyformer.hf.register("few-of-seed-1", num_landmarks=8, seed=1)
    q, k, v = (some_heads(seed=seed)[:, :1].expand(-1, 2, -1, -1) for seed in range(3))
    own, shared, other = (attend(name, query=q, key=k, value=v) for name in ("few", "shared-rows", "few-of-seed-1"))
    assert not torch.allclose(own[:, 0], own[:, 1])
    torch.testing.assert_close(shared[:, 0], shared[:, 1])
    assert not torch.allclose(own, other), "another seed draws other landmarks"


def test_modules_without_an_index_are_numbered_as_they_are_called() -> None:
    model = ViTModel(ViTConfig(**PICTURE)).eval()
    model.set_attn_implementation("few")
    model(**pixels())
    modules = [module for module in model.modules() if type(module).__name__ == "ViTAttention"]
    assert [layer_number(module) for module in modules] == [0, 1]


def test_models_that_share_a_config_and_weights_agree() -> None:
    config = ViTConfig(**PICTURE)
    config._attn_implementation = "few"
    first = ViTModel(config).eval()
    second = ViTModel(config).eval()
    second.load_state_dict(first.state_dict())
    expected = first(**pixels())[0]
    torch.testing.assert_close(second(**pixels())[0], expected)
    torch.testing.assert_close(copy.deepcopy(first)(**pixels())[0], expected)


@pytest.mark.parametrize("family", [BERT_FAMILY, VIT_FAMILY], ids=str)
def test_evaluation_repeats_and_training_does_not(family: Any) -> None:
    model, inputs = copy.deepcopy(model_of(family)), family.inputs()
    model.set_attn_implementation("few")
    assert torch.equal(model.eval()(**inputs)[0], model(**inputs)[0])
    assert not torch.equal(model.train()(**inputs)[0], model(**inputs)[0])


@pytest.mark.parametrize(("kernel", "exact"), [("gaussian", "kernelized"), ("softmax", "exact-softmax")])
@pytest.mark.parametrize("landmarks", ["stratified", "queries", "probe", "segment_means"])
def test_more_landmarks_than_tokens_cost_nothing(kernel: str, exact: str, landmarks: str) -> None:
    """A matrix of a million by a million landmarks would not fit into memory."""
    name = f"a-million-{kernel}-{landmarks}"
    skyformer.hf.register(name, kernel=kernel, landmarks=landmarks, num_landmarks=10**6)
    mask = tokens()["attention_mask"].bool()
    found, expected = (attend(name, attention_mask=mask) for name in (name, exact))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["few", "few-tilted", "kernelized", "skyformer-softmax"])
def test_a_fully_masked_text_gives_finite_outputs_and_gradients(name: str) -> None:
    model, inputs = copy.deepcopy(model_of(BERT_FAMILY)).train(), tokens()
    model.set_attn_implementation(name)
    inputs["attention_mask"][1] = 0
    out = model(**inputs)[0]
    assert out.isfinite().all()
    out[0].square().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("name", ["few", "kernelized"])
@torch.no_grad()
def test_a_model_of_the_library_is_exported(name: str) -> None:
    model, inputs = model_of(BERT_FAMILY), tokens()
    model.eval().set_attn_implementation(name)
    program = torch.export.export(model, (), inputs).module()
    for again in (inputs, {**inputs, "attention_mask": left_padded()["attention_mask"]}):
        torch.testing.assert_close(program(**again)[0], model(**again)[0], rtol=0, atol=1e-5)


def test_parts_of_a_model_can_have_different_attentions() -> None:
    """CLIP's text encoder is causal, its vision encoder is not."""
    config = CLIPConfig(text_config={**TEXT, **IDS}, vision_config=PICTURE)
    model, inputs = CLIPModel(config).eval(), {"input_ids": tokens()["input_ids"], **pixels()}
    model.set_attn_implementation("few")
    with refused(UnsupportedError, "CLIPAttention", "causal"):
        model(**inputs)
    model.set_attn_implementation({"vision_config": "few", "text_config": "kernelized"})
    assert model(**inputs).logits_per_image.isfinite().all()
    assert model.vision_model.config._attn_implementation == "few"


def test_other_examples_in_the_batch_have_no_effect() -> None:
    model, inputs = model_of(BERT_FAMILY), tokens()
    model.set_attn_implementation("few")
    with torch.no_grad():
        both = model(**inputs)[0]
        alone = model(**{name: x[:1] for name, x in inputs.items()})[0]
        flipped = model(**{name: x.flip(0) for name, x in inputs.items()})[0]
    torch.testing.assert_close(both[:1], alone, rtol=0, atol=1e-5)
    torch.testing.assert_close(both[1, :SHORT], flipped[0, :SHORT], rtol=0, atol=1e-5)


def test_checkpointing_repeats_the_landmarks_of_the_forward_pass() -> None:
    gradients = []
    for checkpointing in (False, True):
        model = copy.deepcopy(model_of(BERT_FAMILY)).train()
        model.set_attn_implementation("few")
        if checkpointing:
            enable_checkpointing(model, {"use_reentrant": False})
        torch.manual_seed(0)
        model(**tokens())[0].square().sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(recomputed, plain)


def test_dropout_of_weights_is_ignored_with_one_warning() -> None:
    skyformer.hf.register("dropping", num_landmarks=8)
    settings = {**BERT, "attention_probs_dropout_prob": 0.1}
    model = BertModel(BertConfig(**settings)).train()
    model.set_attn_implementation("dropping")
    with pytest.warns(IgnoredSettingWarning, match="0.1 has no effect.*attention_probs_dropout_prob"):
        model(**tokens())
    with warnings.catch_warnings(action="error"):
        model(**tokens())


def test_exact_attention_drops_weights() -> None:
    torch.manual_seed(0)
    kept = attend("kernelized", dropout=0.0)
    dropped = torch.stack([attend("kernelized", dropout=0.5) for _ in range(200)])
    assert not torch.allclose(dropped[0], dropped[1])
    assert (dropped.mean(0) - kept).norm() < 0.1 * kept.norm()


def test_half_precision_works() -> None:
    out = attend("few", **{part: some_heads(seed=i).bfloat16() for i, part in enumerate(("query", "key", "value"))})
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), attend("few"), rtol=0.05, atol=0.05)


GEMMA = {**TEXT, "num_key_value_heads": 2, "head_dim": 8, "layer_types": ["full_attention"] * 2}


@pytest.mark.parametrize(
    ("model", "config", "words"),
    [
        (
            ModernBertModel,
            ModernBertConfig(**MODERN),
            ("sliding window", "local_layers='sdpa'", "layer_types=['full_attention']"),
        ),
        (Gemma2Model, Gemma2Config(**GEMMA), ("Gemma2Attention", "softcap")),
        (MPNetModel, MPNetConfig(**BERT), ("'kernelized'", "MPNetModel computes attention with its own code")),
    ],
    ids=["windows", "terms that change the scores", "own attention"],
)
def test_models_that_need_another_attention_are_refused(model: Any, config: Any, words: tuple[str, ...]) -> None:
    config._attn_implementation = "kernelized"
    with refused(UnsupportedError, *words):
        model(config).eval()(**tokens())


@pytest.mark.parametrize("padded", [True, False])
def test_layers_with_windows_can_keep_their_attention(padded: bool) -> None:
    skyformer.hf.register("global-only", kernel="softmax", num_landmarks=400, local_layers="sdpa")
    settings = {**MODERN, "num_hidden_layers": 4, "local_attention": 8, "initializer_range": 0.3}
    model = ModernBertModel(ModernBertConfig(**settings)).eval()
    inputs = tokens() if padded else {"input_ids": tokens()["input_ids"]}
    outputs = []
    for implementation in ("eager", "global-only"):
        model.set_attn_implementation(implementation)
        outputs.append(model(**inputs)[0])
    keep = tokens()["attention_mask"].bool() if padded else torch.ones(2, LENGTH, dtype=torch.bool)
    torch.testing.assert_close(outputs[1][keep], outputs[0][keep], rtol=1e-4, atol=1e-4)


def test_a_checkpoint_with_windows_loads_without_them(tmp_path: Path) -> None:
    ModernBertModel(ModernBertConfig(**{**MODERN, "num_hidden_layers": 4})).save_pretrained(tmp_path)
    model = ModernBertModel.from_pretrained(tmp_path, attn_implementation="tilted", layer_types=["full_attention"] * 4)
    assert model.eval()(**tokens())[0].isfinite().all()


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}, {"use_cache": False}])
def test_exact_attention_generates(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(**{**TEXT, "initializer_range": 0.3}, num_key_value_heads=2, pad_token_id=0, eos_token_id=None)
    model = LlamaForCausalLM(config).eval()
    texts = []
    for implementation in ("eager", "exact-softmax"):
        model.set_attn_implementation(implementation)
        texts.append(model.generate(**left_padded(), max_new_tokens=8, do_sample=False, **options))
    assert torch.equal(*texts)


# torch's tracer warns about its own code.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("implementation", ["few", "few-tilted", "kernelized"])
@torch.no_grad()
def test_a_compiled_model_gives_the_same(implementation: str) -> None:
    """With Dynamo alone; the graphs of the attentions are compiled in the tests of the attentions."""
    torch._dynamo.reset()
    model = BertModel(BertConfig(**{**BERT, "num_hidden_layers": 1})).eval()
    model.set_attn_implementation(implementation)
    expected = model(**tokens())[0]
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(**tokens())[0], expected, rtol=1e-4, atol=1e-4)


def test_queries_after_a_cache_attend_to_earlier_keys() -> None:
    q, k, v = (some_heads(seed=seed) for seed in range(3))
    whole = attend("kernelized", Layer(is_causal=True))
    torch.testing.assert_close(whole, kernelized_attention(q, k, v, is_causal=True))
    last = attend("kernelized", Layer(is_causal=True), query=q[:, :, -7:])
    torch.testing.assert_close(last, whole[:, :, -7:])


def test_a_decoder_made_bidirectional_works() -> None:
    config = LlamaConfig(**{**TEXT, "initializer_range": 0.3}, num_key_value_heads=2)
    config.is_causal = False
    model = LlamaModel(config).eval()
    for inputs in (tokens(), {"input_ids": tokens()["input_ids"]}):
        outputs = []
        for implementation in ("eager", "all-of-softmax"):
            model.set_attn_implementation(implementation)
            outputs.append(model(**inputs)[0])
        keep = inputs.get("attention_mask", torch.ones(2, LENGTH)).bool()
        torch.testing.assert_close(outputs[1][keep], outputs[0][keep], rtol=1e-4, atol=1e-4)


def test_the_weights_of_the_approximation_multiply_the_values() -> None:
    q, k, v = (some_heads(seed=seed) for seed in range(3))
    out, weights = function("few")(Layer(), q, k, v, None, output_attentions=True)
    assert weights is not None
    torch.testing.assert_close((weights @ v).transpose(1, 2), out, rtol=1e-4, atol=1e-4)
    assert weights.shape == (2, 4, LENGTH, LENGTH)


def test_all_samplers_and_kernels_run_through_a_model() -> None:
    model = model_of(BERT_FAMILY)
    samplers = ("stratified", "uniform", "probe", "leverage", "segment_means")
    for landmarks, kernel in itertools.product(samplers, ("gaussian", "softmax")):
        name = f"tried-{landmarks}-{kernel}"
        skyformer.hf.register(name, num_landmarks=8, landmarks=landmarks, kernel=kernel)
        model.set_attn_implementation(name)
        assert model.eval()(**tokens())[0].isfinite().all()
