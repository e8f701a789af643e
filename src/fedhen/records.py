"""The run folder: what a run leaves behind, written line by line and read back without torch.

config.toml        the complete configuration; `fedhen run --config` repeats the run from it
environment.json   versions and hardware
rounds.jsonl       one object a round: what the seed determines, and nothing else
timing.jsonl       one object a round: seconds
errors.jsonl       devices whose training raised, the first hundred of them; only where there are some
summary.json       written last: the run is finished if it is there
models/            the weights of each tier, server and all-devices average (if it is kept), in safetensors
fleet.json         which nodes were its devices; only where a real fleet played it
checkpoints/       all that the next round needs; see checkpoints.py
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from fedhen import salvage
from fedhen.errors import UserError, one_line
from fedhen.files import replace_file, write_json, write_text
from fedhen.salvage import WRONG, mapping, number, text, whole

CONFIG, ENVIRONMENT, ROUNDS, TIMING, ERRORS, SUMMARY, MODELS = (
    "config.toml",
    "environment.json",
    "rounds.jsonl",
    "timing.jsonl",
    "errors.jsonl",
    "summary.json",
    "models",
)
FLEET = "fleet.json"
"""In the folder of a run that a real fleet plays: the run's own name, and its devices."""
KINDS = ("devices", "server")
"""Whose models are scored: the average of all devices' last models, which the paper reports, and the server's."""


MOST_ERRORS = 100
"""Lines of errors.jsonl: what goes wrong more often goes wrong in the same way."""


def reported(scores: Mapping[str, Any]) -> str:
    """The kind that is reported, of those that were scored: what the paper reports if it is there."""
    return next(kind for kind in KINDS if kind in scores)


def resume_line(folder: Path) -> str:
    """The command that goes on with a run."""
    return f"fedhen {'fleet run --resume' if (folder / FLEET).is_file() else 'resume'} {folder}"


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """What goes wrong while a run is written, in one line; what was written before stays."""
    try:
        yield
    except OSError as error:
        # Whoever follows a fleet's run is told how to go on by the command that follows it.
        go_on = "" if (folder / FLEET).is_file() else f", then go on with: {resume_line(folder)}"
        why = error.strerror or str(error)
        raise UserError(
            f"cannot write to {folder}: {why}: free some space{go_on}; the rounds before are kept"
        ) from None


def record_errors(folder: Path, number: int, failed: Mapping[int, str]) -> None:
    """Add a round's failed devices to those of the run; a round that is played again replaces its own."""
    if not failed:
        return
    before = [line for line in salvage.json_lines(folder / ERRORS, _check_error)[0] if line["round"] < number]
    if len(before) < MOST_ERRORS:
        now = [{"round": number, "device": device, "error": error} for device, error in failed.items()]
        write_text(folder / ERRORS, "".join(json.dumps(line) + "\n" for line in [*before, *now][:MOST_ERRORS]))


