"""The progress display: bars on a terminal, lines in a log, nothing if it is not wanted."""

from __future__ import annotations

import io
import sys

import pytest

from skyformer.report import progress
from skyformer.report.progress import Bars, Lines, Silent, display


def test_lines_have_count_pace_and_text(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    lines = Lines(seconds=15)
    lines.begin("files")
    lines.begin("steps", total=100, done=40)
    for _ in range(4):
        lines.update("steps", advance=10, text="now")
    lines.update("files", done=3)
    lines.update("unknown", done=3)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == [
        "steps: 50 of 100  1.0/s  50 s left  now",
        "steps: 70 of 100  1.0/s  30 s left  now",
        "files: 3",
    ]


def test_bars_have_count_text_and_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "150")
    with display() as shown:
        assert isinstance(shown, Bars)
        shown.update("unknown", done=3)
        shown.begin("steps", total=20, done=10)
        shown.update("steps", done=11, text="loss 1.25")
        shown.note("dev accuracy 0.5 [bold]")
    for words in ("steps", "11/20", "loss 1.25", "dev accuracy 0.5 [bold]"):
        assert words in terminal.getvalue()


def test_bars_are_for_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with display(quiet=True) as shown:
        assert isinstance(shown, Silent)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with display() as shown:
        assert isinstance(shown, Lines)


@pytest.mark.parametrize(("seconds", "text"), [(5, "5 s"), (600, "10 min"), (7200, "2.0 h")])
def test_durations(seconds: float, text: str) -> None:
    assert progress._rough_duration(seconds) == text
