"""The numbers of a round that trackers log, by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from fedhen.runs.device_values import average_devices
from fedhen.runs.records import ACCURACY


class RoundValues:
    """Makes named values of each record of a run, in order. Bytes are counted from the start of the run."""

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()

    def add(self, record: Mapping[str, Any], timing: Mapping[str, float]) -> dict[str, float]:
        """Returns the values of the next round. Those that are not finite are left out."""
        for way, tiers in record["bytes"].items():
            self.sent.update({f"bytes/{way}/{tier}": number for tier, number in tiers.items()})
        seconds = {"seconds/round": timing["total"]} if "total" in timing else {}
        of_round = {"loss/training": record["loss"], "privacy/epsilon": record.get("epsilon")}
        found = {**dict(_find_scores(record)), **of_round, **self.sent, **seconds}
        return {name: float(value) for name, value in found.items() if value is not None}


def _find_scores(record: Mapping[str, Any]) -> Iterator[tuple[str, float | None]]:
    """Yields metric/owner/tier, as accuracy/server/simple, the means of own/owner/tier, and distance/tier."""
    scores = {name: record.get(name, {}) for name in (ACCURACY.name, "ensemble", "validation")}
    for metric, owners in {**scores, **record.get("metrics", {})}.items():
        for owner, tiers in owners.items():
            yield from ((f"{metric}/{owner}/{tier}", value) for tier, value in tiers.items())
    for key in ("own", "held_out"):
        for owner, tiers in record.get(key, {}).items():
            yield from ((f"{key}/{owner}/{tier}", average_devices(each)) for tier, each in tiers.items())
    yield from ((f"distance/{tier}", value) for tier, value in (record.get("distance") or {}).items())
