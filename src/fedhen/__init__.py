"""fedhen: federated learning for fleets of unequal devices, one shared model that fits them all."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fedhen.errors import CheckpointError, ConfigError, DataError, FedhenError, FleetError, UserError
from fedhen.version import VERSION as __version__

if TYPE_CHECKING:
    from fedhen import tasks
    from fedhen.algorithm.merging import keep_tiers_apart, share_common_weights
    from fedhen.algorithm.methods import DECOUPLE, FEDHEN, METHODS, NOSIDE, Method
    from fedhen.algorithm.objectives import last_exit, sum_of_exits
    from fedhen.api.comparing import Comparison, compare
    from fedhen.api.deploying import export
    from fedhen.api.plans import Rounds
    from fedhen.api.result import Run, Trained, open_run
    from fedhen.api.saved import evaluate, load, report
    from fedhen.api.training import resume, rounds, run, train
    from fedhen.config.clock_settings import ClockConfig
    from fedhen.config.data_settings import DataConfig, SplitConfig, TaskConfig
    from fedhen.config.devices_settings import DevicesConfig
    from fedhen.config.evaluation_settings import EvaluationConfig, StopConfig
    from fedhen.config.model_settings import ModelConfig, ObjectiveConfig
    from fedhen.config.personal_settings import PersonalConfig
    from fedhen.config.privacy_settings import AttackConfig, PrivacyConfig
    from fedhen.config.recipes import RECIPES
    from fedhen.config.runtime_settings import CheckpointConfig, FleetConfig, RuntimeConfig
    from fedhen.config.settings import Config
    from fedhen.config.training_settings import LocalConfig, ServerConfig, TrainingConfig
    from fedhen.config.wire_settings import WireConfig
    from fedhen.data.dataset import Data, FederatedData, arrays, from_datasets, from_table, per_device
    from fedhen.data.spec import Normalisation
    from fedhen.deploy.cascade import Cascade
    from fedhen.models.family import Family
    from fedhen.models.nesting import nest
    from fedhen.tasks import (
        Classification,
        LanguageModelling,
        Metric,
        MultiLabel,
        Regression,
        Segmentation,
        Task,
        make_mean_metric,
    )
    from fedhen.tracking.observers import Observer

# Imported at first use: the reports and the help need no torch.
_HOMES = {
    "fedhen.algorithm.merging": ("keep_tiers_apart", "share_common_weights"),
    "fedhen.algorithm.objectives": ("last_exit", "sum_of_exits"),
    "fedhen.algorithm.methods": ("DECOUPLE", "FEDHEN", "METHODS", "NOSIDE", "Method"),
    "fedhen.api.comparing": ("Comparison", "compare"),
    "fedhen.api.deploying": ("export",),
    "fedhen.api.plans": ("Rounds",),
    "fedhen.api.result": ("Run", "Trained", "open_run"),
    "fedhen.api.saved": ("evaluate", "load", "report"),
    "fedhen.api.training": ("resume", "rounds", "run", "train"),
    "fedhen.config.clock_settings": ("ClockConfig",),
    "fedhen.config.data_settings": ("DataConfig", "SplitConfig", "TaskConfig"),
    "fedhen.config.devices_settings": ("DevicesConfig",),
    "fedhen.config.evaluation_settings": ("EvaluationConfig", "StopConfig"),
    "fedhen.config.model_settings": ("ModelConfig", "ObjectiveConfig"),
    "fedhen.config.personal_settings": ("PersonalConfig",),
    "fedhen.config.privacy_settings": ("AttackConfig", "PrivacyConfig"),
    "fedhen.config.recipes": ("RECIPES",),
    "fedhen.config.runtime_settings": ("CheckpointConfig", "FleetConfig", "RuntimeConfig"),
    "fedhen.config.settings": ("Config",),
    "fedhen.config.training_settings": ("LocalConfig", "ServerConfig", "TrainingConfig"),
    "fedhen.config.wire_settings": ("WireConfig",),
    "fedhen.data.dataset": (*("Data", "FederatedData", "arrays", "from_datasets", "from_table", "per_device"),),
    "fedhen.data.spec": ("Normalisation",),
    "fedhen.deploy.cascade": ("Cascade",),
    "fedhen.models.family": ("Family",),
    "fedhen.models.nesting": ("nest",),
    "fedhen.tasks": (
        *("Classification", "LanguageModelling", "Metric", "MultiLabel", "Regression", "Segmentation", "Task"),
        "make_mean_metric",
    ),
    "fedhen.tracking.observers": ("Observer",),
}
_OLD_NAMES = {"Data", "Trained", "UserError", "arrays", "from_datasets", "from_table", "per_device"}

__all__ = [
    "DECOUPLE",
    "FEDHEN",
    "METHODS",
    "NOSIDE",
    "RECIPES",
    "AttackConfig",
    "Cascade",
    "CheckpointConfig",
    "CheckpointError",
    "Classification",
    "ClockConfig",
    "Comparison",
    "Config",
    "ConfigError",
    "Data",
    "DataConfig",
    "DataError",
    "DevicesConfig",
    "EvaluationConfig",
    "Family",
    "FederatedData",
    "FedhenError",
    "FleetConfig",
    "FleetError",
    "LanguageModelling",
    "LocalConfig",
    "Method",
    "Metric",
    "ModelConfig",
    "MultiLabel",
    "Normalisation",
    "ObjectiveConfig",
    "Observer",
    "PersonalConfig",
    "PrivacyConfig",
    "Regression",
    "Rounds",
    "Run",
    "RuntimeConfig",
    "Segmentation",
    "ServerConfig",
    "SplitConfig",
    "StopConfig",
    "Task",
    "TaskConfig",
    "Trained",
    "TrainingConfig",
    "UserError",
    "WireConfig",
    "__version__",
    "arrays",
    "compare",
    "evaluate",
    "export",
    "from_datasets",
    "from_table",
    "keep_tiers_apart",
    "last_exit",
    "load",
    "make_mean_metric",
    "nest",
    "open_run",
    "per_device",
    "report",
    "resume",
    "rounds",
    "run",
    "share_common_weights",
    "sum_of_exits",
    "tasks",
    "train",
]


def __dir__() -> list[str]:
    return sorted({*__all__} - _OLD_NAMES)


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    if name == "tasks":
        return importlib.import_module("fedhen.tasks")
    raise AttributeError(f"module 'fedhen' has no attribute {name!r}")
