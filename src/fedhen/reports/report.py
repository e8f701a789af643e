"""Writes a report: a page, the tables in Markdown and LaTeX, the curves as images, and a text for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedhen.errors import ConfigError, FedhenError, one_line
from fedhen.fileio.atomic import write_text
from fedhen.profiles.profile import Profile
from fedhen.reports.charts import Chart
from fedhen.reports.comparison import HERO, Comparison, choose_owner, compare, list_warnings
from fedhen.reports.costs import BYTES, ROUNDS
from fedhen.reports.early_exits import EarlyExits
from fedhen.reports.figures import PNG_DPI, write_figure
from fedhen.reports.own_data import Distribution, has_own_values
from fedhen.reports.page import make_page
from fedhen.reports.participation import DEVICES, Turnout, list_devices
from fedhen.reports.rendering import Table, escape_markdown, make_printable, to_latex, to_markdown, to_text
from fedhen.reports.spending import price_runs
from fedhen.reports.spending_tables import PricedRuns
from fedhen.reports.tables import make_tables
from fedhen.reports.targets import RequestedTargets, choose_targets
from fedhen.runs.folders import create_fresh_folder, find_run_folders
from fedhen.runs.layout import RUNS
from fedhen.runs.reader import Run, read_readable

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Report:
    """A written report: its tables as text for the terminal, and its files, the page first."""

    text: str
    paths: tuple[Path, ...]


def write_report(
    runs: Sequence[Run],
    out: Path,
    *,
    targets: RequestedTargets = None,
    owner: str | None = None,
    hero: str = HERO,
    profile: Profile | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Report:
    """Compares runs of one recipe and writes the report into a folder, replacing an earlier one.

    `targets` are values of the metric by tier, in its unit, "auto" for the auto rule, or None for those of the runs'
    configurations. `owner`, one of MODEL_OWNERS, is whose models are reported: by default the all-devices average, if
    every run kept it. `hero` is the method whose gains are reported: if none of the runs has it, the first run's method
    is taken. With a profile of devices the report has hours and joules too; `say` is called before longer work.
    """
    owner = choose_owner(runs, owner)
    comparison = compare(runs, hero)
    chosen = choose_targets(comparison, targets, owner)
    priced = PricedRuns(profile, price_runs(comparison.runs, profile, say)) if profile else None
    tables = make_tables(comparison, chosen, owner, priced)
    measures = (ROUNDS, BYTES, *(priced.measures() if priced else ())) if comparison.has_scores else ()
    charts = [Chart(comparison, chosen, owner, measure) for measure in measures]
    figures = {f"curves-{chart.measure.name}": chart.figure(comparison.tiers) for chart in charts}
    if has_own_values(comparison):
        figures["own-data"] = Distribution(comparison).figure()
    if priced:
        figures["participation"] = Turnout(comparison, priced).figure()
    if exits := EarlyExits(comparison):
        figures["exits"] = exits.figure()
    texts = _make_texts(comparison, tables, charts, priced)
    paths = write_files(out, texts, figures)
    return Report(_join_texts(comparison, tables), paths)


def describe_runs(runs: Sequence[Run]) -> str:
    """Returns the tables of a report as text, without writing anything."""
    owner, comparison = choose_owner(runs, None), compare(runs)
    return _join_texts(comparison, make_tables(comparison, choose_targets(comparison, None, owner), owner))


def _join_texts(comparison: Comparison, tables: Sequence[Table]) -> str:
    notes = "".join(f"{make_printable(text)}\n" for text in list_warnings(comparison))
    return "\n".join([*([notes] if notes else []), *map(to_text, tables)])


def report_folders(
    paths: Sequence[Path],
    out: Path | None = None,
    *,
    targets: RequestedTargets = None,
    owner: str | None = None,
    rounds: int | None = None,
    profile: Profile | None = None,
    skip: Callable[[str], None],
    say: Callable[[str], None] = lambda text: None,
) -> Report:
    """Writes a report on the runs in folders. `skip` is called with the error of each run that cannot be read.

    Args:
        paths: Run folders, or folders that contain them.
        out: Where to write: by default into the only path, or into a new folder under runs/ if there are several.
        targets, owner: As of `write_report`.
        rounds: Use only the first rounds of each run.
        profile, say: As of `write_report`.
    """
    if rounds is not None and rounds < 1:
        raise ConfigError(f"rounds is {rounds}: it must be at least 1")
    if not paths:
        raise FedhenError("nothing to report: name at least one run folder")
    runs, errors = read_readable(find_run_folders(paths))
    if not runs:
        raise FedhenError(errors[0] if len(errors) == 1 else f"none of {len(errors)} runs can be read: {errors[0]}")
    for error in errors:
        skip(f"skipped: {error}")
    runs = runs if rounds is None else [run.truncate(rounds) for run in runs]
    out = out or (paths[0] if len(paths) == 1 else create_fresh_folder(RUNS, "report"))
    return write_report(runs, out, targets=targets, owner=owner, profile=profile, say=say)


def write_files(
    out: Path, texts: Mapping[str, str], figures: Mapping[str, Figure], dpi: int = PNG_DPI
) -> tuple[Path, ...]:
    """Writes texts by file name, and figures by name as PNG and as SVG, into a folder. Returns all paths."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            write_text(out / name, text)
        images = [path for name, figure in figures.items() for path in write_figure(figure, out, name, dpi)]
    except OSError as error:
        raise FedhenError(f"cannot write to {out}: {error.strerror}") from None
    return (*(out / name for name in texts), *images)


def _make_texts(
    comparison: Comparison, tables: Sequence[Table], charts: Sequence[Chart], priced: PricedRuns | None
) -> dict[str, str]:
    notes = list_warnings(comparison)
    heading = [f"# {escape_markdown(comparison.recipe)}\n", *(f"{escape_markdown(note)}\n" for note in notes)]
    comments = ["% needs \\usepackage{booktabs}", *(f"% {one_line(note)}" for note in notes)]
    return {
        "report.html": make_page(comparison, tables, charts, priced),
        "tables.md": "\n".join([*heading, *map(to_markdown, tables)]),
        "tables.tex": "\n".join([*comments, *map(to_latex, tables)]),
        **({DEVICES: list_devices(comparison, priced)} if priced else {}),
    }
