"""Runs `skyformer` commands in this process, with folders of data and runs of their own."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from skyformer.cli.main import main


@dataclass(frozen=True)
class Outcome:
    code: int
    output: str
    errors: str


class CommandLine:
    """Calls `skyformer` with words, after those it is given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *first: str) -> None:
        self._monkeypatch, self._capsys, self._first = monkeypatch, capsys, first

    def __call__(self, *words: object) -> Outcome:
        self._monkeypatch.setattr(sys, "argv", ["skyformer", *self._first, *map(str, words)])
        with pytest.raises(SystemExit) as exit_:
            main()
        captured = self._capsys.readouterr()
        return Outcome(int(exit_.value.code or 0), captured.out, captured.err)

    def refused(self, *words: object) -> str:
        """The one line that is printed for a wrong command, which must exit with code 2."""
        outcome = self(*words)
        assert outcome.code == 2
        assert outcome.output == ""
        assert outcome.errors.startswith("error: ")
        assert outcome.errors.count("\n") == 1
        return outcome.errors


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def skyformer(
    data_dir: Path, runs_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> CommandLine:
    monkeypatch.setenv("SKYFORMER_DATA", str(data_dir))
    monkeypatch.setenv("SKYFORMER_RUNS", str(runs_dir))
    return CommandLine(monkeypatch, capsys)
