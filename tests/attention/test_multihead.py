"""MultiheadAttention against torch.nn.MultiheadAttention: outputs, masks, state dict, and use inside torch layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from skyformer import MultiheadAttention, list_attentions
from skyformer.errors import InputError, MaskError, ShapeError, UnknownNameError, UnsupportedError
from skyformer.testing.suite import backward, relative_error
from tests.helpers import refused, scattered_mask

E, H, B, L, S = 16, 4, 3, 7, 9
VARIANTS: list[dict[str, Any]] = [
    {},
    {"bias": False},
    {"add_bias_kv": True},
    {"add_zero_attn": True},
    {"add_bias_kv": True, "add_zero_attn": True, "bias": False},
    {"kdim": 5, "vdim": 6},
    {"kdim": 5, "vdim": 6, "bias": False, "add_bias_kv": True},
    {"vdim": 6, "add_zero_attn": True},
]
MASKS: list[dict[str, Tensor]] = [
    {},
    {"key_padding_mask": ~scattered_mask(B, S)},
    {"key_padding_mask": torch.zeros(B, S).masked_fill(~scattered_mask(B, S), float("-inf"))},
    {"attn_mask": torch.ones(L, S).triu(1).bool()},
    {"attn_mask": torch.zeros(L, S).masked_fill(torch.ones(L, S).triu(1).bool(), float("-inf"))},
    {"attn_mask": torch.randn(L, S, generator=torch.Generator().manual_seed(1))},
    {"attn_mask": torch.randn(B * H, L, S, generator=torch.Generator().manual_seed(2))},
    {"attn_mask": torch.ones(L, S).triu(3).bool(), "key_padding_mask": torch.zeros(B, S).bool()},
]


def pair(**options: Any) -> tuple[nn.MultiheadAttention, MultiheadAttention]:
    """torch's module and ours with the same weights."""
    theirs = nn.MultiheadAttention(E, H, **options)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    ours = MultiheadAttention(E, H, attention="softmax", **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def inputs_for(options: dict[str, Any], batch_first: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((B, L, E), (B, S, options.get("kdim", E)), (B, S, options.get("vdim", E)))
    q, k, v = (torch.randn(shape) for shape in shapes)
    if not batch_first:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def assert_agree(theirs: nn.Module, ours: nn.Module, inputs: tuple[Tensor, ...], **options: Any) -> None:
    """Outputs, weights, and gradients of inputs and parameters."""
    (expected, expected_weights), (actual, weights) = theirs(*inputs, **options), ours(*inputs, **options)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert (weights is None) == (expected_weights is None)
    if weights is not None:
        torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-5)
    grad = torch.randn_like(expected)
    named = dict(ours.named_parameters())
    names = [name for name, _ in theirs.named_parameters()]
    left = backward(actual, (*inputs, *(named[name] for name in names)), grad)
    right = backward(expected, (*inputs, *theirs.parameters()), grad)
    for a, e in zip(left, right, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("mask", range(len(MASKS)))
def test_softmax_inside_agrees_with_torch(variant: dict[str, Any], mask: int) -> None:
    theirs, ours = pair(batch_first=True, **variant)
    assert_agree(theirs, ours, inputs_for(variant), **MASKS[mask])


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("average", [False, True])
def test_layouts_and_weights_are_those_of_torch(batch_first: bool, need_weights: bool, average: bool) -> None:
    theirs, ours = pair(batch_first=batch_first)
    assert_agree(theirs, ours, inputs_for({}, batch_first), need_weights=need_weights, average_attn_weights=average)


@pytest.mark.parametrize("batch_first", [False, True])
def test_self_attention_on_one_tensor(batch_first: bool) -> None:
    theirs, ours = pair(batch_first=batch_first)
    x = torch.randn(L, B, E, requires_grad=True)
    torch.testing.assert_close(ours(x, x, x), theirs(x, x, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_unbatched_input(masked: bool, batch_first: bool) -> None:
    theirs, ours = pair(batch_first=batch_first)
    inputs = tuple(x[0].detach().requires_grad_() for x in inputs_for({}))
    options = {"key_padding_mask": MASKS[2]["key_padding_mask"][0]} if masked else {}
    assert_agree(theirs, ours, inputs, **options)
    assert_agree(theirs, ours, inputs, attn_mask=MASKS[6]["attn_mask"][:H], **options)


def test_a_causal_hint_with_its_mask_is_understood() -> None:
    theirs, ours = pair(batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(L)
    x = torch.randn(B, L, E, requires_grad=True)
    for need_weights in (False, True):
        options = {"attn_mask": mask, "is_causal": True, "need_weights": need_weights}
        torch.testing.assert_close(ours(x, x, x, **options), theirs(x, x, x, **options), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("attention", ["softmax", "kernelized", "skyformer"])
def test_state_dicts_load_both_ways(variant: dict[str, Any], attention: str) -> None:
    theirs = nn.MultiheadAttention(E, H, **variant)
    ours = MultiheadAttention(E, H, attention=attention, **variant)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    for (name, a), (expected_name, b) in zip(ours.state_dict().items(), theirs.state_dict().items(), strict=True):
        assert name == expected_name
        assert torch.equal(a, b)


def test_initial_and_reset_weights_are_those_of_torch() -> None:
    for variant in VARIANTS:
        torch.manual_seed(4)
        theirs = nn.MultiheadAttention(E, H, **variant)
        torch.manual_seed(4)
        ours = MultiheadAttention(E, H, attention="softmax", **variant)
        assert isinstance(ours, nn.MultiheadAttention)
        for seed in (None, 5):
            if seed is not None:
                for layer in (theirs, ours):
                    torch.manual_seed(seed)
                    layer._reset_parameters()
            for name, parameter in ours.named_parameters():
                assert torch.equal(parameter, theirs.get_parameter(name)), f"{name} after a reset: {seed}"


def test_dropout_acts_in_training_only() -> None:
    _, ours = pair(batch_first=True, dropout=0.5)
    inputs = inputs_for({})
    for options in ({}, {"attn_mask": MASKS[5]["attn_mask"]}):
        ours.train()
        assert not torch.equal(ours(*inputs, **options)[0], ours(*inputs, **options)[0])
        ours.eval()
        assert torch.equal(ours(*inputs, **options)[0], ours(*inputs, **options)[0])


def test_the_scale_of_the_attention_is_used_with_every_mask() -> None:
    inputs = inputs_for({})
    ours = MultiheadAttention(E, H, batch_first=True, attention="softmax", scale=0.05).eval()
    plain, _ = ours(*inputs)
    masked, _ = ours(*inputs, attn_mask=torch.zeros(L, S).fill_diagonal_(1e-7))
    torch.testing.assert_close(masked, plain)


@pytest.mark.parametrize("attention", ["kernelized", "skyformer"])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_weights_are_what_multiplies_the_values(attention: str, variant: dict[str, Any]) -> None:
    options = {"num_landmarks": 6} if attention == "skyformer" else {}
    module = MultiheadAttention(E, H, attention=attention, batch_first=True, **variant, **options).double().eval()
    q, k, v = (x.double() for x in inputs_for(variant))
    out, weights = module(q, k, v, MASKS[1]["key_padding_mask"], need_weights=True, average_attn_weights=False)
    alone, nothing = module(q, k, v, MASKS[1]["key_padding_mask"], need_weights=False)
    assert nothing is None
    torch.testing.assert_close(out, alone)
    extra = module._num_appended()
    assert weights.shape == (B, H, L, S + extra)
    hidden = MASKS[1]["key_padding_mask"][:, None, None].expand(-1, H, L, -1)
    assert (weights[..., :S][hidden] == 0).all()


def test_weights_are_returned_by_default_only_by_exact_attentions() -> None:
    inputs = inputs_for({})
    for attention, expected in (("softmax", True), ("kernelized", True), ("skyformer", False)):
        module = MultiheadAttention(E, H, attention=attention, batch_first=True)
        assert (module(*inputs)[1] is not None) == expected
        assert module(*inputs, need_weights=False)[1] is None
        weights = module(*inputs, need_weights=True)[1]
        assert weights.shape == (B, L, S)


def test_skyformer_is_the_default_and_exact_on_short_input() -> None:
    module = MultiheadAttention(E, H, batch_first=True)
    assert module.attention.name == "skyformer"
    exact = MultiheadAttention(E, H, batch_first=True, attention="kernelized")
    exact.load_state_dict(module.state_dict())
    inputs = inputs_for({})
    torch.testing.assert_close(module(*inputs)[0], exact(*inputs)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ["bool", "float", "hint"])
def test_a_causal_mask_is_recognised_by_kernelized(form: str) -> None:
    module = MultiheadAttention(E, H, batch_first=True, attention="kernelized").eval()
    x = torch.randn(B, L, E)
    later = torch.ones(L, L).triu(1).bool()
    options: dict[str, Any] = {
        "bool": {"attn_mask": later},
        "float": {"attn_mask": torch.zeros(L, L).masked_fill(later, float("-inf"))},
        "hint": {"is_causal": True},
    }[form]
    before, _ = module(x, x, x, **options)
    changed = torch.cat([x[:, :4], x[:, 4:] + 1], 1)
    after, _ = module(changed, changed, changed, **options)
    torch.testing.assert_close(after[:, :4], before[:, :4])
    assert not torch.allclose(after[:, 4:], before[:, 4:])


def encoder_layer(attention: str, **options: Any) -> nn.TransformerEncoderLayer:
    layer = nn.TransformerEncoderLayer(E, H, 32, dropout=0.0, batch_first=True)
    replacement = MultiheadAttention(E, H, batch_first=True, attention=attention, **options)
    replacement.load_state_dict(layer.self_attn.state_dict())
    layer.self_attn = replacement
    return layer


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_softmax_inside_an_encoder_layer_of_torch(training: bool, masked: bool) -> None:
    theirs = nn.TransformerEncoderLayer(E, H, 32, dropout=0.0, batch_first=True).train(training)
    ours = encoder_layer("softmax").train(training)
    ours.load_state_dict(theirs.state_dict())
    x, ignore = torch.randn(B, S, E), ~scattered_mask(B, S)
    keep = ~ignore if masked else torch.ones(B, S).bool()
    options = {"src_key_padding_mask": ignore} if masked else {}
    torch.testing.assert_close(ours(x, **options)[keep], theirs(x, **options)[keep], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_no_fast_path_bypasses_the_attention_inside_a_layer(training: bool, grad: bool) -> None:
    layer, plain = encoder_layer("skyformer", num_landmarks=6).train(training), encoder_layer("softmax")
    plain.load_state_dict(layer.state_dict())
    calls = []
    layer.self_attn.attention.register_forward_hook(lambda *_: calls.append(1))
    x = torch.randn(B, S, E)
    with torch.set_grad_enabled(grad):
        out = layer(x, src_key_padding_mask=~scattered_mask(B, S))
    assert len(calls) == 1
    assert out.isfinite().all()
    assert relative_error(out, plain.train(training)(x)) > 1e-3


@pytest.mark.parametrize("training", [False, True])
def test_a_stack_of_layers_runs_through_the_attention_of_each(training: bool) -> None:
    encoder = nn.TransformerEncoder(encoder_layer("skyformer", num_landmarks=6), 2, enable_nested_tensor=False)
    calls = []
    for layer in encoder.layers:
        layer.self_attn.attention.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        out = encoder.train(training)(torch.randn(B, S, E), src_key_padding_mask=~scattered_mask(B, S))
    assert len(calls) == 2
    assert out.shape == (B, S, E)


def test_evaluation_repeats_and_training_draws_again() -> None:
    module = MultiheadAttention(E, H, batch_first=True, num_landmarks=4)
    x = torch.randn(B, 40, E)
    assert not torch.equal(module(x, x, x)[0], module(x, x, x)[0])
    module.eval()
    assert torch.equal(module(x, x, x)[0], module(x, x, x)[0])


@pytest.mark.parametrize("attention", ["softmax", "kernelized", "skyformer"])
def test_a_fully_masked_example_gives_the_bias_alone(attention: str) -> None:
    module = MultiheadAttention(E, H, batch_first=True, attention=attention)
    ignore = torch.zeros(B, S, dtype=torch.bool)
    ignore[1] = True
    out, _ = module(*inputs_for({}), key_padding_mask=ignore)
    torch.testing.assert_close(out[1], module.out_proj.bias.expand(L, -1))
    assert out.isfinite().all()


@pytest.mark.parametrize("attention", ["softmax", "kernelized", "skyformer"])
def test_device_and_dtype_apply_to_all_parameters(attention: str) -> None:
    module = MultiheadAttention(E, H, batch_first=True, attention=attention, device="meta", dtype=torch.float64)
    assert all(p.is_meta and p.dtype == torch.float64 for p in module.parameters())
    q, k, v = (x.detach().double().to("meta") for x in inputs_for({}))
    assert module(q, k, v, key_padding_mask=MASKS[1]["key_padding_mask"].to("meta"))[0].shape == (B, L, E)


def default(**options: Any) -> MultiheadAttention:
    return MultiheadAttention(E, H, batch_first=True, **options)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"embed_dim": 15}, InputError, ("embed_dim", "multiple of num_heads", "15 and 4")),
        ({"num_heads": 0}, InputError, ("embed_dim", "num_heads", "16 and 0")),
        ({"dropout": 1.5, "attention": "softmax"}, InputError, ("dropout", "[0, 1)", "1.5")),
        ({"dropout": 0.1}, UnsupportedError, ("skyformer", "dropout")),
        ({"attention": "skyforma"}, UnknownNameError, ("attention", "'skyforma'", *list_attentions())),
        ({"attention": ["softmax"]}, UnknownNameError, ("attention", *list_attentions())),
        ({"landmark_count": 3}, UnknownNameError, ("option", "skyformer", "'landmark_count'", "num_landmarks")),
        ({"num_landmarks": 0}, InputError, ("num_landmarks", "at least 1", "0")),
        ({"gamma": 0.0}, InputError, ("gamma", "above 0", "0.0")),
        ({"solver": "lu"}, UnknownNameError, ("solver", "'lu'", "cholesky")),
        ({"kernel": "rbf"}, UnknownNameError, ("kernel", "'rbf'", "gaussian")),
        ({"landmarks": "rows"}, UnknownNameError, ("sampler", "'rows'", "stratified")),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], error: type[Exception], words: tuple[str, ...]) -> None:
    with refused(error, *words):
        MultiheadAttention(**{"embed_dim": E, "num_heads": H, **options})


X = torch.zeros(B, S, E)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"query": X[None]}, ShapeError, ("query, key and value must", "3 dimensions", "4, 3 and 3")),
        ({"query": X[0]}, ShapeError, ("query, key and value must", "3 dimensions", "2, 3 and 3")),
        ({"query": None}, InputError, ("query must", "tensor", "NoneType")),
        ({"key": X[..., :5]}, ShapeError, ("key must", "16 features", "(3, 9, 5)")),
        ({"key": X[:2], "value": X[:2]}, ShapeError, ("key must", "batch size 3", "batch_first=True", "(2, 9, 16)")),
        ({"value": X[:, :8]}, ShapeError, ("value must", "key's length", "(3, 9, 16)", "(3, 8, 16)")),
        ({"key_padding_mask": torch.ones(S, B).bool()}, MaskError, ("key_padding_mask must", "(3, 9)", "(9, 3)")),
        ({"key_padding_mask": torch.ones(B, S)}, MaskError, ("key_padding_mask must", "bool", "float32", "== 0")),
        ({"key_padding_mask": torch.ones(B, S).int()}, MaskError, ("key_padding_mask must", "bool", "int32")),
        ({"key_padding_mask": [[True]]}, MaskError, ("key_padding_mask must", "tensor", "list")),
        ({"attn_mask": torch.zeros(S, S - 1)}, MaskError, ("attn_mask must", "(9, 9)", "got (9, 8)")),
        ({"attn_mask": torch.zeros(S - 1, S)}, MaskError, ("attn_mask must", "(9, 9)", "got (8, 9)")),
        ({"attn_mask": torch.zeros(5, S, S)}, MaskError, ("attn_mask must", "(12, 9, 9)", "got (5, 9, 9)")),
        ({"attn_mask": torch.zeros(S - 1, S), "is_causal": True}, MaskError, ("attn_mask must", "got (8, 9)")),
        ({"attn_mask": "causal"}, MaskError, ("attn_mask must be a tensor", "got str")),
        ({"attn_mask": torch.zeros(S)}, MaskError, ("attn_mask must", "(9, 9) or (12, 9, 9)", "got (9,)")),
        ({"attn_mask": torch.zeros(S, S).int()}, MaskError, ("attn_mask must", "bool", "int32")),
    ],
)
def test_bad_input_is_refused(change: dict[str, Any], error: type[Exception], words: tuple[str, ...]) -> None:
    with refused(error, *words):
        default(attention="softmax")(**{"query": X, "key": X, "value": X, **change})


@pytest.mark.parametrize("attention", ["kernelized", "skyformer"])
def test_an_attn_mask_needs_softmax(attention: str) -> None:
    with refused(UnsupportedError, "attn_mask", attention, "key_padding_mask", "softmax"):
        default(attention=attention)(X, X, X, attn_mask=torch.randn(S, S))


def test_causality_is_advised_only_where_it_is_supported() -> None:
    for attention, advised in (("kernelized", True), ("skyformer", False)):
        with pytest.raises(UnsupportedError) as caught:
            default(attention=attention)(X, X, X, attn_mask=torch.randn(S, S))
        assert ("is_causal=True" in str(caught.value)) == advised


@pytest.mark.parametrize("options", [{"is_causal": True}, {"attn_mask": torch.ones(S, S).triu(1).bool()}], ids=str)
def test_skyformer_refuses_causality(options: dict[str, Any]) -> None:
    with refused(UnsupportedError, "is_causal", "skyformer", "kernelized"):
        default()(X, X, X, **options)
