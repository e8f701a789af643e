"""Scores the models of a round on the test set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedhen.devices.population import Population
from fedhen.engines.scoring import Pass, Reading, Score
from fedhen.models.family import Family
from fedhen.params import TierModels, distance


def score_models(population: Population, score: Score, models: Mapping[str, TierModels]) -> dict[str, Any]:
    """Returns the accuracy of every model and R(w_s, w_c) of the server's models, by the keys of a record."""
    config, server = population.config, models["server"]
    *shallower, deepest = server
    both = count_right(population, score, models)
    examples = len(population.data.y_test)
    found: dict[str, Any] = {
        part: {owner: {tier: both[owner, tier][place] / examples for tier in server} for owner in models}
        for place, part in enumerate(("accuracy", "ensemble"))
    }
    found["distance"] = {tier: distance(server[tier], server[deepest]) for tier in shallower}
    return found if config.evaluation.ensemble else {key: found[key] for key in ("accuracy", "distance")}


def count_right(
    population: Population, score: Score, models: Mapping[str, TierModels]
) -> dict[tuple[str, str], tuple[int, int]]:
    """Returns (owner, tier) -> the number of examples that its exit, and all its exits together, classify correctly."""
    passes = {
        (owner, tier): [(name, find_exits(population, tier, name)) for name in read]
        for owner, own in models.items()
        for tier, read in plan_passes(own, population.family).items()
    }
    asked = [Pass(tier, models[owner][tier], [exits for _, exits in read]) for (owner, tier), read in passes.items()]
    return {
        (owner, name): right
        for ((owner, _), read), counts in zip(passes.items(), score(asked), strict=True)
        for (name, _), right in zip(read, counts, strict=True)
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
