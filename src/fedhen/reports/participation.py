"""Who took part: the updates that were merged, by tier and device, as a table, a chart and a file of all devices."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from fedhen.reports.comparison import Comparison
from fedhen.reports.costs import format_spread
from fedhen.reports.curves import choose_looks
from fedhen.reports.plots import Curve, Plot
from fedhen.reports.quantiles import SpreadChart, list_points, make_line
from fedhen.reports.rendering import Group, Table
from fedhen.reports.spending import Pricing
from fedhen.reports.spending_tables import PricedRuns

DEVICES = "participation.csv"
"""The file with a line for each device."""
COLUMNS = ("run", "method", "seed", "device", "tier", "class", "asked", "merged", "late", "failed", "joules")

MEANING = (
    "Whose updates were merged. Evenness is 1 if all devices of the tier had equally many, and 1 divided by their "
    f"number if one had all (Jain’s index). {DEVICES} beside this report has every device."
)


@dataclass(frozen=True)
class Counts:
    """In how many rounds each device of a run was asked, and what became of it."""

    asked: Counter[int]
    merged: Counter[int]
    late: Counter[int]
    failed: Counter[int]
    """Its training raised an error, or its update was not finite."""


@dataclass(frozen=True)
class Taking:
    """How often each device of a tier was asked, and how often its update was merged."""

    asked: Sequence[int]
    merged: Sequence[int]
    share: float
    """Of all merged updates, those of this tier's devices."""

    @property
    def evenness(self) -> float:
        squares = len(self.merged) * sum(each**2 for each in self.merged)
        return sum(self.merged) ** 2 / squares if squares else 0.0


def count_rounds(pricing: Pricing) -> Counts:
    """Counts the rounds of each device."""
    counts = Counts(Counter(), Counter(), Counter(), Counter())
    for record in pricing.run.rounds:
        failed = {*record.failed, *record.dropped}
        counts.asked.update(record.active)
        counts.late.update(record.late)
        counts.failed.update(failed)
        counts.merged.update({*record.active} - failed - {*record.late})
    return counts


def count_taking(pricing: Pricing, tier: str) -> Taking:
    """Counts the rounds of each device of a tier."""
    counts = count_rounds(pricing)
    members = [device for device, own in enumerate(pricing.tier_of) if own == tier]
    own = [counts.merged[device] for device in members]
    total = counts.merged.total()
    return Taking([counts.asked[device] for device in members], own, sum(own) / total if total else 0.0)


ROWS: dict[str, tuple[int, Callable[[Taking], float]]] = {
    "share of the merged updates, %": (1, lambda taking: 100 * taking.share),
    "asked and not merged, %": (1, lambda taking: 100 * (1 - sum(taking.merged) / max(1, sum(taking.asked)))),
    "devices never merged": (0, lambda taking: float(taking.merged.count(0))),
    "rounds of a device, fewest": (0, lambda taking: float(min(taking.merged))),
    "rounds of a device, median": (0, lambda taking: float(median(taking.merged))),
    "rounds of a device, most": (0, lambda taking: float(max(taking.merged))),
    "evenness": (2, lambda taking: taking.evenness),
}


def make_participation_table(comparison: Comparison, priced: PricedRuns) -> Table:
    """Makes the table."""
    by_method = [priced.of(runs) for runs in comparison.by_method.values()]
    groups = []
    for tier in comparison.tiers:
        takings = [[count_taking(each, tier) for each in pricings if tier in each.run.tiers] for pricings in by_method]
        rows = [
            (label, *(format_spread([amount(each) for each in found], decimals) for found in takings))
            for label, (decimals, amount) in ROWS.items()
        ]
        groups.append(Group(f"{tier} devices", tuple(rows)))
    return Table(
        name="participation",
        title="Participation",
        columns=("Measure", *map(comparison.heading, comparison.methods)),
        groups=tuple(groups),
        meaning=MEANING,
    )


@dataclass(frozen=True)
class Turnout(SpreadChart):
    """The merged updates of a tier's devices, from the fewest to the most: a curve for each method."""

    priced: PricedRuns

    @property
    def title(self) -> str:
        return "Rounds of each device, from the fewest to the most"

    @property
    def caption(self) -> str:
        return f"In how many rounds each device’s update was merged; the flatter, the more even.{self.seeds}"

    def values(self) -> Table:
        """Returns every point of the curves as a table."""
        return list_points("participation-values", self.plots, lambda each: f"{each[0]:.3g}" if each else "–")

    def plot(self, tier: str) -> Plot:
        looks, curves = choose_looks(self.comparison.methods), list[Curve]()
        for method, runs in self.comparison.by_method.items():
            own = [count_taking(each, tier).merged for each in self.priced.of(runs) if tier in each.run.tiers]
            curves.append(Curve(method, looks[method], make_line(sorted(float(n) for each in own for n in each))))
        most = max((curve.line.mean[-1] for curve in curves if curve.line.mean), default=0.0)
        return Plot(
            title=f"{tier} devices",
            x_label="devices from the fewest rounds, %",
            y_label="rounds whose update was merged",
            curves=curves,
            x_end=100,
            y_limits=(0, 1.05 * most or 1),
        )


def list_devices(comparison: Comparison, priced: PricedRuns) -> str:
    """Returns a table of every device of every run as CSV."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    for method, runs in comparison.by_method.items():
        for pricing in priced.of(runs):
            writer.writerows((pricing.run.folder, method, pricing.run.seed, *each) for each in _describe(pricing))
    return file.getvalue()


def _describe(pricing: Pricing) -> Iterator[tuple[object, ...]]:
    """Yields the cells of each device from the fourth on."""
    counts, joules = count_rounds(pricing), pricing.typical.of_device
    for device, (tier, of) in enumerate(zip(pricing.tier_of, pricing.classes, strict=True)):
        each = (counts.asked, counts.merged, counts.late, counts.failed)
        yield device, tier, of.name, *(count[device] for count in each), f"{joules.get(device, 0.0):.6g}"
