"""Every example runs, and prints what it promises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
CASES = {
    "functional.py": ([], "relative error"),
    "drop_in.py": ([], "a transformer layer with skyformer inside"),
    "train_hf.py": (["--steps", "3"], "skyformer after 3 steps:"),
    "convert_minilm.py": (
        f"embeddings --model tiny --text {__file__} --passages 2 --length 64 --landmarks 16 --threads 1".split(),
        "cosine similarity to the exact embeddings",
    ),
    "million_tokens.py": (["--tokens", "20000"], "20,000 tokens, forward and backward"),
}


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_example_runs(name: str, tmp_path: Path) -> None:
    arguments, promised = CASES[name]
    command = [sys.executable, "-W", "error", str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert promised in done.stdout
