"""RunConfig: valid and invalid settings, its YAML form, and the name of its run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from skyformer.attention import list_attentions
from skyformer.errors import InputError, UnknownNameError
from skyformer.lra.tasks import TASKS, task_spec
from skyformer.training.config import (
    HardwareConfig,
    LoopConfig,
    OptimConfig,
    RunConfig,
    TaskConfig,
    from_yaml,
    to_yaml,
)
from skyformer.training.presets import load_preset
from tests.helpers import refused
from tests.training.fakes import small_config

EARLIER_RUNS = [
    "listops-skyformer-paper-seed0-d5c7a9bc",
    "text-softmax-paper-seed0-3d58cb7d",
    "image-skyformer-paper-seed0-9880af61",
    "listops-skyformer-short-seed0-0f2b2886",
]
ADDED_LATER = {
    "model": [
        "embedding_dropout",
        "attention_output_dropout",
        "mlp_hidden_dropout",
        "mlp_output_dropout",
        "head_activation",
    ],
    "optim": ["cycle_beta1"],
    "loop": ["stop_after", "keep_after", "dev_limit", "test_limit"],
}


def changed(config: RunConfig, section: str, **changes: Any) -> RunConfig:
    return config.replace(**{section: getattr(config, section).replace(**changes)})


@pytest.mark.parametrize("task", TASKS)
def test_yaml_keeps_everything_and_nothing_can_be_changed(task: str) -> None:
    config = small_config(task, "optim.betas=[0.8, 0.99]", "optim.clip_value=null", "hardware.devices=2")
    assert from_yaml(to_yaml(config)) == config
    with pytest.raises(ValidationError, match="frozen"):
        config.seed = 3  # type: ignore[misc]


@pytest.mark.parametrize("attention", list_attentions())
def test_the_model_is_the_tasks(attention: str) -> None:
    config = small_config("image", attention=attention, seed=7)
    model = config.build_model_config()
    assert (model.vocab_size, model.max_length, model.num_classes) == (257, 1024, 10)
    assert (model.attention, model.seed, model.dim) == (attention, 7, 8)


def test_the_model_is_as_long_as_a_padded_batch() -> None:
    assert small_config("text").build_model_config().max_length == task_spec("text").padded_length == 4032
    assert small_config("text", "task.max_length=1000").build_model_config().max_length == 1024
    assert small_config("image", "task.max_length=300").build_model_config().max_length == 256


class TestName:
    def test_says_what_it_is(self) -> None:
        config = small_config("text", seed=3, attention="softmax")
        assert config.run_name() == f"text-softmax-paper-seed3-{config.digest()}"

    @pytest.mark.parametrize(
        ("section", "changes"),
        [
            ("loop", {"workers": 3}),
            ("loop", {"log_every": 3}),
            ("loop", {"checkpoint_every": 3}),
            ("hardware", {"threads": 3}),
            ("hardware", {"accelerator": "cpu"}),
        ],
    )
    def test_is_the_same_when_the_result_is(self, section: str, changes: dict[str, Any]) -> None:
        config = small_config()
        assert changed(config, section, **changes).run_name() == config.run_name()
        assert config.replace(note="another").run_name() == config.run_name()

    @pytest.mark.parametrize(
        ("section", "changes"),
        [
            ("task", {"data_seed": 1}),
            ("task", {"limit": 10}),
            ("model", {"dropout": 0.2}),
            ("model", {"attention_options": {"num_landmarks": 4, "gamma": 0.2}}),
            ("optim", {"lr": 0.5}),
            ("optim", {"betas": (0.8, 0.9)}),
            ("loop", {"batch_size": 3}),
            ("loop", {"eval_every": 3}),
            ("loop", {"accumulate": 2}),
            ("loop", {"dev_limit": 5}),
            ("loop", {"test_limit": 5}),
            ("loop", {"stop_after": 5}),
            ("loop", {"keep_after": 0.5}),
            ("model", {"embedding_dropout": 0.3}),
            ("model", {"attention_output_dropout": 0.3}),
            ("model", {"mlp_hidden_dropout": 0.3}),
            ("model", {"mlp_output_dropout": 0.3}),
            ("model", {"head_activation": "gelu"}),
            ("optim", {"cycle_beta1": False}),
            ("hardware", {"devices": 2}),
            ("hardware", {"precision": "bf16-mixed"}),
        ],
    )
    def test_is_another_when_the_result_is(self, section: str, changes: dict[str, Any]) -> None:
        config = small_config()
        assert changed(config, section, **changes).digest() != config.digest()

    @pytest.mark.parametrize("name", EARLIER_RUNS)
    def test_of_an_earlier_version_stays(self, name: str) -> None:
        """The configs have none of the settings that were added since, and the digests are those of that version."""
        task, attention, preset, _, _ = name.split("-")
        config = load_preset(task, "paper_v1" if preset == "paper" else preset, attention=attention)
        content = yaml.safe_load(to_yaml(config.replace(preset=preset)))
        for section, names in ADDED_LATER.items():
            for added in names:
                content[section].pop(added)
        read = from_yaml(yaml.safe_dump(content))
        assert read.run_name() == name
        assert read == config.replace(preset=preset)

    def test_departures_name_what_differs(self) -> None:
        config = small_config()
        other = changed(changed(config, "optim", lr=0.5), "hardware", threads=3)
        assert other.departures(config) == ["optim.lr=0.5"]


LOOP = {"batch_size": 1, "eval_every": 1, "checkpoint_every": 1, "log_every": 1}
REFUSED: dict[str, tuple[Callable[[], object], list[str]]] = {
    "out of range": (lambda: OptimConfig(lr=-1, warmup_steps=1), ["optim.lr must be greater than 0", "got -1"]),
    "not a number": (lambda: OptimConfig(lr=float("nan"), warmup_steps=1), ["optim.lr must be a finite number"]),
    "another type": (lambda: LoopConfig(steps="many", **LOOP), ["loop.steps must be a valid integer", "'many'"]),
    "missing": (lambda: OptimConfig(), ["optim.lr is required", "optim.warmup_steps is required"]),
    "one of two types": (
        lambda: HardwareConfig(devices="two"),
        ["hardware.devices must be 'auto' or a valid integer; got 'two'"],
    ),
    "inside a pair": (
        lambda: OptimConfig(lr=1, warmup_steps=1, betas=[0.5, 2]),
        ["optim.betas.1 must be less than 1; got 2"],
    ),
    "unknown precision": (lambda: HardwareConfig(precision="8"), ["hardware.precision", "bf16-mixed", "got '8'"]),
    "level without Pathfinder": (lambda: TaskConfig(name="text", level="easy"), ["only pathfinder has levels"]),
    "longer than the task": (
        lambda: TaskConfig(name="text", max_length=4001),
        ["task.max_length must be at most 4000 for text; got 4001"],
    ),
    "a smaller drawing": (
        lambda: TaskConfig(name="pathfinder", max_length=100),
        ["max_length must be at least 1024 for pathfinder", "thin lines", "got 100"],
    ),
    "a stop after the end": (
        lambda: small_config("text", "loop.stop_after=11"),
        ["loop.stop_after must be at most loop.steps; got 11 and 10"],
    ),
    "a single step": (lambda: load_preset("text", steps=1), ["loop.steps must be at least 2", "got 1"]),
    "only warm-up": (
        lambda: small_config("text", "optim.warmup_steps=10"),
        ["optim.warmup_steps must be below loop.steps; got 10 and 10", "optim.warmup_steps=1"],
    ),
    "heads that do not divide": (
        lambda: small_config("text", "model.num_heads=3"),
        ["dim must be a multiple of num_heads; got 8 and 3"],
    ),
}


@pytest.mark.parametrize(("settings", "devices"), [({}, 1), ({"sequence_parallel": 2}, 2), ({"devices": 3}, 3)])
def test_a_run_has_several_devices_only_if_they_are_asked_for(settings: dict[str, int], devices: int) -> None:
    assert HardwareConfig(**settings).trainer_options()["devices"] == devices


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_value_names_its_setting_as_a_user_writes_it(case: str) -> None:
    build, words = REFUSED[case]
    with refused(InputError, *words):
        build()


def test_unknown_names_are_suggested() -> None:
    with refused(UnknownNameError, "unknown setting 'optim.warmup'", "Did you mean 'optim.warmup_steps'?"):
        OptimConfig(lr=1, warmup=1)
    with refused(UnknownNameError, "unknown task 'txet'", "Did you mean 'text'?"):
        TaskConfig(name="txet")


CONFIG = to_yaml(small_config())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\nb: [", ["c.yaml is not valid YAML in line 2"]),
        ("[1, 2]", ["c.yaml must be a mapping", "got list"]),
        (
            CONFIG.replace("warmup_steps:", "warmupsteps:"),
            ["c.yaml: unknown setting 'optim.warmupsteps'", "Did you mean 'optim.warmup_steps'?"],
        ),
        (CONFIG.replace("\noptim:", "\noptimizer:"), ["c.yaml: unknown setting 'optimizer'"]),
        (CONFIG.replace("  lr:", "  1: 2\n  lr:"), ["c.yaml is not valid YAML: a name must be a string; got 1"]),
        ("a: &x [1, 2]\nb: [*x, *x]", ["c.yaml is not valid YAML: aliases are not allowed"]),
        ("a: !!python/object/apply:os.system [exit]", ["c.yaml is not valid YAML"]),
    ],
    ids=["not yaml", "not a mapping", "unknown setting", "unknown section", "number as a name", "alias", "code"],
)
def test_a_bad_file_is_named(text: str, words: list[str]) -> None:
    with refused(InputError, *words):
        from_yaml(text, "c.yaml")
