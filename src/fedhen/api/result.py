"""A run from Python: its history, its scores, its curves and its models. Reading a saved run needs no torch."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedhen.errors import DataError, FedhenError, unknown_name
from fedhen.reports.comparison import choose_owner, compare, lacks_test_data, rounds_done
from fedhen.reports.costs import BYTES, ROUNDS
from fedhen.reports.names import label_owner
from fedhen.reports.targets import TierTargets
from fedhen.runs import reader
from fedhen.runs.device_values import average_devices
from fedhen.runs.layout import BEST, reported_owner
from fedhen.runs.records import MetricInfo, RoundRecord, Values

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedhen.config.settings import Config
    from fedhen.experiment.best_models import BestModel
    from fedhen.experiment.experiment import Experiment
    from fedhen.models.family import Family
    from fedhen.models.loaded_model import LoadedModel
    from fedhen.models.model_card import ModelCard
    from fedhen.params import TierModels
    from fedhen.tasks import Task

MEASURES = {"rounds": ROUNDS, "bytes": BYTES}


@dataclass(frozen=True)
class Models:
    """The models of a run's last evaluated round, and of the round in which each was best."""

    config: Config
    last: Mapping[str, TierModels]
    """Owner ("server" or "devices") -> tier -> weights."""
    best: Mapping[str, Mapping[str, BestModel]]
    cards: Mapping[str, ModelCard]
    task: Task
    round: int


@dataclass(frozen=True, repr=False, eq=False)
class Run:
    """A run that was played, or that `fedhen.open_run` has read from its folder."""

    record: reader.Run
    folder: Path | None = None
    """Its run folder, if it has one."""
    family: Family | None = None
    models: Models | None = None
    """Its models, if they are in memory; else they are in its folder."""
    played: Experiment | None = None

    @property
    def experiment(self) -> Experiment:
        """The experiment that was played, with its population and its last weights."""
        if self.played is None:
            raise FedhenError("this run has no experiment: only runs of fedhen.train, run and resume have it")
        return self.played

    @cached_property
    def rounds(self) -> list[dict[str, Any]]:
        """A record for each round, as in `rounds.jsonl`."""
        return [record.to_dict() for record in self.record.rounds]

    @property
    def history(self) -> list[dict[str, Any]]:
        """A flat mapping for each round, as `pandas.DataFrame` takes it.

        It has the round, the loss, the bytes and seconds of the round, each metric by owner and tier, like `server
        simple accuracy`, its mean over the devices' own test data, like `own personal simple accuracy`, and the ε that
        is spent. A value is None where it was not recorded. Columns that would be empty are left out.
        """
        seconds = {timing.round: timing.total for timing in self.record.timing}
        return [
            {
                "round": each.round,
                "loss": each.loss,
                "bytes": sum(count for way in each.bytes.values() for count in way.values()),
                "seconds": seconds.get(each.round),
                **dict(self._flatten_scores(each)),
                **dict(self._flatten_own(each)),
                **({"epsilon": each.epsilon} if any(r.epsilon is not None for r in self.record.rounds) else {}),
            }
            for each in self.record.rounds
        ]

    def _flatten_scores(self, record: RoundRecord) -> Iterator[tuple[str, float | None]]:
        for name in (*(metric.name for metric in self.record.metrics), "ensemble"):
            if any(_values(each, name) for each in self.record.rounds):
                values = _values(record, name)
                for owner in self.record.owners:
                    yield from ((f"{owner} {t} {name}", values.get(owner, {}).get(t)) for t in self.record.tiers)

    def _flatten_own(self, record: RoundRecord) -> Iterator[tuple[str, float | None]]:
        """Yields the means over the devices that train, each on its own test data."""
        for owner in dict.fromkeys(owner for each in self.record.rounds for owner in each.own):
            for tier in self.record.tiers:
                values = record.own.get(owner, {}).get(tier, [])
                yield f"own {owner} {tier} {self.record.metric.name}", average_devices(values)

    @property
    def accuracy(self) -> dict[str, dict[str, float]]:
        """The accuracies of the last evaluated round: kind (server, devices) -> tier -> share of the test set."""
        if "accuracy" not in self.metrics:
            none = "none, since there is no test data" if lacks_test_data(self.record) else "none yet"
            known = ", ".join(self.metrics) or none
            raise DataError(f"this run has no accuracies: its metrics are {known}; see `metrics`")
        return self.metrics["accuracy"]

    @property
    def metrics(self) -> dict[str, dict[str, dict[str, Any]]]:
        """The metrics of the last evaluated round: name -> kind (server, devices) -> tier -> value."""
        last = next((each for each in reversed(self.record.rounds) if each.accuracy or each.metrics), None)
        if last is None:
            return {}
        return {**({"accuracy": last.accuracy} if last.accuracy else {}), **last.metrics}

    def model(
        self,
        tier: str,
        of: str = "server",
        at: str = "last",
        *,
        family: Family | None = None,
        kind: str | None = None,
    ) -> LoadedModel:
        """Returns the trained model of a tier: a module, with `predict` for raw inputs.

        Args:
            tier: The tier.
            of: "server", or "devices" for the average of all devices' last models.
            at: "last", or "best" for the round in which this model was best.
            family: The run's family, if the run was read from its folder and its family was passed from Python.
            kind: The old name of `of`.
        """
        from fedhen.api.saved import load
        from fedhen.experiment.saved_models import check_choice, refuse_incomplete
        from fedhen.models.loaded_model import LoadedModel
        from fedhen.models.model_files import build_ready_module

        family, models, of = family or self.family, self.models, kind or of
        if models is not None:
            check_choice(models.config, tier, of, at)
            refuse_incomplete(models.config)
        if models is None or (at == BEST and tier not in models.best.get(of, {}) and self.folder is not None):
            # It was read from its folder, or is resumed without a round to play.
            assert self.folder is not None
            return load(self.folder, tier, of, at, family=family)
        if not models.last or (at == BEST and tier not in models.best.get(of, {})):
            raise FedhenError("there is no such model yet: no round of this run was evaluated")
        best = models.best[of][tier] if at == BEST else None
        weights, number = (best.weights, best.round) if best else (models.last[of][tier], models.round)
        assert family is not None
        module = build_ready_module(family, tier, weights, models.cards[tier].exits)
        return LoadedModel(module, models.cards[tier], models.task, number)

    def plot(self, over: Literal["rounds", "bytes"] = "rounds", of: str | None = None) -> Figure:
        """Draws the primary metric of each tier over rounds or bytes, as a figure of matplotlib.

        `of` is whose models: "server" or "devices"; by default the devices' average, if the run keeps it.
        """
        return draw([self.record], over, of)

    @property
    def _title(self) -> str:
        run = self.record
        return f"{run.method} on {run.recipe}, seed {run.seed}, {rounds_done(run)} of {run.settings.rounds} rounds"

    @property
    def _final(self) -> tuple[MetricInfo, dict[str, dict[str, float | None]]]:
        return self.record.metric, self.metrics.get(self.record.metric.name, {})

    def __repr__(self) -> str:
        metric, final = self._final
        parts = [self._title]
        if final:
            owner = reported_owner(final)
            scores = ", ".join(f"{tier} {metric.format(value)}" for tier, value in final[owner].items())
            parts.append(f"{metric.name} ({label_owner([self.record], owner)}): {scores}")
        return f"<Run: {'; '.join([*parts, *([str(self.folder)] if self.folder else [])])}>"

    def _repr_html_(self) -> str:
        """Returns a small table for notebooks."""
        metric, final = self._final
        rows = [["tier", *(f"{metric.name}, {label_owner([self.record], owner)}" for owner in final)]]
        rows += [[tier, *(metric.format(final[owner][tier]) for owner in final)] for tier in self.record.tiers]
        place = f"<p><code>{escape(str(self.folder))}</code></p>" if self.folder else ""
        head, *body = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
        lines = "".join(f"<tr>{row}</tr>" for row in body)
        return (
            f"<p><b>Run</b>: {escape(self._title)}</p>"
            f"<table><thead><tr>{head.replace('td>', 'th>')}</tr></thead><tbody>{lines}</tbody></table>{place}"
        )


