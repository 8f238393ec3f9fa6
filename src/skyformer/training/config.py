"""RunConfig: every setting of a run, with types and checks, and its YAML form."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

import yaml
from pydantic import BeforeValidator, Field, JsonValue, model_validator

from skyformer.checks import LARGEST_INTEGER
from skyformer.distributed.model import check_config
from skyformer.errors import DataError, InputError
from skyformer.lra.folders import Variant
from skyformer.lra.own import NAME, OwnData
from skyformer.lra.tasks import TASKS, TaskSpec, round_up, task_spec
from skyformer.model import ModelConfig
from skyformer.model.config import Activation
from skyformer.settings import Settings, as_tuple

if TYPE_CHECKING:
    from skyformer.lra.dataset import Task

Count = Annotated[int, Field(ge=1, le=LARGEST_INTEGER)]
Share = Annotated[float, Field(ge=0, lt=1)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]

EXCLUDED_FROM_DIGEST: dict[str, Any] = {
    "note": True,
    # What they contain is part of `own.digest`.
    "task": {"own": {"train", "dev", "test", "tokenizer"}},
    "loop": {"workers", "log_every", "checkpoint_every", "loggers"},
    "hardware": {"accelerator", "threads"},
}
"""Settings that change where and how a run is computed, but not its result."""
_ADDED_LATER: dict[str, dict[str, Any]] = {
    "task": {"own": None},
    "model": {
        "embedding_dropout": 0.0,
        "attention_output_dropout": None,
        "mlp_hidden_dropout": 0.0,
        "mlp_output_dropout": None,
        "head_activation": "gelu",
    },
    "optim": {"cycle_beta1": False},
    "loop": {"dev_limit": None, "test_limit": None, "stop_after": None, "keep_after": 0.0},
    "hardware": {"sequence_parallel": 1},
}
"""Settings that earlier versions did not have, with the values that have the effect of those versions. They are the
defaults, so that earlier configs are read correctly, and left out of the digest, so that earlier runs keep theirs."""


class TaskConfig(Settings):
    """The data."""

    section: ClassVar[str] = "task"

    name: str = Field(description="listops, text, retrieval, pathfinder or image; or the name of own data")
    level: str | None = Field(default=None, description="Pathfinder only: easy, intermediate or hard")
    data_seed: Seed = Field(default=0, description="the seed that the data was prepared with")
    limit: Count | None = Field(default=None, description="the limit that the data was prepared with")
    max_length: Count | None = Field(default=None, description="cut texts, shrink images, limit ListOps to it")
    own: OwnData | None = Field(default=None, description="data of one's own, from `own_data` or --data")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.own is not None and (self.name in TASKS or not NAME.fullmatch(self.name)):
            raise InputError(f"task.name must be a name of own data, not {self.name!r}, because task.own is set")
        if self.own is None and self.max_length is not None and self.max_length > self.spec.max_length:
            raise InputError(
                f"task.max_length must be at most {self.spec.max_length} for {self.name}; got {self.max_length}"
            )
        self.variant()
        return self

    @property
    def spec(self) -> TaskSpec:
        """The task, with examples of full length."""
        return task_spec(self.name) if self.own is None else self.own.spec(self.name)

    def variant(self) -> Variant:
        """The version of the task that must be prepared; this checks its options."""
        return Variant.of(
            self.name, seed=self.data_seed, limit=self.limit, level=self.level, max_length=self.max_length, own=self.own
        )

    def load(self, data_dir: Path | str | None) -> Task:
        """The prepared data; an error says how to prepare it if it is missing. Own data is then read again."""
        from skyformer.lra.dataset import load_variant

        variant = self.variant()
        if self.own is None:
            return load_variant(variant, data_dir, self.max_length)
        try:
            return load_variant(variant, data_dir, self.max_length)
        except DataError:
            from skyformer.own.preparation import prepare_again

            prepare_again(variant, data_dir)
            return load_variant(variant, data_dir, self.max_length)

    @property
    def longest(self) -> int:
        """The largest number of tokens of an example."""
        return self.spec.cut_to(self.max_length).max_length


class ModelSettings(Settings):
    """The model, except for what the task decides; see `skyformer.ModelConfig`."""

    section: ClassVar[str] = "model"

    attention: str = "skyformer"
    attention_options: dict[str, JsonValue] = Field(default_factory=dict)
    dim: Count = 64
    hidden_dim: Count = 128
    num_layers: Count = 2
    num_heads: Count = 2
    dropout: Share = 0.1
    embedding_dropout: Share | None = 0.0
    attention_dropout: Share | None = 0.0
    attention_output_dropout: Share | None = None
    mlp_hidden_dropout: Share | None = 0.0
    mlp_output_dropout: Share | None = None
    head_activation: Activation = "gelu"
    checkpoint_activations: bool = False


class OptimConfig(Settings):
    """AdamW; the learning rate rises linearly for `warmup_steps` and then falls linearly to zero."""

    section: ClassVar[str] = "optim"

    lr: float = Field(gt=0, description="the highest learning rate, at the end of the warm-up")
    warmup_steps: int = Field(ge=1, le=LARGEST_INTEGER)
    betas: Annotated[tuple[Share, Share], BeforeValidator(as_tuple)] = (0.9, 0.999)
    cycle_beta1: bool = Field(
        default=False, description="beta1 falls from 0.95 to 0.85 in the warm-up and rises again, instead of betas[0]"
    )
    eps: float = Field(default=1e-6, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    clip_value: float | None = Field(default=1.0, gt=0, description="gradients are clipped to it; null = not at all")


class LoopConfig(Settings):
    """Steps, batches, evaluations, checkpoints and logging."""

    section: ClassVar[str] = "loop"

    steps: Count = Field(description="number of optimizer steps")
    stop_after: Count | None = Field(
        default=None, description="end after this many steps, with the schedule of all steps; null = after all steps"
    )
    batch_size: Count = Field(description="examples per device (or per group that shares sequences) and backward pass")
    accumulate: Count = Field(default=1, description="backward passes per step")
    group_by_length: bool = Field(default=True, description="batches of examples of similar length")
    pad_to_max: bool = Field(default=False, description="pad every batch to the maximum length of the task")
    eval_every: Count = Field(description="steps between evaluations on the dev set; the last step is always evaluated")
    dev_limit: Count | None = Field(default=None, description="examples per evaluation on the dev set; null = all")
    test_limit: Count | None = Field(default=None, description="examples of the final test; null = all")
    keep_after: Share = Field(
        default=0.0, description="share of the training after which an evaluation can be the best; 0 = from the start"
    )
    eval_batch_size: Count | None = Field(default=None, description="null = batch_size")
    checkpoint_every: Count = Field(description="steps between checkpoints")
    log_every: Count = Field(description="steps between rows of metrics.csv")
    workers: int = Field(default=0, ge=0, le=1024, description="data loading processes; 0 = no extra process")
    loggers: Annotated[tuple[str, ...], BeforeValidator(as_tuple)] = Field(
        default=(), description="further loggers, such as wandb:project=reviews"
    )

    @property
    def last_step(self) -> int:
        """The step after which the run ends."""
        return self.stop_after or self.steps

    def may_keep(self, step: int) -> bool:
        """Whether the model of this step can be the best model of the run."""
        return step > self.keep_after * self.last_step

    def first_kept(self) -> int:
        """The first step whose model is evaluated and can be the best."""
        return next(filter(self.may_keep, range(self.eval_every, self.last_step, self.eval_every)), self.last_step)


class HardwareConfig(Settings):
    """The hardware; names and values are Lightning's, except that `devices: auto` is as many devices as share a
    sequence, that is, one by default. More make the batches larger, so they must be asked for."""

    section: ClassVar[str] = "hardware"

    accelerator: Literal["auto", "cpu", "gpu", "cuda", "mps", "tpu"] = "auto"
    devices: Literal["auto"] | Count = "auto"
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"
    precision: Literal["32-true", "64-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed"] = "32-true"
    threads: Annotated[int, Field(ge=1, le=4096)] | None = Field(default=None, description="number of CPU threads")
    sequence_parallel: Annotated[int, Field(ge=1, le=4096)] = Field(
        default=1, description="number of processes that share each sequence; devices must be a multiple of it"
    )

    @model_validator(mode="after")
    def _check_sequence_parallel(self) -> Self:
        shared = self.sequence_parallel
        if self.devices != "auto" and self.devices % shared:
            raise InputError(
                f"hardware.devices must be a multiple of hardware.sequence_parallel; got {self.devices} and {shared}"
            )
        if shared > 1 and self.strategy == "fsdp":
            raise InputError("hardware.sequence_parallel needs hardware.strategy=ddp or auto; got fsdp")
        return self

    def trainer_options(self) -> dict[str, Any]:
        """The arguments of Lightning's trainer."""
        return {
            "accelerator": self.accelerator,
            "devices": self.sequence_parallel if self.devices == "auto" else self.devices,
            "strategy": "ddp" if self.sequence_parallel > 1 else self.strategy,
            "precision": self.precision,
        }


