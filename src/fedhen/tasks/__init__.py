"""What models predict: the loss of an exit's output, the metrics that score it, and which targets fit."""

from __future__ import annotations

from fedhen.tasks.metrics import Metric, make_mean_metric
from fedhen.tasks.positions import LanguageModelling, Segmentation
from fedhen.tasks.predictions import Prediction
from fedhen.tasks.standard import Classification, MultiLabel, Regression
from fedhen.tasks.task import Task

__all__ = [
    "Classification",
    "LanguageModelling",
    "Metric",
    "MultiLabel",
    "Prediction",
    "Regression",
    "Segmentation",
    "Task",
    "make_mean_metric",
]
