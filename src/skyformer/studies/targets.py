"""Targets: what a benchmark must reach, what was measured, and whether it passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skyformer.report.tables import Table, number


@dataclass(frozen=True)
class Target:
    """One target, such as `Target("skyformer, speed-up over sdpa", "at least 9x", "10.7x", True)`."""

    what: str
    limit: str
    measured: str
    passed: bool


def at_most(what: str, value: float, limit: float, unit: str = "x") -> Target:
    return Target(what, f"at most {limit:g}{unit}", f"{number(value)}{unit}", value <= limit)


def at_least(what: str, value: float, limit: float, unit: str = "x") -> Target:
    return Target(what, f"at least {limit:g}{unit}", f"{number(value)}{unit}", value >= limit)


def close_to(what: str, value: float, expected: float, tolerance: float) -> Target:
    """`tolerance` is a share of `expected`."""
    return Target(what, f"{expected:.4g} within {tolerance:.0%}", number(value), abs(value / expected - 1) <= tolerance)


def targets_table(targets: Sequence[Target]) -> Table:
    rows = [[each.what, each.limit, each.measured, "pass" if each.passed else "**FAIL**"] for each in targets]
    return Table("Targets", ["measurement", "target", "measured", "result"], rows)
