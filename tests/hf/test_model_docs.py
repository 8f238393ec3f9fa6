"""The page about the model says what the config says, and its examples run."""

from __future__ import annotations

import inspect
import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
import torch

from skyformer.hf import SkyformerConfig

PAGE = (Path(__file__).parents[2] / "docs" / "huggingface_model.md").read_text()


def test_the_table_lists_every_setting() -> None:
    own = inspect.get_annotations(SkyformerConfig)
    settings = {field.name: field.default for field in fields(SkyformerConfig) if field.name in own}
    assert MISSING not in settings.values()
    listed = dict(re.findall(r"^\| `([a-z_]+)` \| `(.+?)` \|", PAGE, re.MULTILINE))
    assert listed == {name: repr(default) for name, default in settings.items()}


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(block, namespace)
    assert namespace["logits"].shape == (4, 10)
    with torch.no_grad():
        expected = namespace["model"](**namespace["inputs"]).logits
    torch.testing.assert_close(namespace["logits"], expected, rtol=0, atol=1e-5)
