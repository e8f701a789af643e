"""The paper's tables and figures from whatever runs there are, its values beside ours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedhen.errors import UserError
from fedhen.fileio.atomic import write_text
from fedhen.reports.comparison import scored_kind
from fedhen.reports.curves import inline_svg, png, svg
from fedhen.reports.page import Drawings, Section, merge_environments, render_page
from fedhen.reports.paper.accuracies import accuracy_table
from fedhen.reports.paper.centralised import centralised_table
from fedhen.reports.paper.figures import PaperFigure, paper_figures
from fedhen.reports.paper.runs import CENTRALISED, PAPER_RUNS, Found, changes, find, finished
from fedhen.reports.paper.tables import further_tables, outcome_tables, paper_tables
from fedhen.reports.paper.values import CITATION
from fedhen.reports.rendering import Table, latex_text, markdown_text, printable, to_latex, to_markdown, to_text
from fedhen.reports.report import Report
from fedhen.runs.reader import Run

__all__ = ["CENTRALISED", "PAPER_RUNS", "finished", "write_paper"]

TITLE = "The FedHeN paper’s tables and figures"
ABOUT = f"From our runs, with the values of the paper beside them: {CITATION}."
DPI = 220
Part = Table | PaperFigure


def write_paper(runs: Sequence[Run], out: Path, *, kind: str | None = None) -> Report:
    """Write the paper's tables and figures into a folder, over earlier ones; what has not been run says so.

    Runs of other experiments may be among them; `kind` is one of KINDS, by default the devices' average, which the
    paper reports, if all runs kept it.
    """
    found = find(runs)
    kind = scored_kind(found.runs, kind)
    tables = [*paper_tables(found, kind), accuracy_table(found, kind), centralised_table(found)]
    tables += further_tables(found, kind)
    figures = paper_figures(found, kind)
    parts: list[Part] = [*tables[:2], *figures, *tables[2:], *outcome_tables(found)]
    texts = {"paper.html": _page(found, parts), "paper.md": _markdown(found, parts), "paper.tex": _latex(found, parts)}
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            write_text(out / name, text)
        drawn = [path for each in figures for path in _write_figure(each, out)]
    except OSError as error:
        raise UserError(f"cannot write to {out}: {error.strerror}") from None
    said = "".join(f"{printable(text)}\n" for text in (_progress(found), *found.warnings))
    return Report("\n".join([said, *map(to_text, tables)]), (*(out / name for name in texts), *drawn))


def _progress(found: Found) -> str:
    done, references = (
        sum(any(run.summary is not None and not changes(run) for run in runs) for runs in places.values())
        for places in (found.federated, found.centralised)
    )
    return (
        f"Finished: {done} of the paper’s {len(PAPER_RUNS)} runs, and {references} of its {len(CENTRALISED)} "
        "centralised references."
    )


def _write_figure(each: PaperFigure, out: Path) -> list[Path]:
    drawn = each.draw(each.rows)
    (out / f"{each.name}.png").write_bytes(png(drawn, DPI))
    write_text(out / f"{each.name}.svg", svg(drawn, salt=each.name))
    return [out / f"{each.name}.png", out / f"{each.name}.svg"]


def _page(found: Found, parts: Sequence[Part]) -> str:
    return render_page(
        title=TITLE,
        about=f"{ABOUT} {_progress(found)}",
        warnings=found.warnings,
        sections=[_draw(p) if isinstance(p, PaperFigure) else Section(p.name, p.title, p) for p in parts],
        environment=merge_environments(found.runs),
    )


def _draw(each: PaperFigure) -> Section:
    rows = [
        [inline_svg(each.draw([[panel]]), f"{each.name}-{place}-{side}") for side, panel in enumerate(row)]
        for place, row in enumerate(each.rows)
    ]
    return Section(each.name, each.title, figure=Drawings(rows, each.title, each.caption))


def _markdown(found: Found, parts: Sequence[Part]) -> str:
    said = [f"{markdown_text(text)}\n" for text in (ABOUT, _progress(found), *found.warnings)]
    heading = [f"# {TITLE}\n", *said]
    return "\n".join(
        [*heading, *(_figure_markdown(p) if isinstance(p, PaperFigure) else to_markdown(p) for p in parts)]
    )


def _figure_markdown(each: PaperFigure) -> str:
    title = markdown_text(each.title)
    return f"## {title}\n\n![{title}]({each.name}.png)\n\n{markdown_text(each.caption)}\n"


def _latex(found: Found, parts: Sequence[Part]) -> str:
    needs = "% needs \\usepackage{booktabs,multirow,graphicx}, and \\graphicspath where the figures lie elsewhere\n"
    said = "".join(f"\\paragraph{{Note.}} {latex_text(text)}\n\n" for text in found.warnings)
    return needs + said + "\n".join(_figure_latex(p) if isinstance(p, PaperFigure) else to_latex(p) for p in parts)


def _figure_latex(each: PaperFigure) -> str:
    lines = [r"\begin{figure}", r"\centering", rf"\includegraphics[width=\linewidth]{{{each.name}.png}}"]
    lines += [rf"\caption{{{latex_text(each.caption)}}}", rf"\label{{fig:{each.name}}}", r"\end{figure}"]
    return "\n".join(lines) + "\n"
