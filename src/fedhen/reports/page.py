"""Writes a report as one HTML file that needs nothing else; its layout is templates/page.html."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from fedhen.config.validation import flatten
from fedhen.reports.charts import Chart, list_values
from fedhen.reports.comparison import Comparison, list_warnings
from fedhen.reports.early_exits import EarlyExits
from fedhen.reports.own_data import Distribution, has_own_values
from fedhen.reports.participation import Turnout
from fedhen.reports.plots import Plot
from fedhen.reports.rendering import Table
from fedhen.reports.spending_tables import PricedRuns
from fedhen.runs.reader import Run
from fedhen.runs.records import Subject


@dataclass(frozen=True)
class Drawing:
    """Rows of plots with the same curves, side by side if the screen is wide enough."""

    rows: Sequence[Sequence[Plot]]
    description: str
    """For readers who cannot see them."""
    caption: str
    values: Table
    """Every point of the curves; a group for each plot."""


@dataclass(frozen=True)
class Section:
    """A heading with a table, a figure, or both."""

    name: str
    title: str
    table: Table | None = None
    figure: Drawing | None = None


def make_page(
    comparison: Comparison, tables: Sequence[Table], charts: Sequence[Chart], priced: PricedRuns | None = None
) -> str:
    """Renders the report of a comparison; a table is followed by the chart that belongs to it."""
    drawings = {chart.measure.table: draw_chart(chart) for chart in charts}
    spreads: dict[str, Distribution | Turnout | EarlyExits] = {
        **({"own-data": Distribution(comparison)} if has_own_values(comparison) else {}),
        **({"participation": Turnout(comparison, priced)} if priced else {}),
        **({"exits": exits} if (exits := EarlyExits(comparison)) else {}),
    }
    for name, each in spreads.items():
        drawings[name] = Drawing([each.plots], each.title, f"{each.title}. {each.caption}", each.values())
    return render_page(
        title=f"{comparison.recipe}: {_join_names(comparison.methods)}",
        warnings=list_warnings(comparison),
        overview=_overview(comparison),
        sections=[Section(t.name, t.title, t, drawings.get(t.name)) for t in tables],
        environment=merge_environments(comparison.runs),
        configuration=_merge([run.config for run in comparison.runs]),
    )


def render_page(
    *, title: str, warnings: Sequence[str], sections: Sequence[Section], live: bool = False, **parts: Any
) -> str:
    """Renders templates/page.html, which leaves out the parts that are not given.

    A live page takes itself anew from where it came from, every two seconds.
    """
    import jinja2
    import markupsafe

    pages = jinja2.Environment(
        loader=jinja2.PackageLoader("fedhen.reports"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    pages.filters["keep_units"] = _keep_units
    script = "".join(pages.get_template(name).render() for name in ("page.js", *(["live.js"] if live else [])))
    # The page allows only the script with this checksum, and fetches nothing, or if it is live, only itself.
    parts |= {"script": markupsafe.Markup(script), "checksum": b64encode(sha256(script.encode()).digest()).decode()}
    return pages.get_template("page.html").render(title=title, warnings=warnings, sections=sections, live=live, **parts)


def _keep_units(text: str) -> str:
    """Lets a narrow screen break a cell before a ± or a bracket, but not between a number and its unit."""
    return re.sub(r"(?<=[±=>]) | (?=[=%]|[kMGT]?B\b|[kMG]?J\b|(?:h|min|s)\b)", "\N{NO-BREAK SPACE}", text)


def _join_names(names: Sequence[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def draw_chart(chart: Chart) -> Drawing:
    """Draws a chart for a page."""
    description = f"{chart.title} of {_join_names(chart.comparison.methods)}"
    values = list_values(chart.plots, chart.comparison.metric)
    return Drawing([chart.plots], description, f"{chart.title}. {chart.caption}", values)


def _overview(comparison: Comparison) -> dict[str, str]:
    settings = _merge([run.config for run in comparison.runs])
    digest = _join_distinct(run.subject.data_digest[:8] for run in comparison.runs if run.subject.data_digest)
    joined = sum(len(run.joined) for run in comparison.runs)
    shares = (run.settings.tiers.items() for run in comparison.runs)
    return {
        "Recipe": comparison.recipe,
        "Methods": ", ".join(map(comparison.heading, comparison.methods)),
        "Seeds": ", ".join(map(str, sorted({run.seed for run in comparison.runs}))),
        "Rounds": settings.get("rounds", ""),
        "Devices": settings.get("devices.number", "") + (f" ({joined} joined later)" if joined else ""),
        "Active a round": settings.get("devices.active", ""),
        "Tiers": _join_distinct(", ".join(f"{tier} {100 * share:.3g} %" for tier, share in each) for each in shares),
        "Task": _join_distinct(run.subject.task for run in comparison.runs if run.subject.task),
        "Data": settings.get("data.name", "") + (f" ({digest})" if digest else ""),
        "Split": settings.get("split.kind", ""),
    }


def merge_environments(runs: Sequence[Run]) -> dict[str, str]:
    """Returns the hardware and the versions of all runs by their dotted keys."""
    others = ("metrics", *Subject.__dataclass_fields__)
    return _merge([{key: each for key, each in run.environment.items() if key not in others} for run in runs])


def _merge(trees: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    leaves = [flatten(tree) for tree in trees]
    keys = dict.fromkeys(key for each in leaves for key in each)
    return {key: _join_distinct(each[key] for each in leaves if key in each) for key in keys}


def _join_distinct(values: Iterable[Any]) -> str:
    texts = (", ".join(map(str, each)) if isinstance(each, list) else str(each) for each in values)
    return "; ".join(dict.fromkeys(texts))
