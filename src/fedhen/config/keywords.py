"""Settings as keyword arguments of `fedhen.train` and `fedhen.run`, for editors and type checkers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from fedhen.config.clock_settings import ClockConfig
from fedhen.config.data_settings import DataConfig, SplitConfig
from fedhen.config.devices_settings import DevicesConfig
from fedhen.config.evaluation_settings import EvaluationConfig, StopConfig
from fedhen.config.model_settings import ModelConfig, ObjectiveConfig
from fedhen.config.personal_settings import PersonalConfig
from fedhen.config.privacy_settings import AttackConfig, PrivacyConfig
from fedhen.config.runtime_settings import CheckpointConfig, FleetConfig, RuntimeConfig
from fedhen.config.training_settings import LocalConfig, ServerConfig, TrainingConfig
from fedhen.config.wire_settings import WireConfig

Table = Mapping[str, Any]
"""Settings of a section by name."""


class Settings(TypedDict, total=False):
    """Settings of the configuration. A section is a table, which changes what it names, or the whole section."""

    recipe: str
    seed: int
    rounds: int
    split: SplitConfig | Table
    devices: DevicesConfig | Table
    tiers: Mapping[str, float] | Sequence[str]
    """Shares of the devices, counts of them, or the tier of each device."""
    model: ModelConfig | Table
    objective: ObjectiveConfig | Table
    training: TrainingConfig | Table
    local: LocalConfig | Table
    personal: PersonalConfig | Table
    server: ServerConfig | Table
    evaluation: EvaluationConfig | Table
    runtime: RuntimeConfig | Table
    checkpoint: CheckpointConfig | Table
    fleet: FleetConfig | Table
    stop: StopConfig | Table
    wire: WireConfig | Table
    clock: ClockConfig | Table
    privacy: PrivacyConfig | Table
    attack: AttackConfig | Table
    targets: Mapping[str, Sequence[float]]
    out: str | os.PathLike[str] | None
    """The old name of `run_dir`."""
    force: bool
    """The old name of `overwrite`."""


class TrainSettings(Settings, total=False):
    """The settings of `fedhen.train`, whose data is another argument."""

    data: DataConfig | Table
