"""`fedhen report`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fedhen.cli.options import RUNS
from fedhen.errors import UserError, one_line
from fedhen.reports import write_report
from fedhen.runs.folders import create_fresh_folder
from fedhen.runs.layout import CONFIG, MODEL_OWNERS
from fedhen.runs.reader import Run, read_run

EXAMPLES = """\
examples:
  fedhen report runs/digits-compare
  fedhen report runs/digits-fedhen-seed0 runs/digits-noside-seed0 --out my-report
  fedhen report runs/digits-compare --target simple=92,90 --target complex=auto
  fedhen report runs/my-language-models --target simple=6.0     the perplexity to reach
  fedhen report runs/digits-compare --rounds 10 --out early
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
    report.set_defaults(run=report_command)


def report_command(options: argparse.Namespace) -> int:
    if options.rounds is not None and options.rounds < 1:
        raise UserError(f"--rounds {options.rounds}: it must be at least 1")
    folders = list(find_run_folders(options.runs))
    runs = read_runs(folders)
    if options.rounds is not None:
        runs = [run.truncate(options.rounds) for run in runs]
    out = options.out or (options.runs[0] if len(options.runs) == 1 else create_fresh_folder(RUNS, "report"))
    report = write_report(runs, out, targets=parse_targets(options.target), owner=options.of)
    print(report.text)
    print(f"page: {out / 'report.html'}")
    return 0


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Reads the runs. Skips those that cannot be read, with a message. Raises UserError if none can be read."""
    runs, errors = read_readable(folders)
    if not runs:
        raise UserError(errors[0] if len(errors) == 1 else f"none of {len(errors)} runs can be read: {errors[0]}")
    report_skipped(errors)
    return runs


def read_readable(folders: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """Returns the runs that can be read, and the errors of the others."""
    runs, errors = [], []
    for folder in folders:
        try:
            runs.append(read_run(folder))
        except UserError as error:
            errors.append(str(error))
    return runs, errors


def report_skipped(errors: Sequence[str]) -> None:
    for text in errors:
        print(f"fedhen: skipped: {one_line(text)}", file=sys.stderr)


def find_run_folders(paths: Iterable[Path]) -> Iterable[Path]:
    """Yields the run folders among `paths` and directly inside them."""
    for path in paths:
        inside = sorted(child for child in path.iterdir() if (child / CONFIG).is_file()) if path.is_dir() else []
        if (path / CONFIG).is_file():
            yield path
        elif inside:
            yield from inside
        else:
            raise UserError(f"{path} is not a run folder and contains none: a run folder has a {CONFIG}")


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
            raise UserError(f"--target {text!r}: write it like simple=92,90 or simple=auto") from None
    return found or None
