"""Write a report: one page, its tables in Markdown and LaTeX, its curves as pictures, its text for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedhen.errors import UserError, one_line
from fedhen.fileio.atomic import write_text
from fedhen.reports.comparison import HERO, Comparison, compare, scored_kind, warnings
from fedhen.reports.costs import BYTES, ROUNDS
from fedhen.reports.curves import Chart, png, svg
from fedhen.reports.page import make_page
from fedhen.reports.rendering import Table, markdown_text, printable, to_latex, to_markdown, to_text
from fedhen.reports.tables import make_tables
from fedhen.reports.targets import Given, choose_targets
from fedhen.runs.reader import Run


@dataclass(frozen=True)
class Report:
    """A written report: its tables as text for the terminal, and its files, the page first."""

    text: str
    paths: tuple[Path, ...]


def write_report(
    runs: Sequence[Run], out: Path, *, targets: Given = None, kind: str | None = None, hero: str = HERO
) -> Report:
    """Compare runs of one recipe and write the report into a folder, over an earlier report's files.

    `targets` are percents by tier, "auto" for the paper's rule, or what the runs' configurations say; `kind` is one of
    KINDS, by default the devices' average if all runs kept it; gains are those of `hero`, or of the first run's method
    where no run is the hero's.
    """
    kind = scored_kind(runs, kind)
    comparison = compare(runs, hero)
    chosen = choose_targets(comparison, targets, kind)
    tables = make_tables(comparison, chosen, kind)
    charts = [Chart(comparison, chosen, kind, measure) for measure in (ROUNDS, BYTES)]
    try:
        out.mkdir(parents=True, exist_ok=True)
        paths = [*_write_texts(comparison, tables, charts, out), *_write_figures(comparison, charts, out)]
    except OSError as error:
        raise UserError(f"cannot write to {out}: {error.strerror}") from None
    return Report(_text(comparison, tables), tuple(paths))


def _write_texts(comparison: Comparison, tables: Sequence[Table], charts: Sequence[Chart], out: Path) -> list[Path]:
    heading = [f"# {markdown_text(comparison.recipe)}\n", *(f"{markdown_text(t)}\n" for t in warnings(comparison))]
    texts = {
        "report.html": make_page(comparison, tables, charts),
        "tables.md": "\n".join([*heading, *map(to_markdown, tables)]),
        "tables.tex": "% needs \\usepackage{booktabs}\n" + _comments(comparison) + "\n".join(map(to_latex, tables)),
    }
    for name, text in texts.items():
        write_text(out / name, text)
    return [out / name for name in texts]


def _comments(comparison: Comparison) -> str:
    return "".join(f"% {one_line(text)}\n" for text in warnings(comparison))


def _write_figures(comparison: Comparison, charts: Sequence[Chart], out: Path) -> list[Path]:
    paths = []
    for chart in charts:
        figure = chart.figure(comparison.tiers)
        name = f"curves-{chart.measure.name}"
        (out / f"{name}.png").write_bytes(png(figure))
        write_text(out / f"{name}.svg", svg(figure, salt=name))
        paths += [out / f"{name}.png", out / f"{name}.svg"]
    return paths


def _text(comparison: Comparison, tables: Sequence[Table]) -> str:
    notes = "".join(f"{printable(text)}\n" for text in warnings(comparison))
    return "\n".join([*([notes] if notes else []), *map(to_text, tables)])
