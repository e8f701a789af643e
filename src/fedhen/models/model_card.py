"""The card of a model: its exits, its task, and what it is given and predicts. Model files hold it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedhen.config.data_settings import OWN
from fedhen.config.settings import Config
from fedhen.config.validation import from_mapping
from fedhen.data.spec import DataSpec, read_data_spec
from fedhen.fileio import untrusted
from fedhen.tasks import Task
from fedhen.tasks.registry import make_task


@dataclass(frozen=True)
class ModelCard:
    """What a model is, beside its weights."""

    exits: tuple[str, ...]
    """The exits that it has, shallowest first."""
    inputs: tuple[int, ...]
    """The shape of one input; of several tensors, that of the first."""
    classes: int
    """The number of outputs; in classification, of classes."""
    task: Mapping[str, Any] = field(default_factory=dict)
    """The settings of the task. Empty in files from before they were recorded."""
    data: DataSpec | None = None
    """What raw inputs and targets are. None if it is not known."""

    def make_task(self) -> Task:
        """Returns the task. Of one that was passed from Python only the outputs are known."""
        if self.task.get("name") == OWN:
            return Task()
        return make_task(from_mapping({"task": self.task}, Config()).task)

    def to_dict(self) -> dict[str, Any]:
        """Returns it as JSON has it."""
        return {
            "exits": list(self.exits),
            "inputs": list(self.inputs),
            "classes": self.classes,
            **({"task": dict(self.task)} if self.task else {}),
            **({"data": self.data.to_dict()} if self.data else {}),
        }


def read_card(about: Any) -> ModelCard:
    """Reads what `ModelCard.to_dict` returned. Raises one of PARSE_ERRORS for anything else."""
    found = untrusted.check_mapping(about)
    card = ModelCard(
        exits=tuple(untrusted.check_text(name) for name in found["exits"]),
        inputs=tuple(untrusted.check_int(n, 1) for n in found["inputs"]),
        classes=untrusted.check_int(found["classes"], 1),
        task=untrusted.check_mapping(found.get("task", {})),
        data=read_data_spec(found["data"]) if "data" in found else None,
    )
    if not card.exits:
        raise ValueError("it has no exits")
    if card.task:
        card.make_task()
    if card.data is not None and card.data.inputs[0].shape != card.inputs:
        raise ValueError(f"inputs of shape {card.inputs} are described as {card.data.inputs[0].shape}")
    return card
