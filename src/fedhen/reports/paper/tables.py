"""The paper's tables with its values next to ours, and further tables in the same layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from fedhen.reports.comparison import compare
from fedhen.reports.costs import BYTES, OWN_BYTES, ROUNDS, Cost, Format, Goal, Measure, format_costs, gain, measure_cost
from fedhen.reports.names import GAIN, LOWER_BOUND, OWNER_NAMES, SEEDS_TO_TARGET
from fedhen.reports.outcome import make_outcome_table
from fedhen.reports.paper.selection import NOT_RUN, Selection, format_unfinished
from fedhen.reports.paper.values import CITATION, DATA_SETS, METHODS, ROUNDS_TO_TARGET, SPLITS, TIERS, Split
from fedhen.reports.rendering import Group, Table
from fedhen.reports.tables import note_interval
from fedhen.reports.targets import auto_targets, describe_auto_rule, format_target
from fedhen.runs.layout import MODEL_OWNERS
from fedhen.runs.reader import Run
from fedhen.runs.records import ACCURACY

POPULATION = "50 simple and 50 complex devices, 10 of them active a round"
HERO = next(iter(METHODS.values()))

Aim = tuple[float, tuple[str, ...]]
"""A target, and the paper's cells for each method and for the gain, if it has any."""
Aims = Callable[[str, str], Sequence[Aim]]
"""(recipe, tier) -> targets."""


@dataclass(frozen=True)
class View:
    """The runs of one split, whose models are reported, and the measure."""

    selection: Selection
    split: Split
    owner: str
    measure: Measure = ROUNDS

    @property
    def runs(self) -> list[Run]:
        return list(chain.from_iterable(map(self.selection.of_recipe, self.split.recipes.values())))

    @property
    def complete(self) -> dict[str, str]:
        """Data set -> recipe, for those whose runs of every method are finished."""
        return {data: recipe for data, recipe in self.split.recipes.items() if self._finished(recipe)}

    def _finished(self, recipe: str) -> bool:
        cells = [self.selection.federated[recipe, method] for method in METHODS]
        return all(cells) and all(run.summary is not None for run in chain.from_iterable(cells))


def make_paper_tables(selection: Selection, owner: str) -> list[Table]:
    """Makes Tables 1 and 2. Each cell has our value, and the paper's in parentheses."""
    return [_make_paper_table(View(selection, split, owner)) for split in SPLITS]


def make_further_tables(selection: Selection, owner: str) -> list[Table]:
    """Makes what the paper does not print: rounds to targets by its rule on our runs, and bytes to its targets."""
    views = [View(selection, split, owner) for split in SPLITS]
    own = [_make_auto_table(view) for view in views if view.complete]
    return own + [
        _make_bytes_table(replace(view, measure=measure))
        for view in views
        if view.runs
        for measure in (BYTES, OWN_BYTES)
    ]


def _make_paper_table(view: View) -> Table:
    split = view.split
    meaning = (
        f"Rounds until a tier’s model ({OWNER_NAMES[view.owner]}) first scored the accuracy, or more, on the test set. "
        f"Each cell: our value, and in parentheses the paper’s. {_gain_meaning(view)}"
    )
    return _make_table(
        view,
        _list_printed_targets,
        name=f"table-{split.table}",
        title=f"Table {split.table}. {split.heading}: rounds to target, ours (the paper’s)",
        meaning=meaning,
        caption=f"{split.heading}, {POPULATION}. {meaning}",
        notes=[f"In parentheses: Table {split.table} of {CITATION}{_note_owner(view.owner)}."],
    )


def _make_auto_table(view: View) -> Table:
    split = view.split
    whole = replace(view, split=replace(split, recipes=view.complete))
    absent = [DATA_SETS[data] for data in split.recipes if data not in view.complete]
    title = f"{split.heading}: rounds to target"
    meaning = (
        f"The paper’s targets follow a rule: {describe_auto_rule(ACCURACY)}. Here it is applied to our runs. Where "
        f"every method passes the paper’s targets early, these tell more. {_gain_meaning(view)}"
    )
    return _make_table(
        whole,
        lambda recipe, tier: [(each, ()) for each in auto_targets(view.selection.of_recipe(recipe), tier, view.owner)],
        name=f"table-{split.table}-auto",
        title=f"Table {split.table}, auto targets. {title}",
        meaning=meaning,
        caption=f"{title}. {meaning}",
        notes=[f"{each}: not all methods are finished, so the rule sets no targets yet." for each in absent],
    )


