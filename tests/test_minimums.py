"""The lowest versions in pyproject.toml are those that `make test-minimums` installs and tests."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXTRAS = ("cli", "model", "lra", "train", "report", "ray", "hf")


def release(version: str) -> list[int]:
    """The numbers of a version, without zeros at its end."""
    numbers = [int(number) for number in version.split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return numbers


def test_declared_minimums_are_the_tested_ones() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [*project["dependencies"], *(line for name in EXTRAS for line in project["optional-dependencies"][name])]
    minimums = dict(line.split(">=") for line in declared if not line.startswith("skyformer["))
    lines = (ROOT / "constraints-minimums.txt").read_text().splitlines()
    tested = dict(line.split("==") for line in lines if re.match(r"[a-z]", line))
    assert {name: release(version) for name, version in minimums.items()} == {
        name: release(version) for name, version in tested.items()
    }
