"""What a model predicts for one example, in words that its user knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Prediction:
    """What a model predicts for one example.

    Args:
        value: A class by its name, in classification. Other tasks: the names of the labels above 0.5, a number, the
            next token, the class of each pixel as a tensor, or what the exit returned.
        probability: Of the value, between 0 and 1. None if the task has none.
        probabilities: Of each class by its name. Empty if the task has none.
        exit: The exit that predicts it.
    """

    value: Any
    probability: float | None = None
    probabilities: Mapping[str, float] = field(default_factory=dict, repr=False)
    exit: str = ""


def read_classes(logits: Tensor, names: Sequence[str]) -> list[Prediction]:
    """Returns the most probable class of each row of logits."""
    names = name_all(names, logits.shape[1])
    best, shares = logits.argmax(1).tolist(), logits.double().softmax(1).tolist()
    return [
        Prediction(names[place], row[place], dict(zip(names, row, strict=True)))
        for place, row in zip(best, shares, strict=True)
    ]


def name_all(names: Sequence[str], number: int) -> list[str]:
    """Returns a name for each of a number of classes. Those that have none are called by their number."""
    return [*names[:number], *map(str, range(len(names), number))]
