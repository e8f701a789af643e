"""Charts: where their parts are, on the page and in the files, and what the page needs to show them."""

from __future__ import annotations

import hashlib
import itertools
import re
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import replace

import pytest

from fedhen.reports import compare
from fedhen.reports.charts import Chart
from fedhen.reports.comparison import Comparison
from fedhen.reports.costs import BYTES, ROUNDS, Measure
from fedhen.reports.page import make_page
from fedhen.reports.plots import choose_ticks
from fedhen.reports.tables import make_tables
from fedhen.reports.targets import choose_targets
from fedhen.runs.reader import Run
from fedhen.runs.records import MetricInfo
from support.marks import first_is_quick
from support.pages import Checker
from support.report_fixtures import Curves, make_run

SIMPLE, COMPLEX = [0.1, 0.52345, 0.8], [0.2, 0.4, 0.9]
BOTH: Curves = {"simple": SIMPLE, "complex": COMPLEX}
LONG = "a-method-with-a-name-of-one-word-that-is-longer-than-any-line-of-a-legend-has-room-for"


def chart(runs: Sequence[Run], measure: Measure = ROUNDS) -> Chart:
    comparison = compare(runs)
    return Chart(comparison, choose_targets(comparison), "devices", measure)


def page_of(runs: Sequence[Run]) -> tuple[str, Checker]:
    comparison: Comparison = compare(runs)
    targets = choose_targets(comparison)
    charts = [Chart(comparison, targets, "devices", measure) for measure in (ROUNDS, BYTES)]
    text = make_page(comparison, make_tables(comparison, targets, "devices"), charts)
    return text, Checker(text)


@pytest.mark.parametrize(
    ("low", "high", "whole", "labels"),
    [
        (0, 1, True, "0 1"),
        (0, 3, True, "0 1 2 3"),
        (0, 5, True, "0 1 2 3 4 5"),
        (0, 7, True, "0 2 4 6"),
        (0, 1000, True, "0 200 400 600 800 1000"),
        (0, 3, False, "0.0 0.5 1.0 1.5 2.0 2.5 3.0"),
        (-0.12, 0.31, False, "-0.1 0.0 0.1 0.2 0.3"),
        (5.2, 5.3, False, "5.20 5.22 5.24 5.26 5.28 5.30"),
        (0, 4e7, False, "0 1e+07 2e+07 3e+07 4e+07"),
    ],
)
def test_ticks_are_round_and_whole_where_only_whole_numbers_make_sense(
    low: float, high: float, whole: bool, labels: str
) -> None:
    found = choose_ticks(low, high, whole)
    assert " ".join(label for _, label in found) == labels
    assert [value for value, _ in found] == pytest.approx([float(label) for label in labels.split()], abs=1e-9)


@pytest.mark.parametrize("length", first_is_quick([3, 1, 2, 7]))
def test_files_have_ticks_at_whole_rounds(length: int) -> None:
    runs = [make_run("fedhen", {"simple": [0.1 * n for n in range(1, length + 1)]})]
    (panel,) = chart(runs).figure(["simple"]).axes
    ticks = [float(tick) for tick in panel.get_xticks()]
    assert len(ticks) > 1 and all(tick == round(tick) for tick in ticks)


def test_points_are_where_the_axes_say_and_the_table_has_their_values() -> None:
    """Positions are turned into values again by the ticks: each is a straight scale through two of its labels."""
    once: Curves = {"simple": [None, 0.3, None], "complex": [None, 0.5, None]}
    _, page = page_of([make_run("fedhen", BOTH), make_run("noside", once)])
    begin = next(at for at, (tag, _) in enumerate(page.elements) if tag == "figure")
    polylines = [of["points"] for tag, of in page.elements[begin:] if tag == "polyline"]
    groups = [of for tag, of in page.elements if of.get("class") == "curve"]
    # The hero is drawn last, on top.
    assert [of["data-column"] for of in groups[:4]] == ["2", "1", "2", "1"]
    assert [of["data-rows"] for of in groups[:4]] == ["1", "0 1 2", "1", "0 1 2"]
    points = [tuple(map(float, point.split(","))) for point in polylines[1].split()]
    plot = chart([make_run("fedhen", BOTH), make_run("noside", once)]).plots[0]
    (x0, a0), *_, (x1, a1) = plot.x_ticks
    (y0, b0), *_, (y1, b1) = plot.y_ticks
    rounds = [float(a0) + (x - x0) * (float(a1) - float(a0)) / (x1 - x0) for x, _ in points]
    values = [float(b0) + (y - y0) * (float(b1) - float(b0)) / (y1 - y0) for _, y in points]
    assert rounds == pytest.approx([1, 2, 3], abs=0.01)
    assert values == pytest.approx([10, 52.345, 80], abs=0.1)
    at = page.cells.index(["Round", "fedhen", "noside"])
    assert page.cells[at + 1 : at + 9] == [
        ["simple model"],
        *(["1", "10.00", "–"], ["2", "52.34", "30.00"], ["3", "80.00", "–"]),
        ["complex model"],
        *(["1", "20.00", "–"], ["2", "40.00", "50.00"], ["3", "90.00", "–"]),
    ]
    # 1 MB for each tier and direction, so 4 MB a round
    assert ["2", "52.34, 8\N{NO-BREAK SPACE}MB", "30.00, 8\N{NO-BREAK SPACE}MB"] in page.cells[at + 9 :]


