"""Reads a run folder as far as it is undamaged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from fedhen.config.validation import rename_settings
from fedhen.errors import CheckpointError, FedhenError, one_line
from fedhen.fileio import untrusted
from fedhen.fileio.untrusted import PARSE_ERRORS
from fedhen.runs.folders import find_config
from fedhen.runs.joined import read_joined
from fedhen.runs.layout import ENVIRONMENT, MODEL_OWNERS, ROUNDS, SUMMARY, TIMING
from fedhen.runs.records import (
    ACCURACY,
    MetricInfo,
    Record,
    RoundRecord,
    Settings,
    Subject,
    Summary,
    Timing,
    parse_record,
)


@dataclass(frozen=True)
class Run:
    """A run as read from its folder."""

    folder: Path
    config: dict[str, Any]
    rounds: list[RoundRecord]
    timing: list[Timing]
    summary: Summary | None
    environment: dict[str, Any]
    damage: tuple[str, ...] = ()
    """Descriptions of what could not be read; everything else is as it was written."""
    truncated_from: int = 0
    """The planned rounds of a truncated run, else 0."""

    def truncate(self, number: int) -> Run:
        """Returns the run as if it had been planned for at most this number of rounds."""
        if number >= self.length:
            return self
        return replace(
            self,
            config={**self.config, "rounds": number},
            rounds=self.rounds[:number],
            timing=self.timing[:number],
            damage=self.damage if min(len(self.rounds), len(self.timing)) < number else (),
            truncated_from=self.length,
        )

    @cached_property
    def joined(self) -> list[str]:
        """The tiers of the devices that joined a real fleet after its run began; they have the next numbers."""
        return read_joined(self.folder, self.settings.devices.number, len(self.rounds))

    @cached_property
    def settings(self) -> Settings:
        """The settings that reports interpret."""
        return parse_record(Settings, self.config)

    @property
    def length(self) -> int:
        """The number of rounds that the run has if it is finished, else that it will have."""
        planned = self.settings.rounds
        return min(planned, self.summary.rounds) if self.stopped and self.summary else planned

    @property
    def stopped(self) -> str:
        """Why the run ended before its last planned round, or "" if it did not."""
        return self.summary.stopped.reason if self.summary and self.summary.stopped else ""

    @property
    def is_complete(self) -> bool:
        """Whether all rounds are recorded, so that no number can change."""
        return self.summary is not None or len(self.rounds) >= self.length

    @property
    def method(self) -> str:
        """The federated method, and after a "+" each the local variant and what makes models personal, if any."""
        local, personal = self.settings.local.name, self.settings.personal.name
        more = [*([local] if local != "plain" else []), *([personal] if personal != "none" else [])]
        return "+".join([self.settings.method, *more])

    @property
    def label(self) -> str:
        """The run in words: method, seed and folder."""
        return f"{self.method}, seed {self.seed} ({self.folder.name})"

    @property
    def recipe(self) -> str:
        return self.settings.recipe

    @property
    def seed(self) -> int:
        return self.settings.seed

    @property
    def tiers(self) -> tuple[str, ...]:
        """The names of the tiers, shallowest first."""
        return tuple(self.settings.tiers)

    @property
    def owners(self) -> tuple[str, ...]:
        """Whose models are scored, the reported ones first."""
        return MODEL_OWNERS if self.settings.evaluation.devices else MODEL_OWNERS[1:]

    @cached_property
    def scores_own_models(self) -> bool:
        """Whether the server has no whole model, so that its scores are the means of the devices' own models."""
        return any(record.scored for record in self.rounds)

    @cached_property
    def metrics(self) -> tuple[MetricInfo, ...]:
        """The metrics that are recorded, the primary one first."""
        if self.summary is not None and self.summary.metrics:
            return tuple(self.summary.metrics)
        listed = self.environment.get("metrics")
        return tuple(parse_record(MetricInfo, each) for each in listed) if listed else (ACCURACY,)

    @cached_property
    def subject(self) -> Subject:
        """The task and the data set."""
        return parse_record(Subject, self.environment)

    @property
    def metric(self) -> MetricInfo:
        """The primary metric."""
        return self.metrics[0]

    def curve(self, tier: str, owner: str = "devices", metric: str = "") -> list[tuple[int, float]]:
        """Returns (round, value) of a metric, by default the primary one, for every evaluated round.

        It is empty if the run lacks the tier or the owner, and leaves out values that are not finite.
        """
        if tier not in self.tiers or owner not in self.owners:
            return []
        each = ((record.round, record.values(metric or self.metric.name)) for record in self.rounds)
        found = [(number, values[owner][tier]) for number, values in each if values]
        return [(number, value) for number, value in found if value is not None]

    @cached_property
    def bytes_sent(self) -> dict[int, dict[str, int]]:
        """Round -> tier -> bytes sent to and from the tier's devices since the start of the run."""
        each = [{tier: sum(way.get(tier, 0) for way in r.bytes.values()) for tier in self.tiers} for r in self.rounds]
        sums = accumulate(each, lambda a, b: {tier: a[tier] + b[tier] for tier in a})
        return dict(zip((r.round for r in self.rounds), sums, strict=True))


