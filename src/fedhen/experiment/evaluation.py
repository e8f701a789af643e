"""Scores the models of a round on the test set, and on the held-out training examples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fedhen.devices.population import Population
from fedhen.engines.scoring import Pass, Reading, Score
from fedhen.models.family import Family
from fedhen.params import TierModels, distance
from fedhen.runs.records import Values
from fedhen.tasks import Classification


def score_round(population: Population, score: Score, models: Mapping[str, TierModels]) -> dict[str, Any]:
    """Returns the scores of a round's models, as its record has them; empty if there is nothing to score them on."""
    found = score_models(population, score, models) if len(population.data.y_test) else {}
    if population.validation is not None:
        metric = population.task.scores[0]
        sums = sum_metrics(population, score, models, held_out=True)
        found["validation"] = {
            owner: {tier: _finite(float(metric.value(sums[owner, tier][0]))) for tier in tiers}
            for owner, tiers in models.items()
        }
    return found


def primary_scores(record: Mapping[str, Any], metric: str) -> Values:
    """Returns the values of the primary metric in a record; empty if the round was not evaluated."""
    values: Values = {"accuracy": record.get("accuracy"), **record.get("metrics", {})}.get(metric) or {}
    return values


def score_models(population: Population, score: Score, models: Mapping[str, TierModels]) -> dict[str, Any]:
    """Returns the metrics of every model, and R(w_s, w_c) of the server's, as a record has them.

    Accuracy has a key of its own; all other metrics are under `metrics`.
    """
    server, metrics = models["server"], population.task.scores
    *shallower, deepest = server
    sums = sum_metrics(population, score, models)
    together = [metrics[0]] if population.config.evaluation.ensemble else []
    values = [
        {owner: {tier: _finite(float(metric.value(sums[owner, tier][place]))) for tier in server} for owner in models}
        for place, metric in enumerate([*metrics, *together])
    ]
    named = dict(zip((metric.name for metric in metrics), values, strict=False))
    # Only classification's own: another metric of that name need not be a share.
    has_accuracy = isinstance(population.task, Classification) and "accuracy" in named
    found: dict[str, Any] = {"accuracy": named.pop("accuracy")} if has_accuracy else {}
    found |= {"ensemble": values[-1]} if together else {}
    found |= {"metrics": named} if named else {}
    return {**found, "distance": {tier: distance(server[tier], server[deepest]) for tier in shallower}}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def sum_metrics(
    population: Population, score: Score, models: Mapping[str, TierModels], held_out: bool = False
) -> dict[tuple[str, str], list[Tensor]]:
    """Returns (owner, tier) -> the sums of each metric of its exit, then that of its exits together."""
    passes = {
        (owner, tier): [(name, find_exits(population, tier, name)) for name in read]
        for owner, own in models.items()
        for tier, read in plan_passes(own, population.family).items()
    }
    asked = [
        Pass(tier, models[owner][tier], [exits for _, exits in read], held_out)
        for (owner, tier), read in passes.items()
    ]
    return {
        (owner, name): sums
        for ((owner, _), read), found in zip(passes.items(), score(asked), strict=True)
        for (name, _), sums in zip(read, found, strict=True)
    }


def find_exits(population: Population, scored_in: str, tier: str) -> Reading:
    """Finds the exits of a tier's model among those of the tier that it is scored in."""
    family = population.family
    places = {name: place for place, name in enumerate(family.exits(scored_in))}
    held = population.holdings[tier].exits if population.config.evaluation.ensemble else ()
    return Reading(places[tier], tuple(places[name] for name in family.exits(tier) if name in held))


def plan_passes(models: TierModels, family: Family) -> dict[str, tuple[str, ...]]:
    """Returns tier -> the tiers that one pass through its model scores: those nested in it with the same tensors."""
    passes: dict[str, tuple[str, ...]] = {}
    covered: set[str] = set()
    for tier in reversed(list(models)):
        if tier not in covered:
            own = models[tier]
            nested = [t for t in family.exits(tier) if t in models and t not in covered and t != tier]
            inside = [t for t in nested if all(own.get(name) is tensor for name, tensor in models[t].items())]
            passes[tier] = (*inside, tier)
            covered |= {*passes[tier]}
    return passes
