"""Losses, combined exits, and the metrics and targets that are refused."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedhen import FedhenError
from fedhen.tasks import Classification, LanguageModelling, MultiLabel, Regression, Segmentation, Task, make_mean_metric

RNG = torch.Generator().manual_seed(0)


def logits(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=RNG)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Classification(["acuracy"]).scores, "unknown metric of classification 'acuracy': did you mean"),
        (lambda: Regression(error="l1"), "unknown error of regression 'l1': .*choose from mse, huber"),
        (lambda: Task().scores, "task 'Task' has no metrics"),
        (
            lambda: Classification([make_mean_metric("a", torch.eq), make_mean_metric("a", torch.eq)]).scores,
            "two metrics have the same name: a, a",
        ),
    ],
)
def test_metrics_that_cannot_be_are_refused_in_one_line(make: Any, message: str) -> None:
    with pytest.raises(FedhenError, match=message):
        make()


@pytest.mark.parametrize(
    ("task", "targets", "classes", "message"),
    [
        (Classification(), torch.zeros(3), 2, "labels must be whole numbers, found float32"),
        (Classification(), torch.zeros(3, 2, dtype=torch.long), 2, r"one for each example, found shape \(3, 2\)"),
        (Classification(), torch.tensor([0, 2]), 2, "label 2 is out of range, labels must be 0 to 1"),
        (Classification(class_weights=(1.0,)), torch.tensor([0, 1]), 2, "1 weights, and there are 2 classes"),
        (MultiLabel(), torch.zeros(3), 0, "a column for each label"),
        (MultiLabel(), torch.full((2, 2), 0.5), 0, "must be 0 or 1"),
        (Regression(), torch.tensor([1.0, float("nan")]), 0, "finite numbers"),
        (LanguageModelling(), torch.zeros(3, dtype=torch.long), 0, r"token ids of shape \(examples, positions\)"),
        (LanguageModelling(), torch.tensor([[-1]]), 0, "token -1 is below 0"),
        (Segmentation(), torch.zeros(3, dtype=torch.long), 0, "a class for each pixel"),
    ],
)
def test_targets_that_do_not_fit_are_named(task: Task, targets: Tensor, classes: int, message: str) -> None:
    assert re.search(message, task.check_targets(targets, classes))


def test_a_metric_that_compares_each_output_with_each_target_is_refused() -> None:
    """(n, 1) − (n,) is (n, n), of which the mean would be a wrong number."""
    task = Regression([make_mean_metric("bias", lambda output, y: output - y)])
    with pytest.raises(FedhenError, match=r"bias makes \(2, 2\) numbers of outputs and targets \(2, 1\)"):
        task.try_on(torch.zeros(2, 1), torch.zeros(2))
    task.try_on(torch.zeros(2), torch.zeros(2))


def test_losses_are_those_of_their_formulas() -> None:
    """Class weights: the weighted mean of −log p. Huber with δ = 1: 0.5·e² below, |e| − 0.5 above."""
    z, y = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0])
    each = -torch.log_softmax(z, 1)[:, 0]
    assert float(Classification(class_weights=(3.0, 1.0)).loss(z, y)) == pytest.approx(float(each.mean()))
    z, y = torch.tensor([[0.5], [3.0]]), torch.tensor([0.0, 0.0])
    assert float(Regression(error="huber").loss(z, y)) == pytest.approx((0.5 * 0.25 + 2.5) / 2)
    assert float(Regression().loss(z, y)) == pytest.approx((0.25 + 9) / 2)
    z, y = torch.zeros(1, 3, 4), torch.tensor([[1, 2, -100]])
    assert float(LanguageModelling().loss(z, y)) == pytest.approx(np.log(4))


def test_exits_together_are_the_mean_of_their_probabilities() -> None:
    one, other = logits(5, 3), logits(5, 3)
    mean = (one.double().softmax(1) + other.double().softmax(1)) / 2
    torch.testing.assert_close(Classification().combine([one, other]).exp(), mean, rtol=1e-6, atol=1e-6)
    mean = (one.double().sigmoid() + other.double().sigmoid()) / 2
    torch.testing.assert_close(MultiLabel().combine([one, other]).sigmoid(), mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(Regression().combine([one, other]), (one.double() + other.double()) / 2)
