"""A copy of transformers' own tests: where it is, and how to import it beside another version of transformers."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import ClassVar

VARIABLE = "SKYFORMER_TRANSFORMERS_TESTS"
"""The environment variable with a folder that contains the folder `tests` of transformers."""

_MIXINS = ("test_tensor_parallel_mixin", "test_fsdp_mixin", "test_training_mixin", "test_pipeline_mixin")
"""Modules of tests that need several devices or the network; they are left out where they cannot be imported, because
they use functions of one version of transformers."""

_UNUSED = (
    "httpx",
    "timeout_decorator",
    "fetch_hub_objects_for_ci",
    "test_module",
    *(f"test_module.custom_{part}" for part in ("configuration", "modeling", "feature_extraction", "processing")),
)
"""Modules that the tests import for tests of the network and of remote code (the last ones are in another folder of the
repository, `utils`); where one is missing, an empty module takes its place."""

_MOVED = {"transformers.distributed.tensor_parallel": ("_get_parameter_tp_plan",)}
"""Functions that some versions of the tests import but only tests on several devices call."""


def folder() -> Path | None:
    """The folder that the environment variable names."""
    named = os.environ.get(VARIABLE)
    return Path(named).resolve() if named else None


def prepare(root: Path) -> list[str]:
    """Makes `tests` of `root` importable; returns the names of what was left out."""
    if not (root / "tests" / "test_modeling_common.py").is_file():
        raise SystemExit(f"{VARIABLE} must name a folder with tests/test_modeling_common.py; got {root}")
    sys.path.insert(0, str(root))
    left_out = []
    if (root / "utils").is_dir():
        sys.path.append(str(root / "utils"))
    for name in _UNUSED:
        try:
            importlib.import_module(name)
        except ImportError:
            left_out.append(name)
            sys.modules[name] = _Empty(name, str)
    for home, names in _MOVED.items():
        module = importlib.import_module(home)
        for name in names:
            if not hasattr(module, name):
                left_out.append(name)
                setattr(module, name, None)
    for name in _MIXINS:
        try:
            importlib.import_module(f"tests.{name}")
        except (ImportError, OSError):
            left_out.append(name)
            sys.modules[f"tests.{name}"] = _Empty(f"tests.{name}")
    return left_out


class _Empty(ModuleType):
    """A module in which every name is an empty class; one of strings returns the address that it is called with."""

    __path__: ClassVar[list[str]] = []

    def __init__(self, name: str, base: type = object) -> None:
        super().__init__(name)
        self._base = base

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (self._base,), {})
