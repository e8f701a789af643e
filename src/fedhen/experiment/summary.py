"""Makes the summary of a run from its records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fedhen.config.settings import Config
from fedhen.experiment.evaluation import primary_scores
from fedhen.privacy.promise import describe_promise
from fedhen.profiles.workload import Workload
from fedhen.runs.device_values import describe_owners
from fedhen.runs.records import DeviceValues, MetricInfo


@dataclass(frozen=True)
class Outcome:
    """What the records of a run do not say about it."""

    parameters: Mapping[str, int]
    """Tier -> number of parameters."""
    workload: Workload
    best_rounds: Mapping[str, Mapping[str, int]]
    """Owner -> tier -> the round of its best model."""
    seconds: float
    stopped: Mapping[str, Any]
    """Why the run ended before its last planned round: `reason`, and `rule` if it stopped by itself; else empty."""
    is_fleet: bool = False
    """Whether a real fleet played the run."""
    spent: Sequence[int] = ()
    """The noisy sums that each stream of noise has released, where these are not the rounds."""


def make_summary(
    config: Config, metrics: Sequence[MetricInfo], records: Sequence[Mapping[str, Any]], outcome: Outcome
) -> dict[str, Any]:
    """Returns the summary of a run: its settings, the final and best values of its primary metric, and totals."""
    # There may be no test data.
    scored = [values for record in records if (values := primary_scores(record, metrics[0].name))]
    final = scored[-1] if scored else {}
    best = {
        owner: {t: _find_best(metrics[0], [s[owner][t] for s in scored]) for t in tiers}
        for owner, tiers in final.items()
    }
    late = sum(len(r.get("late", ())) for r in records)
    return {
        "recipe": config.recipe,
        "method": config.method,
        "seed": config.seed,
        "rounds": len(records),
        **({"stopped": outcome.stopped} if outcome.stopped else {}),
        "parameters": outcome.parameters,
        **{name: found for name, found in asdict(outcome.workload).items() if found},
        "metrics": [asdict(metric) for metric in metrics],
        **({"final": final, "best": best} if scored else {}),
        **summarise_own(metrics[0], records),
        **({"best_rounds": outcome.best_rounds} if outcome.best_rounds else {}),
        **describe_promise(config, records, outcome.is_fleet, outcome.spent),
        "dropped": sum(len(r["dropped"]) for r in records),
        "failed": sum(len(r.get("failed", ())) for r in records),
        **({"late": late} if late else {}),
        "bytes": sum(n for r in records for way in r["bytes"].values() for n in way.values()),
        "seconds": round(outcome.seconds, 3),
    }


def summarise_own(metric: MetricInfo, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the last scores on the devices' own test data, spread over the devices of each tier."""
    summary = {}
    for key in ("own", "held_out"):
        last: DeviceValues = next((record[key] for record in reversed(records) if record.get(key)), {})
        spreads = describe_owners(last, metric)
        if found := {owner: {t: asdict(spread) for t, spread in tiers.items()} for owner, tiers in spreads.items()}:
            summary[key] = found
    return summary


def _find_best(metric: MetricInfo, values: Sequence[float | None]) -> float | None:
    finite = [value for value in values if value is not None]
    return metric.best(finite) if finite else None
