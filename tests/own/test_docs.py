"""docs/own_data.md: its code runs, its commands exist with all their options, and its table is that of the presets."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from skyformer.cli.main import build_app
from skyformer.training.fitting import OWN_PRESETS

PAGE = (Path(__file__).parents[2] / "docs" / "own_data.md").read_text()


def test_the_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SKYFORMER_RUNS", str(tmp_path / "runs"))
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(block, {})
    assert capsys.readouterr().out.strip() in ("positive", "negative")


@pytest.mark.parametrize("line", re.findall(r"^    (skyformer .*)$", PAGE, re.MULTILINE))
def test_the_commands_exist(line: str) -> None:
    words = shlex.split(line.partition(" > ")[0], comments=True)
    command = get_command(build_app()).commands[words[1]]  # type: ignore[attr-defined]
    command.make_context(words[1], words[2:])


def test_the_table_of_presets() -> None:
    rows = re.findall(r"^\| `(\w+)`.* \| (\d+) million \| ([\d.]+) to (\d+) \| ([\d,]+) \|$", PAGE, re.MULTILINE)
    shown = {name: [float(cell.replace(",", "")) for cell in cells] for name, *cells in rows}
    assert shown == {
        name: [each.tokens / 1e6, each.least_epochs, each.most_epochs, each.longest]
        for name, each in OWN_PRESETS.items()
    }
