"""The recipes of docs/huggingface.md run, with small random models in place of those on the hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    ModernBertConfig,
    ModernBertModel,
    ViTConfig,
    ViTModel,
)

import skyformer.hf
from skyformer.hf.options import SkyformerOptions
from tests.hf.families import BERT, MODERN, PICTURE, TEXT

PAGE = (Path(__file__).parent.parent.parent / "docs" / "huggingface.md").read_text()
RECIPES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
MODELS = {
    "bert-base-cased": lambda: BertForMaskedLM(BertConfig(**BERT)),
    "answerdotai/ModernBERT-base": lambda: ModernBertModel(ModernBertConfig(**{**MODERN, "num_hidden_layers": 4})),
    "google/vit-base-patch16-224": lambda: ViTModel(ViTConfig(**PICTURE)),
    "meta-llama/Llama-3.2-1B": lambda: LlamaForCausalLM(LlamaConfig(**TEXT, num_key_value_heads=2)),
}


@pytest.mark.parametrize("recipe", RECIPES, ids=range(len(RECIPES)))
def test_recipes_run(recipe: str, tmp_path: Path) -> None:
    for number, (name, build) in enumerate(MODELS.items()):
        if name in recipe:
            build().save_pretrained(tmp_path / str(number))
            recipe = recipe.replace(f'"{name}"', repr(str(tmp_path / str(number))))
    names: dict[str, Any] = {}
    exec(recipe, names)
    assert names["model"].config._attn_implementation in recipe
    skyformer.hf.register()


def test_every_option_is_in_the_table() -> None:
    (table,) = re.findall(r"## Options of `register`\n\n(.*?)\n\n", PAGE, re.DOTALL)
    for option in SkyformerOptions.__dataclass_fields__.values():
        assert not option.init or f"`{option.name}`" in table
