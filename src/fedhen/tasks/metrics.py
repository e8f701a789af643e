"""Metrics as sums: what a batch adds, and the number that follows from the sums of all batches.

Sums are in float64 and are added in the order of the batches. So a metric is the same number however the batches are
divided among workers and ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedhen.errors import ConfigError

Sums = Callable[[Tensor, Tensor], Tensor]
"""(output of an exit, targets) of a batch -> a vector of sums."""
Align = Callable[[Tensor, Tensor], Tensor]
"""(output of an exit, targets) of a batch -> the output in the shape that other libraries expect."""


@dataclass(frozen=True)
class Metric:
    """A number that scores predictions.

    Args:
        name: Its name in records and reports.
        sums: (output of an exit, targets) of a batch -> a vector of sums, which are added over all batches.
        value: The total of the sums -> the metric.
        higher_is_better: Its direction.
        unit: "%" if it is a share between 0 and 1, which reports show in percent; else the unit to show, or "".

    Example:
        The mean error::

            Metric("bias", lambda output, y: torch.stack([(output - y).sum(), torch.tensor(len(y))]),
                   lambda sums: float(sums[0] / sums[1]), higher_is_better=False)
    """

    name: str
    sums: Sums
    value: Callable[[Tensor], float]
    higher_is_better: bool = True
    unit: str = ""

    @property
    def direction(self) -> str:
        return "higher" if self.higher_is_better else "lower"


def make_mean_metric(
    name: str, each: Callable[[Tensor, Tensor], Tensor], *, higher_is_better: bool = True, unit: str = ""
) -> Metric:
    """Makes the metric that is the mean of what `each(output, targets)` returns, over all examples.

    Args:
        name: Its name in records and reports.
        each: (output of an exit, targets) of a batch -> a tensor with a number or a truth value for each prediction.
        higher_is_better: Its direction.
        unit: "%" for a share between 0 and 1, else the unit to show.
    """

    def sums(output: Tensor, targets: Tensor) -> Tensor:
        found = each(output, targets)
        if found.numel() > max(output.numel(), targets.numel()):
            # (n, 1) and (n,) make (n, n).
            shapes = f"{tuple(output.shape)} and {tuple(targets.shape)}"
            raise ValueError(f"metric {name} makes {tuple(found.shape)} numbers of outputs and targets {shapes}")
        return sum_and_count(found.double().sum(), found.numel())

    return Metric(name, sums, take_mean, higher_is_better, unit)


def sum_and_count(total: Tensor, count: int) -> Tensor:
    return torch.stack([total, total.new_tensor(count)])


def take_mean(sums: Tensor) -> float:
    return divide(float(sums[0]), float(sums[1]))


def divide(a: float, b: float) -> float:
    """Returns a / b, or NaN if there is nothing to divide by."""
    return a / b if b else math.nan


def count_per_class(predicted: Tensor, actual: Tensor, classes: int) -> Tensor:
    """Returns, for each class, how often it was predicted rightly, predicted, and true; as one vector."""
    counts = [
        torch.bincount(predicted[predicted == actual].flatten(), minlength=classes),
        torch.bincount(predicted.flatten(), minlength=classes),
        torch.bincount(actual.flatten(), minlength=classes),
    ]
    return torch.cat(counts).double()


def macro_f1(sums: Tensor) -> float:
    """Returns the mean F1 over the classes that are predicted or true at least once."""
    right, predicted, actual = sums.view(3, -1)
    seen = predicted + actual > 0
    return float((2 * right[seen] / (predicted + actual)[seen]).mean()) if bool(seen.any()) else math.nan


def micro_f1(sums: Tensor) -> float:
    right, predicted, actual = sums.view(3, -1).sum(1).tolist()
    return divide(2 * right, predicted + actual)


def mean_iou(sums: Tensor) -> float:
    """Returns the mean intersection over union of the classes that are predicted or true at least once."""
    right, predicted, actual = sums.view(3, -1)
    union = predicted + actual - right
    seen = union > 0
    return float((right[seen] / union[seen]).mean()) if bool(seen.any()) else math.nan


def read_torchmetric(metric: Any, align: Align = lambda output, targets: output) -> Metric:
    """Makes a metric of a `torchmetrics.Metric`, which is given an exit's aligned output and the targets.

    All its states must be reduced by a sum, so that they merge exactly.
    """
    name = type(metric).__name__
    if not hasattr(metric, "_reductions"):
        raise ConfigError(f"{name} is not a metric: name one, or pass a fedhen.tasks.Metric or one of torchmetrics")
    for state, reduction in metric._reductions.items():
        tensor = getattr(metric, state)
        if getattr(reduction, "__name__", "") != "dim_zero_sum" or not isinstance(tensor, Tensor):
            raise ConfigError(f"metric {name} cannot be merged exactly: its state {state!r} is not a sum of tensors")
    if metric.higher_is_better is None:
        raise ConfigError(f"metric {name} does not say whether higher is better: wrap it in fedhen.tasks.Metric")
    defaults = {state: getattr(metric, state).clone() for state in metric._reductions}

    def sums(output: Tensor, targets: Tensor) -> Tensor:
        metric.to(output.device).reset()
        metric.update(align(output, targets), targets)
        return torch.cat([getattr(metric, state).double().reshape(-1) for state in defaults])

    def value(total: Tensor) -> float:
        metric.to(total.device).reset()
        parts = torch.split(total, [default.numel() for default in defaults.values()])
        for (state, default), part in zip(defaults.items(), parts, strict=True):
            setattr(metric, state, part.view(default.shape).to(default.dtype))
        metric._update_count = 1
        return float(metric.compute())

    return Metric(name, sums, value, higher_is_better=bool(metric.higher_is_better))


def read_metrics(given: Sequence[Any], align: Align = lambda output, targets: output) -> tuple[Metric, ...]:
    """Returns metrics, with those of torchmetrics made into ours. Their names must differ."""
    found = tuple(each if isinstance(each, Metric) else read_torchmetric(each, align) for each in given)
    names = [metric.name for metric in found]
    if len(set(names)) < len(names):
        raise ConfigError(f"two metrics have the same name: {', '.join(names)}")
    return found
