"""One table value, and its four writings: plain text, Markdown, HTML, LaTeX."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from html import escape

WIDTH = 100
"""Columns of a terminal that notes are wrapped to."""


@dataclass(frozen=True)
class Group:
    """Rows under a common heading; the first cell of a row is its label."""

    title: str
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Table:
    """What a table says, whatever it is written in."""

    name: str
    title: str
    columns: tuple[str, ...]
    groups: tuple[Group, ...]
    meaning: str
    notes: tuple[str, ...] = ()
    strong: str = ""
    """The column to be set in bold, if any."""


def to_text(table: Table) -> str:
    """Aligned columns for a terminal."""
    rows = [table.columns, *(row for group in table.groups for row in group.rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]

    def line(row: tuple[str, ...]) -> str:
        first, *others = (
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join(["  " + first, *others]).rstrip()

    rule = "─" * max(len(line(row)) for row in rows)
    lines = [table.title, rule, line(table.columns), rule]
    for group in table.groups:
        lines += [group.title, *map(line, group.rows)]
    lines.append(rule)
    for note in table.notes:
        lines += textwrap.wrap(note, WIDTH)
    return printable("\n".join(lines)) + "\n"


def printable(text: str) -> str:
    """Text without what could steer a terminal."""
    return "".join(char if char.isprintable() or char == "\n" else "?" for char in text)


def to_markdown(table: Table) -> str:
    """A section with a pipe table."""

    def line(cells: list[str]) -> str:
        return f"| {' | '.join(cells)} |"

    columns = [markdown_text(cell) for cell in table.columns]
    lines = [f"## {markdown_text(table.title)}", "", markdown_text(table.meaning), ""]
    lines += [line(columns), line([":---", *["---:"] * (len(columns) - 1)])]
    for group in table.groups:
        lines.append(line([f"**{markdown_text(group.title)}**", *[""] * (len(columns) - 1)]))
        for row in group.rows:
            cells = zip(table.columns, map(markdown_text, row), strict=True)
            lines.append(line([f"**{cell}**" if column == table.strong else cell for column, cell in cells]))
    for note in table.notes:
        lines += ["", markdown_text(note)]
    return "\n".join(lines) + "\n"


def markdown_text(text: str) -> str:
    """Text that Markdown shows as it is."""
    return re.sub(r"([\\`*_\[\]<|#&])", r"\\\1", " ".join(text.split()))


def to_html(table: Table) -> str:
    """A table element in a box that scrolls sideways where the screen is narrow."""
    head = "".join(f'<th scope="col">{_html_cell(cell)}</th>' for cell in table.columns)
    bodies = []
    for group in table.groups:
        title = f'<tr><th scope="rowgroup" colspan="{len(table.columns)}">{escape(group.title)}</th></tr>'
        bodies.append(f"<tbody>{title}{''.join(_html_row(table, row) for row in group.rows)}</tbody>")
    notes = "".join(f"<p class='note'>{escape(note)}</p>" for note in table.notes)
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(table.title)}"><table>'
        f"<thead><tr>{head}</tr></thead>{''.join(bodies)}</table></div>{notes}"
    )


def _html_row(table: Table, row: tuple[str, ...]) -> str:
    cells = [f'<th scope="row">{_html_cell(row[0])}</th>']
    for column, cell in zip(table.columns[1:], row[1:], strict=True):
        cells.append(
            f"<td><b>{_html_cell(cell)}</b></td>" if column == table.strong else f"<td>{_html_cell(cell)}</td>"
        )
    return f"<tr>{''.join(cells)}</tr>"


def _html_cell(text: str) -> str:
    """A cell that a narrow screen may break before a ± or a bracket, but not within a number and its unit."""
    return escape(re.sub(r"(?<=[±=>]) | (?=[=%]|[kMGT]?B\b)", "\N{NO-BREAK SPACE}", text))


def to_latex(table: Table) -> str:
    """A table float; its preamble needs the package booktabs."""
    width = len(table.columns)
    lines = [r"\begin{table}", r"\centering", rf"\caption{{{latex_text(table.title)}}}", rf"\label{{tab:{table.name}}}"]
    lines += [rf"\begin{{tabular}}{{l{'r' * (width - 1)}}}", r"\toprule", _latex_row(table, table.columns)]
    for group in table.groups:
        lines += [r"\midrule", rf"\multicolumn{{{width}}}{{l}}{{\textit{{{latex_text(group.title)}}}}} \\"]
        lines += [_latex_row(table, row) for row in group.rows]
    lines += [r"\bottomrule", r"\end{tabular}"]
    lines += [rf"\par\smallskip\footnotesize {latex_text(note)}" for note in table.notes]
    return "\n".join([*lines, r"\end{table}"]) + "\n"


def _latex_row(table: Table, row: tuple[str, ...]) -> str:
    cells = zip(table.columns, map(latex_text, row), strict=True)
    return " & ".join(rf"\textbf{{{cell}}}" if column == table.strong else cell for column, cell in cells) + r" \\"


def latex_text(text: str) -> str:
    """Text that LaTeX prints as it is."""
    special: dict[str, str | int | None] = {char: f"\\{char}" for char in "&%$#_{}"}
    special |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    special |= {"×": r"$\times$", "±": r"$\pm$", ">": "$>$", "<": "$<$", "–": "--", "’": "'"}
    return text.translate(str.maketrans(special))
