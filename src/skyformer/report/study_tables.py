"""A study's tables as Markdown and as LaTeX (booktabs)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from skyformer.studies.show import Table

_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"$<$",
    ">": r"$>$",
}
_BOLD = re.compile(r"\*\*(.+?)\*\*")


def as_markdown(tables: Sequence[Table]) -> str:
    """One section a table."""
    return "\n".join(_markdown(table) for table in tables)


def _markdown(table: Table) -> str:
    lines = [f"### {table.title}", ""]
    header = _grouped_header(table)
    lines.append(_markdown_row(header))
    lines.append("|" + "---|" * len(header))
    lines.extend(_markdown_row(row) for row in table.rows)
    if table.note:
        lines.extend(["", table.note])
    return "\n".join(lines) + "\n"


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _grouped_header(table: Table) -> list[str]:
    """The header with its group's name before each column, for Markdown has one header line only."""
    groups = [name for name, width in table.groups for _ in range(width)] or [""] * len(table.header)
    return [f"{group} {column}".strip() for group, column in zip(groups, table.header, strict=True)]


def as_latex(tables: Sequence[Table]) -> str:
    """One `table` environment each; needs the package booktabs."""
    return "\n".join(_latex(table) for table in tables)


def _latex(table: Table) -> str:
    width = len(table.header)
    note = f"\n\\\\[2pt] {{\\footnotesize {escape(table.note)}}}" if table.note else ""
    lines = [
        r"\begin{table}",
        rf"\caption{{{escape(table.title)}.}}",
        r"\centering",
        rf"\begin{{tabular}}{{l{'r' * (width - 1)}}}",
        r"\toprule",
        *([_latex_groups(table)] if table.groups else []),
        _latex_row(table.header),
        r"\midrule",
        *(_latex_row(row) for row in table.rows),
        r"\bottomrule",
        r"\end{tabular}" + note,
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _latex_groups(table: Table) -> str:
    return " & ".join(rf"\multicolumn{{{width}}}{{c}}{{{escape(name)}}}" for name, width in table.groups) + r" \\"


def _latex_row(cells: Sequence[str]) -> str:
    return " & ".join(escape(cell) for cell in cells) + r" \\"


def escape(text: str) -> str:
    """Text for LaTeX, with **bold** as \\textbf."""
    escaped = "".join(_LATEX.get(character, character) for character in text)
    return _BOLD.sub(r"\\textbf{\1}", escaped)
