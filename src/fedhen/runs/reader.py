"""Reads a run folder as far as it can be trusted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from fedhen.config.validation import rename_settings
from fedhen.errors import UserError, one_line
from fedhen.fileio import untrusted
from fedhen.fileio.untrusted import PARSE_ERRORS, check_int, check_mapping, check_number, check_text
from fedhen.runs.layout import CONFIG, ENVIRONMENT, MODEL_OWNERS, ROUNDS, SUMMARY, TIMING


@dataclass(frozen=True)
class Run:
    """A run folder, read back."""

    folder: Path
    config: dict[str, Any]
    rounds: list[dict[str, Any]]
    timing: list[dict[str, Any]]
    summary: dict[str, Any] | None
    environment: dict[str, Any]
    damage: tuple[str, ...] = ()
    """What of the folder could not be read, in words; all else is as it was written."""
    cut_from: int = 0
    """The rounds it was to play, where fewer are looked at."""

    def first(self, number: int) -> Run:
        """Its first rounds alone, as if no more had been asked for."""
        if number >= self.config["rounds"]:
            return self
        return replace(
            self,
            config={**self.config, "rounds": number},
            rounds=self.rounds[:number],
            timing=self.timing[:number],
            damage=self.damage if min(len(self.rounds), len(self.timing)) < number else (),
            cut_from=self.config["rounds"],
        )

    @property
    def over(self) -> bool:
        """Whether its numbers cannot change any more."""
        return self.summary is not None or len(self.rounds) >= self.config["rounds"]

    @property
    def method(self) -> str:
        """Its federated method, with the local variant behind a plus sign if it is not the plain one."""
        local = self.config.get("local", {}).get("name", "plain")
        return str(self.config["method"]) + (f"+{local}" if local != "plain" else "")

    @property
    def recipe(self) -> str:
        """Its experiment's name."""
        return str(self.config["recipe"])

    @property
    def seed(self) -> int:
        """Its seed."""
        return int(self.config["seed"])

    @property
    def tiers(self) -> tuple[str, ...]:
        """Shallowest first."""
        return tuple(self.config["tiers"])

    @property
    def kinds(self) -> tuple[str, ...]:
        """Whose models it scores, first those that it reports."""
        return MODEL_OWNERS if self.config.get("evaluation", {}).get("devices", True) else MODEL_OWNERS[1:]

    def curve(self, tier: str, kind: str = "devices") -> list[tuple[int, float]]:
        """(round, accuracy between 0 and 1) at every evaluated round; nothing for a tier or kind it does not have."""
        if tier not in self.tiers or kind not in self.kinds:
            return []
        return [(r["round"], r["accuracy"][kind][tier]) for r in self.rounds if "accuracy" in r]

    @cached_property
    def bytes_sent(self) -> dict[int, dict[str, int]]:
        """Round -> tier -> bytes sent since the start of the run, down and up, by the tier's devices."""
        each = [
            {tier: sum(way.get(tier, 0) for way in r["bytes"].values()) for tier in self.tiers} for r in self.rounds
        ]
        sums = accumulate(each, lambda a, b: {tier: a[tier] + b[tier] for tier in a})
        return dict(zip((r["round"] for r in self.rounds), sums, strict=True))


def read_run(folder: Path) -> Run:
    """Read a run folder as far as it can be trusted; an unfinished run has no summary."""
    if not (folder / CONFIG).is_file():
        raise UserError(f"{folder} is not a run folder: it has no {CONFIG}")
    try:
        config = rename_settings(untrusted.read_toml(folder / CONFIG))
        _check_config(config)
        summary, environment = (untrusted.read_json(folder / name) for name in (SUMMARY, ENVIRONMENT))
        blank = Run(folder, config, [], [], summary, environment or {})
        rounds, torn = untrusted.read_json_lines(folder / ROUNDS, partial(_check_round, blank))
        timing, torn_timing = untrusted.read_json_lines(folder / TIMING, _check_timing)
        damage = [note for note in (torn, torn_timing) if note]
        if summary is not None:
            _check_summary(blank, summary)
            if not rounds:
                raise ValueError(f"it is finished, but {torn or f'{ROUNDS} holds no round'}")
            if len(rounds) < config["rounds"] and not torn:
                damage.append(f"it is finished, but {ROUNDS} ends early")
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror}") from None
    except PARSE_ERRORS as error:
        raise UserError(f"{folder} is damaged: {one_line(untrusted.describe_error(error))}") from None
    return replace(blank, rounds=rounds, timing=timing, damage=tuple(damage))


def _check_config(config: Mapping[str, Any]) -> None:
    """All that reports read of it."""
    _ = (
        check_text(config["recipe"]),
        check_text(config["method"]),
        check_int(config["seed"]),
        check_int(config["rounds"], 1),
    )
    for name in ("evaluation", "local", "data", "targets"):
        check_mapping(config.get(name, {}))
    check_int(config.get("evaluation", {}).get("every", 1), 1)
    check_text(config.get("local", {}).get("name", "plain"))
    check_number(config.get("data", {}).get("fraction", 1.0))
    if not check_mapping(config["tiers"]):
        raise ValueError("there are no tiers")
    _ = [check_number(share) for share in config["tiers"].values()]
    for targets in config.get("targets", {}).values():
        if not isinstance(targets, list):
            raise TypeError("targets are no list")
        _ = [check_number(target, most=100) for target in targets]


def _check_round(run: Run, record: Mapping[str, Any], line: int) -> None:
    """All that reports read of a round; the rounds follow each other from 1."""
    if check_int(record["round"]) != line:
        raise ValueError(f"round {record['round']} where {line} should be")
    for name in ("active", "dropped", "failed", "late"):
        if not isinstance(record.get(name, [] if name in ("failed", "late") else None), list):
            raise TypeError(f"{name} is no list")
    _ = [check_int(n) for way in check_mapping(record["bytes"]).values() for n in check_mapping(way).values()]
    for name in ("accuracy", "ensemble"):
        if name in record:
            _ = [check_number(record[name][kind][tier], most=1) for kind in run.kinds for tier in run.tiers]


def _check_timing(timing: Mapping[str, Any], line: int) -> None:
    check_number(timing["total"])


def _check_summary(run: Run, summary: Mapping[str, Any]) -> None:
    _ = [check_int(summary["parameters"][tier]) for tier in run.tiers]
    if "final" in summary:
        _ = [check_number(summary["final"][kind][tier], most=1) for kind in run.kinds for tier in run.tiers]
