"""`import skyformer` needs torch alone; the models bring pydantic when they are first asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

import skyformer

NAMES = ("ModelConfig", "PairClassifier", "SequenceClassifier", "SkyformerEncoder")

HIDE = """
import importlib.abc, sys
class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {packages!r}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Hidden())
"""


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_importing_the_package_imports_no_extra() -> None:
    loaded = "[name for name in ('pydantic', 'safetensors', 'skyformer.model') if name in sys.modules]"
    assert run(f"import sys, skyformer; print({loaded})") == "[]"


def test_the_models_are_there_when_asked_for() -> None:
    assert set(NAMES) <= set(dir(skyformer))
    assert all(getattr(skyformer, name).__name__ == name for name in NAMES)
    with pytest.raises(AttributeError, match="no attribute 'SequenceClasifier'"):
        skyformer.SequenceClasifier  # noqa: B018


def test_without_pydantic_the_extra_is_named() -> None:
    attempt = """
from skyformer import *
import skyformer
try:
    skyformer.SequenceClassifier
except skyformer.errors.MissingExtraError as missing:
    print(missing)
"""
    assert run(HIDE.format(packages=["pydantic"]) + attempt) == (
        "'pydantic' is not installed: pip install 'skyformer[model]', or in a clone pip install '.[model]'"
    )


def test_without_safetensors_models_work_but_cannot_be_saved() -> None:
    attempt = """
import skyformer, tempfile
model = skyformer.SequenceClassifier(vocab_size=4, max_length=8, attention="softmax")
try:
    model.save_pretrained(tempfile.mkdtemp())
except skyformer.errors.MissingExtraError as missing:
    print(missing)
"""
    assert run(HIDE.format(packages=["safetensors"]) + attempt) == (
        "'safetensors' is not installed: pip install 'skyformer[model]', or in a clone pip install '.[model]'"
    )
