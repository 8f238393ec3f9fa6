"""Completion of names in the shell: tasks, attentions, presets, runs and prepared data. None of it imports torch.

`skyformer --install-completion` installs it for the current shell.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path

from skyformer.cli.index import read_index
from skyformer.files import runs_dir_or_default
from skyformer.lra.tasks import TASKS

ALL = "all"
OWN_PRESETS = ("quick", "standard", "long")
"""Of `skyformer.training.fitting`."""


def task(incomplete: str) -> list[str]:
    return _starting(TASKS, incomplete)


def task_or_all(incomplete: str) -> list[str]:
    return _starting((*TASKS, ALL), incomplete)


def tasks(incomplete: str) -> list[str]:
    return _last_of_list(TASKS, incomplete)


def tasks_or_all(incomplete: str) -> list[str]:
    return _last_of_list((*TASKS, ALL), incomplete)


def attention(incomplete: str) -> list[str]:
    return _starting(read_index().attentions, incomplete)


def attentions(incomplete: str) -> list[str]:
    return _last_of_list(read_index().attentions, incomplete)


def attentions_or_all(incomplete: str) -> list[str]:
    return _last_of_list((*read_index().attentions, ALL), incomplete)


def preset(incomplete: str) -> list[str]:
    folder = files("skyformer.training") / "presets"
    names = sorted(file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml"))
    return _last_of_list([*names, *OWN_PRESETS], incomplete)


def run(incomplete: str) -> list[str]:
    """Names in the folder of runs, or folders of runs at the given path."""
    if os.sep not in incomplete:
        return _starting((file.parent.name for file in _configs(runs_dir_or_default())), incomplete)
    return _starting((str(file.parent) for file in _configs(Path(incomplete).parent)), incomplete)


def _configs(root: Path) -> list[Path]:
    return sorted(file for file in root.glob("*/config.yaml") if not file.parent.name.startswith("."))


def _starting(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _last_of_list(names: Iterable[str], incomplete: str) -> list[str]:
    """Completes the last name of a comma-separated list with names that are not in it yet."""
    done, comma, last = incomplete.rpartition(",")
    return [f"{done}{comma}{name}" for name in _starting(names, last) if name not in done.split(",")]
