"""Makes the task that a configuration names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fedhen.config.data_settings import OWN, TaskConfig
from fedhen.config.settings import Config
from fedhen.config.validation import from_mapping
from fedhen.errors import ConfigError, unknown_name
from fedhen.fileio.python_files import refuse_reference
from fedhen.tasks.positions import LanguageModelling, Segmentation
from fedhen.tasks.standard import Classification, MultiLabel, Regression
from fedhen.tasks.task import Task

TASKS: Mapping[str, Callable[..., Task]] = {
    "classification": Classification,
    "multi-label": MultiLabel,
    "regression": Regression,
    "language-modelling": LanguageModelling,
    "segmentation": Segmentation,
}
SETTINGS: Mapping[str, tuple[str, ...]] = {
    "classification": ("class_weights", "label_smoothing"),
    "multi-label": (),
    "regression": ("error", "huber_delta"),
    "language-modelling": ("padding",),
    "segmentation": ("padding",),
}
"""Task -> its settings, besides `metrics`, which all have."""


def make_task(config: TaskConfig) -> Task:
    """Returns the task that a configuration names."""
    if config.name == OWN:
        raise ConfigError(
            "the task of this run was passed from Python: pass it again as task=..., or with --task FILE.py:NAME"
        )
    refuse_reference(config.name, "task")
    if config.name not in TASKS:
        raise unknown_name("task", config.name, TASKS)
    default, used = TaskConfig(), SETTINGS[config.name]
    for name in {name for names in SETTINGS.values() for name in names} - {*used}:
        if getattr(config, name) != getattr(default, name):
            raise ConfigError(f"task.{name} is not a setting of {config.name}: remove it")
    return TASKS[config.name](config.metrics, **{name: getattr(config, name) for name in used})


def describe_metrics(task: Task) -> list[dict[str, str]]:
    """Returns name, unit and direction of each metric, the primary one first."""
    return [{"name": m.name, "unit": m.unit, "direction": m.direction} for m in task.scores]


def describe_task(task: Task) -> dict[str, Any]:
    """Returns the settings that name a task. One that the configuration cannot describe has the name `python`."""
    ours = type(task) is TASKS.get(task.name) and all(isinstance(metric, str) for metric in task.metrics)
    if not ours:
        return {"name": OWN}
    return {"name": task.name, "metrics": task.metrics, **{key: getattr(task, key) for key in SETTINGS[task.name]}}


def task_settings(task: Task) -> dict[str, Any]:
    """Returns the same, checked and in the types of settings, as model files hold it."""
    described = describe_task(task)
    checked = from_mapping({"task": described}, Config()).task
    return {key: getattr(checked, key) for key in described}
