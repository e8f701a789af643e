"""`fedhen privacy`: the noise that an ε needs, or the ε of a noise, and whether a fleet is large enough for it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import Any

from fedhen.errors import ConfigError
from fedhen.privacy.accounting import default_delta
from fedhen.privacy.planning import (
    LOSS,
    Option,
    Plan,
    count_needed_devices,
    judge,
    list_options,
    read_reference,
)

EXAMPLES = """\
Differential privacy hides each device's data among that of the others, so it needs many devices. The noise is in units
of privacy.bound; docs/privacy.md says what ε and δ promise, and to whom.

examples:
  fedhen privacy --devices 1000 --active 100 --rounds 40 --epsilon 2     the noise that ε = 2 needs
  fedhen privacy --devices 1000 --active 100 --rounds 40 --noise 1.2     the ε of a noise
  fedhen privacy --devices 700 --active 70 --rounds 60 --noise 1 --json
"""
VERDICTS = {
    "enough": f"This fleet is large enough for models like those of the digits: they lost at most {LOSS:g} points.",
    "unsure": f"This fleet may be too small: on the digits a model lost up to {LOSS:g} points or more to such noise.",
    "too small": f"This fleet is too small: on the digits a model lost more than {LOSS:g} points to such noise.",
}
COLUMNS = ("", "noise", "ε", "in the model")


def add_commands(commands: Any) -> None:
    command = commands.add_parser(
        "privacy",
        help="plan differential privacy: the noise of an ε, the ε of a noise, and how large a fleet it needs",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--devices", type=int, required=True, metavar="N", help="devices of the fleet")
    command.add_argument("--active", type=int, required=True, metavar="N", help="active devices in a round, on average")
    command.add_argument("--rounds", type=int, required=True, metavar="N", help="communication rounds")
    wanted = command.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--epsilon", type=float, metavar="E", help="find the noise that this ε needs")
    wanted.add_argument("--noise", type=float, metavar="Z", help="find the ε of this noise, privacy.noise")
    command.add_argument("--delta", type=float, metavar="D", help="δ (default: 1 / devices^1.1, at most 0.01)")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=privacy_command)


def privacy_command(options: argparse.Namespace) -> int:
    plan, epsilon = read_plan(options), options.epsilon or 0.0
    found = list_options(plan, epsilon=epsilon, noise=options.noise or 0.0)
    # Without loss distributions, whose noise takes seconds to find.
    best = min((each for each in found if not each.accountant.is_exact), key=lambda option: option.model_noise)
    needed = count_needed_devices(plan, best, epsilon)
    print(json.dumps(describe(plan, found, needed), indent=2) if options.json else "\n".join(show(plan, found, needed)))
    return 0


def read_plan(options: argparse.Namespace) -> Plan:
    """Returns the plan that the options describe. Raises a ConfigError if it cannot be."""
    for name, least in (("devices", 1), ("active", 1), ("rounds", 1), ("epsilon", 0), ("noise", 0), ("delta", 0)):
        value = getattr(options, name)
        if value is not None and not (value >= least if least else 0 < value < float("inf")):
            raise ConfigError(f"--{name} {value:g}: it must be {f'at least {least}' if least else 'above 0'}")
    if options.active > options.devices:
        raise ConfigError(f"--active {options.active} is more than --devices {options.devices}: lower it")
    delta = default_delta(options.devices) if options.delta is None else options.delta
    if delta >= 1:
        raise ConfigError(f"--delta {delta:g}: it must be below 1")
    return Plan(options.devices, options.active, options.rounds, delta)


def describe(plan: Plan, found: Sequence[Option], needed: int) -> dict[str, Any]:
    """Returns what the command prints, as JSON represents it."""
    reference = read_reference()
    return {
        **vars(plan),
        "options": [
            {
                "settings": dict(option.settings),
                "noise": option.accountant.noise,
                "epsilon": option.epsilon,
                "model_noise": option.model_noise,
                "digits": reference.find_ranges(option.model_noise),
            }
            for option in found
        ],
        "fleet": judge(min(option.model_noise for option in found)),
        "real_fleet": judge(find_fleet_noise(found)),
        "devices_needed": needed,
        "digits_source": reference.source,
    }


def show(plan: Plan, found: Sequence[Option], needed: int) -> Iterator[str]:
    """Yields the lines for people."""
    reference = read_reference()
    tiers = list(reference.find_ranges(0.0))
    yield f"{plan.devices} devices, {plan.active} active in a round, {plan.rounds} rounds, δ = {plan.delta:.3g}"
    if plan.delta * plan.devices >= 1:
        yield f"warning: with δ of 1/{plan.devices} or more, a device's data may be given away whole"
    yield ""
    yield from align([(*COLUMNS, *(f"{tier} on the digits" for tier in tiers)), *make_rows(found)])
    yield ""
    yield "in the model: deviation of the noise in a weight that all devices hold, in units of privacy.bound, over the"
    yield f"rounds; on the digits: the accuracies that about so much noise left ({reference.source})"
    yield ""
    yield VERDICTS[judge(min(option.model_noise for option in found))]
    if needed > plan.devices:
        yield f"About {needed} devices would do, with the same share of them active."
    yield "Nobody can promise that real devices are drawn at random: a real fleet needs devices.sampling=uniform."
    yield f"With uniform: {VERDICTS[judge(find_fleet_noise(found))]}"


def find_fleet_noise(found: Sequence[Option]) -> float:
    """Returns the least noise in the model of a real fleet, which cannot draw its devices at random."""
    return min(option.model_noise for option in found if option.settings["devices.sampling"] == "uniform")


def make_rows(found: Sequence[Option]) -> Iterator[tuple[str, ...]]:
    reference = read_reference()
    for option in found:
        settings = " ".join(f"{key}={value}" for key, value in option.settings.items())
        ranges = [
            f"{low:.0f}–{high:.0f} %" if low else f"below {high:.0f} %"
            for low, high in reference.find_ranges(option.model_noise).values()
        ]
        numbers = (f"{option.accountant.noise:.3g}", f"{option.epsilon:.3g}", f"{option.model_noise:.3g}")
        yield settings, *numbers, *ranges


def align(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
