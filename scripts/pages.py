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


def families_page() -> str:
    """The classes of transformers that were tried with our attentions: counts, and then the names by outcome."""
    tried = json.loads(FAMILIES.read_text())
    counts, lists = [], []
    for group in tried["groups"]:
        works = {name: group[name] == "works" for name in ("skyformer", "kernelized")}
        reasons = list(dict.fromkeys(group[name] for name, fine in works.items() if not fine))
        title = "; ".join(reasons) or "no limits"
        marks = ["works" if fine else "refused" for fine in works.values()]
        counts.append([title, *marks, str(len(group["classes"]))])
        lists.append((title, group["classes"]))
    for reason, names in tried["not tried"].items():
        counts.append([reason, "not tried", "not tried", str(len(names))])
        lists.append((reason, names))
    numbered = [[str(number), *row] for number, row in enumerate(counts, 1)]
    compared = tried["equal to eager"]
    number_tried = sum(len(group["classes"]) for group in tried["groups"])
    note = (
        f"{number_tried} classes tried, {sum(map(len, tried['not tried'].values()))} not; transformers "
        f"{tried['transformers']}, torch {tried['torch']}. Softmax attention by our interface was compared with the "
        f"model's own in {compared['compared']} classes, and differs in {_names(compared['different']) or 'none'}. "
        f"`from_config` or `from_pretrained` answers differently for {_names(tried['other ways in']) or 'none'}."
    )
    overview = table(["", "reason", "skyformer", "kernelized", "classes"], numbered, note)
    names = "\n".join(
        f"{number}. {title[0].upper()}{title[1:]}: {_names(each)}." for number, (title, each) in enumerate(lists, 1)
    )
    return f"{overview}\n\n{names}"


def _names(classes: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in classes)


def skips_table() -> str:
    """One row per reason for which tests of transformers are skipped, with the tests of all suites."""
    by_reason: dict[str, set[str]] = {}
    for skipped in json.loads((RESULTS / "outside" / "matrix.json").read_text())["skips"].values():
        for name, reason in skipped.items():
            by_reason.setdefault(str(reason), set()).add(name)
    rows = [[reason, str(len(names)), _names(sorted(names))] for reason, names in sorted(by_reason.items())]
    return table(["reason", "tests", "names"], rows)


def matrix_table() -> str:
    """One row per outside suite and versions."""
    rows = json.loads((RESULTS / "outside" / "matrix.json").read_text())["rows"]
    columns = ("suite", "torch", "transformers", "passed", "skipped")
    cells = [
        [
            *(str(row[name]) for name in columns),
            *(", ".join(row.get(kind, ())) or "none" for kind in ("failed", "outdated")),
        ]
        for row in rows
    ]
    return table([*columns, "failed", "failed by BERT, too"], cells)


def study_table(study: StudyClass, number: int = 0) -> str:
    """One of the tables of a benchmark, from its record in results/."""
    record = read_record(study, record_path(study.name, RESULTS / study.name))
    made = study.tables(record.results())[number]
    return as_markdown([replace(made, title="")]).rstrip("\n")


def study_tables(study: StudyClass, part: slice = slice(None)) -> str:
    """All tables of a study with their titles, its targets first, or a part of them, from its record in results/."""
    record = read_record(study, record_path(study.name, RESULTS / study.name))
    made = report_tables(study, record)[part]
    return "\n\n".join(f"**{each.title}.**\n\n{table(each.header, each.rows, each.note)}" for each in made)


def idle_table() -> str:
    """Seconds per step of the preset `paper`, one column for each record of the study of efficiency in a folder below
    its own, which gives the column its name."""
    columns = {}
    for file in sorted((RESULTS / Efficiency.name).glob(f"*/{Efficiency.name}.json")):
        seconds = Costs(read_record(Efficiency, file).results(), SIMILAR).ours("seconds text")
        columns[file.parent.name] = seconds["text"].dropna()
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
    "outside_tests.md": {"families": families_page, "suites": matrix_table, "skips": skips_table},
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
        "evaluations": partial(study_tables, Arena, slice(1, -1)),
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
