"""fedhen: federated learning for fleets of unequal devices, one shared model that fits them all."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fedhen.errors import UserError
from fedhen.version import VERSION as __version__

if TYPE_CHECKING:
    from fedhen.algorithm.methods import DECOUPLE, FEDHEN, METHODS, NOSIDE, Method
    from fedhen.api import Trained, evaluate, load, report, resume, train
    from fedhen.data.dataset import Data, arrays, per_device
    from fedhen.data.tables import from_table
    from fedhen.data.torch_datasets import from_datasets
    from fedhen.models.family import Family
    from fedhen.models.nesting import nest
    from fedhen.tasks import Task

# Imported at first use: the reports and the help need no torch.
_HOMES = {
    "fedhen.algorithm.methods": ("DECOUPLE", "FEDHEN", "METHODS", "NOSIDE", "Method"),
    "fedhen.api": ("Trained", "evaluate", "load", "report", "resume", "train"),
    "fedhen.data.dataset": ("Data", "arrays", "per_device"),
    "fedhen.data.tables": ("from_table",),
    "fedhen.data.torch_datasets": ("from_datasets",),
    "fedhen.models.family": ("Family",),
    "fedhen.models.nesting": ("nest",),
    "fedhen.tasks": ("Task",),
}

__all__ = [
    "DECOUPLE",
    "FEDHEN",
    "METHODS",
    "NOSIDE",
    "Data",
    "Family",
    "Method",
    "Task",
    "Trained",
    "UserError",
    "__version__",
    "arrays",
    "evaluate",
    "from_datasets",
    "from_table",
    "load",
    "nest",
    "per_device",
    "report",
    "resume",
    "train",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    if name == "tasks":
        return importlib.import_module("fedhen.tasks")
    raise AttributeError(f"module 'fedhen' has no attribute {name!r}")
