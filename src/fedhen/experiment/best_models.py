"""Keeps the best model of every owner and tier, by the primary metric."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fedhen.config.evaluation_settings import StopConfig
from fedhen.experiment.stopping import find_reason
from fedhen.fileio import untrusted
from fedhen.params import TierModels, Weights
from fedhen.runs.layout import BEST, MODEL_OWNERS, reported_owner
from fedhen.runs.records import MetricInfo, Values


@dataclass(frozen=True)
class BestModel:
    """The model of one owner and tier in the round in which it was best."""

    round: int
    value: float
    weights: Weights


@dataclass(frozen=True)
class Standing:
    """How a run stands after its evaluations. It is replaced and never changed."""

    best: Mapping[str, Mapping[str, BestModel]] = field(default_factory=dict)
    """Owner -> tier -> its best model so far. The first of several that are equally good."""
    waited: int = 0
    """The number of evaluations in a row that have improved no tier of the reported models."""
    reason: str = ""
    """Why the run stops after this round, or "" if it continues."""

    def observe(
        self, number: int, values: Values, models: Mapping[str, TierModels], metric: MetricInfo, stop: StopConfig
    ) -> Standing:
        """Returns the standing after the evaluation of a round, with the values of its models."""
        best = {owner: dict(self.best.get(owner, {})) for owner in values}
        improved = set()
        for owner, tiers in values.items():
            for tier, value in tiers.items():
                before = best[owner].get(tier)
                if value is not None and (before is None or metric.is_better(value, before.value)):
                    best[owner][tier] = BestModel(number, value, models[owner][tier])
                    improved.add(owner)
        reported = reported_owner(values)
        waited = 0 if reported in improved else self.waited + 1
        return Standing(best, waited, find_reason(stop, metric, number, values[reported], waited))

    def parts(self, played: int) -> dict[str, TierModels]:
        """Returns the weights that a checkpoint holds for it. Those of its own round are in other parts."""
        found = {
            f"{BEST}-{owner}": {tier: kept.weights for tier, kept in tiers.items() if kept.round != played}
            for owner, tiers in self.best.items()
        }
        return {part: models for part, models in found.items() if models}

    def describe(self) -> dict[str, Any]:
        """Returns all but the weights, as JSON represents it."""
        best = {owner: {tier: [b.round, b.value] for tier, b in tiers.items()} for owner, tiers in self.best.items()}
        return {"best": best, "waited": self.waited, "reason": self.reason}

    def fill(
        self, parts: Mapping[str, TierModels], played: int, current: Callable[[], Mapping[str, TierModels]]
    ) -> Standing:
        """Returns the standing with the weights of a checkpoint. `current` returns the models of its own round."""
        is_new = any(kept.round == played for tiers in self.best.values() for kept in tiers.values())
        now = current() if is_new else {}
        best = {
            owner: {
                tier: replace(kept, weights=(now[owner] if kept.round == played else parts[f"{BEST}-{owner}"])[tier])
                for tier, kept in tiers.items()
            }
            for owner, tiers in self.best.items()
        }
        return replace(self, best=best)


def parse_standing(values: Any, like: TierModels, played: int) -> Standing:
    """Parses what `describe` returned. The weights are those of `like`. Raises one of PARSE_ERRORS."""
    best = {
        owner: {tier: _parse_best(kept, like[tier], played) for tier, kept in untrusted.check_mapping(tiers).items()}
        for owner, tiers in untrusted.check_mapping(values.get("best", {})).items()
    }
    if not best.keys() <= set(MODEL_OWNERS):
        raise ValueError("it has models of an unknown owner")
    return Standing(best, untrusted.check_int(values.get("waited", 0)), untrusted.check_text(values.get("reason", "")))


def _parse_best(kept: Any, like: Weights, played: int) -> BestModel:
    number, value = kept
    if not 1 <= untrusted.check_int(number) <= played:
        raise ValueError(f"its best round {number} has not been played")
    return BestModel(number, untrusted.check_number(value, -sys.float_info.max, sys.float_info.max), like)
