"""The record of the outside suites: which versions were tried, how many tests passed, and why others did not run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from skyformer.environment import installed_version
from skyformer.files import dump_json, write_atomic

FILE = Path(__file__).parents[2] / "results" / "outside" / "matrix.json"


def record(
    suite: str,
    passed: int,
    skipped: int,
    failed: Sequence[str],
    outdated: Sequence[str] = (),
    reasons: Mapping[str, str | None] | None = None,
) -> None:
    """Replace the row of this suite and these versions.

    Args:
        failed: the tests that failed. outdated: those that transformers' own BERT fails as well.
        reasons: why tests were skipped, by their names.
    """
    versions = {name: installed_version(name) for name in ("torch", "transformers")}
    content = json.loads(FILE.read_text()) if FILE.exists() else {"rows": []}
    key = {"suite": suite, **versions}
    rows = [row for row in content["rows"] if any(row[name] != value for name, value in key.items())]
    rows.append({**key, "passed": passed, "skipped": skipped, "failed": list(failed), "outdated": list(outdated)})
    rows.sort(key=lambda row: (row["suite"], row["torch"], row["transformers"]))
    skips = content.get("skips", {})
    if reasons is not None:
        skips[suite] = dict(sorted(reasons.items()))
    FILE.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(FILE, dump_json({"rows": rows, "skips": skips}))
