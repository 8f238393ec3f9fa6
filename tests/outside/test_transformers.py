"""transformers' own tests of models, on the Skyformer models, in a process of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.outside.borrowed import VARIABLE, folder
from tests.outside.matrix import record
from tests.outside.skips import justification

HERE = Path(__file__).parent
REQUIRED = (
    "test_attention_outputs",
    "test_capture_outputs_decorator",
    "test_config",
    "test_inputs_embeds_matches_input_ids",
    "test_model_outputs_equivalence",
    "test_retain_grad_hidden_states_attentions",
    "test_save_load",
    "test_sdpa_can_dispatch_non_composite_models",
)
"""Tests that must have run and passed."""


@dataclass(frozen=True)
class Result:
    """The names of the tests, and the message of each skip."""

    passed: frozenset[str]
    failed: frozenset[str]
    skipped: dict[str, str]


def run(suite: str, work: Path, *options: str, **variables: str) -> Result:
    """Run a suite in a folder of its own, so that the package `tests` is that of transformers."""
    report = work / f"{suite}.xml"
    shutil.copy(HERE / "borrowed.py", work)
    shutil.copy(HERE / f"{suite}.py", work / f"test_{suite}.py")
    common = ["-p", "no:cacheprovider", "-q", "-c", os.devnull, "--rootdir", str(work), f"--junitxml={report}"]
    subprocess.run(
        [sys.executable, "-m", "pytest", *common, f"test_{suite}.py", *options],
        env={**os.environ, "RUN_SLOW": "1", "HF_HUB_OFFLINE": "1", **variables},
        cwd=work,
        check=False,
    )
    passed, failed, skipped = set[str](), set[str](), dict[str, str]()
    for case in ElementTree.parse(report).iter("testcase"):
        name, skip = case.attrib["name"], case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            failed.add(name)
        elif skip is not None:
            skipped[name] = skip.attrib.get("message", "")
        else:
            passed.add(name)
    return Result(frozenset(passed - failed), frozenset(failed), skipped)


_bert: dict[frozenset[str], frozenset[str]] = {}
"""The tests that BERT fails, by the tests that were asked for: the same for every attention."""


def fails_with_bert(names: frozenset[str], work: Path) -> frozenset[str]:
    """Those tests that transformers' own BERT fails as well: the copy is of another version than the one installed."""
    if names and names not in _bert:
        _bert[names] = run("control_suite", work, "-k", " or ".join(sorted(names))).failed & names
    return _bert.get(names, names)


@pytest.mark.outside
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("attention", "implementation"), [("softmax", None), ("skyformer", None), ("skyformer", "kernelized")]
)
def test_the_models_pass_the_tests_of_transformers(attention: str, implementation: str | None, tmp_path: Path) -> None:
    if folder() is None:
        pytest.skip(f"{VARIABLE} names no folder with the tests of transformers; see docs/outside_tests.md")
    chosen = {"SKYFORMER_IMPLEMENTATION": implementation} if implementation else {}
    found = run("model_suite", tmp_path, SKYFORMER_ATTENTION=attention, **chosen)
    outdated = fails_with_bert(found.failed, tmp_path)
    reasons = {name: justification(message) for name, message in found.skipped.items()}
    suite = f"ModelTesterMixin, {attention}" + (f", attn_implementation={implementation}" if implementation else "")
    failed = sorted(found.failed - outdated)
    record(suite, len(found.passed), len(reasons), failed, sorted(outdated), reasons)
    assert failed == []
    assert [found.skipped[name] for name, reason in reasons.items() if reason is None] == []
    assert [name for name in REQUIRED if name not in found.passed] == []
