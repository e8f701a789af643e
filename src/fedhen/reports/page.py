"""The whole report as one HTML file that needs nothing else: no network, no scripts, no fonts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from fedhen.config.validation import flatten
from fedhen.reports.comparison import Comparison, warnings
from fedhen.reports.curves import Chart, inline_svg
from fedhen.reports.rendering import Table, to_html
from fedhen.runs.reader import Run

STYLE = """
:root { color-scheme: light dark; --text: #1c2128; --soft: #59636e; --line: #d5dae0; --back: #ffffff; --band: #f3f5f7;
  --warn: #fff4d6; --warn-line: #d39b00; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e9ed; --soft: #a3adb8; --line: #3a424c; --back: #14181d;
  --band: #1f252c; --warn: #3a2f10; --warn-line: #d9a520; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.25rem clamp(.9rem, 3vw, 2rem) 4rem; max-width: 62rem; color: var(--text);
  background: var(--back); font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: clamp(1.4rem, 4.5vw, 2rem); line-height: 1.2; margin: .5rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; line-height: 1.3; margin: 2.5rem 0 .5rem; }
p { margin: .5rem 0; max-width: 44rem; }
.note, figcaption { color: var(--soft); font-size: .875rem; }
.warnings { margin: 1rem 0; padding: .6rem 1rem; border-left: .25rem solid var(--warn-line); background: var(--warn); }
.warnings p { max-width: none; overflow-wrap: anywhere; }
.wide { overflow-x: auto; margin: .75rem 0; }
table { border-collapse: collapse; font-size: .9375rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .7rem; text-align: right; font-weight: normal; white-space: nowrap; }
th:first-child { text-align: left; }
th[scope=row], thead th:first-child { position: sticky; left: 0; background: var(--back); }
th[rowspan] { white-space: nowrap; }
thead th { font-weight: 600; border-bottom: 2px solid var(--line); vertical-align: bottom; white-space: normal; }
tbody tr + tr > * { border-top: 1px solid var(--line); }
tbody th[scope=rowgroup] { background: var(--band); font-weight: 600; }
figure { margin: 1rem 0; }
figcaption { margin-top: .5rem; max-width: 44rem; }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 19rem), 1fr)); gap: .75rem; }
.panels + .panels { margin-top: .75rem; }
.panels svg { display: block; width: 100%; max-width: 36rem; height: auto; padding: .3rem; background: #ffffff;
  border: 1px solid var(--line); border-radius: .4rem; }
dl { display: grid; grid-template-columns: minmax(6rem, max-content) 1fr; gap: .2rem 1.2rem; margin: .75rem 0; }
dt { color: var(--soft); overflow-wrap: anywhere; }
dd { margin: 0; overflow-wrap: anywhere; }
summary { cursor: pointer; font-weight: 600; }
details { margin: 1.5rem 0; }
@media (max-width: 34rem) { table { font-size: .78rem; } th, td { padding: .3rem; white-space: normal; }
  dl { gap: .2rem .8rem; font-size: .9375rem; } }
"""


def make_page(comparison: Comparison, tables: Sequence[Table], charts: Sequence[Chart]) -> str:
    """The report of a comparison; the first tables each go with the chart of the same measure."""
    sections = [section(table) for table in tables]
    for place, chart in enumerate(charts):
        sections[place] += _figure(chart)
    return document(
        f"{comparison.recipe}: {_names(comparison.methods)}",
        [
            notice(warnings(comparison)),
            _what_was_run(comparison),
            *sections,
            environment(comparison.runs),
            _configuration(comparison),
        ],
    )


def document(title: str, parts: Sequence[str]) -> str:
    """A whole page with a heading and these elements."""
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            *parts,
            "</body></html>\n",
        ]
    )


def _names(names: Sequence[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def notice(texts: Sequence[str]) -> str:
    """What must be known before the numbers are trusted, in a box; nothing if there is nothing."""
    if not texts:
        return ""
    return f'<div class="warnings" role="note">{"".join(f"<p>{escape(text)}</p>" for text in texts)}</div>'


def section(table: Table) -> str:
    """A table with its heading and its meaning."""
    return f'<h2 id="{table.name}">{escape(table.title)}</h2><p>{escape(table.meaning)}</p>{to_html(table)}'


def _figure(chart: Chart) -> str:
    tiers = chart.comparison.tiers
    panels = [inline_svg(chart.figure([tier]), f"{chart.measure.name}-{place}") for place, tier in enumerate(tiers)]
    described = f"{chart.title} of {_names(chart.comparison.methods)}, for {_names(tiers)}"
    return figure([panels], described, f"{chart.title}. {chart.caption}")


def figure(rows: Sequence[Sequence[str]], described: str, caption: str) -> str:
    """Rows of drawings, side by side where the screen is wide enough, with a caption."""
    panels = "".join(
        f'<div class="panels" role="img" aria-label="{escape(described)}">{"".join(row)}</div>' for row in rows
    )
    return f"<figure>{panels}<figcaption>{escape(caption)}</figcaption></figure>"


def _what_was_run(comparison: Comparison) -> str:
    settings = _merged([run.config for run in comparison.runs])
    shares = (run.config["tiers"].items() for run in comparison.runs)
    facts = {
        "Recipe": comparison.recipe,
        "Methods": ", ".join(map(comparison.heading, comparison.methods)),
        "Seeds": ", ".join(map(str, sorted({run.seed for run in comparison.runs}))),
        "Rounds": settings.get("rounds", ""),
        "Devices": settings.get("devices.number", ""),
        "Active a round": settings.get("devices.active", ""),
        "Tiers": _distinct(", ".join(f"{tier} {100 * share:.3g} %" for tier, share in each) for each in shares),
        "Data": settings.get("data.name", ""),
        "Split": settings.get("split.kind", ""),
    }
    return f"<h2>What was run</h2>{_facts(facts)}"


def environment(runs: Sequence[Run]) -> str:
    """Hardware and versions of all runs."""
    facts = _merged([run.environment for run in runs])
    return f"<h2>Hardware and versions</h2>{_facts(facts)}" if facts else ""


def _configuration(comparison: Comparison) -> str:
    facts = _facts(_merged([run.config for run in comparison.runs]))
    return f"<details><summary>Complete configuration</summary>{facts}</details>"


def _merged(trees: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Dotted keys with all their values."""
    leaves = [flatten(tree) for tree in trees]
    keys = dict.fromkeys(key for each in leaves for key in each)
    return {key: _distinct(each[key] for each in leaves if key in each) for key in keys}


def _distinct(values: Iterable[Any]) -> str:
    """Each value once; a list or a table by its items."""
    texts = (", ".join(map(str, each)) if isinstance(each, list) else str(each) for each in values)
    return "; ".join(dict.fromkeys(texts))


def _facts(facts: Mapping[str, str]) -> str:
    rows = (f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in facts.items() if value)
    return f"<dl>{''.join(rows)}</dl>"
