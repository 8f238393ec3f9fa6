"""Try our attentions in every base model class of transformers, and record what happened.

    python tests/outside/families.py TESTS [MODEL ...] [--again]

TESTS is a folder that contains the folder `tests` of a copy of transformers. The classes are built as small as those
tests build them. The record is results/outside/families.json, from which the file is made that `skyformer.hf.supports`
and the docs read. Every file of tests is run in a process of its own, forked from one that has imported everything, and
with limits of time and memory. A run continues where the last one stopped with the same versions; with `--again` it
starts anew, and with names of models (bert, vit, ...) only these are tried again.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import logging
import os
import resource
import signal
import sys
import tempfile
import time
import unittest
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

# Forking is safe only in a process of one thread, and no test may wait for the network.
os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from skyformer.files import dump_json, write_atomic
from skyformer.hf.families import KINDS

sys.path.insert(0, str(Path(__file__).parent))
from borrowed import prepare
from matrix import record as record_suite
from outcomes import TRIALS, write_groups
from trial import first_line, record_of_case, record_of_text_model, register_softmax

SECONDS_PER_CLASS, SECONDS_PER_FILE, SECONDS_WITHOUT_TESTS = 60, 240, 15
BYTES_PER_FILE = 6 * 2**30
NOT_TRIED = "not tried: "


def base_classes() -> dict[str, str]:
    """The base model of every model type, by the name of its class."""
    found = {}
    for kind, names in MODEL_MAPPING_NAMES.items():
        for name in [names] if isinstance(names, str) else names:
            found.setdefault(name, kind)
    return found


def cases_of(module: Any) -> Iterator[type[unittest.TestCase]]:
    for cls in vars(module).values():
        if isinstance(cls, type) and issubclass(cls, unittest.TestCase) and cls.__module__ == module.__name__:
            yield cls


def classes_of(case: Any, bases: dict[str, str]) -> list[type[PreTrainedModel]]:
    """The base models that a test case builds. If it lists models with a head only, the first stands for its base."""
    listed = [cls for cls in getattr(case, "all_model_classes", ()) or () if isinstance(cls, type)]
    return [cls for cls in listed if cls.__name__ in bases] or listed[:1]


@contextmanager
def limit(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"it took longer than {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def try_file(file: Path, bases: dict[str, str], out: Path) -> None:
    """In the forked process: one line of JSON for every class, and one before it, in case the process dies."""

    def tell(name: str, row: dict[str, str]) -> None:
        with out.open("a") as handle:
            handle.write(json.dumps([name, row]) + "\n")

    model = file.parent.name
    try:
        with limit(SECONDS_PER_CLASS):
            module = importlib.import_module(f"tests.models.{model}.{file.stem}")
    except BaseException as error:
        tell(f"{file.stem} (no class)", {"outcome": f"{NOT_TRIED}{type(error).__name__}: {first_line(error)}"})
        return
    for kind in cases_of(module):
        try:
            with limit(SECONDS_PER_CLASS):
                case: Any = kind()
                case.setUp()
            classes = classes_of(case, bases)
        except BaseException as error:
            classes = classes_of(kind, bases)
            for cls in classes:
                tell(cls.__name__, {"outcome": f"{NOT_TRIED}setUp: {type(error).__name__}: {first_line(error)}"})
            continue
        for cls in classes:
            about = {"model": model, "config": getattr(cls.config_class, "__name__", "")}
            tell(cls.__name__, {**about, "outcome": "fault: the process died or took too long"})
            try:
                with limit(SECONDS_PER_CLASS):
                    tell(cls.__name__, {**about, **record_of_case(case, cls)})
            except BaseException as error:
                tell(cls.__name__, {**about, "outcome": f"{NOT_TRIED}{type(error).__name__}: {first_line(error)}"})


def try_text_model(name: str, out: Path) -> None:
    """In the forked process: a class without tests, if it can be made as a model of texts."""
    try:
        with limit(SECONDS_WITHOUT_TESTS):
            cls = getattr(transformers, name)
            if cls.config_class.sub_configs or "input_ids" not in inspect.signature(cls.forward).parameters:
                raise TypeError("it is not a model of texts alone")
            about = {"model": cls.__module__.split(".")[-2], "config": cls.config_class.__name__}
            row = {**about, **record_of_text_model(cls)}
    except BaseException as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        row = {"outcome": f"{NOT_TRIED}no tests in this copy, and a small model of texts cannot be made ({reason})"}
    out.write_text(json.dumps([name, row]))


def in_a_process(run: Callable[[Path], None]) -> dict[str, dict[str, str]]:
    """The rows by class that a function writes; the first complete row of a class counts."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.jsonl"
        out.touch()
        child = os.fork()
        if child == 0:
            try:
                resource.setrlimit(resource.RLIMIT_AS, (BYTES_PER_FILE, BYTES_PER_FILE))
                with Path(os.devnull).open("w") as null:
                    os.dup2(null.fileno(), 1)
                    os.dup2(null.fileno(), 2)
                    run(out)
            finally:
                os._exit(0)
        end = time.monotonic() + SECONDS_PER_FILE
        while os.waitpid(child, os.WNOHANG)[0] == 0:
            if time.monotonic() > end:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                break
            time.sleep(0.05)
        rows: dict[str, dict[str, str]] = {}
        for line in out.read_text().splitlines():
            name, row = json.loads(line)
            if KINDS[0] not in rows.get(name, {}):
                rows[name] = row
        return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", type=Path)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--again", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    root = options.tests.resolve()
    prepare(root)
    importlib.import_module("tests.causal_lm_tester")
    register_softmax()
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    record: dict[str, Any] = json.loads(TRIALS.read_text()) if TRIALS.exists() else {}
    if options.again or any(record.get(name) != version for name, version in versions.items()):
        record = {**versions, "files": {}}
    bases = base_classes()
    for file in sorted((root / "tests" / "models").glob("*/test_modeling_*.py")):
        name = f"{file.parent.name}/{file.name}"
        if options.models and file.parent.name not in options.models:
            continue
        if name in record["files"] and not options.models:
            continue
        begin = time.monotonic()
        record["files"][name] = in_a_process(partial(try_file, file, bases))
        print(f"{time.monotonic() - begin:.1f} s {name}", json.dumps(record["files"][name]), flush=True)
        record["files"] = dict(sorted(record["files"].items()))
        write_atomic(TRIALS, dump_json(record))
    if not options.models:
        tried = {name for rows in record["files"].values() for name in rows}
        for name in sorted(set(bases) - tried):
            record["files"][f"{name} (no tests)"] = in_a_process(partial(try_text_model, name))
            print(name, json.dumps(record["files"][f"{name} (no tests)"]), flush=True)
            write_atomic(TRIALS, dump_json(record))
    write_atomic(TRIALS, dump_json(record))
    found = write_groups()
    faults = [group for group in found["groups"] if any("fault" in group[kind] for kind in KINDS)]
    record_suite(
        "model classes",
        sum(len(group["classes"]) for group in found["groups"] if group not in faults),
        sum(map(len, found["not tried"].values())),
        [name for group in faults for name in group["classes"]] + found["equal to eager"]["different"],
    )


if __name__ == "__main__":
    main()
