"""Write the tables of docs/ that come from the code and from results/huggingface: `make docs`.

With `--check` nothing is written, and the exit code says whether every page is up to date. A number that was not
measured is shown as "?".
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from skyformer.attention import Promise, attention_class, list_attentions
from skyformer.model import ModelConfig
from skyformer.report.tables import Table, as_markdown
from skyformer.studies.benchmarks.huggingface import TARGET_LENGTH, HuggingFaceBenchmark
from skyformer.studies.record import read_record, record_path

ROOT = Path(__file__).parent.parent
DOCS, RESULTS = ROOT / "docs", ROOT / "results" / "huggingface"
OPEN = "?"


def promises_table() -> str:
    """One row per promise, one column per attention; a number refers to the reason below the table."""
    names = list_attentions()
    reasons: list[str] = []
    rows = [[promise.value, *(_promise_cell(name, promise, reasons) for name in names)] for promise in Promise]
    notes = "\n".join(f"{number}. {reason}" for number, reason in enumerate(reasons, 1))
    return table(["promise", *names], rows, notes)


def _promise_cell(name: str, promise: Promise, reasons: list[str]) -> str:
    cannot = attention_class(name).cannot
    if promise not in cannot:
        return "yes"
    reasons.append(f"{name}: {cannot[promise]}.")
    return f"no ({len(reasons)})"


def settings_table() -> str:
    """One row per setting of ModelConfig."""
    rows = []
    for name, field in ModelConfig.model_fields.items():
        default = "required" if field.is_required() else f"`{field.get_default(call_default_factory=True)!r}`"
        rows.append([f"`{name}`", default, str(field.description)])
    return table(["setting", "default", "meaning"], rows)


def read(name: str) -> Any:
    """The results in a file, or None if it does not exist."""
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
    file = record_path(HuggingFaceBenchmark.name, RESULTS)
    if not file.exists():
        return OPEN
    results = read_record(HuggingFaceBenchmark, file).results()
    rows = next(result.rows for cell, result in results.items() if cell.length == TARGET_LENGTH)
    sdpa = next(statistics.median(row.attention_seconds) for row in rows if row.attention == "sdpa")
    return table(
        ["attention", "in the attention", "share of sdpa's", "whole forward pass"],
        [
            [
                row.attention,
                seconds(row.attention_seconds),
                f"{statistics.median(row.attention_seconds) / sdpa:.3f}",
                seconds(row.forward_seconds),
            ]
            for row in rows
        ],
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> str:
    return as_markdown([Table("", header, rows, note)]).rstrip("\n")


PAGES: Mapping[str, Mapping[str, Callable[[], str]]] = {
    "attentions.md": {"promises": promises_table},
    "model.md": {"settings": settings_table},
    "huggingface.md": {
        "embeddings": embeddings_table,
        "finetune": finetune_table,
        "long": long_table,
        "speed": speed_table,
    },
}
"""The generated tables of each page; a table stands between `<!-- name: begin -->` and `<!-- name: end -->`."""


def with_tables(page: str, tables: Mapping[str, Callable[[], str]]) -> str:
    """The text of a page with fresh tables."""
    for name, make in tables.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, rest = page.split(begin)
        _, after = rest.split(end)
        page = f"{before}{begin}\n{make()}\n{end}{after}"
    return page


def main() -> None:
    outdated = []
    for name, tables in PAGES.items():
        page = (DOCS / name).read_text()
        fresh = with_tables(page, tables)
        if fresh != page:
            outdated.append(name)
        if "--check" not in sys.argv:
            (DOCS / name).write_text(fresh)
    if "--check" in sys.argv:
        sys.exit(f"out of date: {', '.join(outdated)}; run make docs" if outdated else 0)


if __name__ == "__main__":
    main()
