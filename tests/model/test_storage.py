"""Saving and loading: a model is the same after loading, and a damaged folder is an error that names the file."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skyformer import PairClassifier, SequenceClassifier, SkyformerEncoder
from skyformer.errors import DataError, InputError
from tests.model.small import ATTENTIONS, draw_mask, draw_tokens, small_config


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    SequenceClassifier(small_config()).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def weights_file(folder: Path) -> Path:
    (file,) = folder.glob("*.safetensors")
    return file


def edit(folder: Path, **changes: Any) -> None:
    """Changes fields of config.json; None removes one."""
    file = folder / "config.json"
    content = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def edit_config(folder: Path, /, **changes: Any) -> None:
    """Changes settings of the model."""
    config = json.loads((folder / "config.json").read_text())["config"]
    edit(folder, config={**config, **changes})


def as_float8(file: Path) -> bytes:
    weights = safetensors.torch.load(file.read_bytes())
    content: bytes = safetensors.torch.save({name: x.to(torch.float8_e4m3fn) for name, x in weights.items()})
    return content


def put_weights(folder: Path, content: bytes) -> None:
    """Other weights, with a sum that fits them."""
    digest = hashlib.sha256(content).hexdigest()
    (folder / f"weights-{digest[:16]}.safetensors").write_bytes(content)
    edit(folder, weights_sha256=digest)


def without(file: Path, name: str) -> bytes:
    """The same weights but for one."""
    weights = safetensors.torch.load(file.read_bytes())
    del weights[name]
    content: bytes = safetensors.torch.save(weights)
    return content


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_round_trip(attention: str, tmp_path: Path) -> None:
    model = SequenceClassifier(small_config(attention, seed=5)).eval()
    tokens, mask = draw_tokens(2, 30), draw_mask(2, 30)
    model.save_pretrained(tmp_path)
    before = torch.get_rng_state()
    loaded = SequenceClassifier.from_pretrained(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    assert loaded.config == model.config
    assert not loaded.training
    assert torch.equal(loaded(tokens, mask), model(tokens, mask))
    assert all(p.requires_grad for p in loaded.parameters())


@pytest.mark.parametrize("cls", [SkyformerEncoder, PairClassifier])
def test_every_model_is_stored(cls: type[SkyformerEncoder] | type[PairClassifier], tmp_path: Path) -> None:
    model = cls(small_config("softmax"))
    model.save_pretrained(str(tmp_path))
    loaded = cls.from_pretrained(str(tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))


def test_the_dtype_is_kept_and_the_device_chosen(tmp_path: Path) -> None:
    SequenceClassifier(small_config()).bfloat16().save_pretrained(tmp_path)
    loaded = SequenceClassifier.from_pretrained(tmp_path, device="meta")
    assert all(p.dtype == torch.bfloat16 and p.is_meta for p in loaded.parameters())


def test_a_later_save_takes_the_place_of_an_earlier_one(saved: Path) -> None:
    other = SequenceClassifier(small_config("softmax", num_layers=1))
    other.save_pretrained(saved)
    assert sorted(file.name for file in saved.iterdir()) == sorted(["config.json", weights_file(saved).name])
    assert SequenceClassifier.from_pretrained(saved).config == other.config


@pytest.mark.parametrize("at", ["weights", "config"])
def test_an_interrupted_save_leaves_the_old_model(saved: Path, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = SequenceClassifier.from_pretrained(saved)
    replace = Path.replace

    def fail(self: Path, target: Path) -> Path:
        if at in target.name:
            raise OSError("the disk is full")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk is full"):
        SequenceClassifier(small_config("softmax")).save_pretrained(saved)
    monkeypatch.undo()
    after = SequenceClassifier.from_pretrained(saved)
    assert all(torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True))
    assert not list(saved.glob(".*"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), r"config\.json cannot be read: No such file"),
        (lambda folder: (folder / "config.json").write_text('{"format": '), r"config\.json is damaged: it is not JSON"),
        (
            lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe\x00"),
            r"config\.json is damaged: it is not UTF-8",
        ),
        (lambda folder: (folder / "config.json").write_text("[" * 100_000), r"config\.json is damaged: it is not JSON"),
        (
            lambda folder: (folder / "config.json").write_text("[]"),
            r"config\.json is damaged: expected a JSON object, got list",
        ),
        (lambda folder: edit(folder, format="bert"), "does not describe a skyformer model"),
        (
            lambda folder: edit(folder, version=2),
            r"config\.json has format version 2; this version of skyformer reads only 1",
        ),
        (lambda folder: edit(folder, version=True), r"config\.json has format version True"),
        (lambda folder: edit_config(folder, self=1), r"config\.json has a config .* 'self'"),
        (lambda folder: edit_config(folder, vocab_size=2**70), r"config\.json has a config .* vocab_size"),
        (lambda folder: edit_config(folder, num_classes=2**63), r"config\.json has a config .* num_classes"),
        (
            lambda folder: edit_config(folder, attention="performer", attention_options={"num_features": 10**13}),
            r"config\.json has a config .* num_features must be",
        ),
        (
            lambda folder: edit_config(folder, attention="performer", attention_options={"num_features": 2**31}),
            r"weights-.*\.safetensors does not hold the weights",
        ),
        (
            lambda folder: put_weights(folder, as_float8(weights_file(folder))),
            r"weights-.*\.safetensors holds '.*' as torch.float8_e4m3fn",
        ),
        (lambda folder: edit(folder, version=None), "has format version None"),
        (
            lambda folder: edit(folder, model="PairClassifier"),
            "describes a 'PairClassifier', not a 'SequenceClassifier'",
        ),
        (lambda folder: edit(folder, config=None), r"config\.json must have the settings of the model"),
        (lambda folder: edit(folder, config={"dim": 16}), r"config\.json has a config .* vocab_size is required"),
        (lambda folder: edit(folder, weights_sha256="../../secret"), r"config\.json must have the SHA-256 sum"),
        (lambda folder: edit(folder, weights_sha256="0" * 64), r"weights-0{16}\.safetensors cannot be read"),
        (lambda folder: weights_file(folder).unlink(), r"weights-.*\.safetensors cannot be read"),
        (lambda folder: weights_file(folder).write_bytes(b""), r"weights-.*\.safetensors is damaged"),
        (
            lambda folder: weights_file(folder).write_bytes(weights_file(folder).read_bytes()[:-5]),
            r"weights-.*\.safetensors is damaged",
        ),
        (lambda folder: put_weights(folder, b"junk"), r"weights-.*\.safetensors is not a safetensors file"),
        (lambda folder: put_weights(folder, pickle.dumps({"a": 1})), "is not a safetensors file"),
        (
            lambda folder: put_weights(folder, safetensors.torch.save({"head.0.bias": torch.zeros(24)})),
            r"config\.json describes 2 layers; the weights have 0",
        ),
        (
            lambda folder: put_weights(folder, without(weights_file(folder), "head.0.bias")),
            r"weights-.*\.safetensors does not hold the weights .* missing \['head.0.bias'\], unknown none",
        ),
    ],
)
def test_a_damaged_folder_is_refused(saved: Path, damage: Callable[[Path], Any], message: str) -> None:
    damage(saved)
    with pytest.raises(DataError, match=message):
        SequenceClassifier.from_pretrained(saved)


@pytest.mark.parametrize("setting", ["vocab_size", "max_length", "dim", "hidden_dim", "num_classes"])
def test_a_config_that_asks_for_too_much_takes_no_memory(saved: Path, setting: str) -> None:
    config = json.loads((saved / "config.json").read_text())["config"]
    edit(saved, config={**config, setting: 10**9})
    refusals = r"safetensors holds .* of shape|cannot be built|at most 100,000,000,000 weights"
    with pytest.raises(DataError, match=refusals):
        SequenceClassifier.from_pretrained(saved)


def test_layers_that_are_not_there_are_not_built(saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text())["config"]
    edit(saved, config={**config, "num_layers": 10**4})
    with pytest.raises(DataError, match=r"config\.json describes 10000 layers; the weights have 2"):
        SequenceClassifier.from_pretrained(saved)
    edit(saved, config={**config, "num_layers": 10**9})
    with pytest.raises(DataError, match="num_layers must be less than or equal to 10000; got 1000000000"):
        SequenceClassifier.from_pretrained(saved)


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_file_is_no_folder_to_save_to(tmp_path: Path, below: str) -> None:
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(InputError, match=r"taken.* is a file"):
        SequenceClassifier(small_config()).save_pretrained(tmp_path / "taken" / below)
    assert (tmp_path / "taken").read_text() == "mine"


def test_nothing_in_the_folder_is_run(saved: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
            return Path.touch, (str(saved / "exploded"),)  # type: ignore[return-value]

    for name in ("pytorch_model.bin", "model.pt", "modeling.py", "__init__.py"):
        (saved / name).write_bytes(pickle.dumps(Bomb()))
    put_weights(saved, pickle.dumps(Bomb()))
    with pytest.raises(DataError):
        SequenceClassifier.from_pretrained(saved)
    assert not (saved / "exploded").exists()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_bytes_are_noticed(saved: Path, data: st.DataObject) -> None:
    file = weights_file(saved)
    whole = file.read_bytes()
    place, mask = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(1, 255))
    flipped = bytearray(whole)
    flipped[place] ^= mask
    file.write_bytes(flipped)
    try:
        with pytest.raises(DataError, match=file.name):
            SequenceClassifier.from_pretrained(saved)
    finally:
        file.write_bytes(whole)


def test_a_model_saved_before_some_settings_existed(saved: Path) -> None:
    """Such a model has dropout before the residual additions only, and GELU in the head."""
    expected = SequenceClassifier.from_pretrained(saved)
    added = ("embedding_dropout", "attention_output_dropout", "mlp_hidden_dropout", "mlp_output_dropout")
    config = json.loads((saved / "config.json").read_text())["config"]
    edit(saved, config={key: value for key, value in config.items() if key not in (*added, "head_activation")})
    found = SequenceClassifier.from_pretrained(saved)
    assert found.config == expected.config
    tokens = draw_tokens(2, 20)
    assert torch.equal(found(tokens), expected(tokens))
