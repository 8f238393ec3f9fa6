"""The examples in the docstrings run."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import skyformer

SOURCE = Path(skyformer.__file__).parent
MODULES = [
    ".".join(("skyformer", *file.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
    for file in sorted(SOURCE.rglob("*.py"))
    if ">>> " in file.read_text()
]
WITH_EXAMPLE = [
    "MultiheadAttention",
    "SequenceClassifier",
    "SkyformerEncoder",
    "build_attention",
    "kernel_product",
    "kernelized_attention",
    "list_attentions",
    "skyformer_attention",
    "softmax_attention",
    "suggest_budget",
    "suggest_landmarks",
    "tilted_attention",
]


@pytest.mark.parametrize("module", MODULES)
def test_examples_run(module: str) -> None:
    assert doctest.testmod(importlib.import_module(module)).failed == 0


def test_the_most_used_names_have_an_example() -> None:
    assert [name for name in WITH_EXAMPLE if ">>> " not in (getattr(skyformer, name).__doc__ or "")] == []
