"""The page about the models says what the config says, and its examples run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from skyformer import ModelConfig

PAGE = (Path(__file__).parents[2] / "docs" / "model.md").read_text()


def test_the_table_lists_every_setting() -> None:
    rows = []
    for name, field in ModelConfig.model_fields.items():
        default = "required" if field.is_required() else f"`{field.get_default(call_default_factory=True)!r}`"
        rows.append(f"| `{name}` | {default} | {field.description} |")
    assert "\n".join(rows) in PAGE


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(block, namespace)
    assert namespace["logits"].shape == (4, 2)