class RunConfig(Settings):
    """One run: a preset, a seed, and the settings in full."""

    preset: str = Field(pattern=r"^[a-z0-9_]{1,32}$", description="the preset that the settings come from")
    note: str = Field(default="", max_length=5000, description="how it differs from the paper; part of the result")
    seed: Seed = 0
    task: TaskConfig
    model: ModelSettings = Field(default_factory=ModelSettings)
    optim: OptimConfig
    loop: LoopConfig
    hardware: HardwareConfig = Field(default_factory=HardwareConfig)

    @model_validator(mode="after")
    def _check_contradictions(self) -> Self:
        if self.loop.steps < 2:
            raise InputError(f"loop.steps must be at least 2, one of them for the warm-up; got {self.loop.steps}")
        if self.optim.warmup_steps >= self.loop.steps:
            raise InputError(
                f"optim.warmup_steps must be below loop.steps; got {self.optim.warmup_steps} and {self.loop.steps}. "
                f"Try --set optim.warmup_steps={max(1, self.loop.steps // 10)}"
            )
        if self.loop.last_step > self.loop.steps:
            raise InputError(
                f"loop.stop_after must be at most loop.steps; got {self.loop.stop_after} and {self.loop.steps}"
            )
        model = self.build_model_config()
        if self.hardware.sequence_parallel > 1:
            check_config(model)
        return self

    def build_model_config(self) -> ModelConfig:
        """The model's config: these settings and what the task decides."""
        spec = self.task.spec
        return ModelConfig(
            vocab_size=spec.vocab_size,
            max_length=round_up(self.task.longest),
            num_classes=spec.num_classes,
            seed=self.seed,
            **dict(self.model),
        )

    def digest(self) -> str:
        """Eight hexadecimal digits of a hash of all settings that decide the result."""
        settings = self.deciding_settings()
        for section, added in _ADDED_LATER.items():
            for name, value in added.items():
                if settings[section][name] == value:
                    del settings[section][name]
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]

    def deciding_settings(self) -> dict[str, Any]:
        """The settings that decide the result, seed included, as plain data."""
        return self.model_dump(mode="json", exclude=EXCLUDED_FROM_DIGEST)

    def departures(self, other: RunConfig) -> list[str]:
        """The settings that decide the result and differ from those of `other`, as `name=value`."""
        own, others = (flatten(config.deciding_settings()) for config in (self, other))
        names = [name for name in own | others if own.get(name) != others.get(name)]
        return [f"{name}={own.get(name)}" for name in names]

    def run_name(self) -> str:
        """The name of the run's folder."""
        return f"{self.task.name}-{self.model.attention}-{self.preset}-seed{self.seed}-{self.digest()}"


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their dotted names."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


