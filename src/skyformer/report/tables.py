"""Tables as plain data, written as Markdown, LaTeX (booktabs) or CSV, or printed."""

from __future__ import annotations

import csv
import io
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pandas import DataFrame
    from rich.table import Table as RichTable

NOTHING = "-"
"""What a cell without a value shows."""
PRINTED_WIDTH = 160
"""Width of a table that is printed to a file."""


@dataclass(frozen=True)
class Table:
    """Rows of text under a header. `**text**` is bold in every format that has bold.

    Args:
        note: sentences below the table, one per line.
        groups: a line above the header; each pair is a text and the number of columns it spans.
        rules: row numbers that have a horizontal rule above them (LaTeX and terminal).
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    groups: Sequence[tuple[str, int]] = ()
    rules: Sequence[int] = ()


def from_frame(title: str, frame: DataFrame, note: str = "") -> Table:
    """A table of a data frame of text: the index makes the first columns, and missing values are shown as "-".

    If the columns have two levels, the first level names the groups.
    """
    index = [str(name) for name in frame.index.names]
    keys = [key if isinstance(key, tuple) else (key,) for key in frame.index]
    values = frame.astype(object).where(frame.notna(), NOTHING).to_numpy().tolist()
    groups: list[tuple[str, int]] = []
    if frame.columns.nlevels == 2:
        names = itertools.groupby(frame.columns.get_level_values(0))
        groups = [("", len(index)), *((name, len(list(columns))) for name, columns in names)]
    header = [*index, *(str(name) for name in frame.columns.get_level_values(-1))]
    rows = [[*map(str, key), *row] for key, row in zip(keys, values, strict=True)]
    return Table(title, header, rows, note, groups)


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
    "±": r"$\pm$",
    '"': "''",
    # After \\\\, LaTeX would read a bracket as an argument.
    "[": "{[}",
    "]": "{]}",
}
_BOLD = re.compile(r"\*\*(.+?)\*\*")


def as_markdown(tables: Sequence[Table]) -> str:
    """The tables as Markdown, one section per table; without a heading where a table has no title."""
    return "\n".join(_markdown(table) for table in tables)


def _markdown(table: Table) -> str:
    lines = [f"### {table.title}", ""] if table.title else []
    header = grouped_header(table)
    lines.append(_markdown_row(header))
    lines.append("|" + "---|" * len(header))
    lines.extend(_markdown_row(row) for row in table.rows)
    if table.note:
        lines.extend(["", table.note])
    return "\n".join(lines) + "\n"


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def grouped_header(table: Table) -> list[str]:
    """The header with the name of its group before each column, because Markdown has only one header line."""
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
        *(line for number, row in enumerate(table.rows) for line in _latex_lines(table, number, row)),
        r"\bottomrule",
        r"\end{tabular}" + note,
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _latex_groups(table: Table) -> str:
    return " & ".join(rf"\multicolumn{{{width}}}{{c}}{{{escape(name)}}}" for name, width in table.groups) + r" \\"


def _latex_lines(table: Table, number: int, row: Sequence[str]) -> list[str]:
    return [r"\midrule"] * (number in table.rules) + [_latex_row(row)]


def _latex_row(cells: Sequence[str]) -> str:
    return " & ".join(escape(cell) for cell in cells) + r" \\"


def escape(text: str) -> str:
    """Text for LaTeX, with **bold** as \\textbf."""
    escaped = "".join(_LATEX.get(character, character) for character in text)
    return _BOLD.sub(r"\\textbf{\1}", escaped)


def visible(text: str, *, lines: bool = False) -> str:
    """Text for a terminal: characters that would control it are shown as escapes, such as \\x1b.

    Args:
        lines: keep line breaks.
    """
    return "".join(
        letter
        if letter.isprintable() or (lines and letter == "\n")
        else letter.encode("unicode_escape", "surrogatepass").decode()
        for letter in text
    )


def plain(text: str) -> str:
    """Text without the marks of bold."""
    return _BOLD.sub(r"\1", text)


_FORMULA = re.compile(r"[=+\-@]")
_NUMBER = re.compile(r"[-+]?(\d[\d,]*\.?\d*([eE][-+]?\d+)?%?|inf|nan)?")


def _csv_cell(cell: str) -> str:
    """A cell without bold. A spreadsheet would compute one that begins as a formula, so it gets a quote before it."""
    text = visible(plain(cell), lines=True)
    return f"'{text}" if _FORMULA.match(text) and not _NUMBER.fullmatch(text) else text


def as_csv(table: Table) -> str:
    """The header and the rows as comma-separated values, without title, note and bold; safe in spreadsheets."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(grouped_header(table))
    writer.writerows([_csv_cell(cell) for cell in row] for row in table.rows)
    return text.getvalue()


def print_table(table: Table) -> None:
    """Print to standard output: as wide as the terminal, or PRINTED_WIDTH in a file; title and note are not wrapped."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=PRINTED_WIDTH)
    if table.title:
        print(visible(table.title))
    console.print(for_terminal(table))
    if table.note:
        print(visible(table.note, lines=True))


def for_terminal(table: Table) -> RichTable:
    """The header and rows for `rich.print`, with numbers aligned to the right."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    shown = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    for number, column in enumerate(grouped_header(table)):
        has_numbers = any(character.isdigit() for row in table.rows for character in row[number])
        shown.add_column(visible(column), justify="right" if number and has_numbers else "left", overflow="fold")
    for number, row in enumerate(table.rows):
        if number in table.rules:
            shown.add_section()
        shown.add_row(*(Text(visible(plain(cell)), style="bold" * bool(_BOLD.search(cell))) for cell in row))
    return shown


def yes_or_no(holds: bool) -> str:
    return "yes" if holds else "no"


def percent(share: float | None) -> str:
    """A share of one as percent with two decimals, as the paper prints accuracies."""
    return NOTHING if share is None else f"{100 * share:.2f}"


def duration(seconds: float | None) -> str:
    """A time that people can read: 3.2 s, 4 min 05 s, 2 h 10 min."""
    if seconds is None:
        return NOTHING
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{seconds:.1f} s"


def number(x: float | None) -> str:
    """Three significant digits in a short form: 0.0312, 1.05, 31.2, 1,230, 2.1e-05."""
    if x is None or math.isnan(x):
        return NOTHING
    if x == 0:
        return "0"
    if abs(x) >= 999.5:  # 1,000 when rounded to three digits
        return f"{x:,.0f}" if abs(x) < 1e6 else f"{x:.1e}"
    return f"{x:.1e}" if abs(x) < 1e-3 else f"{x:.3g}"
