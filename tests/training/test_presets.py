"""Presets: the paper's numbers, changed settings, and suggestions for misspelt names."""

from __future__ import annotations

import pytest

from skyformer.attention import list_attentions
from skyformer.errors import InputError, UnknownNameError
from skyformer.lra.tasks import TASKS
from skyformer.training.presets import (
    SETTABLE,
    differing,
    feature_options,
    list_presets,
    load_preset,
    parse_overrides,
)
from tests.helpers import refused

PAPER = {
    "text": (16, 1e-4, 80, 500),
    "listops": (32, 1e-4, 1000, 500),
    "retrieval": (16, 2e-4, 800, 1000),
    "pathfinder": (128, 2e-4, 312, 500),
    "image": (256, 1e-4, 175, 50),
}
EVERY_PRESET = [(preset, task) for preset in list_presets() for task in TASKS if preset in list_presets(task)]


class TestPaper:
    @pytest.mark.parametrize("task", PAPER)
    def test_has_the_papers_numbers(self, task: str) -> None:
        config = load_preset(task)
        model, optim, loop = config.model, config.optim, config.loop
        assert (loop.batch_size, optim.lr, optim.warmup_steps, loop.eval_every) == PAPER[task]
        assert (model.num_layers, model.dim, model.hidden_dim, model.num_heads, model.dropout) == (2, 64, 128, 2, 0.1)
        assert model.attention_options == {"num_landmarks": 128, "gamma": 0.1, "landmarks": "paper"}
        assert (model.head_activation, optim.cycle_beta1, config.loop.keep_after) == ("relu", True, 0.2)
        assert (optim.betas, optim.eps, optim.weight_decay, optim.clip_value) == ((0.9, 0.999), 1e-6, 0, 1)
        assert (config.loop.steps, config.loop.accumulate) == (50_000, 1)
        assert (config.task.limit, config.task.max_length, config.note) == (None, None, "")

    @pytest.mark.parametrize("attention", list_attentions())
    def test_has_dropout_at_every_place_that_the_attention_has(self, attention: str) -> None:
        model = load_preset("text", attention=attention).model
        elsewhere = ("embedding_dropout", "attention_output_dropout", "mlp_hidden_dropout", "mlp_output_dropout")
        assert {getattr(model, name) for name in elsewhere} == {None}
        assert model.attention_dropout == (None if attention in ("softmax", "kernelized") else 0.0)

    def test_its_attention_dropout_can_be_changed(self) -> None:
        config = load_preset("text", attention="softmax", overrides=["model.attention_dropout=0.0"])
        assert config.model.attention_dropout == 0.0
        assert config.note == "changed: model.attention_dropout=0.0"

    def test_its_reformer_has_the_chunks_of_the_library(self) -> None:
        options = load_preset("text", attention="reformer").model.attention_options
        assert options == {"num_hashes": 2, "chunk_size": 64}


@pytest.mark.parametrize("attention", list_attentions())
def test_every_preset_takes_every_attention(attention: str) -> None:
    for preset, task in EVERY_PRESET:
        config = load_preset(task, preset, attention=attention)
        assert (config.preset, config.task.name, config.model.attention) == (preset, task, attention)
        assert ("gamma" in config.model.attention_options) == (attention == "skyformer")
        assert config.build_model_config().attention == attention


def test_the_paper_comes_first_and_reduced_presets_have_a_note() -> None:
    assert list_presets()[0] == "paper"
    for preset, task in EVERY_PRESET:
        note = load_preset(task, preset).note
        begin = {"paper": "", "paper_v1": "version 1 of the preset paper: "}.get(preset, "reduced: ")
        assert note.startswith(begin)
        assert bool(note) == (preset != "paper")


class TestFeatures:
    def test_every_attention_is_in_the_table(self) -> None:
        without = [name for name in list_attentions() if not feature_options(name, 128)]
        assert without == ["softmax", "kernelized", "bigbird"]

    def test_reformer_sees_as_many_tokens(self) -> None:
        options = feature_options("reformer", 128)
        assert options["num_hashes"] * 2 * options["chunk_size"] == 128

    def test_they_reach_the_attention_unless_it_has_an_option_of_its_own(self) -> None:
        config = load_preset("text", attention="performer", overrides=["model.features=64"])
        assert config.model.attention_options == {"num_features": 64}
        overrides = ["model.features=64", "model.attention_options.num_landmarks=32"]
        assert load_preset("text", overrides=overrides).model.attention_options == {
            "num_landmarks": 32,
            "gamma": 0.1,
            "landmarks": "paper",
        }

    def test_given_features_count_more_than_the_presets_options_of_one_attention(self) -> None:
        chunks = {"chunk_size": 64, "num_hashes": 2}
        assert load_preset("text", attention="reformer").model.attention_options == chunks
        fewer = load_preset("text", attention="reformer", overrides=["model.features=64"])
        assert fewer.model.attention_options == chunks | {"chunk_size": 16}
        assert "chunk_size=16" in fewer.note
        assert differing(fewer, {"model.features": 64}) == []


