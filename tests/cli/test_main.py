"""The `skyformer` command itself: missing packages become one line, and real bugs stay tracebacks."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from skyformer.cli import main as command
from skyformer.errors import EXTRA_OF_MODULE
from tests.cli.typed import CommandLine

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
DISTRIBUTIONS = {"PIL": "pillow", "yaml": "pyyaml"}


def without(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command fails as if `module` were not installed."""

    def fail(arguments: list[str]) -> None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr(command, "build_app", lambda: fail)


@pytest.mark.parametrize(("module", "extra"), [("typer", "cli"), ("lightning.pytorch", "train"), ("ray", "ray")])
def test_a_missing_package_is_reported_with_its_extra(
    module: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without(module, monkeypatch)
    outcome = CommandLine(monkeypatch, capsys)("train", "listops")
    assert outcome.code == 2
    package = module.partition(".")[0]
    assert outcome.errors == (
        f"error: {package!r} is not installed: pip install 'skyformer[{extra}]', "
        f"or in a clone pip install '.[{extra}]'\n"
    )


def test_a_missing_module_of_no_extra_stays_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    without("skyformer.trainning", monkeypatch)
    with pytest.raises(ModuleNotFoundError):
        command.main()


def test_every_module_belongs_to_an_extra_that_installs_it() -> None:
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    for module, extra in EXTRA_OF_MODULE.items():
        if module == "pyarrow":
            continue  # installed by datasets
        names = [re.split("[<>=!]", requirement)[0] for requirement in extras[extra]]
        assert DISTRIBUTIONS.get(module, module.replace("_", "-")) in names


def test_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "skyformer", "--help"], capture_output=True, text=True, check=True)
    assert "Usage" in done.stdout
    assert "sweep" in done.stdout