_WHOLE_NUMBER = re.compile(r"[-+]?(0|[1-9](_?[0-9]){0,19})")
_LONGEST_NUMBER = 40


class _Loader(yaml.SafeLoader):
    """Reads plain data: names must be strings, and aliases are refused (a few can expand to gigabytes)."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            raise yaml.YAMLError("aliases are not allowed")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        for name in mapping:
            if not isinstance(name, str):
                raise yaml.YAMLError(f"a name must be a string; got {name!r}")
        names = [key.value for key, _ in node.value]
        for name in names:
            if names.count(name) > 1:
                raise yaml.YAMLError(f"{name!r} is given {names.count(name)} times")
        return mapping

    def construct_yaml_int(self, node: Any) -> int:
        """YAML 1.1 also reads 0x10, 010 and 1:30 as whole numbers."""
        if not _WHOLE_NUMBER.fullmatch(node.value):
            text = node.value if len(node.value) <= _LONGEST_NUMBER else f"{node.value[:_LONGEST_NUMBER]}..."
            raise yaml.YAMLError(f"a whole number must be decimal, with at most 20 digits; got {text}")
        return int(node.value)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
# YAML 1.1 reads 3e-4 as a string because it has no decimal point.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+$"), list("-+0123456789")
)


class _Dumper(yaml.SafeDumper):
    """Writes lists on one line and everything else in blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(
    list, lambda dumper, items: dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=True)
)


def parse_yaml(text: str, what: str) -> Any:
    """The data in a YAML text; `what` names the text in errors."""
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as invalid:
        place = getattr(invalid, "problem_mark", None)
        where = f" in line {place.line + 1}" if place else ""
        raise InputError(f"{what} is not valid YAML{where}: {getattr(invalid, 'problem', invalid)}") from None


def to_yaml(config: RunConfig) -> str:
    """A config as YAML, as in a run's `config.yaml` and as `--show-config` prints it."""
    data = config.model_dump(mode="json")
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, default_flow_style=False, allow_unicode=True, width=100)


def from_yaml(text: str, what: str = "the config") -> RunConfig:
    """The config in a text that `to_yaml` wrote; `what` names the text in errors."""
    content = parse_yaml(text, what)
    if not isinstance(content, dict):
        raise InputError(f"{what} must be a mapping with task, model, optim, loop ...; got {type(content).__name__}")
    try:
        return RunConfig(**content)
    except InputError as invalid:
        raise InputError(f"{what}: {invalid}") from invalid
