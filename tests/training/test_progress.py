"""What a run shows of itself."""

from __future__ import annotations

import io
import sys

import pytest

from skyformer.training import progress
from skyformer.training.progress import Bar, Lines, RunningMean, Silent, choose_display


def test_the_mean_forgets() -> None:
    mean = RunningMean()
    assert mean.value != mean.value
    mean.add(4.0)
    assert mean.value == 4.0
    for _ in range(1000):
        mean.add(1.0)
    assert mean.value == pytest.approx(1.0)


def test_lines_tell_pace_and_time_left(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    lines = Lines(seconds=15)
    lines.begin("a run", 100, 500)
    for step in range(101, 106):
        lines.advance(step, 2.0, 0.5)
    printed = capsys.readouterr()
    assert printed.out == ""
    first, *rest = printed.err.splitlines()
    assert first == "a run: from step 100 to 500"
    assert rest == [
        "step 102 of 500  loss 2.0000  accuracy 0.5000  0.10 steps/s  66 min left",
        "step 104 of 500  loss 2.0000  accuracy 0.5000  0.10 steps/s  66 min left",
    ]


def test_the_bar_has_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "150")
    bar = Bar()
    bar.evaluating("dev")
    bar.begin("a run", 10, 20)
    bar.advance(11, 1.25, 0.25)
    bar.evaluating("dev")
    bar.note("step 11: dev accuracy 0.5000")
    bar.end()
    shown = terminal.getvalue()
    for words in (
        "a run: from step 10 to 20",
        "11/20",
        "loss 1.2500",
        "accuracy 0.2500",
        "step 11: dev accuracy 0.5000",
    ):
        assert words in shown


def test_a_bar_for_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(choose_display(False), Silent)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert isinstance(choose_display(True), Lines)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert isinstance(choose_display(True), Bar)


@pytest.mark.parametrize(("seconds", "text"), [(5, "5 s"), (600, "10 min"), (7200, "2.0 h")])
def test_durations(seconds: float, text: str) -> None:
    assert progress._duration(seconds) == text
