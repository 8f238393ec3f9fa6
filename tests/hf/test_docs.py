"""The code of docs/huggingface.md and docs/huggingface_model.md runs, and their tables list every option."""

from __future__ import annotations

import inspect
import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    CLIPConfig,
    CLIPModel,
    LlamaConfig,
    LlamaForCausalLM,
    ModernBertConfig,
    ModernBertModel,
    ViTConfig,
    ViTModel,
)

import skyformer.hf
from skyformer.hf import SkyformerConfig
from skyformer.hf.options import SkyformerOptions, TiltedOptions
from tests.hf.families import BERT, GROUPED, MODERN, PICTURE, TEXT

DOCS = Path(__file__).parents[2] / "docs"
PAGE, MODEL_PAGE = ((DOCS / name).read_text() for name in ("huggingface.md", "huggingface_model.md"))
RECIPES, MODEL_RECIPES = (re.findall(r"```python\n(.*?)```", page, re.DOTALL) for page in (PAGE, MODEL_PAGE))
MODELS = {
    "bert-base-cased": lambda: BertForMaskedLM(BertConfig(**BERT)),
    "answerdotai/ModernBERT-base": lambda: ModernBertModel(ModernBertConfig(**{**MODERN, "num_hidden_layers": 4})),
    "google/vit-base-patch16-224": lambda: ViTModel(ViTConfig(**PICTURE)),
    "openai/clip-vit-base-patch32": lambda: CLIPModel(CLIPConfig(text_config=TEXT, vision_config=PICTURE)),
    "meta-llama/Llama-3.2-1B": lambda: LlamaForCausalLM(LlamaConfig(**GROUPED)),
}
"""Small random models that replace those on the hub."""


@pytest.mark.parametrize("recipe", RECIPES, ids=range(len(RECIPES)))
def test_recipes_run(recipe: str, tmp_path: Path) -> None:
    for number, (name, build) in enumerate(MODELS.items()):
        if name in recipe:
            build().save_pretrained(tmp_path / str(number))
            recipe = recipe.replace(f'"{name}"', repr(str(tmp_path / str(number))))
    names: dict[str, Any] = {}
    exec(recipe, names)
    model = names["model"]
    parts = [model.config, *(getattr(model.config, part) for part in model.config.sub_configs)]
    last = [line for line in recipe.splitlines() if "attn_implementation" in line][-1]
    assert all(re.search(rf"['\"]{re.escape(part._attn_implementation)}['\"]", last) for part in parts[-2:])
    skyformer.hf.register()


def test_every_option_of_register_is_listed() -> None:
    (table,) = re.findall(r"## Options of `register`\n\n(.*?)\n\n", PAGE, re.DOTALL)
    for option in (*fields(SkyformerOptions), *fields(TiltedOptions)):
        assert not option.init or f"`{option.name}`" in table


def test_every_setting_of_the_model_is_listed_with_its_default() -> None:
    own = inspect.get_annotations(SkyformerConfig)
    settings = {field.name: field.default for field in fields(SkyformerConfig) if field.name in own}
    assert MISSING not in settings.values()
    listed = dict(re.findall(r"^\| `([a-z_]+)` \| `(.+?)` \|", MODEL_PAGE, re.MULTILINE))
    assert listed == {name: repr(default) for name, default in settings.items()}


def test_the_examples_of_the_model_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {}
    for block in MODEL_RECIPES:
        exec(block, namespace)
    assert namespace["logits"].shape == (4, 10)
    with torch.no_grad():
        expected = namespace["model"](**namespace["inputs"]).logits
    torch.testing.assert_close(namespace["logits"], expected, rtol=0, atol=1e-5)