def test_several_seeds_have_their_range_in_the_table_and_a_band() -> None:
    runs = [make_run("fedhen", {"simple": [0.1, 0.2 * seed]}, seed=seed) for seed in (1, 2)]
    _, page = page_of(runs)
    assert ["2", "30.00 (20.00 to 40.00)"] in page.cells and page.tags["polygon"] == 2
    assert "Mean over the seeds, with the lowest and the highest seed." in page.text


def test_the_page_refers_to_nothing_outside_and_allows_only_its_own_script() -> None:
    text, page = page_of([make_run("fedhen", BOTH), make_run("noside", BOTH)])
    assert page.links == []
    assert not re.search(r"https?:|//\w|url\(|@import|\bsrc=|import\(|fetch\(|XMLHttp", text)
    (policy,) = (of["content"] for _, of in page.elements if of.get("http-equiv") == "Content-Security-Policy")
    allowed = b64encode(hashlib.sha256(page.script.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{allowed}'"


def test_every_curve_has_a_colour_for_light_and_one_for_dark() -> None:
    names = [*"abcdefgh", "fedhen", "noside", "decouple"]
    text, page = page_of([make_run(name, {"simple": [0.5, 0.6]}) for name in names])
    styles = [of["style"] for _, of in page.elements if of.get("class") == "curve"]
    assert len(styles) == 2 * len(names)
    for style in styles:
        light, dark = (luminance(colour) for colour in re.findall(r"#(\w{6})", style))
        # WCAG's contrast to the page's backgrounds, #ffffff and #14181d
        assert 1.05 / (light + 0.05) > 2, style
        assert (dark + 0.05) / (luminance("14181d") + 0.05) > 5, style
    assert "@media (prefers-color-scheme: dark)" in text


def luminance(colour: str) -> float:
    """The relative luminance of WCAG 2."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("tiers", first_is_quick([1, 2, 5]))
def test_long_names_wrap_and_nothing_is_cut_off_in_the_files(tiers: int) -> None:
    metric = MetricInfo("mean_absolute_percentage_error_of_the_last_seven_days", "%", "lower")
    curves: Curves = {f"tier-{n}": [0.2, 0.1] for n in range(tiers)}
    settings = [{"lr": 0.1 * n, "weight_decay": 0.001 * n, "clip": 7.5 + n} for n in range(3)]
    runs = [make_run("noside", curves, metric=metric, training=each) for each in settings]
    runs += [make_run(name, curves, metric=metric, training=settings[0]) for name in ("fedhen", LONG)]
    figure = chart(runs).figure([*curves])
    figure.draw_without_rendering()
    (legend,) = figure.legends
    shown = ["".join(text.get_text().split()) for text in legend.get_texts()]
    assert shown == ["".join(name.split()) for name in compare(runs).methods]
    box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert 0 <= box.x0 < box.x1 <= width and 0 <= box.y0 < box.y1 <= height
    for panel in figure.axes:
        assert not panel.get_visible() or panel.bbox.height > 1.5 * figure.dpi  # the legend leaves room for the curves


def test_labels_of_targets_do_not_overlap() -> None:
    plot = chart([make_run("fedhen", {"simple": [0.1, 0.9]})]).plots[0]
    crowded = replace(plot, levels=[replace(plot.levels[0], value=80.0 + n / 10) for n in range(4)])
    labels = [label for _, _, label in crowded.place_levels()]
    assert all(lower - upper > 11.9 for upper, lower in itertools.pairwise(labels))
