"""transformers' own tests of models, on the Skyformer models, in a process of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.outside.borrowed import VARIABLE, folder
from tests.outside.matrix import record

HERE = Path(__file__).parent
KNOWN_FAILURES = {
    "test_capture_outputs_decorator": "it asks for attention weights, which the attentions of the config never compute",
    "test_config": "it sets output_attentions=True, which the config refuses for the same reason",
}
"""Tests that fail by definition, each with its reason."""


@pytest.mark.outside
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("attention", ["softmax", "skyformer"])
def test_the_models_pass_the_tests_of_transformers(attention: str, tmp_path: Path) -> None:
    root = folder()
    if root is None:
        pytest.skip(f"{VARIABLE} names no folder with the tests of transformers; see docs/outside_tests.md")
    report = tmp_path / "report.xml"
    shutil.copy(HERE / "borrowed.py", tmp_path)
    shutil.copy(HERE / "model_suite.py", tmp_path / "test_model.py")
    options = ["-q", "-c", os.devnull, "--rootdir", str(tmp_path), f"--junitxml={report}"]
    subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, "test_model.py"],
        env={**os.environ, "SKYFORMER_ATTENTION": attention},
        cwd=tmp_path,
        check=False,
    )
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = sorted(
        {case.attrib["name"] for case in cases if case.find("failure") is not None or case.find("error") is not None}
    )
    skipped = sum(case.find("skipped") is not None for case in cases)
    record(f"ModelTesterMixin, {attention}", len(cases) - skipped - len(failed), skipped, failed)
    assert [name for name in failed if name not in KNOWN_FAILURES] == []