class Recorder:
    """Writes one run's folder while the run goes on."""

    def __init__(self, folder: Path, config_toml: str, environment: Mapping[str, Any], after: int = 0) -> None:
        """Begin, or go on after that round: what was recorded of later ones is cut off."""
        self.folder = folder
        # The configuration first: a folder that has it can be gone on with, whatever else a crash leaves there.
        write_text(folder / CONFIG, config_toml)
        write_json(folder / ENVIRONMENT, environment)
        for name in (ROUNDS, TIMING):
            replace_file(folder / name, b"".join(recorded_lines(folder / name, after)))
        # With more rounds to play the run is not finished any more.
        (folder / SUMMARY).unlink(missing_ok=True)
        self._rounds: IO[str] = (folder / ROUNDS).open("a", encoding="utf-8")
        self._timing: IO[str] = (folder / TIMING).open("a", encoding="utf-8")

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._rounds.close()
        self._timing.close()

    def round(self, record: Mapping[str, Any]) -> None:
        """Append one round; flushed, so that a report of the unfinished run sees it."""
        _append(self._rounds, record)

    def timing(self, number: int, timing: Mapping[str, float]) -> None:
        """Append what a round took; after the checkpoint, whose seconds belong to it."""
        _append(self._timing, {"round": number, **timing})

    def sync(self) -> None:
        """See that all lines are on the disk."""
        for file in (self._rounds, self._timing):
            os.fsync(file.fileno())

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The last thing a run writes."""
        self.sync()
        write_json(self.folder / SUMMARY, summary)


def _append(file: IO[str], value: Mapping[str, Any]) -> None:
    file.write(json.dumps(value, allow_nan=False) + "\n")
    file.flush()


def recorded_lines(path: Path, last: int) -> list[bytes]:
    """The lines of rounds 1 to `last`, as far as they are whole and in order."""
    lines: list[bytes] = []
    if last and path.is_file():
        for line in path.read_bytes().splitlines(keepends=True)[:last]:
            try:
                if not line.endswith(b"\n") or json.loads(line)["round"] != len(lines) + 1:
                    break
            except WRONG:
                break
            lines.append(line)
    return lines


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
        return KINDS if self.config.get("evaluation", {}).get("devices", True) else KINDS[1:]

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
        config = salvage.table(folder / CONFIG)
        _check_config(config)
        summary, environment = (salvage.json_object(folder / name) for name in (SUMMARY, ENVIRONMENT))
        blank = Run(folder, config, [], [], summary, environment or {})
        rounds, torn = salvage.json_lines(folder / ROUNDS, partial(_check_round, blank))
        timing, torn_timing = salvage.json_lines(folder / TIMING, _check_timing)
        damage = [note for note in (torn, torn_timing) if note]
        if summary is not None:
            _check_summary(blank, summary)
            if not rounds:
                raise ValueError(f"it is finished, but {torn or f'{ROUNDS} holds no round'}")
            if len(rounds) < config["rounds"] and not torn:
                damage.append(f"it is finished, but {ROUNDS} ends early")
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror}") from None
    except WRONG as error:
        raise UserError(f"{folder} is damaged: {one_line(salvage.reason(error))}") from None
    return replace(blank, rounds=rounds, timing=timing, damage=tuple(damage))


def _check_config(config: Mapping[str, Any]) -> None:
    """All that reports read of it."""
    _ = text(config["recipe"]), text(config["method"]), whole(config["seed"]), whole(config["rounds"], 1)
    for name in ("evaluation", "local", "data", "targets"):
        mapping(config.get(name, {}))
    whole(config.get("evaluation", {}).get("every", 1), 1)
    text(config.get("local", {}).get("name", "plain"))
    number(config.get("data", {}).get("fraction", 1.0))
    if not mapping(config["tiers"]):
        raise ValueError("there are no tiers")
    _ = [number(share) for share in config["tiers"].values()]
    for targets in config.get("targets", {}).values():
        if not isinstance(targets, list):
            raise TypeError("targets are no list")
        _ = [number(target, most=100) for target in targets]


def _check_round(run: Run, record: Mapping[str, Any], line: int) -> None:
    """All that reports read of a round; the rounds follow each other from 1."""
    if whole(record["round"]) != line:
        raise ValueError(f"round {record['round']} where {line} should be")
    for name in ("active", "dropped", "failed", "late"):
        if not isinstance(record.get(name, [] if name in ("failed", "late") else None), list):
            raise TypeError(f"{name} is no list")
    _ = [whole(n) for way in mapping(record["bytes"]).values() for n in mapping(way).values()]
    for name in ("accuracy", "ensemble"):
        if name in record:
            _ = [number(record[name][kind][tier], most=1) for kind in run.kinds for tier in run.tiers]


def _check_timing(timing: Mapping[str, Any], line: int) -> None:
    number(timing["total"])


def _check_error(error: Mapping[str, Any], line: int) -> None:
    _ = whole(error["round"]), whole(error["device"]), text(error["error"])


def _check_summary(run: Run, summary: Mapping[str, Any]) -> None:
    _ = [whole(summary["parameters"][tier]) for tier in run.tiers]
    if "final" in summary:
        _ = [number(summary["final"][kind][tier], most=1) for kind in run.kinds for tier in run.tiers]
