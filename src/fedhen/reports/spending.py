"""What the devices of a run spent, by a profile: seconds and joules of every round, from its records."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from fedhen.config.personal_settings import TRAINING_OTHERWISE
from fedhen.config.settings import Config
from fedhen.errors import CheckpointError, FedhenError, one_line
from fedhen.profiles.device_round import DeviceRound, Parts
from fedhen.profiles.profile import DeviceClass, Profile, draw_jitter, drops_out
from fedhen.profiles.quantity import Bound
from fedhen.profiles.waiting import Ending, Waiting
from fedhen.profiles.workload import Workload
from fedhen.runs.reader import Run
from fedhen.runs.records import RoundRecord


@dataclass
class Spending:
    """The totals of a run so far, and its seconds and joules by round."""

    seconds: dict[int, float] = field(default_factory=dict)
    """Round -> seconds from the start of the run to its end. A round lasts until its slowest device has answered."""
    joules: dict[int, float] = field(default_factory=dict)
    """Round -> joules that all devices together had spent by its end."""
    of_device: dict[int, float] = field(default_factory=dict)
    """Device -> its joules."""
    tier_seconds: dict[str, Parts] = field(default_factory=dict)
    """Tier -> seconds of its devices in all rounds, without waiting."""
    tier_joules: dict[str, Parts] = field(default_factory=dict)
    device_rounds: Counter[str] = field(default_factory=Counter)
    """Tier -> how often one of its devices was active."""
    waiting: float = 0.0
    """Seconds that devices waited for the slowest of their round, summed over the devices."""
    waiting_joules: float = 0.0
    waited_for: Counter[str] = field(default_factory=Counter)
    """Tier -> the number of rounds whose slowest device was of it."""

    @property
    def total_joules(self) -> Parts:
        """Of all tiers, without waiting."""
        found = Parts()
        for each in self.tier_joules.values():
            found = found.plus(each)
        return found

    @property
    def busy(self) -> float:
        """Seconds that devices worked, summed over the devices."""
        return sum(each.total for each in self.tier_seconds.values())


@dataclass(frozen=True)
class Pricing:
    """A run under a profile: the class of each device, and what a round asks of it."""

    run: Run
    profile: Profile
    workload: Workload

    @cached_property
    def tier_of(self) -> list[str]:
        """The tier of each device."""
        devices = self.run.settings.devices
        config = replace(Config(), tiers=dict(self.run.settings.tiers), targets={})
        settings = replace(config.devices, number=devices.number, active=1, tiers=tuple(devices.tiers))
        return [*replace(config, devices=settings).tier_of_devices(), *self.run.joined]

    @cached_property
    def operations(self) -> list[float]:
        """Of each device's training in a round."""
        return self.workload.count_round(self.tier_of, self.run.settings.training)

    @cached_property
    def classes(self) -> list[DeviceClass]:
        """The class of each device."""
        return self.profile.choose_classes(self.tier_of, self.run.tiers, self.operations, self.run.seed)

    @cached_property
    def typical(self) -> Spending:
        return self.spend("typical")

    @cached_property
    def low(self) -> Spending:
        """With the fastest and thriftiest devices and links that the profile's sources allow."""
        return self.spend("low")

    @cached_property
    def high(self) -> Spending:
        return self.spend("high")

    def spend(self, bound: Bound) -> Spending:
        """Adds up all recorded rounds."""
        found, seconds, joules = Spending(), 0.0, 0.0
        for record in self.run.rounds:
            spent, cost = self._play(found, record, bound)
            seconds, joules = seconds + spent, joules + cost
            found.seconds[record.round], found.joules[record.round] = seconds, joules
        return found

    def _play(self, found: Spending, record: RoundRecord, bound: Bound) -> tuple[float, float]:
        """Adds a round to the totals. Returns its seconds and joules."""
        asked = self.describe_round(record)
        own, joules = dict[int, float](), 0.0
        for device, work in asked.items():
            of, tier = self.classes[device], self.tier_of[device]
            jitter = draw_jitter(of, self.run.seed, record.round, device)
            seconds, cost = work.seconds(of, jitter, bound), work.joules(of, bound)
            own[device], joules = seconds.total, joules + cost.total
            found.tier_seconds[tier] = found.tier_seconds.get(tier, Parts()).plus(seconds)
            found.tier_joules[tier] = found.tier_joules.get(tier, Parts()).plus(cost)
            found.device_rounds[tier] += 1
            found.of_device[device] = found.of_device.get(device, 0.0) + cost.total
        ending = self.end_round(record, own)
        if ending.waited_for is not None:
            found.waited_for[self.tier_of[ending.waited_for]] += 1
        for device, seconds_of_own in own.items():
            # Those that are late are still at work, or gone.
            waiting = 0.0 if device in record.late else max(0.0, ending.seconds - seconds_of_own)
            idle = waiting * self.classes[device].idle_power.at(bound)
            found.waiting += waiting
            found.waiting_joules += idle
            found.of_device[device] += idle
            joules += idle
        return ending.seconds, joules

    def end_round(self, record: RoundRecord, own: Mapping[int, float]) -> Ending:
        """Returns the end of a round, given the seconds of its devices.

        The records say who was late: the server waited for the others. If there was a deadline, it waited until then
        for those that were late and had not dropped out.
        """
        deadline = self.run.settings.clock.deadline_seconds
        if not deadline:
            return Waiting().end(own, {*record.failed, *record.late})
        gone = {d for d in record.late if drops_out(self.classes[d], self.run.seed, record.round, d)}
        slow = dict.fromkeys({*record.late} - gone, math.inf)
        return Waiting(deadline, self.run.settings.clock.spare_devices).end({**own, **slow}, gone)

    def describe_round(self, record: RoundRecord) -> dict[int, DeviceRound]:
        """Returns what each active device did. The devices of a tier share its recorded bytes equally."""
        silent = {*record.failed, *record.late}
        asked = Counter(self.tier_of[device] for device in record.active)
        answered = Counter(self.tier_of[device] for device in record.active if device not in silent)
        found = {}
        for device in record.active:
            tier = self.tier_of[device]
            up = 0.0 if device in silent else record.bytes["up"].get(tier, 0) / answered[tier]
            found[device] = DeviceRound(self.operations[device], record.bytes["down"].get(tier, 0) / asked[tier], up)
        return found


