"""The studies by name: every module in this folder is imported, and each class it registers joins."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from skyformer.errors import InputError, UnknownNameError
from skyformer.studies.base import Study

_NEEDS_TRAINING = {"tasks"}
"""No study, and not to be imported before a study trains: it brings Lightning along."""

_REGISTRY: dict[str, type[Study[Any, Any, Any]]] = {}

AnyStudy = TypeVar("AnyStudy", bound=type[Study[Any, Any, Any]])


def register_study(cls: AnyStudy) -> AnyStudy:
    """Class decorator: makes a study known by its `name`."""
    if cls.name in _REGISTRY:
        raise InputError(f"the name {cls.name!r} belongs to {_REGISTRY[cls.name].__qualname__}; register under another")
    _REGISTRY[cls.name] = cls
    return cls


def list_studies() -> list[str]:
    """The names of all studies, in alphabetical order."""
    _import_studies()
    return sorted(_REGISTRY)


def study_class(name: str) -> type[Study[Any, Any, Any]]:
    """The class behind a name."""
    if name not in list_studies():
        raise UnknownNameError("study", name, _REGISTRY)
    return _REGISTRY[name]


@cache
def _import_studies() -> None:
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if module.name not in _NEEDS_TRAINING:
            importlib.import_module(f"skyformer.studies.{module.name}")
