"""Errors say what they said wherever they are read, also in another process."""

from __future__ import annotations

import json
import pickle
from importlib import metadata
from pathlib import Path

import pytest

from skyformer import errors
from skyformer.errors import (
    InputError,
    InterruptedRunError,
    MissingExtraError,
    SkyformerError,
    UnknownNameError,
    install_command,
)


@pytest.mark.parametrize(
    "error",
    [
        InputError("x must be 1; got 2"),
        UnknownNameError("kernel", "gausian", ["gaussian"]),
        InterruptedRunError("stopped", 15),
        MissingExtraError("ray", "ray"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_survives_the_way_between_processes(error: SkyformerError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert again.exit_code == error.exit_code


class TestInstallCommand:
    """It names what is at hand, because `skyformer` on the package index is another package."""

    def test_of_a_clone(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "pyproject.toml").touch()
        monkeypatch.setattr(errors, "__file__", str(tmp_path / "src" / "skyformer" / "errors.py"))
        assert install_command("train") == f"pip install '{tmp_path}[train]'"
        assert str(MissingExtraError("ray")) == f"'ray' is not installed: pip install '{tmp_path}[ray]'"

    @pytest.mark.parametrize("still_there", [True, False])
    def test_of_a_wheel(self, still_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        wheel = tmp_path / "my wheels" / "skyformer-0.1.0-py3-none-any.whl"
        wheel.parent.mkdir()
        if still_there:
            wheel.touch()
        monkeypatch.setattr(errors, "__file__", str(tmp_path / "lib" / "skyformer" / "errors.py"))
        monkeypatch.setattr(metadata, "distribution", lambda _: metadata.PathDistribution(tmp_path))
        monkeypatch.setattr(metadata.PathDistribution, "read_text", lambda *_: json.dumps({"url": wheel.as_uri()}))
        command = install_command("train")
        assert command == (
            f"pip install '{wheel}[train]'" if still_there else "pip install '.[train]' in a clone of this package"
        )

    def test_of_an_unknown_origin(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(errors, "__file__", str(tmp_path / "lib" / "skyformer" / "errors.py"))

        def missing(_: str) -> None:
            raise metadata.PackageNotFoundError

        monkeypatch.setattr(metadata, "distribution", missing)
        assert install_command("train") == "pip install '.[train]' in a clone of this package"
