"""Presets: named settings for each task, read from the YAML files in presets/, and changes to them.

A file has a `note`, settings `common` to all its tasks, and what each of its `tasks` adds; `base` names another preset
whose settings it starts from. Three names depend on the chosen attention: `model.features`, the size of its
approximation, and `model.options_of`, options of one attention only, become part of `model.attention_options`;
`model.settings_of` has settings of the model for one attention only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from skyformer.attention import attention_class
from skyformer.attention.tilted import SMALLEST_BUDGET
from skyformer.errors import InputError, UnknownNameError
from skyformer.lra.dataset import load_variant
from skyformer.lra.preparation import Prepared
from skyformer.lra.tasks import TASKS, task_spec
from skyformer.settings import setting_names, unknown_setting
from skyformer.training.config import RunConfig, flatten, parse_yaml
from skyformer.training.fitting import DEFAULT_OWN_PRESET, OWN_PRESETS, fitting_features, fitting_settings

DEFAULT_PRESET = "paper"
FEATURES = "model.features"
OPTIONS = "model.attention_options"
SETTABLE = (
    FEATURES,
    *(
        name
        for name in setting_names(RunConfig)
        if name not in ("preset", "note", "task.name") and not name.startswith("task.own")
    ),
)
"""Names that `--set` accepts; the preset and the data decide the others."""
_FIXED_BY_OWN_DATA = ("task.limit", "task.level", "task.data_seed")

Tree = dict[str, Any]

_REFORMER_HASHES = 2


def feature_options(attention: str, features: int) -> Tree:
    """The options with which an attention uses about `features` entries per row of the attention matrix."""
    table: dict[str, Tree] = {
        "softmax": {},
        "kernelized": {},
        "skyformer": {"num_landmarks": features},
        "nystromformer": {"num_landmarks": features},
        "linformer": {"num_features": features},
        "informer": {"num_features": features},
        "performer": {"num_features": features},
        # In each hashing round a query attends to two chunks.
        "reformer": {"num_hashes": _REFORMER_HASHES, "chunk_size": max(1, features // (2 * _REFORMER_HASHES))},
        "tilted": {"budget": max(SMALLEST_BUDGET, features)},
        # The paper makes an exception for BigBird: eight blocks of 64 per query.
        "bigbird": {},
    }
    attention_class(attention)
    return table.get(attention, {})


def list_presets(task: str | None = None) -> list[str]:
    """The names of all presets, or of those that have `task`; the paper's comes first."""
    names = [name for name in _preset_names() if task is None or task in _tasks_of(name)]
    return sorted(names, key=lambda name: (name != DEFAULT_PRESET, name))


def load_preset(
    task: str | Prepared,
    preset: str | None = None,
    *,
    attention: str | None = None,
    overrides: Sequence[str] = (),
    steps: int | None = None,
    seed: int | None = None,
) -> RunConfig:
    """The config of a task under a preset.

    Args:
        task: a task of Long Range Arena, or own data from `skyformer.own.own_data`.
        preset: a name from `list_presets()`, by default "paper". For own data by default "standard", or "quick" or
            "long": their lengths and steps fit the size of the data and this machine (see `training.fitting`).
        attention: replaces the preset's attention.
        overrides: changed settings such as `"optim.lr=3e-4"`, with values in YAML.
        steps: replaces `loop.steps`; a warm-up of the preset that would not fit becomes a tenth of the steps.
        seed: seed for weights, batches and dropout.

    >>> config = load_preset("listops", "cpu", attention="performer", overrides=["optim.lr=3e-4"], seed=1)
    >>> config.model.attention, config.optim.lr, config.seed
    ('performer', 0.0003, 1)
    """
    tree = _settings_of(task, preset or DEFAULT_PRESET) if isinstance(task, str) else _settings_of_own(task, preset)
    given = {"model.attention": attention, "loop.steps": steps, "seed": seed}
    chosen = parse_overrides(overrides) | {name: value for name, value in given.items() if value is not None}
    if not isinstance(task, str):
        _check_own(chosen)
    changed = _with_fitting_warmup(_put_all(tree, chosen), chosen)
    return _with_note(RunConfig(**_resolve_features(changed, features_given=FEATURES in chosen)), tree)


def change_config(
    config: RunConfig, overrides: Sequence[str] = (), *, steps: int | None = None, seed: int | None = None
) -> RunConfig:
    """A config with some settings changed, as in `load_preset`; its note names those that decide the result."""
    given = {"loop.steps": steps, "seed": seed}
    chosen = parse_overrides(overrides) | {name: value for name, value in given.items() if value is not None}
    if config.task.own is not None:
        _check_own(chosen)
    if FEATURES in chosen:
        raise InputError(f"{FEATURES} cannot be set in a whole config; set the option in {OPTIONS} instead")
    changed = RunConfig(**_with_fitting_warmup(_put_all(config.model_dump(), chosen), chosen))
    departures = changed.departures(config.replace(seed=changed.seed))
    if not departures:
        return changed
    return changed.replace(note="; ".join(filter(None, [config.note, f"changed: {', '.join(departures)}"])))


