"""Try our attentions in every model class that transformers' own tests build, and record what happened.

    python tests/outside/families.py TESTS [MODEL ...]

TESTS is a folder that contains the folder `tests` of a copy of transformers. The classes are built as small as those
tests build them. The record is src/skyformer/hf/families.json, which `skyformer.hf.supports` and the docs read; with
names of models (bert, vit, ...) only these are tried, and the others keep their record.
"""

from __future__ import annotations

import copy
import importlib
import json
import logging
import sys
import unittest
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

import skyformer.hf
from skyformer.errors import SkyformerError
from skyformer.files import dump_json, write_atomic
from skyformer.hf.families import RECORD

sys.path.insert(0, str(Path(__file__).parent))
from borrowed import prepare

ATTENTIONS = ("skyformer", "kernelized")
ALL_KEYS = "every-key-of-softmax"
"""Skyformer with the softmax kernel and every row as a landmark, which is softmax attention."""
TOLERANCE = 2e-3


def testers(tests: Path, only: list[str]) -> Iterator[tuple[str, Any]]:
    """The test cases of all models that build models of transformers, after their own set-up."""
    for folder in sorted((tests / "models").iterdir()):
        file = folder / f"test_modeling_{folder.name}.py"
        if not file.is_file() or (only and folder.name not in only):
            continue
        try:
            module = importlib.import_module(f"tests.models.{folder.name}.{file.stem}")
        except Exception as error:
            print(f"{folder.name}: not imported: {type(error).__name__}: {error}", flush=True)
            continue
        for cls in vars(module).values():
            if isinstance(cls, type) and issubclass(cls, unittest.TestCase) and getattr(cls, "all_model_classes", ()):
                try:
                    case = cls()
                    case.setUp()
                    yield folder.name, case
                except Exception as error:
                    print(f"{folder.name}: {cls.__name__}: {type(error).__name__}: {error}", flush=True)


def outputs(model: PreTrainedModel, inputs: Mapping[str, Any]) -> list[Tensor]:
    torch.manual_seed(0)
    with torch.no_grad():
        result = model(**copy.deepcopy(inputs)).to_tuple()
    return [x for x in result if isinstance(x, Tensor) and x.is_floating_point()]


def same(a: list[Tensor], b: list[Tensor], tolerance: float) -> bool:
    return len(a) == len(b) and all(
        x.shape == y.shape and torch.allclose(x, y, rtol=tolerance, atol=tolerance) for x, y in zip(a, b, strict=True)
    )


def build(cls: type[PreTrainedModel], config: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model = cls(copy.deepcopy(config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                # The initial weights are so small that all keys would have the same weight.
                parameter.normal_(0, 0.2)
    return model


def first_line(error: BaseException) -> str:
    """The first sentence of an error."""
    return (str(error).strip().splitlines() or [""])[0].partition(". ")[0][:300]


def implementations(model: PreTrainedModel) -> dict[str, Any]:
    """The attention of each part of a model, as `set_attn_implementation` takes it."""
    parts = {name: getattr(model.config, name, None) for name in model.config.sub_configs}
    inside = {name: part._attn_implementation for name, part in parts.items() if part is not None}
    return {"": model.config._attn_implementation, **inside}


def tried(model: PreTrainedModel, inputs: Mapping[str, Any], name: str) -> str:
    """What happens with this attention: "works", a refusal with its reason, or a fault."""
    first, own = implementations(model), outputs(model, inputs)
    repeats = same(own, outputs(model, inputs), 1e-5)
    try:
        model.set_attn_implementation(name)
        found = outputs(model, inputs)
        finite = all(x.isfinite().all() for x, y in zip(found, own, strict=True) if y.isfinite().all())
        verdict = "works" if finite else "fault: outputs that are not finite"
        if repeats and name != ALL_KEYS and same(found, own, 0.0):
            verdict = "fault: no effect"
    except SkyformerError as refused:
        verdict = f"refused: {first_line(refused)}"
    except Exception as error:
        verdict = f"fault: {type(error).__name__}: {first_line(error)}"
    model.set_attn_implementation(first)
    if repeats and not same(outputs(model, inputs), own, 1e-5):
        return f"fault: not restored after: {verdict}"
    return verdict


def agrees(model: PreTrainedModel, inputs: Mapping[str, Any]) -> bool | None:
    """Whether softmax attention by our interface equals the model's own; None if that cannot be told."""
    model.set_attn_implementation("eager")
    own = outputs(model, inputs)
    if not same(own, outputs(model, inputs), 1e-5) or not all(x.isfinite().all() for x in own):
        return None
    model.set_attn_implementation(ALL_KEYS)
    found = outputs(model, inputs)
    mask = inputs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2:
        # The outputs at padding have no meaning.
        found, own = ([x[mask.bool()] if x.shape[:2] == mask.shape else x for x in each] for each in (found, own))
    return same(found, own, TOLERANCE)


def record_of(case: Any, cls: type[PreTrainedModel]) -> dict[str, str]:
    config, inputs = case.model_tester.prepare_config_and_inputs_for_common()
    inputs = case._prepare_for_class(inputs, cls)
    model = build(cls, config)
    result = {name: tried(model, inputs, name) for name in ATTENTIONS}
    if result["skyformer"] == "works":
        equal = agrees(model, inputs)
        if equal is not None:
            result["equal to eager"] = "yes" if equal else "no"
    return result


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    root, only = Path(sys.argv[1]).resolve(), sys.argv[2:]
    prepare(root)
    skyformer.hf.register(ALL_KEYS, kernel="softmax", num_landmarks=100_000)
    record = json.loads(RECORD.read_text()) if only and RECORD.exists() else {"classes": {}}
    record["transformers"], record["torch"] = transformers.__version__, torch.__version__
    for name, case in testers(root / "tests", only):
        # The first class is the model itself; the others add heads, which have no attention.
        for cls in case.all_model_classes[:1]:
            try:
                result = record_of(case, cls)
            except Exception as error:
                print(f"{name}: {cls.__name__} was not tried: {type(error).__name__}: {first_line(error)}", flush=True)
                continue
            record["classes"][cls.__name__] = {"model": name, "config": cls.config_class.__name__, **result}
            print(name, cls.__name__, result, flush=True)
        record["classes"] = dict(sorted(record["classes"].items()))
        write_atomic(RECORD, dump_json(record))


if __name__ == "__main__":
    main()
