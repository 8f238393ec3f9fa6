"""Write the tables of docs/ that come from the code and from results/, and the index of the command line: `make docs`.

With `--check` nothing is written, and the exit code says whether every page is up to date.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from skyformer.attention import Promise, attention_class, list_attentions
from skyformer.cli.index import FILE, fresh_index
from skyformer.files import read_json
from skyformer.model import ModelConfig
from skyformer.report.tables import NOTHING, Table, as_markdown
from skyformer.studies.arena import Arena
from skyformer.studies.base import StudyClass
from skyformer.studies.benchmarks.conversion import Conversion
from skyformer.studies.benchmarks.huggingface import HuggingFaceBenchmark
from skyformer.studies.benchmarks.tilted import TiltedBenchmark
from skyformer.studies.efficiency import ATTENTIONS, SIMILAR, Costs, Efficiency
from skyformer.studies.files import report_tables
from skyformer.studies.frames import in_order
from skyformer.studies.gradients import Gradients
from skyformer.studies.readings import Readings
from skyformer.studies.record import read_record, record_path

ROOT = Path(__file__).parent.parent
DOCS, RESULTS = ROOT / "docs", ROOT / "results"
FAMILIES = ROOT / "src" / "skyformer" / "hf" / "families.json"
INDEX = ROOT / "src" / "skyformer" / "cli" / FILE


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


def families_table() -> str:
    """One row per class of transformers that was tried with our attentions."""
    tried = json.loads(FAMILIES.read_text())
    rows = []
    for name, found in tried["classes"].items():
        reasons = {found[attention].partition(": ")[2] for attention in ("skyformer", "kernelized")} - {""}
        marks = ["works" if found[attention] == "works" else "refused" for attention in ("skyformer", "kernelized")]
        rows.append([f"`{name}`", *marks, found.get("equal to eager", "-"), "; ".join(sorted(reasons))])
    note = f"{len(rows)} classes, transformers {tried['transformers']}, torch {tried['torch']}."
    return table(["class", "skyformer", "kernelized", "softmax equal to eager", "reason"], rows, note)


def matrix_table() -> str:
    """One row per outside suite and versions."""
    rows = json.loads((RESULTS / "outside" / "matrix.json").read_text())["rows"]
    columns = ("suite", "torch", "transformers", "passed", "skipped")
    cells = [[*(str(row[name]) for name in columns), ", ".join(row["failed"]) or "none"] for row in rows]
    return table([*columns, "failed"], cells)


def study_table(study: StudyClass, number: int = 0) -> str:
    """One of the tables of a benchmark, from its record in results/."""
    record = read_record(study, record_path(study.name, RESULTS / study.name))
    made = study.tables(record.results())[number]
    return as_markdown([replace(made, title="")]).rstrip("\n")


def study_tables(study: StudyClass) -> str:
    """All tables of a benchmark, with its targets first, from its record in results/."""
    record = read_record(study, record_path(study.name, RESULTS / study.name))
    made = report_tables(study, record)
    return "\n\n".join(f"**{each.title}.**\n\n{table(each.header, each.rows, each.note)}" for each in made)


def idle_table() -> str:
    """Seconds per step of the preset `paper`, one column for each record of the study of efficiency in a folder below
    its own."""
    columns = {}
    for file in sorted((RESULTS / Efficiency.name).glob(f"*/{Efficiency.name}.json")):
        record = read_record(Efficiency, file)
        seconds = Costs(record.results(), SIMILAR).ours("seconds text")
        columns[f"preset {record.facts['preset']}, threads: {record.facts['threads']}"] = seconds["text"].dropna()
    if not columns:
        return "Not measured yet."
    names = in_order((name for column in columns.values() for name in column.index), ATTENTIONS)
    rows = [[name, *(column.get(name, NOTHING) for column in columns.values())] for name in names]
    return table(["seconds per step on Text", *columns], rows)


def transforms_table() -> str:
    """One row per transform of torch, one column per attention; a number refers to the error below the table."""
    outcomes, errors = read_json(RESULTS / "torch_transforms.json")["outcomes"], list[str]()
    rows = []
    for title, of_attentions in outcomes.items():
        cells = []
        for name in list_attentions():
            error = of_attentions[name]
            if error != "yes":
                errors.append(f"{name}: {error}")
            cells.append("yes" if error == "yes" else f"no ({len(errors)})")
        rows.append([title, *cells])
    notes = "\n".join(f"{number}. {error}" for number, error in enumerate(errors, 1))
    return table(["transform", *list_attentions()], rows, notes)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> str:
    return as_markdown([Table("", header, rows, note)]).rstrip("\n")


PAGES: Mapping[str, Mapping[str, Callable[[], str]]] = {
    "attentions.md": {"promises": promises_table},
    "model.md": {"settings": settings_table},
    "outside_tests.md": {"families": families_table, "suites": matrix_table},
    "huggingface.md": {
        "embeddings": partial(study_table, Conversion, 0),
        "finetune": partial(study_table, Conversion, 1),
        "long": partial(study_table, Conversion, 2),
        "speed": partial(study_table, HuggingFaceBenchmark),
        "tilted": partial(study_table, TiltedBenchmark, 1),
    },
    "transforms.md": {"outcomes": transforms_table},
    "tilted.md": {"results": partial(study_tables, TiltedBenchmark)},
    "reproduction.md": {
        "readings": partial(study_table, Readings, 2),
        "gradients": partial(study_table, Gradients),
        "idle": idle_table,
        "arena": partial(study_table, Arena),
        "evaluations": partial(study_table, Arena, 1),
        "runs": partial(study_table, Arena, -1),
    },
}
"""The generated tables of each page; a table is between `<!-- name: begin -->` and `<!-- name: end -->`."""


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
    if INDEX.read_text() != fresh_index():
        outdated.append(INDEX.name)
    if "--check" not in sys.argv:
        INDEX.write_text(fresh_index())
    if "--check" in sys.argv:
        sys.exit(f"out of date: {', '.join(outdated)}; run make docs" if outdated else 0)


if __name__ == "__main__":
    main()
