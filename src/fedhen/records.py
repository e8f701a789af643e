"""The run folder: what a run leaves behind, written line by line and read back without torch.

config.toml        the complete configuration; `fedhen run --config` repeats the run from it
environment.json   versions and hardware
rounds.jsonl       one object a round: what the seed determines, and nothing else
timing.jsonl       one object a round: seconds
summary.json       written last: the run is finished if it is there
models/            the weights of each tier, server and all-devices average (if it is kept), in safetensors
checkpoints/       all that the next round needs; see checkpoints.py
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from fedhen.errors import UserError

CONFIG, ENVIRONMENT, ROUNDS, TIMING, SUMMARY, MODELS = (
    "config.toml",
    "environment.json",
    "rounds.jsonl",
    "timing.jsonl",
    "summary.json",
    "models",
)
PART = ".part"
"""The end of the name of a file that is not whole yet."""
KINDS = ("devices", "server")
"""Whose models are scored: the average of all devices' last models, which the paper reports, and the server's."""


def reported(scores: Mapping[str, Any]) -> str:
    """The kind that is reported, of those that were scored: what the paper reports if it is there."""
    return next(kind for kind in KINDS if kind in scores)


def write_text(path: Path, text: str) -> None:
    """Write a text file, so that a reader never sees half of it."""
    replace_file(path, text.encode())


def replace_file(path: Path, content: bytes) -> None:
    """Write a file beside, see that it is on the disk, and rename it: after a crash it is the old one or the new."""
    beside = path.with_name(path.name + PART)
    with beside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """See that the names in a folder are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write an object as indented JSON."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


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
            except (ValueError, KeyError, TypeError):
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
    def bytes_sent(self) -> dict[int, int]:
        """Round -> bytes sent since the start of the run, down and up, by the devices of all tiers."""
        each = [sum(n for way in r["bytes"].values() for n in way.values()) for r in self.rounds]
        return dict(zip((r["round"] for r in self.rounds), accumulate(each), strict=True))


def read_run(folder: Path) -> Run:
    """Read a run folder; an unfinished run has no summary."""
    if not (folder / CONFIG).is_file():
        raise UserError(f"{folder} is not a run folder: it has no {CONFIG}")
    try:
        config = tomllib.loads((folder / CONFIG).read_text(encoding="utf-8"))
        rounds, timing = (_lines(folder / name) for name in (ROUNDS, TIMING))
        summary, environment = (_object(folder / name) for name in (SUMMARY, ENVIRONMENT))
        run = Run(folder, config, rounds, timing, summary, environment or {})
        _check(run)
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder} is damaged: {type(error).__name__}: {error}") from None
    return run


def _check(run: Run) -> None:
    """Read all that reports read, so that what is wrong is found here."""
    numbers: list[float] = [run.seed, int(run.config["rounds"]), int(run.config.get("evaluation", {}).get("every", 1))]
    numbers += [len(record["active"]) + len(record["dropped"]) for record in run.rounds]
    numbers += [float(timing["total"]) for timing in run.timing]
    numbers += [float(share) for share in run.config["tiers"].values()]
    numbers += [float(accuracy) for tier in run.tiers for kind in run.kinds for _, accuracy in run.curve(tier, kind)]
    if not all(isinstance(number, int | float) for number in [*numbers, *run.bytes_sent.values()]):
        raise TypeError("a number is no number")
    if not isinstance(run.environment, dict) or not isinstance(run.method + run.recipe, str):
        raise TypeError("environment.json is no object")
    if run.summary is not None:
        _ = [int(run.summary["parameters"][tier]) for tier in run.tiers]
        if not run.rounds:
            raise ValueError(f"it is finished, but {ROUNDS} holds no round")


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def _object(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
