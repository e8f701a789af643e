"""Plans a private run: the noise of an ε, the ε of a noise, and what such noise left of an accuracy. Needs no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from typing import Any

from fedhen.privacy.accounting import Accountant, default_delta, find_noise
from fedhen.privacy.bands import band_norm, sum_noise

TABLE = "digits.json"
"""What noise left of the accuracy on the digits; `benchmarks/private_digits.py` measures it."""
LOSS = 10.0
"""Points of accuracy that a model may lose before its fleet is called too small."""
TRIES = 20


@dataclass(frozen=True)
class Plan:
    """A private run: its devices, how many of them are active in a round on average, its rounds, and its δ."""

    devices: int
    active: int
    rounds: int
    delta: float


@dataclass(frozen=True)
class Option:
    """One way to choose the active devices and to account for it."""

    settings: Mapping[str, Any]
    accountant: Accountant
    epsilon: float
    model_noise: float
    """Deviation of the noise in a weight that all devices hold, in units of the bound, over the rounds."""


@dataclass(frozen=True)
class Reference:
    """What noise left of the accuracy on the digits."""

    source: str
    rows: Mapping[float, Mapping[str, list[float]]]
    """Noise in the model, rising from 0 -> tier -> accuracies in percent, one for each seed."""

    def find_ranges(self, noise: float) -> dict[str, tuple[float, float]]:
        """Returns tier -> the lowest and the highest accuracy that so much noise left, from the rows around it."""
        below = [row for level, row in self.rows.items() if level <= noise][-1]
        above = next((row for level, row in self.rows.items() if level >= noise), None)
        return {tier: (min(above[tier]) if above else 0.0, max(below[tier])) for tier in below}

    @property
    def most_noise(self) -> float:
        """The largest noise with which no model lost more than `LOSS` points on average."""
        clean = {tier: _mean(values) for tier, values in self.rows[0.0].items()}
        fine = [
            noise
            for noise, row in self.rows.items()
            if all(_mean(values) >= clean[tier] - LOSS for tier, values in row.items())
        ]
        return max(fine)


def judge(noise: float) -> str:
    """Returns "enough" if so much noise left models useful on the digits, "too small" if it did not, else "unsure"."""
    most = read_reference().most_noise
    worse = min((level for level in read_reference().rows if level > most), default=math.inf)
    return "enough" if noise <= most else "unsure" if noise < worse else "too small"


def list_accountants(plan: Plan) -> Iterator[tuple[dict[str, Any], Accountant]]:
    """Yields the settings of every allowed sampling with its accountant. The noise is still missing."""
    full = Accountant(0.0, plan.delta)
    if plan.active < plan.devices:
        sampled = replace(full, rate=plan.active / plan.devices)
        yield {"devices.sampling": "bernoulli"}, sampled
        if find_spec("dp_accounting"):
            yield {"devices.sampling": "bernoulli", "privacy.accountant": "pld"}, replace(sampled, is_exact=True)
    yield {"devices.sampling": "uniform"}, full
    separation = min(plan.devices // plan.active, plan.rounds)
    if separation > 1:
        yield (
            {"devices.sampling": "uniform", "privacy.separation": separation},
            replace(full, separation=separation),
        )


def list_options(plan: Plan, *, epsilon: float = 0.0, noise: float = 0.0) -> list[Option]:
    """Returns each option with the noise that an ε needs, or with this noise."""
    return [
        make_option(plan, settings, replace(each, noise=noise or find_least_noise(epsilon, each, plan.rounds)))
        for settings, each in list_accountants(plan)
    ]


def make_option(plan: Plan, settings: Mapping[str, Any], accountant: Accountant) -> Option:
    noise = accountant.noise * band_norm(accountant.separation) * sum_noise(accountant.separation, plan.rounds)
    return Option(settings, accountant, accountant.epsilon([plan.rounds]), noise / plan.active)


def find_least_noise(epsilon: float, accountant: Accountant, rounds: int) -> float:
    """Returns the noise that an ε needs, rounded upwards to three digits."""
    if not accountant.is_exact:
        return _round_up(find_noise(epsilon, accountant, [rounds]))
    # Loss distributions take up to seconds: only between half and all of what the simple bound asks for, in few steps.
    high = find_least_noise(epsilon, replace(accountant, is_exact=False), rounds)
    low = high / 2
    for _ in range(7):
        middle = (low + high) / 2
        enough = replace(accountant, noise=middle).epsilon([rounds]) <= epsilon
        low, high = (low, middle) if enough else (middle, high)
    return _round_up(high)


def count_needed_devices(plan: Plan, option: Option, epsilon: float) -> int:
    """Returns about how many devices an option needs, with the same share active, for a model that is still useful.

    With an ε, or else with the option's noise. The noise of an ε depends little on the number of devices, by δ alone.
    """
    most, share = read_reference().most_noise, plan.active / plan.devices
    for _ in range(TRIES):
        if option.model_noise <= most:
            break
        devices = _round_up_devices(plan.devices * option.model_noise / most)
        plan = Plan(
            devices, max(plan.active, round(share * devices)), plan.rounds, min(plan.delta, default_delta(devices))
        )
        accountant = replace(option.accountant, delta=plan.delta)
        noise = find_least_noise(epsilon, accountant, plan.rounds) if epsilon else accountant.noise
        option = make_option(plan, option.settings, replace(accountant, noise=noise))
    return plan.devices


@cache
def read_reference() -> Reference:
    """Reads the table that comes with the package."""
    found = json.loads((files("fedhen.privacy") / TABLE).read_text(encoding="utf-8"))
    unit = sum_noise(1, found["rounds"]) / found["active"]
    rows = {row.pop("noise") * unit: row for row in found["rows"]}
    return Reference(found["source"], rows)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _round_up(value: float, digits: int = 3) -> float:
    unit = 10.0 ** (math.floor(math.log10(value)) + 1 - digits)
    # The division may be rounded to just above a whole number.
    return float(f"{math.ceil(value / unit - 1e-9) * unit:.{digits}g}")


def _round_up_devices(number: float) -> int:
    return int(_round_up(math.ceil(number), 2))
