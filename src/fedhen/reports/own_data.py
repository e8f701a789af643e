"""How models do on the devices' own test data: a table of the spread over devices, and a chart of the distribution."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from fedhen.reports.comparison import Comparison
from fedhen.reports.curves import choose_looks
from fedhen.reports.names import SEEDS, capitalise
from fedhen.reports.outcome import choose_format
from fedhen.reports.plots import Curve, Plot
from fedhen.reports.quantiles import SpreadChart, list_points, make_line
from fedhen.reports.rendering import Group, Table
from fedhen.runs.device_values import Spread, describe_owners
from fedhen.runs.layout import LOCAL, PERSONAL, SERVER
from fedhen.runs.reader import Run
from fedhen.runs.records import ACCURACY, DeviceValues, MetricInfo

OWN_LABELS = {SERVER: "server’s model", PERSONAL: "personal model", LOCAL: "trained alone"}
"""Owner of the models -> how tables call it."""
MEANING = (
    "{metric} on the test data of each device, after the last round in which it was recorded. Every device of a tier "
    "counts once. A tenth is the mean of the worst or of the best tenth of the devices. A device is hurt if its model "
    "is worse than the server’s on its data."
)
HELD_OUT = "held-out"
OWN_TITLE, HELD_OUT_TITLE = "{metric} on devices’ own test data", "{metric} of devices that never trained"
HELD_OUT_MEANING = "{metric} of devices that never trained: the last models, adapted to each one’s training data."


def has_own_values(comparison: Comparison) -> bool:
    return any(last_values(run) for run in comparison.runs)


def last_values(run: Run, held_out: bool = False) -> DeviceValues:
    """Returns the last values of each owner on the devices' own test data; empty if there are none."""
    found: DeviceValues = {}
    for record in run.rounds:
        # Some owners are scored after the last round only, or a run was truncated.
        found |= record.held_out if held_out else record.own
    return found


def describe_scored(runs: Sequence[Run]) -> str:
    """Returns a line on runs whose server's scores are those of the devices' own models; "" if there are none."""
    names = sorted({run.method for run in runs if run.scores_own_models})
    if not names:
        return ""
    return (
        f"{', '.join(names)}: a part of the models never leaves the devices, and the server has no whole model; its "
        "scores are the means of the devices’ own models, each on its own test data."
    )


def make_own_tables(comparison: Comparison) -> list[Table]:
    """Makes tables of the spread over devices: of those that trained, and of those that did not, if there are any."""
    tables = [_make_table(comparison, "own-data", OWN_TITLE, MEANING)]
    if any(last_values(run, held_out=True) for run in comparison.runs):
        tables.append(_make_table(comparison, HELD_OUT, HELD_OUT_TITLE, HELD_OUT_MEANING))
    return tables


def _make_table(comparison: Comparison, name: str, title: str, meaning: str) -> Table:
    """Makes a table of the spread over devices: by tier and owner, a column for each method."""
    metric = capitalise(comparison.metric.title)
    groups = [
        Group(f"{tier} devices", tuple(_list_rows(comparison, tier, name == HELD_OUT))) for tier in comparison.tiers
    ]
    notes = [f"{SEEDS}."] * comparison.several_seeds + [note for note in [describe_scored(comparison.runs)] if note]
    return Table(
        name=name,
        title=title.format(metric=metric),
        columns=("Measure", *map(comparison.heading, comparison.methods)),
        groups=tuple(groups),
        meaning=meaning.format(metric=metric),
        notes=tuple(notes),
    )


def _list_rows(comparison: Comparison, tier: str, held_out: bool) -> Iterator[tuple[str, ...]]:
    metric = comparison.metric
    unit = f", {metric.unit}" if metric.unit else ""
    measures: dict[str, Callable[[Spread], float | None]] = {
        f"mean{unit}": lambda spread: spread.mean,
        f"deviation{unit}": lambda spread: spread.deviation,
        f"worst tenth{unit}": lambda spread: spread.worst_tenth,
        f"best tenth{unit}": lambda spread: spread.best_tenth,
    }
    for owner in _list_owners(comparison):
        spreads = [
            [_find_spread(last_values(run, held_out), metric, owner, tier) for run in runs]
            for runs in comparison.by_method.values()
        ]
        for measure, read in measures.items():
            cells = (
                _format([metric.scale(v) for s in each if s and (v := read(s)) is not None], metric) for each in spreads
            )
            yield f"{OWN_LABELS[owner]}, {measure}", *cells
        hurt = [[100 * s.hurt for s in each if s and s.hurt is not None] for each in spreads]
        if any(hurt):
            yield f"{OWN_LABELS[owner]}, hurt, %", *(_format(each, ACCURACY) for each in hurt)


def _list_owners(comparison: Comparison) -> list[str]:
    return [owner for owner in OWN_LABELS if any(owner in last_values(run) for run in comparison.runs)]


def _find_spread(values: DeviceValues, metric: MetricInfo, owner: str, tier: str) -> Spread | None:
    return describe_owners(values, metric).get(owner, {}).get(tier)


def _format(values: Sequence[float], metric: MetricInfo) -> str:
    return choose_format(metric, values)(values) if values else "–"


class Distribution(SpreadChart):
    """The values of a tier's devices from the worst to the best, a curve for each method and owner."""

    @property
    def title(self) -> str:
        return f"{capitalise(self.comparison.metric.title)} of the devices, from the worst to the best"

    @property
    def caption(self) -> str:
        return f"Each device is scored on its own test data.{self.seeds}"

    def values(self) -> Table:
        """Returns every point of the curves as a table."""
        return list_points("own-values", self.plots, partial(_format, metric=self.comparison.metric))

    @property
    def _named(self) -> list[tuple[str, str, str]]:
        """The name of each curve, its method and the owner of its models: those that any run of the method has."""
        return [
            (f"{method}: {label}", method, owner)
            for method, runs in self.comparison.by_method.items()
            for owner, label in OWN_LABELS.items()
            if any(owner in last_values(run) for run in runs)
        ]

    def plot(self, tier: str) -> Plot:
        metric, curves = self.comparison.metric, list[Curve]()
        looks = choose_looks([name for name, _, _ in self._named])
        for name, method, owner in self._named:
            found = [last_values(run).get(owner, {}).get(tier, []) for run in self.comparison.by_method[method]]
            values = sorted(
                (metric.scale(v) for each in found for v in each if v is not None), reverse=not metric.higher_is_better
            )
            curves.append(Curve(name, looks[name], make_line(values)))
        unit = f", {metric.unit}" if metric.unit else ""
        empty = not any(curve.line.spent for curve in curves)
        return Plot(
            title=f"{tier} devices",
            x_label="devices from the worst, %",
            y_label=f"test {metric.title}{unit} on own data",
            curves=curves,
            excuse="no device with test data" if empty else "",
            x_end=100,
        )