def _make_bytes_table(view: View) -> Table:
    split = view.split
    title = f"{split.heading}: {view.measure.noun} to target"
    meaning = f"{view.measure.explain(ACCURACY)} The paper counts none. {_gain_meaning(view)}"
    return _make_table(
        view,
        lambda recipe, tier: [(target, ()) for target, _ in _list_printed_targets(recipe, tier)],
        name=f"table-{split.table}-{view.measure.name}",
        title=f"Table {split.table} in bytes. {title}",
        meaning=meaning,
        caption=f"{title}. {meaning}",
        notes=[],
    )


def _note_owner(owner: str) -> str:
    return "" if owner == MODEL_OWNERS[0] else f", of the {OWNER_NAMES[MODEL_OWNERS[0]]}"


def _gain_meaning(view: View) -> str:
    return f"Gain is the best other method’s {view.measure.unit} divided by {HERO}’s."


def _list_printed_targets(recipe: str, tier: str) -> list[Aim]:
    rows = ROUNDS_TO_TARGET[recipe][tier]
    return [(row.percent, (*map(str, row.rounds.values()), f"{row.gain}×")) for row in rows]


def _make_table(
    view: View, aims: Aims, *, name: str, title: str, meaning: str, caption: str, notes: Sequence[str]
) -> Table:
    groups = []
    for tier in TIERS:
        places = [(data, recipe, aim) for data, recipe in view.split.recipes.items() for aim in aims(recipe, tier)]
        rows = tuple((DATA_SETS[data], *_make_row(view, recipe, tier, aim)) for data, recipe, aim in places)
        groups.append(Group(f"{tier} model", rows))
    return Table(
        name=name,
        title=title,
        columns=("Dataset", "Accuracy", *(_format_heading(view, method) for method in METHODS), GAIN),
        groups=tuple(groups),
        meaning=meaning,
        notes=(*notes, *_reading_notes(view, groups)),
        strong=GAIN,
        merged=True,
        caption=caption,
    )


def _make_row(view: View, recipe: str, tier: str, aim: Aim) -> tuple[str, ...]:
    target, printed = aim
    runs = [view.selection.federated[recipe, method] for method in METHODS]
    costs = [[measure_cost(run, Goal(tier, target, view.owner), view.measure.spent) for run in each] for each in runs]
    show = view.measure.choose_format([each.amount for each in chain.from_iterable(costs) if each.exact])
    ours = [_format_cell(*each, show) for each in zip(runs, costs, strict=True)]
    hero, *baselines = costs
    ours.append(gain(hero, baselines) if all(runs) else "–" if any(runs) else NOT_RUN)
    cells = [f"{own} ({its})" for own, its in zip(ours, printed, strict=True)] if printed else ours
    return (format_target(ACCURACY, target), *cells)


def _format_cell(runs: Sequence[Run], costs: Sequence[Cost], show: Format) -> str:
    if not runs:
        return NOT_RUN
    alone = len(runs) == 1 and not costs[0].exact
    return format_unfinished(runs[0]) if alone and runs[0].summary is None else format_costs(costs, show)


def _format_heading(view: View, method: str) -> str:
    # With the number of runs, if any method has several.
    counts = {m: {len(view.selection.federated[r, m]) for r in view.split.recipes.values()} - {0} for m in METHODS}
    several = max(chain.from_iterable(counts.values()), default=1) > 1
    own = " or ".join(map(str, sorted(counts[method])))
    return f"{METHODS[method]} (n = {own})" if several and own else METHODS[method]


def _reading_notes(view: View, groups: Sequence[Group]) -> list[str]:
    gains = [row[-1] for group in groups for row in group.rows]
    notes = note_interval(view.runs)
    if any("n = " in _format_heading(view, method) for method in METHODS):
        notes.append(SEEDS_TO_TARGET)
    if any(text.startswith(">") for text in gains):
        notes.append(LOWER_BOUND)
    if any(text.startswith("–") for text in gains):
        notes.append(f"–: {HERO} has not reached the target, or another method’s run is missing or too short to tell.")
    return notes


def make_outcome_tables(selection: Selection) -> list[Table]:
    """Makes a table of the outcome of the runs of each recipe."""
    tables = []
    for recipe in ROUNDS_TO_TARGET:
        if runs := selection.of_recipe(recipe):
            table = make_outcome_table(compare(runs))
            title = f"{recipe}: {table.title[0].lower()}{table.title[1:]}"
            tables.append(replace(table, name=f"outcome-{recipe}", title=title))
    return tables
