"""Writes the paper's tables and figures from the available runs, with its values next to ours."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from fedhen.reports.charts import list_values
from fedhen.reports.comparison import choose_owner
from fedhen.reports.page import Drawing, Section, merge_environments, render_page
from fedhen.reports.paper.accuracies import make_accuracy_table
from fedhen.reports.paper.centralised import make_centralised_table
from fedhen.reports.paper.drawing import draw_figure
from fedhen.reports.paper.figures import PaperFigure, make_figures
from fedhen.reports.paper.selection import (
    CENTRALISED,
    PAPER_RUNS,
    Selection,
    has_finished_run,
    list_changes,
    select_runs,
)
from fedhen.reports.paper.tables import make_further_tables, make_outcome_tables, make_paper_tables
from fedhen.reports.paper.values import CITATION
from fedhen.reports.rendering import (
    Table,
    escape_latex,
    escape_markdown,
    make_printable,
    to_latex,
    to_markdown,
    to_text,
)
from fedhen.reports.report import Report, write_files
from fedhen.runs.reader import Run
from fedhen.runs.records import ACCURACY

__all__ = ["CENTRALISED", "PAPER_RUNS", "has_finished_run", "write_paper"]

TITLE = "The FedHeN paper’s tables and figures"
ABOUT = f"From our runs, with the values of the paper in parentheses: {CITATION}."
DPI = 220
Part = Table | PaperFigure


def write_paper(runs: Sequence[Run], out: Path, *, owner: str | None = None) -> Report:
    """Writes the paper's tables and figures into a folder, replacing earlier ones.

    Runs of other experiments are ignored, and cells without a run say so. `owner`, one of MODEL_OWNERS, is whose models
    are reported: by default the all-devices average, as in the paper, if every run kept it.
    """
    selection = select_runs(runs)
    owner = choose_owner(selection.runs, owner)
    tables = [
        *make_paper_tables(selection, owner),
        make_accuracy_table(selection, owner),
        make_centralised_table(selection),
    ]
    tables += make_further_tables(selection, owner)
    figures = make_figures(selection, owner)
    parts: list[Part] = [*tables[:2], *figures, *tables[2:], *make_outcome_tables(selection)]
    texts = {
        "paper.html": _page(selection, parts),
        "paper.md": _markdown(selection, parts),
        "paper.tex": _latex(selection, parts),
    }
    paths = write_files(out, texts, {each.name: draw_figure(each) for each in figures}, DPI)
    notes = "".join(f"{make_printable(text)}\n" for text in (_progress(selection), *selection.warnings))
    return Report("\n".join([notes, *map(to_text, tables)]), paths)


def _progress(selection: Selection) -> str:
    done, references = (
        sum(any(run.summary is not None and not list_changes(run) for run in runs) for runs in places.values())
        for places in (selection.federated, selection.centralised)
    )
    return (
        f"Finished: {done} of the paper’s {len(PAPER_RUNS)} runs, and {references} of its {len(CENTRALISED)} "
        "centralised references."
    )


def _page(selection: Selection, parts: Sequence[Part]) -> str:
    return render_page(
        title=TITLE,
        about=f"{ABOUT} {_progress(selection)}",
        warnings=selection.warnings,
        sections=[_draw(p) if isinstance(p, PaperFigure) else Section(p.name, p.title, p) for p in parts],
        environment=merge_environments(selection.runs),
    )


def _draw(each: PaperFigure) -> Section:
    values = list_values(list(chain.from_iterable(each.plots)), ACCURACY)
    return Section(each.name, each.title, figure=Drawing(each.plots, each.title, each.caption, values))


def _markdown(selection: Selection, parts: Sequence[Part]) -> str:
    notes = [f"{escape_markdown(text)}\n" for text in (ABOUT, _progress(selection), *selection.warnings)]
    bodies = [_figure_markdown(p) if isinstance(p, PaperFigure) else to_markdown(p) for p in parts]
    return "\n".join([f"# {TITLE}\n", *notes, *bodies])


def _figure_markdown(each: PaperFigure) -> str:
    title = escape_markdown(each.title)
    return f"## {title}\n\n![{title}]({each.name}.png)\n\n{escape_markdown(each.caption)}\n"


def _latex(selection: Selection, parts: Sequence[Part]) -> str:
    needs = "% needs \\usepackage{booktabs,multirow,graphicx}, and \\graphicspath where the figures lie elsewhere\n"
    notes = "".join(f"\\paragraph{{Note.}} {escape_latex(text)}\n\n" for text in selection.warnings)
    return needs + notes + "\n".join(_figure_latex(p) if isinstance(p, PaperFigure) else to_latex(p) for p in parts)


def _figure_latex(each: PaperFigure) -> str:
    lines = [r"\begin{figure}", r"\centering", rf"\includegraphics[width=\linewidth]{{{each.name}.png}}"]
    lines += [rf"\caption{{{escape_latex(each.caption)}}}", rf"\label{{fig:{each.name}}}", r"\end{figure}"]
    return "\n".join(lines) + "\n"
