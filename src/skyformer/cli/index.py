"""What help and completion know of attentions, studies and benchmarks without importing them, which would import torch.

`make docs` writes `index.json`; a test compares it with the code.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skyformer.registry import Registry
    from skyformer.studies.base import StudyClass

FILE = "index.json"


@dataclass(frozen=True)
class StudyOption:
    """An option of a study; `metavar` is None for one that is on or off."""

    name: str
    flag: str
    help: str
    metavar: str | None


@dataclass(frozen=True)
class StudyCommand:
    """The command of a study or benchmark."""

    name: str
    title: str
    options: tuple[StudyOption, ...]


@dataclass(frozen=True)
class Index:
    """The names of all attentions, and the commands of all studies and benchmarks."""

    attentions: tuple[str, ...]
    studies: tuple[StudyCommand, ...]
    benchmarks: tuple[StudyCommand, ...]


@cache
def read_index() -> Index:
    """The index as it is stored."""
    content = json.loads((files("skyformer.cli") / FILE).read_text(encoding="utf-8"))
    commands = ([_command(**each) for each in content[kind]] for kind in ("studies", "benchmarks"))
    return Index(tuple(content["attentions"]), *map(tuple, commands))


def _command(name: str, title: str, options: Sequence[dict[str, str]]) -> StudyCommand:
    return StudyCommand(name, title, tuple(StudyOption(**each) for each in options))


def commands_of(registry: Registry[StudyClass]) -> tuple[StudyCommand, ...]:
    """The commands of all studies of a registry."""
    from skyformer.studies.base import option_fields

    def describe(study: StudyClass) -> StudyCommand:
        options = [
            StudyOption(
                each.name,
                each.flag,
                each.help(),
                None if each.kind is bool else each.kind.__name__.upper() + (",..." if each.many else ""),
            )
            for each in option_fields(study.options_type)
        ]
        return StudyCommand(study.name, study.title, tuple(options))

    return tuple(describe(registry.get(name)) for name in registry.names())


def fresh_index() -> str:
    """The content that `index.json` should have."""
    from skyformer.attention import list_attentions
    from skyformer.studies.registry import BENCHMARKS, STUDIES

    index = Index(tuple(list_attentions()), commands_of(STUDIES), commands_of(BENCHMARKS))
    return json.dumps(asdict(index), indent=1, ensure_ascii=False) + "\n"
