"""Who took part: a table of the updates that were merged, by tier and device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from fedhen.reports.comparison import Comparison
from fedhen.reports.costs import format_spread
from fedhen.reports.rendering import Group, Table
from fedhen.reports.spending import Pricing
from fedhen.reports.spending_tables import PricedRuns

MEANING = (
    "Whose updates were merged. Evenness is 1 if all devices of the tier had equally many, and 1 divided by their "
    "number if one had all (Jain’s index)."
)


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


def count_taking(pricing: Pricing, tier: str) -> Taking:
    """Counts the rounds of each device of a tier."""
    asked, merged = Counter[int](), Counter[int]()
    for record in pricing.run.rounds:
        asked.update(record.active)
        merged.update(set(record.active) - {*record.failed, *record.late, *record.dropped})
    members = [device for device, own in enumerate(pricing.tier_of) if own == tier]
    own = [merged[device] for device in members]
    return Taking([asked[device] for device in members], own, sum(own) / merged.total() if merged else 0.0)


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
