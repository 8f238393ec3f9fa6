"""From the record of every class to the groups that the package and the docs show.

    python tests/outside/outcomes.py

reads results/outside/families.json and writes src/skyformer/hf/families.json.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from skyformer.files import dump_json, write_atomic
from skyformer.hf.families import KINDS, RECORD, WORKS

TRIALS = Path(__file__).parents[2] / "results" / "outside" / "families.json"
REASONS = (
    ("with its own code and never asks", "it computes attention with its own code and never asks the interface"),
    ("from a list of its own", "it chooses its attention from a list of its own and never asks the interface"),
    ("ran without calling", "it never asks the interface: it has no attention, or keeps its own"),
    ("which is causal", "it is causal, but every output of an approximation depends on the whole sequence"),
    (
        "sliding window",
        "it has layers with a sliding window; `register(..., local_layers='sdpa')` leaves them as they are",
    ),
    ("hides different keys", "it hides different keys from different queries or heads"),
    (
        "a pattern of its own",
        "it hides different keys from different queries, by a pattern of its own",
    ),
    (r"passes (\w+): (.*)", r"it passes `\1`: \2"),
    (r"^\w+ models (.*)", r"it is of a family whose models \1"),
)
"""Patterns of refusals, and the reason without the names of the class and of the attention."""

NOT_TRIED = (
    (r"No module named '(\w+)|requires the (\w+) library", r"its tests need the package `\1\2`"),
    ("couldn't connect|Can't load|offline|OSError", "its tests need files from the network"),
    ("no tests in this copy", "the copy of the tests has none for it, and it cannot be made as a small model of texts"),
    ("took longer|died", "its small model takes too long"),
    (r"^\w+Error", "its tests do not run with the installed versions"),
)
"""The same for classes that were not tried."""


def shortened(message: str, patterns: tuple[tuple[str, str], ...]) -> str:
    for pattern, reason in patterns:
        if found := re.search(pattern, message):
            return found.expand(reason) if "\\" in reason else reason
    return message


def outcome(message: str) -> str:
    """ "works", the reason for a refusal, or a fault as it was found."""
    if message.startswith(WORKS):
        return WORKS
    if message.startswith("refused: "):
        return shortened(message.removeprefix("refused: "), REASONS)
    return message


def rows_by_class(trials: dict[str, Any]) -> dict[str, dict[str, str]]:
    """One row for every class: the first in which it was tried."""
    found: dict[str, dict[str, str]] = {}
    for rows in trials["files"].values():
        for name, row in rows.items():
            if KINDS[0] not in found.get(name, {}):
                found[name] = row
    return found


def grouped(trials: dict[str, Any]) -> dict[str, Any]:
    """The content of src/skyformer/hf/families.json."""
    rows = rows_by_class(trials)
    inside = {part: name for name, row in rows.items() for part in row.get("parts", "").split(", ") if part}
    outcomes, missing = defaultdict[tuple[str, ...], list[str]](list), defaultdict[str, list[str]](list)
    for name, row in sorted(rows.items()):
        if KINDS[0] in row:
            outcomes[tuple(outcome(row[attention]) for attention in KINDS)].append(name)
        elif name in inside:
            missing["it was tried only inside another model"].append(name)
        else:
            missing[shortened(row["outcome"].removeprefix("not tried: "), NOT_TRIED)].append(name)
    groups = [{**dict(zip(KINDS, key, strict=True)), "classes": names} for key, names in outcomes.items()]
    equal = {answer: [n for n, row in rows.items() if row.get("equal to eager") == answer] for answer in ("yes", "no")}
    return {
        "transformers": trials["transformers"],
        "torch": trials["torch"],
        "groups": sorted(groups, key=lambda group: (group[KINDS[0]] != WORKS, -len(group["classes"]))),
        "not tried": dict(sorted(missing.items(), key=lambda item: -len(item[1]))),
        "equal to eager": {"compared": sum(map(len, equal.values())), "different": sorted(equal["no"])},
        "other ways in": sorted(name for name, row in rows.items() if "from_config" in row or "from_pretrained" in row),
    }


def write_groups() -> dict[str, Any]:
    groups = grouped(json.loads(TRIALS.read_text()))
    write_atomic(RECORD, dump_json(groups))
    return groups


if __name__ == "__main__":
    write_groups()
