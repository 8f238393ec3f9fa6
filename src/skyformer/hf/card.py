"""Model cards: the README.md that `save_pretrained` and `push_to_hub` of a Skyformer model write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import ModelCardData

from skyformer.environment import installed_version
from skyformer.files import write_atomic

if TYPE_CHECKING:
    from skyformer.hf.modeling import SkyformerPreTrainedModel

FILE = "README.md"
_TEMPLATE = "This model card has been automatically generated"
"""What the card contains that transformers writes if there is none."""

_TASKS = {
    "SkyformerForSequenceClassification": "text-classification",
    "SkyformerForTokenClassification": "token-classification",
    "SkyformerForQuestionAnswering": "question-answering",
    "SkyformerForMaskedLM": "fill-mask",
    "SkyformerModel": "feature-extraction",
}


def write_card(model: SkyformerPreTrainedModel, folder: Path) -> None:
    """Write the card of a model, unless the folder has one that somebody wrote."""
    file = folder / FILE
    if not file.exists() or _TEMPLATE in file.read_text():
        write_atomic(file, model_card(model))


def model_card(model: SkyformerPreTrainedModel) -> str:
    """The metadata for the hub, what the model is, and the code that loads it."""
    config, kind, version = model.config, type(model).__name__, installed_version("skyformer")
    tags = ["skyformer", config.attention, "long-sequences", *(model.model_tags or [])]
    data = ModelCardData(library_name="transformers", pipeline_tag=_TASKS.get(kind), tags=list(dict.fromkeys(tags)))
    sizes = {
        "attention": f"`{config.attention}`, options `{json.dumps(config.attention_options)}`",
        "parameters": f"{model.num_parameters():,}",
        "layers, heads, features": f"{config.num_hidden_layers}, {config.num_attention_heads}, {config.hidden_size}",
        "longest input": f"{config.max_position_embeddings:,} tokens",
        "vocabulary": f"{config.vocab_size:,} tokens",
    }
    if kind in ("SkyformerForSequenceClassification", "SkyformerForTokenClassification"):
        sizes["labels"] = ", ".join(str(name) for name in (config.id2label or {}).values())
    rows = "\n".join(f"| {name} | {value} |" for name, value in sizes.items())
    return f"""---
{data.to_yaml()}
---

# {kind}

An encoder with {config.attention} attention of the package skyformer (version {version}), which must be installed.

| | |
|---|---|
{rows}

```python
import skyformer.hf
from skyformer.hf import {kind}

model = {kind}.from_pretrained("PATH")
```

The training data, the results and the licence are not known to the program that wrote this card; please add them.
"""
