"""Presets: a task's settings by name, from the YAML files beside this module, with changes from the command line.

A file has a `note`, settings `common` to all its tasks, and what each of its `tasks` adds; `base` names another preset
whose settings it starts from. Two names stand for settings of the attention that is chosen: `model.features`, the
size of an approximation, and `model.options_of`, options of one attention alone. Both end up in
`model.attention_options`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from skyformer.attention import attention_class
from skyformer.errors import InputError, UnknownNameError
from skyformer.lra.tasks import TASKS, task_spec
from skyformer.settings import setting_names, unknown_setting
from skyformer.training.config import RunConfig, flatten, to_yaml
from skyformer.training.documents import parse_yaml

__all__ = ["DEFAULT_PRESET", "differing", "list_presets", "load_preset", "parse_overrides", "to_yaml"]

DEFAULT_PRESET = "paper"
FEATURES = "model.features"
OPTIONS = "model.attention_options"
SETTABLE = (FEATURES, *(name for name in setting_names(RunConfig) if name not in ("preset", "note", "task.name")))
"""What `--set` takes; the others belong to the preset and the task."""

Tree = dict[str, Any]

_REFORMER_HASHES = 2


def feature_options(attention: str, features: int) -> Tree:
    """Which options of an attention make it visit about `features` entries a row of the attention matrix."""
    table: dict[str, Tree] = {
        "softmax": {},
        "kernelized": {},
        "skyformer": {"num_landmarks": features},
        "nystromformer": {"num_landmarks": features},
        "linformer": {"num_features": features},
        "informer": {"num_features": features},
        "performer": {"num_features": features},
        # In each round a query sees two chunks.
        "reformer": {"num_hashes": _REFORMER_HASHES, "chunk_size": max(1, features // (2 * _REFORMER_HASHES))},
        # The paper leaves BigBird out of this rule: it sees blocks of 64, eight a query.
        "bigbird": {},
    }
    attention_class(attention)
    return table.get(attention, {})


def list_presets(task: str | None = None) -> list[str]:
    """The names of all presets, the paper's first; of those that have a task, if one is given."""
    names = [name for name in _preset_names() if task is None or task in _tasks_of(name)]
    return sorted(names, key=lambda name: (name != DEFAULT_PRESET, name))


def load_preset(
    task: str,
    preset: str = DEFAULT_PRESET,
    *,
    attention: str | None = None,
    overrides: Sequence[str] = (),
    steps: int | None = None,
    seed: int | None = None,
) -> RunConfig:
    """The config of a task under a preset.

    Args:
        task: a task of Long Range Arena. preset: a name from `list_presets()`.
        attention: another attention than the preset's.
        overrides: settings as `"optim.lr=3e-4"`, with values in YAML.
        steps: loop.steps. seed: of everything random in the run.
    """
    tree = _settings_of(task, preset)
    given = {"model.attention": attention, "loop.steps": steps, "seed": seed}
    chosen = {name: value for name, value in given.items() if value is not None}
    changed = _put_all(tree, parse_overrides(overrides) | chosen)
    return _with_note(RunConfig(**_resolve_features(changed)), tree)


def parse_overrides(overrides: Sequence[str]) -> Tree:
    """Values by the names of their settings; a name that is not known says which one may be meant."""
    values: Tree = {}
    for override in overrides:
        name, equals, text = override.partition("=")
        name = name.strip()
        if not equals or not name:
            raise InputError(f"--set must be NAME=VALUE, such as optim.lr=3e-4; got {override!r}")
        if not name.startswith(f"{OPTIONS}.") and name not in SETTABLE:
            raise unknown_setting(name, SETTABLE)
        values[name] = parse_yaml(text, f"the value of --set {name}")
    return values


