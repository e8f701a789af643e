"""The configuration of an experiment: every setting with its default, its meaning and its bounds."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fedhen.config.clock_settings import ClockConfig, check_clock
from fedhen.config.data_settings import DataConfig, SplitConfig, TaskConfig
from fedhen.config.devices_settings import DevicesConfig
from fedhen.config.evaluation_settings import EvaluationConfig, StopConfig
from fedhen.config.model_settings import ModelConfig, ObjectiveConfig
from fedhen.config.optimizer_settings import check_optimizers
from fedhen.config.personal_settings import PersonalConfig
from fedhen.config.privacy_settings import AttackConfig, PrivacyConfig
from fedhen.config.runtime_settings import CheckpointConfig, FleetConfig, RuntimeConfig
from fedhen.config.setting import setting
from fedhen.config.training_settings import LocalConfig, ServerConfig, TrainingConfig
from fedhen.config.wire_settings import WireConfig, check_wire
from fedhen.errors import ConfigError, unknown_name


@dataclass(frozen=True)
class Config:
    """The configuration of an experiment."""

    recipe: str = setting("custom", "name of the experiment; a report compares runs with the same name")
    method: str = setting("fedhen", "federated method")
    method_file: str = setting("", "the Python file that defines the method, as file.py:NAME, if it is your own")
    seed: int = setting(0, "every random number follows from it; in a fleet they follow from a secret", least=0)
    rounds: int = setting(1000, "T, communication rounds", least=1)
    data: DataConfig = field(default_factory=DataConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    split: SplitConfig = field(default_factory=SplitConfig)
    devices: DevicesConfig = field(default_factory=DevicesConfig)
    tiers: dict[str, float] = setting(
        {"simple": 0.5, "complex": 0.5},
        "the tiers, shallowest first, and the share of the devices that each has; counts of devices, or a list with "
        "the tier of each device, become shares (and `devices.tiers`)",
    )
    model: ModelConfig = field(default_factory=ModelConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    local: LocalConfig = field(default_factory=LocalConfig)
    personal: PersonalConfig = field(default_factory=PersonalConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    attack: AttackConfig = field(default_factory=AttackConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    stop: StopConfig = field(default_factory=StopConfig)
    wire: WireConfig = field(default_factory=WireConfig)
    clock: ClockConfig = field(default_factory=ClockConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    fleet: FleetConfig = field(default_factory=FleetConfig)
    targets: dict[str, tuple[float, ...]] = setting(
        {},
        "targets of each tier for reports, of the primary metric: shares like accuracy in percent; by default they "
        "follow the paper's rule",
    )

    def __post_init__(self) -> None:
        for name in (self.recipe, self.method, *self.tiers):
            # They become parts of the names of folders and files.
            if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
                raise ConfigError(f"{name!r} cannot be a name here: use letters, digits, '_', '-' and '.'")
        if any(weight < 0 for weight in self.objective.exit_weights.values()):
            raise ConfigError("objective.exit_weights must not be negative")
        if self.devices.active > self.devices.number:
            raise ConfigError(
                f"devices.active={self.devices.active} is more than devices.number={self.devices.number}: lower it"
            )
        if not self.tiers or min(self.tiers.values()) <= 0:
            raise ConfigError("tiers needs at least one tier, and every tier a share above 0")
        if abs(sum(self.tiers.values()) - 1) > 1e-6:
            total = f"{sum(self.tiers.values()):g}"
            raise ConfigError(f"the shares in tiers add up to {total}: they must add up to 1, or count the devices")
        until = {tier: (value,) for tier, value in self.stop.until.items()}
        for key, targets in (("targets", self.targets), ("stop.until", until)):
            for tier in targets:
                if tier not in self.tiers:
                    raise unknown_name(f"tier in {key}", tier, self.tiers)
                if self.task.name == "classification" and not all(0 < target <= 100 for target in targets[tier]):
                    raise ConfigError(f"{key}.{tier} must be percents, above 0 and at most 100")
        if 0 in self.tier_sizes().values():
            raise ConfigError(f"devices.number={self.devices.number} leaves a tier without a device: raise it")
        check_optimizers(self.training, self.server, self.local)
        check_wire(self.wire, self.local)
        check_clock(self.clock, self.devices)
        if self.devices.tiers and Counter(self.devices.tiers) != self.tier_sizes():
            raise ConfigError(
                f"devices.tiers has {_list(Counter(self.devices.tiers))}, but tiers and devices.number make "
                f"{_list(self.tier_sizes())}: give tiers as the list, or make devices.tiers empty"
            )

    def tier_sizes(self) -> dict[str, int]:
        """Returns the number of devices of each tier."""
        ends, total = [0], 0.0
        for share in self.tiers.values():
            total += share
            ends.append(round(total * self.devices.number))
        return {tier: ends[k + 1] - ends[k] for k, tier in enumerate(self.tiers)}

    def training_sizes(self) -> dict[str, int]:
        """Returns the number of devices of each tier that are not held out of training."""
        return {tier: size - round(self.devices.held_out * size) for tier, size in self.tier_sizes().items()}

    def tier_of_devices(self) -> list[str]:
        """Returns the tier of every device, in the order of the devices."""
        if self.devices.tiers:
            return list(self.devices.tiers)
        return [tier for tier, number in self.tier_sizes().items() for _ in range(number)]

    def with_tiers(self, shares: Mapping[str, float]) -> Config:
        """Returns the configuration with these tiers, whose devices are in their order, and targets of these only."""
        targets = {tier: values for tier, values in self.targets.items() if tier in shares}
        until = {tier: value for tier, value in self.stop.until.items() if tier in shares}
        return replace(
            self,
            tiers=dict(shares),
            devices=replace(self.devices, tiers=()),
            stop=replace(self.stop, until=until),
            targets=targets,
        )


def _list(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {tier}" for tier, number in counts.items())
