"""The release: wheel and sdist pass twine and are complete, and every extra works in a clean environment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

import skyformer

ROOT = Path(__file__).parent.parent
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
DATA = ["py.typed", "cli/index.json", "report/page.html", "studies/authors.safetensors", "training/presets/paper.yaml"]


def run(*words: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Without PYTHONPATH, which would put this tree in the place of the installed wheel."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(list(map(str, words)), cwd=cwd, env=clean, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the sdist, from a copy of the tree so that building leaves nothing behind."""
    pytest.importorskip("build")
    tree = tmp_path_factory.mktemp("tree") / "skyformer"
    leave_out = shutil.ignore_patterns(".git", ".venv*", "build", "results", "*.egg-info", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, tree, ignore=leave_out, symlinks=True)
    done = run(sys.executable, "-m", "build", "--no-isolation", "--outdir", tree / "dist", tree)
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,), (sdist,) = (tree / "dist").glob("*.whl"), (tree / "dist").glob("*.tar.gz")
    return wheel, sdist


def test_both_pass_twine_and_hold_the_package(built: tuple[Path, Path]) -> None:
    wheel, sdist = built
    assert wheel.name == f"skyformer-{skyformer.__version__}-py3-none-any.whl"
    checked = run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
    assert checked.returncode == 0, checked.stdout
    inside = set(zipfile.ZipFile(wheel).namelist())
    assert [name for name in DATA if f"skyformer/{name}" not in inside] == []
    modules = {f"skyformer/{file.relative_to(ROOT / 'src/skyformer')}" for file in ROOT.glob("src/skyformer/**/*.py")}
    assert modules <= inside
    with tarfile.open(sdist) as archive:
        source = {name.partition("/")[2] for name in archive.getnames()}
    assert {"CHANGELOG.md", "CITATION.cff", "LICENSE", "docs/index.md", "tests/test_release.py"} <= source


def test_versions_agree() -> None:
    """The package, the changes and the citation name one version."""
    assert f"version: {skyformer.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    headings = re.findall(r"^## \[?([\w.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert skyformer.__version__ in headings[:2]


def test_the_workflow_runs_the_tests() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())
    assert "make test" in [step.get("run") for step in workflow["jobs"]["test"]["steps"]]


# One command for each extra, in the order of installation: each needs nothing of a later one.
COMMANDS = {
    "model": "from skyformer import SequenceClassifier; SequenceClassifier(vocab_size=9, max_length=9)",
    "cli": "bench attention --small --lengths 64 --output bench",
    "lra": "data prepare listops --limit 20 --max-length 64 --data-dir data",
    "hf": "import skyformer.hf; skyformer.hf.SkyformerConfig(vocab_size=9)",
    "train": "train listops --preset cpu --steps 2 --data-dir data --runs-dir runs --set task.limit=20 "
    "--set task.max_length=64 --set optim.warmup_steps=1",
    "report": "report runs bench -o report.html",
    "testing": "from skyformer.testing import AttentionSuite",
    "peers": "bench attention --small --lengths 64 --peers --output peers",
}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_extra_works_in_a_clean_environment(built: tuple[Path, Path], tmp_path: Path) -> None:
    """With torch alone the package can be imported; each command names its extra first, and works once it is there."""
    wheel, _ = built
    assert set(COMMANDS) == set(EXTRAS) - {"ray", "docs", "dev"}
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"

    def call(command: str) -> subprocess.CompletedProcess[str]:
        words = ["-c", command] if " import " in command or command.startswith("import") else []
        return run(python, *(words or ["-m", "skyformer", *command.split()]), cwd=tmp_path)

    def install(what: str) -> None:
        done = run(python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", what)
        assert done.returncode == 0, done.stderr[-2000:]

    install(str(wheel))
    first = "import torch, skyformer; q = torch.randn(1, 2, 50, 8); print(skyformer.skyformer_attention(q, q, q).shape)"
    assert "torch.Size([1, 2, 50, 8])" in call(first).stdout
    assert str(tmp_path) in call("import skyformer; print(skyformer.__file__)").stdout
    listed = run(python, "-m", "pip", "list", "--format", "freeze").stdout.lower()
    assert not re.search(r"^(typer|pydantic|lightning|transformers|matplotlib)==", listed, re.MULTILINE)
    for extra, command in COMMANDS.items():
        # The option --peers measures those that are installed, so it does not fail without them.
        if extra != "peers":
            missing = call(command)
            advice = rf"is not installed: pip install '[^']*\[[\w,]*{extra}[\w,]*\]'"
            assert missing.returncode != 0, command
            assert re.search(advice, missing.stderr), missing.stderr
        install(f"{wheel}[{extra}]")
        done = call(command)
        assert done.returncode == 0, f"{extra}: {done.stderr[-1500:]}"
    assert call("--version").stdout.strip() == f"skyformer {skyformer.__version__}"