def read_run(folder: Path) -> Run:
    """Reads a run folder as far as it is undamaged. Raises CheckpointError if that is too little for a report."""
    path = find_config(folder)
    try:
        config = rename_settings(untrusted.read_toml(path))
        summary, environment = (untrusted.read_json(folder / name) for name in (SUMMARY, ENVIRONMENT))
        blank = Run(folder, config, [], [], _parse_summary(summary), environment or {})
        _ = blank.metrics, blank.subject
        if not blank.tiers:
            raise ValueError("there are no tiers")
        rounds, torn = _read_lines(folder / ROUNDS, partial(_parse_round, blank))
        timing, torn_timing = _read_lines(folder / TIMING, lambda values, line: parse_record(Timing, values))
        damage = [note for note in (torn, torn_timing) if note]
        if blank.summary is not None:
            _check_scores(blank, blank.summary.final)
            _ = [blank.summary.parameters[tier] for tier in blank.tiers]
            if not rounds:
                raise ValueError(f"it is finished, but {torn or f'{ROUNDS} holds no round'}")
            if len(rounds) < blank.length and not torn:
                damage.append(f"it is finished, but {ROUNDS} ends early")
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror}") from None
    except PARSE_ERRORS as error:
        raise CheckpointError(f"{folder} is damaged: {one_line(untrusted.describe_error(error))}") from None
    return replace(blank, rounds=rounds, timing=timing, damage=tuple(damage))


def read_readable(folders: Iterable[Path]) -> tuple[list[Run], list[str]]:
    """Returns the runs that can be read, and the errors of the others."""
    runs, errors = [], []
    for folder in folders:
        try:
            runs.append(read_run(folder))
        except FedhenError as error:
            errors.append(one_line(str(error)))
    return runs, errors


def read_summary(folder: Path) -> Summary | None:
    """Reads the summary of a run, or returns None if the run is not finished."""
    try:
        return _parse_summary(untrusted.read_json(folder / SUMMARY))
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror}") from None
    except PARSE_ERRORS as error:
        raise CheckpointError(f"{folder} is damaged: {one_line(untrusted.describe_error(error))}") from None


def _read_lines(path: Path, parse: Callable[[Mapping[str, Any], int], Record]) -> tuple[list[Record], str]:
    found: list[Record] = []
    _, damage = untrusted.read_json_lines(path, lambda values, line: found.append(parse(values, line)))
    return found, damage


def _parse_round(run: Run, values: Mapping[str, Any], line: int) -> RoundRecord:
    record = parse_record(RoundRecord, values)
    if record.round != line:
        raise ValueError(f"round {record.round} where {line} should be")
    _check_scores(run, record.accuracy)
    for scores in (record.ensemble, record.validation, *record.metrics.values()):
        _check_scores(run, scores)
    return record


def _parse_summary(values: Mapping[str, Any] | None) -> Summary | None:
    return None if values is None else parse_record(Summary, values)


def _check_scores(run: Run, scores: Mapping[str, Mapping[str, object]]) -> None:
    """Raises KeyError unless there are none or one for every owner and tier."""
    _ = scores and [scores[owner][tier] for owner in run.owners for tier in run.tiers]
