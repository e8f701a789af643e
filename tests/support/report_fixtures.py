"""Invented runs, with which every expected number can be derived by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedhen.runs.reader import Run
from fedhen.runs.records import ACCURACY, MetricInfo, RoundRecord, Summary, Timing, Values

Curves = Mapping[str, Sequence[float | None]]
"""Tier -> the primary metric in each round, None if the round was not evaluated."""


def make_run(
    method: str,
    curves: Curves,
    *,
    metric: MetricInfo = ACCURACY,
    seed: int = 0,
    planned: int | None = None,
    **config: Any,
) -> Run:
    """Makes a run with equal scores for all owners and 1 MB per tier, direction and round.

    It is finished unless `planned` exceeds the length of the curves.
    """
    length = max((len(curve) for curve in curves.values()), default=0)
    planned = length if planned is None else planned
    rounds = [
        _round(number, metric, {tier: curve[number - 1] for tier, curve in curves.items()})
        for number in range(1, length + 1)
    ]
    shares = {tier: 1 / len(curves) for tier in curves}
    settings = {
        "recipe": "made-up",
        "method": method,
        "seed": seed,
        "rounds": planned,
        "devices": {"number": 20},
        "tiers": shares,
    }
    parameters = {tier: 1000 * (place + 1) for place, tier in enumerate(curves)}
    metrics = [] if metric == ACCURACY else [metric]
    environment = {"python": "3.11", "gpu": {"name": "none"}}
    return Run(
        folder=Path("runs") / f"{method}-{seed}",
        config={**settings, "targets": {}, "evaluation": {"every": 1}, **config},
        rounds=rounds,
        timing=[Timing(record.round, 1.5) for record in rounds],
        summary=Summary(parameters, metrics=metrics) if length == planned else None,
        environment={**environment, **({"metrics": list(map(asdict, metrics))} if metrics else {})},
    )


def _round(number: int, metric: MetricInfo, values: Mapping[str, float | None]) -> RoundRecord:
    scores = {tier: score for tier, score in values.items() if score is not None}
    both = {owner: dict(scores) for owner in ("devices", "server")} if scores else {}
    others: dict[str, Values] = {metric.name: {owner: {**tiers} for owner, tiers in both.items()}}
    return RoundRecord(
        round=number,
        active=[0],
        dropped=[],
        loss=1.0,
        bytes={way: dict.fromkeys(values, 1000000) for way in ("down", "up")},
        accuracy=both if metric == ACCURACY else {},
        metrics=others if both and metric != ACCURACY else {},
        distance=dict.fromkeys(scores, 0.0) if scores else None,
    )


def staircase(length: int, steps: Mapping[int, float], start: float = 0.1) -> list[float]:
    """Returns a value per round, which changes only in the rounds of `steps`."""
    curve, now = [], start
    for number in range(1, length + 1):
        now = steps.get(number, now)
        curve.append(now)
    return curve


def write_folder(run: Run, folder: Path) -> Path:
    """Writes a run as a folder."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(_toml(run.config), encoding="utf-8")
    rounds, timing = [record.to_dict() for record in run.rounds], [asdict(each) for each in run.timing]
    for name, lines in (("rounds.jsonl", rounds), ("timing.jsonl", timing)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (folder / "environment.json").write_text(json.dumps(run.environment), encoding="utf-8")
    if run.summary is not None:
        (folder / "summary.json").write_text(json.dumps(asdict(run.summary)), encoding="utf-8")
    return folder


def _toml(config: Mapping[str, Any]) -> str:
    tables = {key: value for key, value in config.items() if isinstance(value, dict)}
    lines = [f"{key} = {json.dumps(value)}" for key, value in config.items() if key not in tables]
    for name, table in tables.items():
        lines += [f"[{name}]", *(f"{json.dumps(key)} = {json.dumps(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"