def price_runs(runs: Sequence[Run], profile: Profile, say: Callable[[str], None]) -> dict[str, Pricing]:
    """Returns the pricing of each run by its folder. `say` is called before operations are counted."""
    for run in runs:
        profile.check_tiers(run.tiers)
        last, number = max((max(r.active, default=0) for r in run.rounds), default=0), count_devices(run)
        if last >= number:
            raise CheckpointError(f"{run.folder} is damaged: device {last} was active, and there are {number} devices")
    return {str(run.folder): Pricing(run, profile, find_workload(run, say)) for run in runs}


def count_devices(run: Run) -> int:
    return run.settings.devices.number + len(run.joined)


def find_workload(run: Run, say: Callable[[str], None]) -> Workload:
    """Returns the workload that a run recorded, or measures it again with torch."""
    summary = run.summary
    if summary is not None and (summary.examples or summary.tier_examples):
        recorded = Workload(
            summary.operations,
            summary.training_operations,
            summary.examples,
            summary.tier_examples,
            summary.phases,
        )
        if is_whole(run, recorded):
            return recorded
    if summary is not None and summary.privacy is not None:
        raise FedhenError(
            f"{run.folder} has differential privacy: who took part and with how many examples is not recorded, so it "
            "has no hours and joules; leave out --profile"
        )
    missing = f"{run.folder} has no record of what training takes"
    try:
        from fedhen.experiment.recount import recount_workload
    except ImportError:
        raise FedhenError(f"{missing}, and it cannot be counted without torch: install torch") from None
    say(f"counting the operations of {run.folder}, which did not record them")
    try:
        counted = recount_workload(run.folder)
    except FedhenError as error:
        raise FedhenError(f"{missing}, and it cannot be counted: {one_line(str(error))}") from None
    if not is_whole(run, counted):
        raise FedhenError(f"{missing}, and the operations of its models cannot be counted")
    return counted


def is_whole(run: Run, workload: Workload) -> bool:
    """Returns whether a workload says enough about a run."""
    number, tiers = count_devices(run), set(run.tiers)
    # Runs from before there were phases did not record these.
    if run.settings.personal.name in TRAINING_OTHERWISE and not workload.phases:
        return False
    counted = [workload.training_operations, *(phase.operations for phase in workload.phases)]
    return all(tiers <= set(operations) for operations in counted) and (
        len(workload.examples) == number or tiers <= set(workload.tier_examples)
    )
