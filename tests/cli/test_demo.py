"""`skyformer demo`: the authors' outputs, timings and two trainings, with files and words that agree with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from skyformer.cli.demo import _command
from skyformer.errors import TrainingError
from skyformer.studies import demo
from skyformer.studies.demo import (
    SYMBOLS,
    Training,
    compare_with_authors,
    sequences,
    share_of_cores,
    time_attentions,
    train,
)
from tests.cli.conftest import CommandLine
from tests.helpers import authors_outputs


def test_the_whole_demo(skyformer: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("skyformer.report.figures.FORMATS", ("svg",))
    monkeypatch.setattr(demo, "TEST_SEQUENCES", 16)
    folder = tmp_path / "my run"
    done = skyformer("demo", "--output", folder, "--seconds", 1, "--longest", 1024, "--length", 64, "--threads", 1)
    assert done.code == 0, done.errors
    assert {file.name for file in folder.iterdir()} == {"demo.json", "speed.svg", "training.svg"}
    stored = json.loads((folder / "demo.json").read_text())
    assert [timing["attention"] for timing in stored["timings"]] == ["softmax", "kernelized", "skyformer"]
    assert all(timing["seconds"] > 0 for timing in stored["timings"])
    assert [each["attention"] for each in stored["trainings"]] == ["skyformer", "softmax"]
    for each in stored["trainings"]:
        assert f"{each['steps']:,}" in done.output
        assert f"{100 * each['test_accuracy']:.0f} %" in done.output
    for words in (
        "1. Correct",
        "2. Fast",
        "3. Worth it",
        "What this showed",
        "figures:",
        f"next: {_command()} bench attention",
    ):
        assert words in done.output


@pytest.mark.parametrize(("share", "told"), [(0.5, True), (1.0, False)])
def test_a_busy_machine_is_told(
    share: float, told: bool, skyformer: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("skyformer.report.figures.FORMATS", ("svg",))
    monkeypatch.setattr(demo, "share_of_cores", lambda threads: share)
    monkeypatch.setattr(demo, "TEST_SEQUENCES", 4)
    options = ("--seconds", 1, "--longest", 1024, "--length", 16, "--threads", 1)
    assert ("gets 50 % of its cores" in skyformer("demo", "--output", tmp_path, *options).output) == told


@pytest.mark.parametrize(("threads", "cores"), [(2, 8), (8, 2)])
def test_the_share_of_the_cores_is_processor_time_over_time(
    threads: int, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[int] = []
    monkeypatch.setattr(demo, "available_cores", lambda: cores)
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    wall, own = iter([0.0, 0.2, 1.0, 1.0]), iter([5.0, 6.5])
    monkeypatch.setattr("time.perf_counter", lambda: next(wall))
    monkeypatch.setattr("time.process_time", lambda: next(own))
    assert share_of_cores(threads) == 0.75
    assert used == [2]


@pytest.mark.parametrize(("found", "command"), [("/bin/skyformer", "skyformer"), (None, "-m skyformer")])
def test_the_next_command_can_be_typed(found: str | None, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: found)
    assert _command().endswith(command)


def test_the_stored_outputs_are_the_authors(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = load_file(Path(demo.__file__).parent / "authors.safetensors")
    reference = authors_outputs("padded")[0]
    assert all(torch.equal(tensor, reference[name]) for name, tensor in stored.items())
    assert {"softmax.out", "kernelized.out", "skyformer.out"} < stored.keys()
    errors = compare_with_authors()
    assert 0 < max(errors.values()) < 1e-5
    monkeypatch.setattr(demo, "softmax_attention", lambda query, key, value, key_mask: 1.01 * value)
    with pytest.raises(TrainingError, match="softmax differs from the authors' output"):
        compare_with_authors()


def test_slow_attentions_are_left_out_of_longer_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quadratic time is foreseen: 3 s at 1,000 tokens are 12 s at 2,000."""
    taken = {"softmax": 3.0, "kernelized": 2.0, "skyformer": 9.0}
    functions = {function: name for name, function in demo.ATTENTIONS.items()}
    monkeypatch.setattr(demo, "_measure_step", lambda function, length: (taken[functions[function]], length))
    found = {(each.attention, each.length): each.seconds for each in time_attentions((1000, 2000), limit=10.0)}
    assert found["softmax", 2000] is None
    assert found["kernelized", 2000] == 2.0
    assert found["skyformer", 2000] == 9.0


def test_the_answer_is_the_most_frequent_symbol() -> None:
    tokens, answer = sequences(20, 4096, torch.Generator().manual_seed(0))
    assert tokens.shape == (20, 4096)
    assert (tokens[:, 0] == SYMBOLS).all()
    counts = torch.stack([row.bincount(minlength=SYMBOLS) for row in tokens[:, 1:]])
    assert torch.equal(counts.argmax(1), answer)


def test_a_model_learns_and_time_is_counted() -> None:
    """With one thread and short sequences; the running accuracy rises from chance."""
    seen: list[tuple[float, int, float]] = []
    done = train("skyformer", 2.5, length=128, report=lambda *progress: seen.append(progress))
    assert done.seconds[-1] >= 2.5
    assert [progress[0] for progress in seen] == list(done.seconds)
    assert max(done.accuracies) > 0.3 > done.accuracies[0] / 2


def test_above_chance_and_time_to_an_accuracy() -> None:
    training = Training("softmax", (1.0, 2.0, 3.0), (0.2, 0.8, 0.7), 30, 0.14)
    assert not training.above_chance
    assert Training("softmax", (), (), 30, 0.3).above_chance
    assert training.seconds_until(0.75) == 2.0
    assert training.seconds_until(0.9) is None