Trained = Run
"""The old name."""


def open_run(folder: str | os.PathLike[str], *, family: Family | None = None) -> Run:
    """Reads a run from its folder, finished or not, as far as it is undamaged.

    Its models need `family` if the run was trained with a family from Python.
    """
    return Run(reader.read_run(Path(folder)), Path(folder), family)


def _values(record: RoundRecord, name: str) -> Values:
    return record.ensemble if name == "ensemble" else record.values(name)


def draw(runs: Sequence[reader.Run], over: str, of: str | None) -> Figure:
    """Draws the primary metric of runs, with the targets of their configurations. Notebooks show the figure."""
    from fedhen.reports.charts import Chart
    from fedhen.reports.figures import PNG_DPI

    if over not in MEASURES:
        raise unknown_name("measure", over, MEASURES)
    if all(map(lacks_test_data, runs)):
        raise DataError("there is nothing to plot: without test data models are not scored")
    owner, comparison = choose_owner(runs, of), compare(runs)
    targets = {
        tier: TierTargets(tuple({target for run in runs for target in run.settings.targets.get(tier, ())}), auto=False)
        for tier in comparison.tiers
    }
    figure = Chart(comparison, targets, owner, MEASURES[over]).figure(comparison.tiers)
    # Without pyplot, notebooks do not know how to show a figure.
    figure._repr_png_ = partial(_render_png, figure, PNG_DPI)  # type: ignore[attr-defined]
    return figure


def _render_png(figure: Figure, dpi: int) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=dpi)
    return file.getvalue()
