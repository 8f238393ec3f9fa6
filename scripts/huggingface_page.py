"""Writes the figures of docs/huggingface.md from results/huggingface: `make docs`.

With `--check` it only says whether the page is up to date. What has not been measured is left open in the tables.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE, RESULTS = ROOT / "docs" / "huggingface.md", ROOT / "results" / "huggingface"
OPEN = "?"


def read(name: str) -> Any:
    """The results in a file, None if nobody has made it yet."""
    file = RESULTS / name
    return json.loads(file.read_text())["results"] if file.exists() else None


def embeddings_table() -> str:
    results = read("embeddings.json")
    if results is None:
        return OPEN
    counts = sorted({case["num_landmarks"] for case in results["cases"]})
    rows: dict[str, dict[int, str]] = {}
    for case in results["cases"]:
        row = rows.setdefault(f"{case['kernel']}, {case['landmarks']}", {})
        row[case["num_landmarks"]] = f"{case['mean']:.3f} ({case['least']:.3f})"
    return table(
        ["kernel, landmarks", *(f"d = {count}" for count in counts)],
        [[name, *(row.get(count, "") for count in counts)] for name, row in rows.items()],
        f"Mean (least) cosine similarity on {results['passages']} passages of {results['length']} tokens; of different "
        f"passages to each other: {results['between_different_passages']:.2f}.",
    )


def finetune_table() -> str:
    times = (read("finetune-times.json") or {}).get("seconds", {})
    files = sorted(RESULTS.glob("finetune-*.json"))
    runs = [read(file.name) for file in files if file.name != "finetune-times.json"]
    if not runs:
        return OPEN
    runs.sort(key=lambda run: _FINETUNED.index(run["attention"]))
    rows = [
        [
            run["attention"],
            f"{100 * run['accuracy']:.1f} ± {100 * run['standard_error']:.1f} %",
            f"{statistics.mean(run['losses'][-10:]):.2f}",
            seconds(times.get(run["attention"])),
        ]
        for run in runs
    ]
    first = runs[0]
    return table(
        ["attention", "test accuracy", "mean of the last 10 losses", "a training step"],
        rows,
        f"{first['steps']} steps of {first['batch']} reviews, at most {first['length']} tokens of each; accuracy on "
        f"{first['test_reviews']} other reviews, with its standard error.",
    )


_FINETUNED = ("softmax", "kernelized", "skyformer", "skyformer-softmax")


def long_table() -> str:
    results, times = read("long.json"), (read("long-times.json") or {}).get("seconds", {})
    if results is None:
        return OPEN
    names = list(dict.fromkeys(run["attention"] for run in results["runs"]))
    rows = []
    for name in names:
        forward, training = (run for run in results["runs"] if run["attention"] == name)
        close = f"{forward['cosine_to_softmax']:.3f}" if "cosine_to_softmax" in forward else ""
        cells = [
            cell
            for kind, run in (("forward", forward), ("training", training))
            for cell in (
                memory(run, results["limit_gb"]),
                "" if "failed" in run else seconds(times.get(f"{name}, {kind}")),
            )
        ]
        rows.append([name, *cells, close])
    return table(
        ["attention", "forward adds", "takes", "forward and backward add", "takes", "cosine to softmax"],
        rows,
        f"{results['collections']} collections of reviews of {results['length']} tokens, one at a time; peak memory "
        f"beyond the peak after loading and a short warm-up, within {results['limit_gb']:g} GB of address space.",
    )


def memory(run: dict[str, Any], limit: float) -> str:
    return f"over {limit:g} GB" if "failed" in run else f"{run['added_bytes'] / 1e9:.2f} GB"


def seconds(taken: Sequence[float] | None) -> str:
    return OPEN if not taken else f"{statistics.median(taken):.2f} s"


def speed_table() -> str:
    results = read("speed.json")
    if results is None:
        return OPEN
    return table(
        ["attention", "in the attention", "share of sdpa's", "whole forward pass"],
        [
            [r["attention"], f"{r['in_attention']:.2f} s", f"{r['share_of_sdpa']:.3f}", f"{r['forward']:.2f} s"]
            for r in results
        ],
        "",
    )


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([*([caption, ""] if caption else []), *lines])


TABLES: dict[str, Callable[[], str]] = {
    "embeddings": embeddings_table,
    "finetune": finetune_table,
    "long": long_table,
    "speed": speed_table,
}


def with_tables(page: str) -> str:
    for name, make in TABLES.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, rest = page.split(begin)
        _, after = rest.split(end)
        page = f"{before}{begin}\n{make()}\n{end}{after}"
    return page


def main() -> None:
    page = PAGE.read_text()
    fresh = with_tables(page)
    if "--check" in sys.argv:
        sys.exit(0 if fresh == page else "docs/huggingface.md is out of date: make docs")
    PAGE.write_text(fresh)


if __name__ == "__main__":
    main()
