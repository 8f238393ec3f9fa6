"""The house: each file imports only from rooms above its own, and importing the package stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import skyformer

SOURCE = Path(skyformer.__file__).parent
ROOMS = [
    "errors",
    "checks",
    "files",
    "environment",
    "processes",
    "settings",
    "ops",
    "landmarks",
    "functional",
    "suggestion",
    "attention",
    "model",
    "hf",
    "report",
    "lra",
    "training",
    "studies",
    "bench",
    "cli",
]
FILES = sorted(SOURCE.rglob("*.py"))
HEAVY = [
    "typer",
    "rich",
    "datasets",
    "transformers",
    "matplotlib",
    "pydantic",
    "lightning",
    "pytorch_lightning",
    "safetensors",
    "pandas",
    "scipy",
    "PIL",
]


def name_of(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def room_of(path: Path) -> str:
    """The first name below the package: functional for functional.py, attention for attention/base.py."""
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def imported_rooms(path: Path) -> Iterator[tuple[int, str]]:
    """Line number and room of every import from this package, wherever in the file it stands."""
    package = ("skyformer", *path.relative_to(SOURCE).parent.parts)
    for node in ast.walk(ast.parse(path.read_text())):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module or "")))
            # `from skyformer import x` names a room, or what __init__ gathers from all of them.
            modules = [f"{module}.{alias.name}" for alias in node.names] if module == "skyformer" else [module]
        for module in modules:
            parts = module.split(".")
            if parts[0] == "skyformer":
                yield node.lineno, parts[1] if len(parts) > 1 else ""


def fresh_interpreter(code: str) -> str:
    """What `code` prints in an interpreter of its own."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    return done.stdout


def test_there_is_a_house() -> None:
    assert "ops/products.py" in [name_of(path) for path in FILES]


@pytest.mark.parametrize("path", [path for path in FILES if path != SOURCE / "__init__.py"], ids=name_of)
def test_imports_come_from_rooms_above(path: Path) -> None:
    own = room_of(path)
    assert own in ROOMS, f"{name_of(path)} stands in no known room"
    above = {own, *ROOMS[: ROOMS.index(own)]}
    wrong = [f"line {line}: skyformer.{room}" for line, room in imported_rooms(path) if room not in above]
    assert not wrong, f"{name_of(path)} imports from below: {wrong}"


def test_a_wrong_import_would_be_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "attention" / "odd.py"
    file.parent.mkdir()
    file.write_text(
        "import skyformer.cli.main\nfrom skyformer import report\n"
        "def f():\n    from ..multihead import MultiheadAttention\nfrom .base import Attention\nimport torch\n"
    )
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", tmp_path)
    assert sorted(imported_rooms(file)) == [(1, "cli"), (2, "report"), (4, "multihead"), (5, "attention")]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_file_opens_with_a_docstring(path: Path) -> None:
    assert (ast.get_docstring(ast.parse(path.read_text())) or "").strip()


def test_import_brings_in_nothing_heavy() -> None:
    # Against torch alone, for torch may bring in some of these itself.
    code = "import sys, torch\nbefore = set(sys.modules)\nimport skyformer\nprint(*set(sys.modules) - before)"
    brought = {module.split(".")[0] for module in fresh_interpreter(code).split()}
    assert "skyformer" in brought
    assert brought.isdisjoint(HEAVY)


@pytest.mark.timing
def test_import_is_quick() -> None:
    code = "import time, torch\nstart = time.perf_counter()\nimport skyformer\nprint(time.perf_counter() - start)"
    assert min(float(fresh_interpreter(code)) for _ in range(3)) < 0.3