class TestChanges:
    def test_by_name(self) -> None:
        config = load_preset("text", attention="kernelized", overrides=["optim.lr=3e-4"], steps=5000, seed=1)
        assert (config.optim.lr, config.loop.steps, config.seed) == (3e-4, 5000, 1)
        assert config.model.attention == "kernelized"
        assert config.note == "changed: optim.lr=0.0003, loop.steps=5000"

    def test_a_note_keeps_the_presets(self) -> None:
        note = load_preset("listops", "cpu", overrides=["loop.batch_size=8"]).note
        assert note.startswith("reduced: ")
        assert note.endswith("; changed: loop.batch_size=8")

    def test_what_decides_nothing_needs_no_note(self) -> None:
        config = load_preset("text", overrides=["hardware.threads=2", "loop.workers=1"], seed=5)
        assert config.note == ""
        assert config.run_name().startswith("text-skyformer-paper-seed5-")

    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("3e-4", 3e-4),
            ("0.5", 0.5),
            ("2", 2),
            ("null", None),
            ("[0.8, 0.9]", [0.8, 0.9]),
            ("true", True),
            ("a", "a"),
        ],
    )
    def test_values_are_yaml(self, text: str, value: object) -> None:
        assert parse_overrides([f"optim.lr={text}"]) == {"optim.lr": value}

    @pytest.mark.parametrize(
        ("overrides", "words"),
        [
            *(
                ([wrong], ["--set must be NAME=VALUE, such as optim.lr=3e-4", repr(wrong)])
                for wrong in ("optim.lr", "=3", "optim.lr: 3", "")
            ),
            (["loop.steps=["], ["the value of --set loop.steps is not valid YAML"]),
            (
                ["model.attention_options=3", "model.attention_options.x=1"],
                ["model.attention_options.x", "was set to 3"],
            ),
            *(
                ([f"model.features={wrong}"], ["model.features must be an integer of at least 1"])
                for wrong in ("0", "-1", "many", "1.5", "true")
            ),
        ],
    )
    def test_wrong_values(self, overrides: list[str], words: list[str]) -> None:
        with refused(InputError, *words):
            load_preset("text", overrides=overrides)


class TestSuggestions:
    def test_a_missing_letter(self) -> None:
        for name in [name for name in SETTABLE if len(name.partition(".")[2]) > 3]:
            misspelt = name[:-2] + name[-1]
            with refused(UnknownNameError, f"unknown setting {misspelt!r}", f"Did you mean {name!r}?"):
                parse_overrides([f"{misspelt}=1"])

    def test_the_wrong_section(self) -> None:
        for name in SETTABLE:
            with refused(UnknownNameError, f"Did you mean {name!r}?"):
                parse_overrides([f"wrong.{name.rpartition('.')[2]}=1"])

    @pytest.mark.parametrize(
        ("task", "preset", "attention", "overrides", "words"),
        [
            ("listop", "paper", None, [], ["unknown task 'listop'", "Did you mean 'listops'?"]),
            ("text", "papre", None, [], ["unknown preset 'papre'", "Did you mean 'paper'?"]),
            ("text", "paper", "skyfomer", [], ["unknown attention 'skyfomer'", "Did you mean 'skyformer'?"]),
            ("text", "paper", None, ["model.attention_options.num_landmark=3"], ["Did you mean 'num_landmarks'?"]),
            ("text", "paper", None, ["preset=x"], ["unknown setting 'preset'"]),
            ("text", "paper", None, ["note=x"], ["unknown setting 'note'"]),
            ("text", "paper", None, ["task.name=x"], ["unknown setting 'task.name'"]),
            ("text", "paper", None, ["optim=1"], ["unknown setting 'optim'; known: optim.betas, optim.clip_value"]),
        ],
    )
    def test_other_names(
        self, task: str, preset: str, attention: str | None, overrides: list[str], words: list[str]
    ) -> None:
        with refused(UnknownNameError, *words):
            load_preset(task, preset, attention=attention, overrides=overrides)


class TestDiffering:
    def test_nothing_when_all_is_the_same(self) -> None:
        given = {"model.features": 128, "optim.lr": 1e-4, "optim.betas": [0.9, 0.999], "task.limit": None, "seed": 0}
        assert differing(load_preset("text"), given) == []

    def test_each_with_both_values(self) -> None:
        given = {"model.features": 64, "optim.lr": 1e-3, "model.attention": "softmax"}
        assert differing(load_preset("text"), given) == [
            "model.attention_options.num_landmarks is 128, not 64",
            "optim.lr is 0.0001, not 0.001",
            "model.attention is skyformer, not softmax",
        ]


def test_few_steps_shorten_the_warm_up_unless_it_is_given() -> None:
    assert load_preset("listops", steps=8).optim.warmup_steps == 1
    assert load_preset("listops", steps=500).optim.warmup_steps == 50
    assert load_preset("listops", steps=2000).optim.warmup_steps == 1000
    assert load_preset("listops", steps=8, overrides=["optim.warmup_steps=4"]).optim.warmup_steps == 4
