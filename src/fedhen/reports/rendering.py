"""A table as data, and as plain text, Markdown and LaTeX; as HTML it is written by templates/page.html."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass

WIDTH = 100
"""Columns of the terminal at which notes are wrapped."""
HEADING = 20
"""Characters at which a column's heading is wrapped."""


@dataclass(frozen=True)
class Group:
    """Rows under a common heading; the first cell of a row is its label."""

    title: str
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Table:
    """A table's content, independent of the format."""

    name: str
    title: str
    columns: tuple[str, ...]
    groups: tuple[Group, ...]
    meaning: str
    notes: tuple[str, ...] = ()
    strong: str = ""
    """The column that is set in bold, if any."""
    merged: bool = False
    """Whether consecutive rows of a group with the same label share it."""
    caption: str = ""
    """The caption in LaTeX, which numbers tables itself; the title if empty."""

    def heights(self, group: Group) -> list[int]:
        """Returns for each row how many rows its label spans, 0 if it shares the label of a row above."""
        labels = [row[0] for row in group.rows]
        starts = [at for at, label in enumerate(labels) if not self.merged or at == 0 or labels[at - 1] != label]
        ends = [*starts[1:], len(labels)]
        return [ends[starts.index(at)] - at if at in starts else 0 for at in range(len(labels))]

    def visible_rows(self, group: Group) -> list[tuple[str, ...]]:
        """Returns a group's rows with repeated labels left empty."""
        rows = zip(group.rows, self.heights(group), strict=True)
        return [row if height else ("", *row[1:]) for row, height in rows]


def to_text(table: Table) -> str:
    """Writes a table with aligned columns for a terminal."""
    tall = [_wrap_heading(heading) for heading in table.columns]
    depth = max(map(len, tall))
    heads = list(zip(*([""] * (depth - len(each)) + each for each in tall), strict=True))
    rows = [*heads, *(row for group in table.groups for row in group.rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]

    def line(row: tuple[str, ...]) -> str:
        first, *others = (
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join(["  " + first, *others]).rstrip()

    rule = "─" * max(len(line(row)) for row in rows)
    lines = [table.title, rule, *map(line, heads), rule]
    for group in table.groups:
        lines += [group.title, *map(line, table.visible_rows(group))]
    lines.append(rule)
    for note in table.notes:
        lines += textwrap.wrap(note, WIDTH)
    return make_printable("\n".join(lines)) + "\n"


def _wrap_heading(heading: str) -> list[str]:
    # Equations, lists and tables are not broken.
    whole = re.sub(r" = |\[.*?\]|\{.*?\}", lambda found: found[0].replace(" ", "\N{NO-BREAK SPACE}"), heading)
    lines = textwrap.wrap(whole, HEADING, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines] or [""]


def make_printable(text: str) -> str:
    """Replaces control characters, which could change the state of a terminal."""
    return "".join(char if char.isprintable() or char == "\n" else "?" for char in text)


def to_markdown(table: Table) -> str:
    """Writes a section with a pipe table."""

    def line(cells: list[str]) -> str:
        return f"| {' | '.join(cells)} |"

    columns = [escape_markdown(cell) for cell in table.columns]
    lines = [f"## {escape_markdown(table.title)}", "", escape_markdown(table.meaning), ""]
    lines += [line(columns), line([":---", *["---:"] * (len(columns) - 1)])]
    for group in table.groups:
        lines.append(line([f"**{escape_markdown(group.title)}**", *[""] * (len(columns) - 1)]))
        for row in table.visible_rows(group):
            cells = zip(table.columns, map(escape_markdown, row), strict=True)
            lines.append(line([f"**{cell}**" if column == table.strong else cell for column, cell in cells]))
    for note in table.notes:
        lines += ["", escape_markdown(note)]
    return "\n".join(lines) + "\n"


def escape_markdown(text: str) -> str:
    return re.sub(r"([\\`*_\[\]<|#&])", r"\\\1", " ".join(text.split()))


def to_latex(table: Table) -> str:
    """Writes a table float; the document needs the package booktabs, and multirow if labels are merged."""
    width = len(table.columns)
    caption = escape_latex(table.caption or table.title)
    lines = [r"\begin{table}", r"\centering", rf"\caption{{{caption}}}", rf"\label{{tab:{table.name}}}"]
    lines += [rf"\begin{{tabular}}{{l{'r' * (width - 1)}}}", r"\toprule", _format_latex_row(table, table.columns)]
    for group in table.groups:
        lines += [r"\midrule", rf"\multicolumn{{{width}}}{{l}}{{\textit{{{escape_latex(group.title)}}}}} \\"]
        for place, (row, height) in enumerate(zip(group.rows, table.heights(group), strict=True)):
            lines += [rf"\cmidrule{{1-{width}}}"] if table.merged and height and place else []
            lines.append(_format_latex_row(table, row, height))
    lines += [r"\bottomrule", r"\end{tabular}"]
    lines += [rf"\par\smallskip\footnotesize {escape_latex(note)}" for note in table.notes]
    return "\n".join([*lines, r"\end{table}"]) + "\n"


def _format_latex_row(table: Table, row: tuple[str, ...], height: int = 1) -> str:
    label, *others = map(escape_latex, row)
    cells = [rf"\multirow{{{height}}}{{*}}{{{label}}}" if height > 1 else label if height else ""]
    for column, cell in zip(table.columns[1:], others, strict=True):
        cells.append(rf"\textbf{{{cell}}}" if column == table.strong else cell)
    return " & ".join(cells) + r" \\"


def escape_latex(text: str) -> str:
    special: dict[str, str | int | None] = {char: f"\\{char}" for char in "&%$#_{}"}
    special |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    special |= {"×": r"$\times$", "±": r"$\pm$", ">": "$>$", "<": "$<$", "–": "--", "’": "'", "²": "$^2$"}
    return text.translate(str.maketrans(special))
