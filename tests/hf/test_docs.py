"""The recipes of docs/huggingface.md run, with small random models in place of those on the hub."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
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
from skyformer.hf.options import SkyformerOptions
from tests.hf.families import BERT, MODERN, PICTURE, TEXT

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "huggingface.md").read_text()
FIGURES = ROOT / "scripts" / "pages.py"
RECIPES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
MODELS = {
    "bert-base-cased": lambda: BertForMaskedLM(BertConfig(**BERT)),
    "answerdotai/ModernBERT-base": lambda: ModernBertModel(ModernBertConfig(**{**MODERN, "num_hidden_layers": 4})),
    "google/vit-base-patch16-224": lambda: ViTModel(ViTConfig(**PICTURE)),
    "openai/clip-vit-base-patch32": lambda: CLIPModel(CLIPConfig(text_config=TEXT, vision_config=PICTURE)),
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
    model = names["model"]
    parts = [model.config, *(getattr(model.config, part) for part in model.config.sub_configs)]
    last = [line for line in recipe.splitlines() if "attn_implementation" in line][-1]
    assert all(re.search(rf"['\"]{re.escape(part._attn_implementation)}['\"]", last) for part in parts[-2:])
    skyformer.hf.register()


def test_what_was_not_timed_is_left_open(tmp_path: Path) -> None:
    script = runpy.run_path(str(FIGURES))
    made: dict[str, Any] = {
        "finetune-softmax.json": {
            "attention": "softmax", "accuracy": 0.75, "standard_error": 0.02, "losses": [0.5, 0.3], "steps": 2,
            "batch": 4, "length": 9, "test_reviews": 8,
        },
        "long.json": {
            "length": 600, "collections": 1, "limit_gb": 4,
            "runs": [
                {"attention": "few", "training": False, "added_bytes": 25e7, "cosine_to_softmax": 0.9},
                {"attention": "few", "training": True, "failed": "no memory"},
            ],
        },
    }  # fmt: skip
    for name, results in made.items():
        (tmp_path / name).write_text(json.dumps({"results": results}))
    script["table"].__globals__["RESULTS"] = tmp_path
    assert script["embeddings_table"]() == "?"
    assert "| softmax | 75.0 ± 2.0 % | 0.40 | ? |" in script["finetune_table"]()
    assert "| few | 0.25 GB | ? | over 4 GB |  | 0.900 |" in script["long_table"]()
    (tmp_path / "finetune-times.json").write_text(json.dumps({"results": {"seconds": {"softmax": [1.0, 3.0, 2.0]}}}))
    assert "| 0.40 | 2.00 s |" in script["finetune_table"]()


def test_every_option_is_in_the_table() -> None:
    (table,) = re.findall(r"## Options of `register`\n\n(.*?)\n\n", PAGE, re.DOTALL)
    for option in SkyformerOptions.__dataclass_fields__.values():
        assert not option.init or f"`{option.name}`" in table
