"""The record of the outside suites: which versions were tried, and how many tests passed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from skyformer.environment import installed_version
from skyformer.files import dump_json, write_atomic

FILE = Path(__file__).parents[2] / "results" / "outside" / "matrix.json"


def record(suite: str, passed: int, skipped: int, failed: Sequence[str]) -> None:
    """Replace the row of this suite and these versions."""
    versions = {name: installed_version(name) for name in ("torch", "transformers")}
    rows = json.loads(FILE.read_text())["rows"] if FILE.exists() else []
    key = {"suite": suite, **versions}
    rows = [row for row in rows if any(row[name] != value for name, value in key.items())]
    rows.append({**key, "passed": passed, "skipped": skipped, "failed": list(failed)})
    FILE.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(FILE, dump_json({"rows": sorted(rows, key=lambda row: (row["suite"], row["torch"]))}))
