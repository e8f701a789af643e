"""`fedhen report`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedhen.errors import FedhenError
from fedhen.profiles.profile import Profile
from fedhen.profiles.reading import list_shipped, parse_measured, read_profile, take_measured
from fedhen.reports import report_folders
from fedhen.runs.layout import MODEL_OWNERS

EXAMPLES = """\
examples:
  fedhen report runs/digits-compare          all runs in a folder
  fedhen report runs/digits-fedhen-seed0 runs/digits-noside-seed0 --out my-report
  fedhen report runs/digits-compare --target simple=92,90 --target complex=auto
  fedhen report runs/my-language-models --target simple=6.0     the perplexity to reach
  fedhen report runs/digits-compare --rounds 10 --out early
  fedhen report runs/digits-compare --profile phones            hours and joules on phones
  fedhen report runs/usual runs/groups-4     one method with two settings: one column each
"""
AUTO = "auto"


def add_commands(commands: Any) -> None:
    look = argparse.RawDescriptionHelpFormatter
    report = commands.add_parser(
        "report", help="make tables, curves and a page from run folders", epilog=EXAMPLES, formatter_class=look
    )
    report.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders, or folders that contain them")
    report.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where to write (default: RUN if there is only one, else a fresh folder under runs/)",
    )
    report.add_argument(
        "--target",
        action="append",
        default=[],
        metavar="TIER=X,Y",
        help="a tier's targets in the unit of the metric (accuracy in percent), or auto: what the worst method "
        "reaches, and a little less; may be repeated",
    )
    report.add_argument(
        "--of",
        choices=MODEL_OWNERS,
        help="whose models: the average of all devices (default, if all runs keep it), or the server's",
    )
    report.add_argument("--rounds", type=int, metavar="N", help="use only the first N rounds of each run")
    add_profile(report, "add hours and joules")
    report.set_defaults(run=report_command)


def report_command(options: argparse.Namespace) -> int:
    report = report_folders(
        options.runs,
        options.out,
        targets=parse_targets(options.target),
        owner=options.of,
        rounds=options.rounds,
        profile=choose_profile(options),
        skip=print_note,
        say=print_note,
    )
    print(report.text)
    print(f"page: {report.paths[0]}")
    return 0


def add_profile(command: argparse.ArgumentParser, purpose: str, required: bool = False) -> None:
    """Adds the profile of devices, and the number that was measured on one of them."""
    command.add_argument(
        "--profile",
        required=required,
        metavar="PROFILE",
        help=f"{purpose}, by a profile of devices: {', '.join(list_shipped())}, or your own as FILE.toml",
    )
    command.add_argument(
        "--measured",
        metavar="CLASS:TIER=SECONDS",
        help="the seconds that a device of this class of the profile needs to train this tier's model for one round; "
        "all speeds of the profile are scaled to fit",
    )


def choose_profile(options: argparse.Namespace) -> Profile | None:
    """Returns the profile that the options name, if they name one."""
    if options.profile is None:
        if options.measured is not None:
            raise FedhenError("--measured needs a --profile")
        return None
    profile = read_profile(options.profile)
    return profile if options.measured is None else take_measured(profile, parse_measured(options.measured))


def print_note(text: str) -> None:
    print(f"fedhen: {text}", file=sys.stderr)


def parse_targets(texts: Sequence[str]) -> dict[str, list[float]] | None:
    """Parses `tier=x,y`. Returns tier -> its targets; `auto` becomes an empty list."""
    found: dict[str, list[float]] = {}
    for text in texts:
        tier, equals, values = text.partition("=")
        try:
            if not equals:
                raise ValueError
            found[tier] = [] if values == AUTO else [float(value) for value in values.split(",")]
        except ValueError:
            raise FedhenError(f"--target {text!r}: write it like simple=92,90 or simple=auto") from None
    return found or None
