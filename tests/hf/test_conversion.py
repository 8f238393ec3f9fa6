"""examples/convert_minilm.py on a tiny model and a few made-up reviews: every part, and going on after a stop."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.lra.fake_files import review_files, write_folder

SCRIPT = Path(__file__).parent.parent.parent / "examples" / "convert_minilm.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("convert_minilm", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # The limit would stay with the process that runs the tests.
    monkeypatch.setattr(module, "limit_memory", lambda _: None)
    return module


@pytest.fixture
def reviews(tmp_path: Path) -> Path:
    return write_folder(tmp_path, review_files(60)) / "aclImdb"


def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> str:
    """What the script prints."""
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments), "--model", "tiny", "--threads", "1"])
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        script.main()
    return printed.getvalue()


def test_fine_tuning_goes_on_where_it_stopped(
    script: ModuleType, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    sizes = ("--steps", 3, "--batch", 4, "--length", 20, "--test-reviews", 8)
    run(script, monkeypatch, "finetune", "--imdb", reviews, "--output", out, *sizes, "--attention", "skyformer")
    first = json.loads((out / "finetune-skyformer.json").read_text())
    assert 0 <= first["results"]["accuracy"] <= 1
    assert len(first["results"]["losses"]) == 3
    names = ("softmax", "skyformer")
    shown = run(script, monkeypatch, "finetune", "--imdb", reviews, "--output", out, *sizes, "--attention", *names)
    assert json.loads((out / "finetune-skyformer.json").read_text()) == first
    assert "softmax: step 0" in shown
    assert "skyformer: step" not in shown
    with pytest.raises(SystemExit, match=r"finetune-softmax.json was made with steps = 3, not 4"):
        run(script, monkeypatch, "finetune", "--imdb", reviews, "--output", out, *sizes, "--steps", 4)
    run(script, monkeypatch, "finetune", "--imdb", reviews, "--output", out, *sizes, "--time-only", "--repeats", 2)
    times = json.loads((out / "finetune-times.json").read_text())["results"]
    assert (times["batch"], times["length"]) == (4, 17)
    assert list(times["seconds"]) == list(script.FINETUNED)
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in times["seconds"].values())


def test_embeddings_go_on_where_they_stopped(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "SAMPLERS", ("queries",))
    wanted = ("embeddings", "--text", SCRIPT, "--passages", 3, "--length", 40, "--output", tmp_path)
    run(script, monkeypatch, *wanted, "--landmarks", 8)
    shown = run(script, monkeypatch, *wanted, "--landmarks", 8, 80)
    assert "softmax, queries, d=80" in shown
    assert "softmax, queries, d=8:" not in shown
    cases = json.loads((tmp_path / "embeddings.json").read_text())["results"]["cases"]
    closeness = {case["num_landmarks"]: case["mean"] for case in cases if case["landmarks"] == "queries"}
    assert closeness[8] < 0.9999 < closeness[80]


def test_recorded_commands_do_not_say_where_things_lie(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    typed = ["finetune", "--model", "/a/model", "--imdb", "/b/imdb.tar", "--output", "/c/out", "--steps", "3"]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *typed])
    written = "python examples/convert_minilm.py finetune --model MODEL --imdb REVIEWS --steps 3"
    assert script.command(script.parse()) == written


def test_long_texts_are_measured(
    script: ModuleType, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_this_process(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if command[command.index("--one") + 1] == "kernelized":
            return subprocess.CompletedProcess(command, 1, "", "no memory left")
        printed = io.StringIO()
        with monkeypatch.context() as patch, contextlib.redirect_stdout(printed):
            patch.setattr(sys, "argv", command[1:])
            script.main()
        return subprocess.CompletedProcess(command, 0, printed.getvalue(), "")

    monkeypatch.setattr(script.subprocess, "run", in_this_process)
    names = ("softmax", "skyformer", "kernelized")
    wanted = ("--imdb", reviews, "--output", tmp_path, "--collections", 1, "--reviews", 120, "--attention", *names)
    with pytest.raises(SystemExit, match="too short for 1 passages of 9000"):
        run(script, monkeypatch, "long", *wanted, "--length", 9000)
    shown = run(script, monkeypatch, "long", *wanted, "--length", 600)
    assert "over 4 GB" in shown
    results = json.loads((tmp_path / "long.json").read_text())["results"]["runs"]
    assert [(r["attention"], r["training"]) for r in results] == [(n, t) for n in names for t in (False, True)]
    assert results[-1]["failed"] == "no memory left"
    assert results[0]["cosine_to_softmax"] == pytest.approx(1.0, abs=1e-5)
    run(script, monkeypatch, "long", *wanted, "--length", 600, "--time-only", "--repeats", 1)
    times = json.loads((tmp_path / "long-times.json").read_text())["results"]["seconds"]
    assert list(times) == [f"{name}, {kind}" for name in ("softmax", "skyformer") for kind in ("forward", "training")]
    monkeypatch.setattr(script.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, "", "!"))
    with pytest.raises(SystemExit, match="softmax failed: !"):
        run(script, monkeypatch, "long", *wanted)
    with pytest.raises(SystemExit, match=r"long.json is missing.*first run long"):
        run(script, monkeypatch, "long", "--imdb", reviews, "--output", tmp_path / "none", "--time-only")
