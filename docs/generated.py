"""Pages that are written anew whenever the site is built: results, the help of every command, and the API."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from skyformer.errors import SkyformerError
from skyformer.report.tables import as_markdown
from skyformer.studies.base import StudyClass
from skyformer.studies.files import report_tables
from skyformer.studies.record import read_record
from skyformer.studies.registry import BENCHMARKS, STUDIES

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "results"


API = {
    "skyformer": "Functions, the layer and the classifiers",
    "skyformer.attention": "Attentions by name, and writing new ones",
    "skyformer.landmarks": "Landmarks and their samplers",
    "skyformer.ops.kernels": "Kernels",
    "skyformer.distributed": "Sequences over many devices",
    "skyformer.hf": "Hugging Face",
    "skyformer.lra": "Long Range Arena",
    "skyformer.own": "Own data",
    "skyformer.training": "Training",
    "skyformer.studies": "Studies",
    "skyformer.testing": "Tests for attentions from outside",
    "skyformer.errors": "Errors and warnings",
}
"""Modules of the reference, with the titles of their pages."""


def write_api_pages() -> None:
    """A page per module with the docstrings of its public names, each described once; autodoc reads them."""
    folder = _empty_folder("api")
    described: set[int] = set()
    for name, title in API.items():
        module = importlib.import_module(name)
        public = getattr(module, "__all__", None) or [
            each for each, part in vars(module).items() if getattr(part, "__module__", "") == name and each[0] != "_"
        ]
        parts = {each: getattr(module, each) for each in public}
        fresh = {each: part for each, part in parts.items() if id(part) not in described}
        described |= {id(part) for part in fresh.values()}
        listed = "\n".join(filter(None, (_entry(name, each, part) for each, part in fresh.items())))
        (folder / f"{name}.rst").write_text(f"{title}\n{'=' * len(title)}\n\n.. py:module:: {name}\n\n{listed}")


def _entry(module: str, name: str, part: object) -> str:
    """The directive of a public name; constants have no docstring of their own."""
    if isinstance(part, type):
        return f".. autoclass:: {module}.{name}\n   :members:\n   :exclude-members: model_config\n"
    return f".. autofunction:: {module}.{name}\n" if callable(part) else ""


def _empty_folder(name: str) -> Path:
    folder = DOCS / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def write_results_pages() -> None:
    """A page per study or benchmark with a record in results/: figures, tables, and the commands that measured them."""
    folder = _empty_folder("measured")
    for registry, command in ((STUDIES, "study"), (BENCHMARKS, "bench")):
        for name in registry.names():
            page = _results_page(registry.get(name), command)
            if page:
                (folder / f"{name}.md").write_text(page)


def _results_page(study: StudyClass, command: str) -> str | None:
    """None without a record that this version reads."""
    file = RESULTS / study.name / f"{study.name}.json"
    try:
        record = read_record(study, file)
    except SkyformerError:
        return None
    invocations = {(each.command, each.machine["processor"], each.threads) for each in record.invocations}
    where = "\n".join(f"- `{what}` on {cpu}, {threads} threads" for what, cpu, threads in sorted(invocations))
    figures = "\n\n".join(
        f"![{image.stem} of {study.name}](../../results/{study.name}/{image.name})"
        for image in sorted(file.parent.glob("*.png"), key=lambda image: (image.stem != "figure", image.stem))
    )
    how = f"`skyformer {command} {study.name}` measures this again. The committed record was measured by:"
    tables = as_markdown(report_tables(study, record)).replace("\n### ", "\n## ").removeprefix("#")
    raw = f"The raw measurements are in [{file.name}](../../results/{study.name}/{file.name})."
    return f"# {study.title}\n\n{how}\n\n{where}\n\n{raw}\n\n{figures}\n\n{tables}"


def write_commands_page() -> None:
    """The help of every command, as a terminal shows it."""
    from typer.main import get_command
    from typer.testing import CliRunner

    from skyformer.cli.main import build_app

    app = build_app()
    parts = ["# Commands", "`skyformer COMMAND --help` shows the same in a terminal."]
    for words in _commands(get_command(app)):
        shown = CliRunner().invoke(app, [*words, "--help"], prog_name="skyformer", color=False)
        text = "\n".join(line.rstrip() for line in shown.output.strip().splitlines())
        parts.append(f"## {' '.join(['skyformer', *words])}\n\n```text\n{text}\n```")
    (DOCS / "commands.md").write_text("\n\n".join(parts) + "\n")


def _commands(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of a command and of all commands below it."""
    yield words
    for name, each in getattr(command, "commands", {}).items():
        yield from _commands(each, (*words, name))
