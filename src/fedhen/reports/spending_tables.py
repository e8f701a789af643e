"""What runs spent by a profile, for a report: hours and joules to target, and a table of where they went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean

from fedhen.profiles.device_round import Parts
from fedhen.profiles.profile import Profile
from fedhen.reports.comparison import Comparison
from fedhen.reports.costs import JOULE_UNITS, TIME_UNITS, Measure, Units, choose_format_in, choose_unit, format_spread
from fedhen.reports.names import SEEDS
from fedhen.reports.rendering import Group, Table
from fedhen.reports.spending import Pricing, Spending
from fedhen.runs.reader import Run

NAME = "spending"
MEANING = (
    "Seconds and joules of the devices, from the recorded rounds and bytes, the operations of training, and the "
    "profile; the server’s are not counted. A device downloads, trains and uploads, one after the other. A round lasts "
    "until its slowest device has answered, while the others wait. In brackets: the range that the profile’s sources "
    "allow."
)
Amount = Callable[[Spending], float]
Row = tuple[str, Callable[[Sequence[Pricing]], str]]


@dataclass(frozen=True)
class PricedRuns:
    """Runs under a profile."""

    profile: Profile
    by_folder: Mapping[str, Pricing]

    def of(self, runs: Sequence[Run]) -> list[Pricing]:
        return [self.by_folder[str(run.folder)] for run in runs]

    def measures(self) -> tuple[Measure, Measure]:
        """Returns the hours and the joules as measures of cost."""
        return (
            Measure(
                name="hours",
                unit="hours",
                noun="hours",
                meaning=f"How long the fleet of the profile “{self.profile.name}” needs until a tier’s model first "
                "scores the {metric} on the left, or {better}. Evaluation and the server take no time.",
                spent=lambda run, number, tier: self.by_folder[str(run.folder)].typical.seconds[number],
                choose_format=partial(choose_format_in, TIME_UNITS),
                axis=lambda furthest: _axis(furthest, TIME_UNITS, f"by profile {self.profile.name}"),
            ),
            Measure(
                name="joules",
                unit="joules",
                noun="joules",
                meaning=f"What all devices together have spent by then, with the profile “{self.profile.name}”: "
                "training, radio, and waiting if that costs anything.",
                spent=lambda run, number, tier: self.by_folder[str(run.folder)].typical.joules[number],
                choose_format=partial(choose_format_in, JOULE_UNITS),
                axis=lambda furthest: _axis(furthest, JOULE_UNITS, f"all devices, by profile {self.profile.name}"),
            ),
        )

    def make_table(self, comparison: Comparison) -> Table:
        """Makes the table of where seconds and joules went."""
        groups = [
            Group(f"{tier} device in a round", self._rows(comparison, _list_tier_rows(tier)))
            for tier in comparison.tiers
        ]
        groups.append(Group("run", self._rows(comparison, _list_run_rows(comparison.tiers))))
        return Table(
            name=NAME,
            title=f"Time and energy by profile {self.profile.name}",
            columns=("Measure", *map(comparison.heading, comparison.methods)),
            groups=tuple(groups),
            meaning=MEANING,
            notes=tuple(self._list_notes(comparison)),
        )

    def _rows(self, comparison: Comparison, rows: Iterator[Row]) -> tuple[tuple[str, ...], ...]:
        by_method = [self.of(runs) for runs in comparison.by_method.values()]
        return tuple((label, *map(show, by_method)) for label, show in rows)

    def _list_notes(self, comparison: Comparison) -> Iterator[str]:
        about = f": {self.profile.about}" if self.profile.about else ""
        yield f"Profile {self.profile.name}{about}."
        found = self.of(comparison.runs)[0]
        counts = Counter((tier, of.name) for tier, of in zip(found.tier_of, found.classes, strict=True))
        shown = "; ".join(
            f"{tier}: {', '.join(f'{n} {name}' for (own, name), n in counts.items() if own == tier)}"
            for tier in found.run.tiers
        )
        yield f"Classes of the devices: {shown}."
        if measured := self.profile.calibration:
            yield (
                f"All speeds are scaled so that a {measured.device_class} device trains the {measured.tier} model for "
                f"one round in {measured.seconds:g} s, as was measured."
            )
        if comparison.several_seeds:
            yield f"{SEEDS}."


def _list_tier_rows(tier: str) -> Iterator[Row]:
    def seconds(part: Callable[[Parts], float]) -> Amount:
        return lambda spending: _per_device_round(spending, spending.tier_seconds, tier, part)

    def joules(part: Callable[[Parts], float]) -> Amount:
        return lambda spending: _per_device_round(spending, spending.tier_joules, tier, part)

    yield "time", _show(TIME_UNITS, seconds(lambda parts: parts.total), tier)
    yield "time, training", _show(TIME_UNITS, seconds(lambda parts: parts.training), tier)
    yield "time, down and up", _show(TIME_UNITS, seconds(lambda parts: parts.radio), tier)
    yield "energy, training", _show(JOULE_UNITS, joules(lambda parts: parts.training), tier)
    yield "energy, down and up", _show(JOULE_UNITS, joules(lambda parts: parts.radio), tier)


def _list_run_rows(tiers: Sequence[str]) -> Iterator[Row]:
    yield "time", _show(TIME_UNITS, lambda spending: _last(spending.seconds))
    yield "energy, all devices", _show(JOULE_UNITS, lambda spending: _last(spending.joules))
    yield "energy, worst device", _show(JOULE_UNITS, lambda spending: max(spending.of_device.values(), default=0.0))
    yield "training’s share of the energy", _show_training_share
    yield "upload’s share of the energy", partial(_show_share, lambda s: _ratio(s.total_joules.up, _last(s.joules)))
    yield (
        "waiting’s share of the devices’ time",
        partial(_show_share, lambda spending: _ratio(spending.waiting, spending.waiting + spending.busy)),
    )
    for tier in tiers:
        yield f"rounds that waited for a {tier} device", partial(_show_share, partial(_find_share_waited_for, tier))


def _find_share_waited_for(tier: str, spending: Spending) -> float:
    return _ratio(spending.waited_for[tier], spending.waited_for.total())


def _per_device_round(
    spending: Spending, sums: Mapping[str, Parts], tier: str, part: Callable[[Parts], float]
) -> float:
    return _ratio(part(sums.get(tier, Parts())), spending.device_rounds[tier])


def _show(units: Units, amount: Amount, tier: str = "") -> Callable[[Sequence[Pricing]], str]:
    def show(pricings: Sequence[Pricing]) -> str:
        found = [each for each in pricings if each.typical.device_rounds[tier]] if tier else pricings
        if not found:
            return "–"
        typical, low, high = ([amount(getattr(each, bound)) for each in found] for bound in ("typical", "low", "high"))
        text = choose_format_in(units, [mean(typical)])(typical)
        return text if low == high else f"{text} ({_format_range(mean(low), mean(high), mean(typical), units)})"

    return show


def _format_range(low: float, high: float, typical: float, units: Units) -> str:
    size, _ = choose_unit(typical, units)
    return " to ".join(f"{each:.0f}" if each >= 100 else f"{each:.3g}" for each in (low / size, high / size))


def _show_share(share: Amount, pricings: Sequence[Pricing]) -> str:
    return format_spread([100 * share(each.typical) for each in pricings], 1, " %")


def _show_training_share(pricings: Sequence[Pricing]) -> str:
    """Writes the share, and its range: training at its cheapest beside the dearest radio, and the other way round."""

    def share(training: Spending, radio: Spending) -> float:
        own, other = training.total_joules.training, radio.total_joules.radio
        return 100 * _ratio(own, own + other + radio.waiting_joules)

    low = mean(share(each.low, each.high) for each in pricings)
    high = mean(share(each.high, each.low) for each in pricings)
    text = format_spread([share(each.typical, each.typical) for each in pricings], 1, " %")
    return text if low == high else f"{text} ({low:.1f} to {high:.1f})"


def _last(amounts: Mapping[int, float]) -> float:
    return max(amounts.values(), default=0.0)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _axis(furthest: float, units: Units, rest: str) -> tuple[float, str]:
    size, unit = choose_unit(furthest, units)
    return size, f"{unit}, {rest}"
