"""The encoder: inputs, outputs, parameters, and that models of one seed differ only in their attention."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from skyformer import SkyformerEncoder
from skyformer.attention import build_attention
from skyformer.errors import InputError, MaskError, ShapeError
from tests.model.small import ATTENTIONS, MAX_LENGTH, VOCAB, draw_mask, draw_tokens, small_config


def own_parameters(encoder: SkyformerEncoder) -> dict[str, nn.Parameter]:
    """All parameters except those of the attentions."""
    return {name: p for name, p in encoder.named_parameters() if ".attention.attention." not in name}


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (3, MAX_LENGTH)])
def test_shapes(attention: str, batch: int, length: int) -> None:
    encoder = SkyformerEncoder(small_config(attention))
    assert encoder(draw_tokens(batch, length)).shape == (batch, length, 16)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_only_the_attention_differs_between_models_of_one_seed(attention: str) -> None:
    torch.manual_seed(3)
    expected = own_parameters(SkyformerEncoder(small_config("softmax")))
    after_softmax = torch.rand(4)
    torch.manual_seed(3)
    actual = own_parameters(SkyformerEncoder(small_config(attention)))
    assert torch.equal(torch.rand(4), after_softmax)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_parameters_are_counted_and_all_get_gradients(attention: str) -> None:
    config = small_config(attention)
    encoder = SkyformerEncoder(config)
    layer = 2 * (2 * 16) + (16 * 48 + 48) + (16 * 16 + 16) + (16 * 24 + 24) + (24 * 16 + 16)
    of_mechanism = sum(p.numel() for p in config.build_attention(0).parameters())
    expected = (VOCAB + MAX_LENGTH) * 16 + 2 * (layer + of_mechanism) + 2 * 16
    assert sum(p.numel() for p in encoder.parameters()) == expected
    encoder(draw_tokens(4, MAX_LENGTH)).square().sum().backward()
    missing = [name for name, p in encoder.named_parameters() if p.grad is None]
    assert missing == []


def test_the_papers_model_has_the_papers_size() -> None:
    encoder = SkyformerEncoder(vocab_size=256, max_length=4096)
    per_layer = 2 * 128 + 64 * 192 + 192 + 64 * 64 + 64 + 64 * 128 + 128 + 128 * 64 + 64
    assert sum(p.numel() for p in encoder.parameters()) == (256 + 4096) * 64 + 2 * per_layer + 128


def test_embeddings_start_small() -> None:
    embeddings = SkyformerEncoder(vocab_size=500, max_length=500).embeddings
    assert float(embeddings.token.detach().std()) == pytest.approx(0.02, rel=0.05)
    assert float(embeddings.position.detach().std()) == pytest.approx(0.02, rel=0.05)


def test_a_layer_agrees_with_torch() -> None:
    """Written out with torch's own multi-head attention."""
    encoder = SkyformerEncoder(small_config("softmax", num_layers=1)).double().eval()
    layer, tokens, mask = encoder.layers[0], draw_tokens(2, 9), draw_mask(2, 9)
    theirs = nn.MultiheadAttention(16, 2, batch_first=True).double()
    assert theirs.in_proj_bias is not None
    with torch.no_grad():
        theirs.in_proj_weight.copy_(layer.attention.project_in.weight)
        theirs.in_proj_bias.copy_(layer.attention.project_in.bias)
        theirs.out_proj.load_state_dict(layer.attention.project_out.state_dict())
    x = encoder.embeddings.token[tokens] + encoder.embeddings.position[:9]
    normed = layer.attention_norm(x)
    x = x + theirs(normed, normed, normed, key_padding_mask=~mask)[0]
    x = x + layer.mlp(layer.mlp_norm(x))
    torch.testing.assert_close(encoder(tokens, mask)[mask], encoder.norm(x)[mask])


def test_evaluation_repeats_and_layers_differ() -> None:
    encoder = SkyformerEncoder(small_config()).eval()
    tokens = draw_tokens(2, MAX_LENGTH)
    assert torch.equal(encoder(tokens), encoder(tokens))
    other = SkyformerEncoder(small_config(seed=1)).eval()
    other.load_state_dict(encoder.state_dict())
    assert not torch.equal(encoder(tokens), other(tokens))


PLACES = {
    "embedding_dropout": "embedding_dropout",
    "attention_dropout": "layers.0.attention.attention",
    "attention_output_dropout": "layers.0.attention_dropout",
    "mlp_hidden_dropout": "layers.0.mlp.1",
    "mlp_output_dropout": "layers.0.mlp_dropout",
}


