"""Keeps the tests away from the user's own data."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty data folder, which is the default one during the test."""
    folder = tmp_path / "data"
    monkeypatch.setenv("SKYFORMER_DATA", str(folder))
    return folder
