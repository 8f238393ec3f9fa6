"""Every example runs and prints its result."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"
CASES = {
    "functional.py": ([], "relative error"),
    "drop_in.py": ([], "a transformer layer with skyformer attention"),
    "train_hf.py": (["--steps", "3"], "skyformer after 3 steps:"),
    "convert_minilm.py": (
        f"--model tiny --text {__file__} --passages 2 --length 64 --landmarks 16".split(),
        "cosine similarity to the exact embeddings",
    ),
    "million_tokens.py": (["--tokens", "20000"], "20,000 tokens, forward and backward"),
    "sequence_parallel.py": (["--tokens", "20000"], "over 1 ranks, the output differs from that of one process"),
}


@pytest.fixture(autouse=True)
def _threads_restored() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_example_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, because a new one would spend most of its time on imports."""
    arguments, promised = CASES[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert promised in capsys.readouterr().out