def outputs_by_place(encoder: SkyformerEncoder, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """The output of the module at each place of dropout, with the modules before it in `eval()`."""
    found: dict[str, torch.Tensor] = {}
    for setting, name in PLACES.items():
        module = encoder.eval().get_submodule(name)
        module.train()
        with module.register_forward_hook(lambda _, __, out, setting=setting: found.update({setting: out})):
            encoder(tokens)
    return found


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("switched_on", [True, False])
def test_each_place_of_dropout_can_be_switched_alone(place: str, switched_on: bool) -> None:
    others, own = (0.0, 0.4) if switched_on else (0.4, 0.0)
    settings = {name: own if name == place else others for name in PLACES}
    encoder = SkyformerEncoder(small_config("softmax", num_layers=1, dropout=0.9, **settings)).double()
    tokens = draw_tokens(2, MAX_LENGTH)
    first, second = (outputs_by_place(encoder, tokens) for _ in range(2))
    random = {name for name in PLACES if not torch.equal(first[name], second[name])}
    assert random == ({place} if switched_on else set(PLACES) - {place})


def test_null_means_the_common_dropout() -> None:
    config = small_config("softmax", dropout=0.3, **dict.fromkeys(PLACES))
    encoder = SkyformerEncoder(config)
    layer = encoder.layers[0]
    places = [encoder.embedding_dropout, layer.attention_dropout, layer.mlp[1][1], layer.mlp_dropout]
    assert [module.p for module in places] == [0.3] * 4
    assert layer.attention.attention.dropout == 0.3


def test_by_default_dropout_is_before_the_residual_additions_only() -> None:
    encoder = SkyformerEncoder(small_config("softmax", dropout=0.3))
    layer = encoder.layers[0]
    places = [encoder.embedding_dropout, layer.attention_dropout, layer.mlp[1][1], layer.mlp_dropout]
    assert [module.p for module in places] == [0.0, 0.3, 0.0, 0.3]
    assert layer.attention.attention.dropout == 0.0


def test_training_repeats_with_the_global_seed() -> None:
    encoder = SkyformerEncoder(small_config(dropout=0.2)).train()
    tokens = draw_tokens(2, MAX_LENGTH)
    runs = []
    for seed in (4, 4, 5):
        torch.manual_seed(seed)
        runs.append(encoder(tokens))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_what_stands_at_masked_positions_does_not_matter() -> None:
    encoder = SkyformerEncoder(small_config()).eval()
    tokens, mask = draw_tokens(3, 20), torch.rand(3, 20) > 0.4
    junk = tokens.masked_fill(~mask, -100)
    assert torch.equal(encoder(tokens, mask)[mask], encoder(junk, mask)[mask])


def test_bad_input_is_named() -> None:
    encoder = SkyformerEncoder(small_config())
    tokens = draw_tokens(2, 9)
    with pytest.raises(ShapeError, match=f"at most max_length = {MAX_LENGTH} long; got {MAX_LENGTH + 1}"):
        encoder(draw_tokens(1, MAX_LENGTH + 1))
    with pytest.raises(InputError, match=rf"from 0 to vocab_size - 1 = {VOCAB - 1}; got numbers from 0 to {VOCAB}"):
        encoder(torch.tensor([[0, VOCAB]]))
    with pytest.raises(InputError, match="tokens must be int64"):
        encoder(tokens.float())
    with pytest.raises(ShapeError, match="2 dimensions"):
        encoder(tokens[0])
    with pytest.raises(InputError, match="got list"):
        encoder([[1, 2]])
    with pytest.raises(MaskError, match="mask must be bool"):
        encoder(tokens, torch.ones(2, 9))
    with pytest.raises(MaskError, match=r"mask must have shape \(2, 9\)"):
        encoder(tokens, torch.ones(2, 8, dtype=torch.bool))


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_meta_device(attention: str) -> None:
    with torch.device("meta"):
        encoder = SkyformerEncoder(small_config(attention))
    assert all(x.is_meta for x in (*encoder.parameters(), *encoder.buffers()))
    tokens, mask = draw_tokens(2, 12).to("meta"), draw_mask(2, 12).to("meta")
    encoder(tokens, mask).sum().backward()


def test_one_projection_serves_what_the_mechanism_sees() -> None:
    """Queries, keys and values come in the layout that mechanisms work on."""
    encoder = SkyformerEncoder(small_config("softmax", num_layers=1))
    seen: list[torch.Tensor] = []
    encoder.layers[0].attention.attention.register_forward_pre_hook(lambda _, inputs: seen.extend(inputs))
    encoder(draw_tokens(2, 9))
    assert [x.shape for x in seen] == [(2, 2, 9, 8)] * 3
    assert all(x.is_contiguous() for x in seen)
    assert isinstance(encoder.layers[0].attention.attention, type(build_attention("softmax", 2, 8)))
