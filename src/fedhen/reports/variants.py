"""Names the variants of a method: its runs that differ in settings."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedhen.config import validation
from fedhen.config.recipes import RECIPES
from fedhen.config.toml import to_toml
from fedhen.runs.reader import Run

NEUTRAL_SECTIONS = ("stop", "checkpoint", "fleet", "targets")
"""Sections that change no number of a round."""
EXECUTION_SECTIONS = ("runtime", "evaluation")
"""Sections that say how an experiment is run and evaluated, not which one it is."""
NOT_SET = "not set"


@dataclass(frozen=True)
class Variants:
    """The runs of one method by the name of their variant."""

    by_name: Mapping[str, Sequence[Run]]
    base: Mapping[str, Any]
    """The settings in which variants differ, with the values of the variant that has the method's name alone."""


def find_variants(runs: Sequence[Run]) -> Variants:
    """Groups one method's runs by the settings in which runs with the same seed differ."""
    settings = {id(run): validation.flatten_config(run.config) for run in runs}
    varied = _find_differing_settings(list(settings.values()))
    wanted = _load_recipe_settings(runs[0])
    # The variant nearest to the recipe, or the first of several, has the method's name alone.
    plain = min(runs, key=lambda run: sum(settings[id(run)].get(key) != wanted.get(key) for key in varied))
    base = {key: settings[id(plain)].get(key, NOT_SET) for key in varied}
    by_name: dict[str, list[Run]] = {runs[0].method: []}
    for run in runs:
        own = {key: settings[id(run)].get(key, NOT_SET) for key in varied}
        changed = [f"{shorten_key(key)}={format_value(own[key])}" for key in varied if own[key] != base[key]]
        by_name.setdefault(" ".join([run.method, *([f"({', '.join(changed)})"] if changed else [])]), []).append(run)
    return Variants(by_name, base)


def _find_differing_settings(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    # Settings of the execution count only between runs that are otherwise equal.
    varied: list[str] = []
    handling = ("rounds", *EXECUTION_SECTIONS)
    filters: tuple[Callable[[str], bool], ...] = (
        lambda section: section not in (*NEUTRAL_SECTIONS, *handling),
        lambda section: section in handling,
    )
    for counts in filters:
        for twins in _group_twins(settings, varied):
            keys = dict.fromkeys(key for twin in twins for key in twin if counts(key.split(".")[0]))
            varied += [key for key in keys if any(twin.get(key) != twins[0].get(key) for twin in twins[1:])]
        varied = list(dict.fromkeys(varied))
    return varied


def _group_twins(settings: Sequence[Mapping[str, Any]], varied: Sequence[str]) -> Iterator[list[Mapping[str, Any]]]:
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for each in settings:
        groups.setdefault(repr([each.get(key) for key in ("seed", *varied)]), []).append(each)
    yield from groups.values()


def _load_recipe_settings(run: Run) -> Mapping[str, Any]:
    made = RECIPES.get(run.recipe)
    return validation.flatten_config(tomllib.loads(to_toml(made()))) if made else {}


def shorten_key(key: str) -> str:
    """Returns the last part of a setting's key if it is unambiguous, else the whole key."""
    known = [each for each, _ in validation.list_settings()]
    ends = Counter(each.rpartition(".")[2] for each in known) + Counter({each.split(".")[0] for each in known})
    end = key.rpartition(".")[2]
    return end if key in known and ends[end] == 1 else key


def format_value(value: Any) -> str:
    """Writes a setting's value for a table."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}={format_value(each)}" for name, each in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value) or '""'
