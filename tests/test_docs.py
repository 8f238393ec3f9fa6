"""The pages agree with the code: generated tables are fresh, links work, and every page is reachable."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


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