def differing(config: RunConfig, given: Mapping[str, Any]) -> list[str]:
    """Which of the given settings are not those of `config`, each with both values."""
    options = dict(given)
    if FEATURES in options:
        features = feature_options(config.model.attention, _checked_features(options.pop(FEATURES)))
        options = {f"{OPTIONS}.{name}": value for name, value in features.items()} | options
    stored = config.model_dump(mode="json")
    stored_by_name = flatten(stored) | {OPTIONS: stored["model"]["attention_options"]}
    return [
        f"{name} is {stored_by_name.get(name)}, not {value}"
        for name, value in options.items()
        if stored_by_name.get(name) != value
    ]


def _with_note(config: RunConfig, tree: Tree) -> RunConfig:
    """The config, with a note of what is not as the preset says; the seed and the attention are there to be chosen."""
    plain = _put_all(tree, {"seed": config.seed, "model.attention": config.model.attention})
    departures = config.departures(RunConfig(**_resolve_features(plain)))
    if not departures:
        return config
    changes = f"changed: {', '.join(departures)}"
    return config.replace(note=f"{config.note}; {changes}" if config.note else changes)


def _put_all(tree: Tree, values: Mapping[str, Any]) -> Tree:
    changed = _copy(tree)
    for name, value in values.items():
        _put(changed, name, value)
    return changed


def _put(tree: Tree, name: str, value: Any) -> None:
    *path, last = name.split(".")
    place = tree
    for part in path:
        place = place.setdefault(part, {})
        if not isinstance(place, dict):
            raise InputError(f"{name} cannot be set, because {part} was set to {place!r}")
    place[last] = value


def _resolve_features(tree: Tree) -> Tree:
    """The settings with `features` and `options_of` turned into options of the attention that was chosen."""
    model = dict(tree.get("model", {}))
    attention = model.get("attention", "skyformer")
    features, options_of = model.pop("features", None), model.pop("options_of", {})
    options = {} if features is None else feature_options(attention, _checked_features(features))
    own = model.get("attention_options", {})
    # What is no mapping is left for the config to refuse.
    model["attention_options"] = options | options_of.get(attention, {}) | own if isinstance(own, dict) else own
    return {**tree, "model": model}


def _checked_features(features: object) -> int:
    if isinstance(features, bool) or not isinstance(features, int) or features < 1:
        raise InputError(f"{FEATURES} must be a whole number of at least 1; got {features!r}")
    return features


def _settings_of(task: str, preset: str) -> Tree:
    """A preset's settings for a task, with the task's and the preset's own name in them."""
    task_spec(task)
    if preset not in _preset_names():
        raise UnknownNameError("preset", preset, list_presets())
    if task not in _tasks_of(preset):
        raise InputError(
            f"preset {preset!r} is for {', '.join(_tasks_of(preset))}, not for {task}; "
            f"presets for {task}: {', '.join(list_presets(task))}"
        )
    return _merge(_layered(task, preset), {"preset": preset, "task": {"name": task}})


def _layered(task: str, preset: str) -> Tree:
    content = _read(preset)
    below = _layered(task, content["base"]) if "base" in content else {"note": ""}
    own = {"note": content["note"]} if "note" in content else {}
    return _merge(_merge(below, own | content.get("common", {})), content["tasks"].get(task, {}))


def _merge(below: Tree, above: Mapping[str, Any]) -> Tree:
    merged = dict(below)
    for name, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(name), dict)
        merged[name] = _merge(merged[name], value) if both else value
    return merged


def _copy(tree: Mapping[str, Any]) -> Tree:
    return {name: _copy(value) if isinstance(value, dict) else value for name, value in tree.items()}


def _tasks_of(preset: str) -> list[str]:
    return [task for task in TASKS if task in _read(preset)["tasks"]]


@cache
def _read(preset: str) -> Tree:
    file = _folder() / f"{preset}.yaml"
    content: Tree = parse_yaml(file.read_text(encoding="utf-8"), f"preset {preset}")
    return content


def _preset_names() -> list[str]:
    return sorted(file.name.removesuffix(".yaml") for file in _folder().iterdir() if file.name.endswith(".yaml"))


def _folder() -> Traversable:
    # Not a package of its own: it holds data alone, and its name is this module's.
    return files("skyformer.training") / "presets"
