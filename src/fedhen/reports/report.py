"""Writes a report: a page, the tables in Markdown and LaTeX, the curves as images, and a text for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedhen.errors import UserError, one_line
from fedhen.fileio.atomic import write_text
from fedhen.reports.comparison import HERO, Comparison, choose_owner, compare, list_warnings
from fedhen.reports.costs import BYTES, ROUNDS
from fedhen.reports.curves import Chart, write_figure
from fedhen.reports.page import make_page
from fedhen.reports.rendering import Table, escape_markdown, make_printable, to_latex, to_markdown, to_text
from fedhen.reports.tables import make_tables
from fedhen.reports.targets import RequestedTargets, choose_targets
from fedhen.runs.reader import Run


@dataclass(frozen=True)
class Report:
    """A written report: its tables as text for the terminal, and its files, the page first."""

    text: str
    paths: tuple[Path, ...]


def write_report(
    runs: Sequence[Run], out: Path, *, targets: RequestedTargets = None, owner: str | None = None, hero: str = HERO
) -> Report:
    """Compares runs of one recipe and writes the report into a folder, replacing an earlier one.

    `targets` are percents by tier, "auto" for the paper's rule, or None for those of the runs' configurations. `owner`,
    one of MODEL_OWNERS, is whose models are reported: by default the all-devices average, if every run kept it. `hero`
    is the method whose gains are reported: if none of the runs has it, the first run's method is taken.
    """
    owner = choose_owner(runs, owner)
    comparison = compare(runs, hero)
    chosen = choose_targets(comparison, targets, owner)
    tables = make_tables(comparison, chosen, owner)
    charts = [Chart(comparison, chosen, owner, measure) for measure in (ROUNDS, BYTES)]
    try:
        out.mkdir(parents=True, exist_ok=True)
        paths = _write_texts(comparison, tables, charts, out)
        for chart in charts:
            paths += write_figure(chart.figure(comparison.tiers), out, f"curves-{chart.measure.name}")
    except OSError as error:
        raise UserError(f"cannot write to {out}: {error.strerror}") from None
    return Report(_terminal_text(comparison, tables), tuple(paths))


def _write_texts(comparison: Comparison, tables: Sequence[Table], charts: Sequence[Chart], out: Path) -> list[Path]:
    heading = [
        f"# {escape_markdown(comparison.recipe)}\n",
        *(f"{escape_markdown(t)}\n" for t in list_warnings(comparison)),
    ]
    texts = {
        "report.html": make_page(comparison, tables, charts),
        "tables.md": "\n".join([*heading, *map(to_markdown, tables)]),
        "tables.tex": "% needs \\usepackage{booktabs}\n"
        + _latex_comments(comparison)
        + "\n".join(map(to_latex, tables)),
    }
    for name, text in texts.items():
        write_text(out / name, text)
    return [out / name for name in texts]


def _latex_comments(comparison: Comparison) -> str:
    return "".join(f"% {one_line(text)}\n" for text in list_warnings(comparison))


def _terminal_text(comparison: Comparison, tables: Sequence[Table]) -> str:
    notes = "".join(f"{make_printable(text)}\n" for text in list_warnings(comparison))
    return "\n".join([*([notes] if notes else []), *map(to_text, tables)])
