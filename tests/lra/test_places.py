"""Where data lies."""

from __future__ import annotations

from pathlib import Path

import platformdirs
import pytest

from skyformer.lra.places import data_dir_or_default


def test_given_then_environment_then_platform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYFORMER_DATA", str(tmp_path / "environment"))
    assert data_dir_or_default(tmp_path / "given") == tmp_path / "given"
    assert data_dir_or_default() == tmp_path / "environment"
    monkeypatch.delenv("SKYFORMER_DATA")
    assert data_dir_or_default() == platformdirs.user_data_path("skyformer", appauthor=False)
