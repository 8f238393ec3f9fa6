"""The pages agree with the code: generated tables are fresh, links work, every page is reachable, and examples run."""

from __future__ import annotations

import doctest
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

import skyformer

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
MOST_USED = (
    "kernelized_attention",
    "skyformer_attention",
    "softmax_attention",
    "kernel_product",
    "suggest_landmarks",
    "MultiheadAttention",
    "build_attention",
    "list_attentions",
    "SequenceClassifier",
    "SkyformerEncoder",
)


def test_generated_tables_are_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    script = str(ROOT / "scripts" / "pages.py")
    monkeypatch.setattr(sys, "argv", [script, "--check"])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_path(script, run_name="__main__")
    assert exit_.value.code == 0


def test_links_work() -> None:
    missing = [
        f"{page.name}: {link}"
        for page in PAGES
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
        if "://" not in link and not (page.parent / link).exists()
    ]
    assert missing == []


def test_readme_links_to_every_page() -> None:
    text = (ROOT / "README.md").read_text()
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f"docs/{page.name}" not in text] == []


@pytest.mark.parametrize("name", MOST_USED)
def test_the_example_in_the_docstring_runs(name: str) -> None:
    documented: Any = getattr(skyformer, name)
    examples = [test for test in doctest.DocTestFinder(recurse=False).find(documented, name) if test.examples]
    assert examples, f"{name} has no example in its docstring"
    results = [doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test) for test in examples]
    assert sum(result.failed for result in results) == 0
