"""Writes the table of promises into docs/attentions.md from what the classes declare: `make docs`.

With `--check` it only says whether the page is up to date.
"""

from __future__ import annotations

import sys
from pathlib import Path

from skyformer.attention import Promise, attention_class, list_attentions

PAGE = Path(__file__).parent.parent / "docs" / "attentions.md"
BEGIN, END = "<!-- promises: begin -->", "<!-- promises: end -->"


def promise_table() -> str:
    """A row a promise, a column an attention; a number refers to the reason below."""
    names = list_attentions()
    reasons: list[str] = []
    lines = ["| promise | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for promise in Promise:
        cells = [_cell(name, promise, reasons) for name in names]
        lines.append(f"| {promise.value} | " + " | ".join(cells) + " |")
    notes = [f"{number}. {reason}" for number, reason in enumerate(reasons, 1)]
    return "\n".join([*lines, "", *notes])


def _cell(name: str, promise: Promise, reasons: list[str]) -> str:
    cannot = attention_class(name).cannot
    if promise not in cannot:
        return "yes"
    reasons.append(f"{name}: {cannot[promise]}.")
    return f"no ({len(reasons)})"


def with_table(page: str) -> str:
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{promise_table()}\n{END}{after}"


def main() -> None:
    page = PAGE.read_text()
    fresh = with_table(page)
    if "--check" in sys.argv:
        sys.exit(0 if fresh == page else "docs/attentions.md is out of date: make docs")
    PAGE.write_text(fresh)


if __name__ == "__main__":
    main()