def _check_own(chosen: Tree) -> None:
    fixed = [name for name in _FIXED_BY_OWN_DATA if name in chosen]
    if fixed:
        raise InputError(f"{', '.join(fixed)} cannot be set for own data; give it when the data is prepared")


def parse_overrides(overrides: Sequence[str]) -> Tree:
    """Settings and values in a list of `NAME=VALUE`; an error for an unknown name suggests a known one."""
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
    """The given settings whose values differ from those of `config`, each with both values."""
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
    """The config, with a note of the settings that differ from the preset; seed and attention do not count."""
    plain = _put_all(tree, {"seed": config.seed, "model.attention": config.model.attention})
    departures = config.departures(RunConfig(**_resolve_features(plain)))
    if not departures:
        return config
    changes = f"changed: {', '.join(departures)}"
    return config.replace(note=f"{config.note}; {changes}" if config.note else changes)


def _with_fitting_warmup(tree: Tree, chosen: Mapping[str, Any]) -> Tree:
    """The settings; if they have fewer steps than the preset's warm-up, it becomes a tenth of the steps."""
    steps, warmup = tree["loop"]["steps"], "optim.warmup_steps"
    if warmup in chosen or not isinstance(steps, int) or steps > tree["optim"]["warmup_steps"]:
        return tree
    return _put_all(tree, {warmup: max(1, steps // 10)})


def _put_all(tree: Tree, values: Mapping[str, Any]) -> Tree:
    changed = deepcopy(tree)
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


def _resolve_features(tree: Tree, *, features_given: bool = False) -> Tree:
    """The settings, with `features` and `options_of` replaced by options of the chosen attention. Where both set the
    same option, `options_of` counts, unless the user has given the features."""
    model = dict(tree.get("model", {}))
    attention = model.get("attention", "skyformer")
    features, options_of = model.pop("features", None), model.pop("options_of", {})
    model = model.pop("settings_of", {}).get(attention, {}) | model
    options = {} if features is None else feature_options(attention, _checked_features(features))
    named = options_of.get(attention, {})
    options = named | options if features_given else options | named
    own = model.get("attention_options", {})
    # If it is not a mapping, RunConfig reports the error.
    model["attention_options"] = options | own if isinstance(own, dict) else own
    return {**tree, "model": model}


def _checked_features(features: object) -> int:
    if isinstance(features, bool) or not isinstance(features, int) or features < 1:
        raise InputError(f"{FEATURES} must be an integer of at least 1; got {features!r}")
    return features


def _settings_of(task: str, preset: str) -> Tree:
    """A preset's settings for a task, including the names of both."""
    task_spec(task)
    if preset not in _preset_names():
        raise UnknownNameError("preset", preset, list_presets())
    if task not in _tasks_of(preset):
        raise InputError(
            f"preset {preset!r} is for {', '.join(_tasks_of(preset))}, not for {task}; "
            f"presets for {task}: {', '.join(list_presets(task))}"
        )
    return _merge(_layered(task, preset), {"preset": preset, "task": {"name": task}})


def _settings_of_own(data: Prepared, preset: str | None) -> Tree:
    """A preset's settings for own data: one that fits it, or those that a preset has for Text or Retrieval."""
    variant, preset = data.manifest.variant, preset or DEFAULT_OWN_PRESET
    if preset not in (*OWN_PRESETS, *_preset_names()):
        raise UnknownNameError("preset", preset, [*OWN_PRESETS, *list_presets()])
    similar = "retrieval" if variant.spec.paired else "text"
    if preset in OWN_PRESETS:
        settings = _layered(similar, "cpu")
        del settings["task"]
        settings = _merge(settings, fitting_settings(load_variant(variant, data.folder.parent), preset))
    else:
        settings = _merge(_settings_of(similar, preset), {"task": {"limit": None}})
    own = variant.own
    assert own is not None
    task = {"name": variant.task, "data_seed": variant.seed, "limit": variant.limit, "own": own.model_dump()}
    return _merge(settings, {"preset": preset, "note": "", "task": task})


def usual_options(config: RunConfig) -> Tree:
    """The options that a preset gives to the attention of a run on own data."""
    similar, own = "retrieval" if config.task.spec.paired else "text", config.preset in OWN_PRESETS
    try:
        model = _layered(similar, "cpu" if own else config.preset)["model"]
    except (OSError, KeyError):
        return {}  # a preset of another version
    features = {"features": fitting_features(config.task.longest)} if own else {}
    chosen = {**model, **features, "attention": config.model.attention}
    options: Tree = _resolve_features({"model": chosen})["model"]["attention_options"]
    return options


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
    # The folder is not a package of its own, because this module has its name.
    return files("skyformer.training") / "presets"
