"""exits.json in a run folder: what early exits of the last tier's server model give, for reports. Needs no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from fedhen.deploy.manifest import ExitStudy
from fedhen.fileio import untrusted
from fedhen.fileio.atomic import write_json
from fedhen.runs.layout import EXITS
from fedhen.runs.records import NonNegative, parse_record


@dataclass(frozen=True, kw_only=True)
class ExitFile:
    """A study of the exits, and the round of the model that was studied."""

    round: NonNegative
    """0 if it is not known."""
    study: ExitStudy


def write_exits(folder: Path, found: ExitFile) -> None:
    """Writes a study into a run folder, in place of an earlier one."""
    write_json(folder / EXITS, asdict(found))


def read_exits(folder: Path) -> ExitFile | None:
    """Reads the study in a run folder. None if there is none, or if it is damaged: it can be made again."""
    try:
        values = untrusted.read_json(folder / EXITS)
        return None if values is None else parse_record(ExitFile, values)
    except (OSError, *untrusted.PARSE_ERRORS):
        return None
