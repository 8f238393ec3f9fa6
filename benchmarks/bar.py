"""A bar: a promise, what was measured, and whether it holds; shown as a table and kept as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from skyformer.bench.measure import describe_machine


@dataclass(frozen=True)
class Bar:
    """`passed` says whether `measured`, which is `value` with its unit, is on the right side of `limit`."""

    what: str
    limit: str
    measured: str
    passed: bool
    value: float


def at_most(what: str, value: float, limit: float, unit: str = "x") -> Bar:
    return Bar(what, f"at most {limit:g}{unit}", f"{value:.2f}{unit}", value <= limit, value)


def at_least(what: str, value: float, limit: float, unit: str = "x") -> Bar:
    return Bar(what, f"at least {limit:g}{unit}", f"{value:.2f}{unit}", value >= limit, value)


def show(bars: list[Bar], title: str) -> None:
    table = Table(title=title)
    for column in ("what", "bar", "measured", ""):
        table.add_column(column)
    for bar in bars:
        table.add_row(bar.what, bar.limit, bar.measured, "[green]pass" if bar.passed else "[red]FAIL")
    Console(width=150).print(table)


def keep(path: Path, command: str, threads: int, **figures: Any) -> None:
    """Figures, with the command that measured them, when, and on what machine."""
    record = {
        "command": command,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(threads),
        **figures,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
