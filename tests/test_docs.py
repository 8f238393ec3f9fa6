"""The pages agree with the code: generated tables are fresh, links work, and their code runs."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from skyformer.lra import prepare
from skyformer.training.config import RunConfig
from tests.training.in_process import InProcess
from tests.training.tiny import tiny_config

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
WRITTEN_BY_THE_SITE = ROOT / "docs" / "commands.md"
PAGES = [page for page in PAGES if page != WRITTEN_BY_THE_SITE]


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
        if "://" not in link and not (page.parent / link).exists() and page.parent / link != WRITTEN_BY_THE_SITE
    ]
    assert missing == []


def blocks(page: Path) -> list[str]:
    """The Python code of a page, in order."""
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


OWN_TESTS = {
    "huggingface.md": "hf/test_docs.py",
    "huggingface_model.md": "hf/test_docs.py",
    "extending.md": "test_extending.py",
    "own_data.md": "own/test_docs.py",
    "distributed.md": "distributed/test_docs.py",
}
"""Pages whose code runs in other tests, for example with small models in place of those on the hub."""


def test_other_tests_run_the_code_of_the_other_pages() -> None:
    assert [page for page, test in OWN_TESTS.items() if page not in (ROOT / "tests" / test).read_text()] == []


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page) and page.name not in OWN_TESTS], ids=str)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page run in order, as a reader would run them, with tiny runs in place of trainings."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SKYFORMER_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("SKYFORMER_RUNS", str(tmp_path / "runs"))
    if "load_preset" in page.read_text() or "plan(" in page.read_text():
        monkeypatch.setattr("skyformer.training.presets.load_preset", _tiny_preset)
        monkeypatch.setattr("skyformer.training.sweeps.load_preset", _tiny_preset)
        monkeypatch.setattr("skyformer.training.sweeps.LocalExecutor", InProcess)
        prepare("listops", limit=64, max_length=64)
    names: dict[str, Any] = {}
    for block in blocks(page):
        exec(block, names)
    assert all(outcome.result is not None for outcome in names.get("outcomes", ()))


def _tiny_preset(task: str, preset: str = "", *, attention: str = "skyformer", seed: int = 0, **_: Any) -> RunConfig:
    return tiny_config(attention=attention, seed=seed, options={}, steps=4)
