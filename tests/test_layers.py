"""The layers: modules import only from earlier layers, and `import skyformer` needs only torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import skyformer
from skyformer.errors import install_command

SOURCE = Path(skyformer.__file__).parent
LAYERS = [
    "errors",
    "checks",
    "registry",
    "files",
    "environment",
    "processes",
    "settings",
    "ops",
    "landmarks",
    "functional",
    "attention",
    "testing",
    "model",
    "distributed",
    "hf",
    "report",
    "lra",
    "own",
    "training",
    "studies",
    "cli",
    "__main__",
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


def layer_of(path: Path) -> str:
    """The first name below the package: functional for functional.py, attention for attention/base.py."""
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line number and layer of every import from this package, at any depth of the file."""
    package = ("skyformer", *path.relative_to(SOURCE).parent.parts)
    for node in ast.walk(ast.parse(path.read_text())):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module or "")))
            # `from skyformer import x` names a layer, or a public name that __init__ imports from any of them.
            modules = [f"{module}.{alias.name}" for alias in node.names] if module == "skyformer" else [module]
        for module in modules:
            parts = module.split(".")
            if parts[0] == "skyformer":
                yield node.lineno, parts[1] if len(parts) > 1 else ""


def fresh_interpreter(code: str) -> str:
    """What `code` prints in a new interpreter."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    return done.stdout


def wrong_imports(path: Path) -> list[str]:
    """Imports of one file that come from its own layer's successors."""
    own = layer_of(path)
    allowed = {own, *LAYERS[: LAYERS.index(own)]}
    return [
        f"{name_of(path)}:{line} imports skyformer.{layer}" for line, layer in imports(path) if layer not in allowed
    ]


def test_modules_import_only_from_earlier_layers() -> None:
    modules = [path for path in FILES if path != SOURCE / "__init__.py"]
    unknown = [name_of(path) for path in modules if layer_of(path) not in LAYERS]
    assert not unknown, f"add the layer of these files to LAYERS: {unknown}"
    assert [wrong for path in modules for wrong in wrong_imports(path)] == []


def test_finds_imports_in_every_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "attention" / "odd.py"
    file.parent.mkdir()
    file.write_text(
        "import skyformer.cli.main\nfrom skyformer import report\n"
        "def f():\n    from ..functional import softmax_attention\nfrom .base import Attention\nimport torch\n"
    )
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", tmp_path)
    assert sorted(imports(file)) == [(1, "cli"), (2, "report"), (4, "functional"), (5, "attention")]


def test_every_file_opens_with_a_docstring() -> None:
    without = [name_of(path) for path in FILES if not (ast.get_docstring(ast.parse(path.read_text())) or "").strip()]
    assert without == []


def test_import_loads_no_optional_dependency() -> None:
    # Compared with torch alone, because torch may import some of these itself.
    code = "import sys, torch\nbefore = set(sys.modules)\nimport skyformer\nprint(*set(sys.modules) - before)"
    imported = {module.split(".")[0] for module in fresh_interpreter(code).split()}
    assert "skyformer" in imported
    assert imported.isdisjoint(HEAVY)


def test_public_names_are_there_and_nothing_else() -> None:
    assert dir(skyformer) == sorted([*skyformer.__all__, "__version__"])
    assert {"ModelConfig", "PairClassifier", "SequenceClassifier", "SkyformerEncoder"} < set(skyformer.__all__)
    assert all(getattr(skyformer, name).__name__ == name for name in skyformer.__all__)
    with pytest.raises(AttributeError, match="no attribute 'SequenceClasifier'"):
        skyformer.SequenceClasifier  # noqa: B018


HIDE = """
import importlib.abc, sys
class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {package!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hidden())
"""


def test_without_pydantic_everything_but_the_models_works() -> None:
    attempt = """
import inspect, skyformer
from skyformer import *
inspect.getmembers(skyformer)
build_attention("skyformer", 2, 8)
load, enter = lambda **_: SkyformerEncoder.from_pretrained("folder"), lambda **_: __import__("skyformer.model")
for use in (SequenceClassifier, load, enter):
    try:
        use(vocab_size=4, max_length=8)
    except skyformer.errors.MissingExtraError as missing:
        print(missing)
"""
    message = f"'pydantic' is not installed: {install_command('model')}"
    assert fresh_interpreter(HIDE.format(package="pydantic") + attempt).splitlines() == [message] * 3


def test_without_safetensors_models_work_but_cannot_be_saved() -> None:
    attempt = """
import skyformer, tempfile
model = skyformer.SequenceClassifier(vocab_size=4, max_length=8, attention="softmax")
try:
    model.save_pretrained(tempfile.mkdtemp())
except skyformer.errors.MissingExtraError as missing:
    print(missing)
"""
    assert fresh_interpreter(HIDE.format(package="safetensors") + attempt).strip() == (
        f"'safetensors' is not installed: {install_command('model')}"
    )


@pytest.mark.timing
def test_import_is_quick() -> None:
    code = "import time, torch\nstart = time.perf_counter()\nimport skyformer\nprint(time.perf_counter() - start)"
    assert min(float(fresh_interpreter(code)) for _ in range(3)) < 0.3
