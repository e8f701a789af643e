"""`fedhen plan`: which model which class of devices should train."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedhen.cli.options import DATA_HELP, add_data_dir, add_method_options, add_recipe, choose_one
from fedhen.cli.report import add_profile, choose_profile, print_note
from fedhen.cli.user_files import add_own_parts, load_own_parts
from fedhen.config import toml
from fedhen.errors import ConfigError
from fedhen.fileio.atomic import write_text
from fedhen.profiles.quantity import parse_seconds
from fedhen.profiles.writing import write_profile
from fedhen.reports.costs import BYTE_UNITS, JOULE_UNITS, TIME_UNITS, Units, choose_format_in
from fedhen.reports.rendering import Group, Table, to_text

if TYPE_CHECKING:
    from fedhen.experiment.planning import Candidate, Plan, Planned

EXAMPLES = """\
Candidates are the exits of the network, or the widths with --set model.nesting=width, or the tiers of your own
family. Each class of the profile's devices gets the largest candidate with which it is done in time: by the deadline
or, without one, when the fastest class has trained the largest candidate or the slowest class the smallest, whichever
is later.

examples:
  fedhen plan digits --profile phones
  fedhen plan cifar10-iid --profile phones --deadline 20min --out planned.toml
  fedhen plan cifar10-iid --profile mixed --set model.nesting=width
  fedhen plan cifar10-iid --profile phones --measured slow:simple=310     scaled by one measured number
  fedhen plan digits --profile phones --json
  fedhen run --config digits-on-phones.toml                               plays what was planned
"""


def add_commands(commands: Any) -> None:
    command = commands.add_parser(
        "plan",
        help="choose exits or widths for classes of devices, so that all finish in time",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_recipe(command)
    command.add_argument("--method", metavar="M", help="federated method (default: the recipe's, fedhen)")
    add_method_options(command)
    command.add_argument("--data", metavar="PATH", help=DATA_HELP)
    add_own_parts(command)
    add_profile(command, "plan for these devices", required=True)
    command.add_argument(
        "--deadline", metavar="TIME", help="when a round must be over: 90s, 20min or 2h (default: together)"
    )
    command.add_argument(
        "--out", type=Path, metavar="FILE.toml", help="where to write the recipe (default: RECIPE-on-PROFILE.toml)"
    )
    command.add_argument("--overwrite", action="store_true", help="replace that file")
    command.add_argument("--json", action="store_true", help="print JSON")
    add_data_dir(command)
    command.add_argument("--quiet", action="store_true", help="show no progress")
    command.set_defaults(run=plan_command)


def plan_command(options: argparse.Namespace) -> int:
    profile = choose_profile(options)
    deadline = None if options.deadline is None else parse_seconds(options.deadline, "--deadline")
    assert profile is not None
    from fedhen.experiment.planning import make_plan

    config, method = choose_one(options)
    out = options.out or Path(f"{config.recipe}-on-{profile.name}.toml")
    # A measured number names a tier, which the planned recipe may not have: its clock takes the speeds themselves.
    measured = out.with_name(f"{out.stem}-profile.toml") if profile.calibration else None
    files = [each for each in (out, measured) if each is not None]
    for path in files:
        if path.exists() and not options.overwrite:
            raise ConfigError(f"{path} exists: choose another --out, or replace it with --overwrite")
    if measured is not None or options.profile.endswith(".toml"):
        path = Path(options.profile) if measured is None else measured
        config = replace(config, clock=replace(config.clock, profile=str(path.resolve())))
    if not options.quiet:
        print_note("measuring what each candidate costs ...")
    plan = make_plan(config, method, profile, load_own_parts(options), deadline, options.data_dir)
    for path, text in zip(files, (toml.to_toml(plan.config), write_profile(plan.profile)), strict=False):
        try:
            write_text(path, text)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    print(json.dumps(describe_plan(plan, out), indent=2) if options.json else format_plan(plan, files))
    return 0


def describe_plan(plan: Plan, out: Path) -> dict[str, Any]:
    """Returns a plan as plain values."""

    def describe(of: Planned, candidate: Candidate) -> dict[str, Any]:
        seconds, joules = of.seconds(candidate), of.joules(candidate)
        return {
            "tier": candidate.tier,
            "chosen": candidate is of.candidate,
            "seconds": {"training": seconds.training, "radio": seconds.radio, "total": seconds.total},
            "joules": {"training": joules.training, "radio": joules.radio, "total": joules.total},
            "bytes": {"down": candidate.work.down, "up": candidate.work.up},
            "parameters": candidate.parameters,
        }

    return {
        "profile": plan.profile.name,
        "deadline_seconds": plan.deadline,
        "classes": [
            {
                "class": of.device_class.name,
                "devices": of.devices,
                "candidates": [describe(of, each) for each in of.options],
            }
            for of in plan.classes
        ],
        "recipe": str(out),
    }


def format_plan(plan: Plan, files: Sequence[Path]) -> str:
    """Returns a plan as a table, and what to do with it. The recipe is the first of its files."""
    out, *profiles = files
    lines = [f"recipe: {out}", *(f"profile of its clock, with the measured speed: {path}" for path in profiles)]
    return "\n".join([to_text(make_table(plan)), *lines, f"play it with: fedhen run --config {out}"])


def make_table(plan: Plan) -> Table:
    """Makes the table of all candidates for each class."""
    groups = [Group(f"{of.device_class.name} ({of.devices} devices)", tuple(_list_rows(of))) for of in plan.classes]
    return Table(
        name="plan",
        title=f"What a device does in a round, by profile {plan.profile.name}",
        columns=("Model", "Chosen", "Time", "of it training", "Energy", "of it training", "Sent", "Parameters"),
        groups=tuple(groups),
        meaning="Candidates for each class of devices, and the chosen ones.",
        notes=tuple(_list_notes(plan)),
    )


def _list_rows(of: Planned) -> Iterator[tuple[str, ...]]:
    for each in of.options:
        seconds, joules = of.seconds(each), of.joules(each)
        yield (
            each.tier,
            "yes" if each is of.candidate else "",
            _format(seconds.total, TIME_UNITS),
            _format(seconds.training, TIME_UNITS),
            _format(joules.total, JOULE_UNITS),
            _format(joules.training, JOULE_UNITS),
            _format(each.work.down + each.work.up, BYTE_UNITS),
            f"{each.parameters:,}",
        )


def _list_notes(plan: Plan) -> Iterator[str]:
    from fedhen.experiment.planning import find_slow_end

    yield (
        f"Profile {plan.profile.name}: {plan.profile.about}." if plan.profile.about else f"Profile {plan.profile.name}."
    )
    of = plan.slowest
    yield (
        f"A round lasts {_format(of.seconds(of.candidate).total, TIME_UNITS)}: it waits for the {of.device_class.name} "
        f"devices. All have {_format(plan.deadline, TIME_UNITS)}. At the slow end of the sources’ ranges it lasts "
        f"{_format(find_slow_end(plan), TIME_UNITS)}."
    )
    yield "Counted are the examples of the device that has most."


def _format(amount: float, units: Units) -> str:
    return choose_format_in(units, [amount])([amount])
