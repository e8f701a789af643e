"""Metrics against scikit-learn and torchmetrics, whole and split over batches."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from sklearn import metrics as sk
from torch import Tensor

from fedhen import UserError
from fedhen.tasks import Classification, LanguageModelling, MultiLabel, Regression, Segmentation, Task, make_mean_metric
from fedhen.tasks.metrics import read_torchmetric

RNG = torch.Generator().manual_seed(0)
N = 237


def logits(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=RNG)


def labels(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=RNG)


def score(task: Task, output: Tensor, targets: Tensor, size: int) -> dict[str, float]:
    """The metrics of batches of that size, with their sums added in order."""
    totals = [
        sum(
            (m.sums(output[k : k + size], targets[k : k + size]) for k in range(0, len(targets), size)), torch.zeros(())
        )
        for m in task.scores
    ]
    return {m.name: m.value(total) for m, total in zip(task.scores, totals, strict=True)}


def classification() -> tuple[Task, Tensor, Tensor, dict[str, float]]:
    # The last class is neither true nor predicted, the one before is predicted only.
    z, y = logits(N, 8), labels(6, N)
    z[:, 7] = -50
    best = z.argmax(1)
    expected = {
        "accuracy": sk.accuracy_score(y, best),
        "macro_f1": sk.f1_score(y, best, average="macro", zero_division=0),
        "top5": sk.top_k_accuracy_score(y, z.numpy(), k=5, labels=range(8)),
        "loss": sk.log_loss(y, z.double().softmax(1).numpy(), labels=range(8)),
    }
    return Classification([*expected]), z, y, expected


def multi_label() -> tuple[Task, Tensor, Tensor, dict[str, float]]:
    z, y = logits(N, 5), labels(2, N, 5)
    best = (z > 0).long()
    expected = {
        "micro_f1": sk.f1_score(y, best, average="micro"),
        "macro_f1": sk.f1_score(y, best, average="macro", zero_division=0),
        "label_accuracy": 1 - sk.hamming_loss(y, best),
        "exact_match": sk.accuracy_score(y, best),
        "loss": float(np.mean([sk.log_loss(y[:, k], z[:, k].double().sigmoid(), labels=[0, 1]) for k in range(5)])),
    }
    return MultiLabel([*expected]), z, y, expected


def regression() -> tuple[Task, Tensor, Tensor, dict[str, float]]:
    z, y = logits(N, 3), logits(N, 3) * 2 + 1
    expected = {
        "rmse": sk.mean_squared_error(y.flatten(), z.flatten()) ** 0.5,
        "mae": sk.mean_absolute_error(y, z),
        "mse": sk.mean_squared_error(y, z),
        "r2": sk.r2_score(y.double(), z.double()),
    }
    return Regression([*expected]), z, y, expected


def language() -> tuple[Task, Tensor, Tensor, dict[str, float]]:
    z, y = logits(N, 4, 9), labels(9, N, 4)
    y[::3, 2:] = -100
    kept = y != -100
    loss = sk.log_loss(y[kept], z[kept].double().softmax(1).numpy(), labels=range(9))
    right = sk.accuracy_score(y[kept], z[kept].argmax(1))
    return (
        LanguageModelling(["perplexity", "loss", "token_accuracy"]),
        z,
        y,
        {"perplexity": float(np.exp(loss)), "loss": loss, "token_accuracy": right},
    )


def segmentation() -> tuple[Task, Tensor, Tensor, dict[str, float]]:
    z, y = logits(N, 4, 3, 2), labels(4, N, 3, 2)
    y[:5, 0, 0] = -100
    kept = y != -100
    best = z.argmax(1)
    expected = {
        "mean_iou": sk.jaccard_score(y[kept], best[kept], average="macro"),
        "pixel_accuracy": sk.accuracy_score(y[kept], best[kept]),
    }
    return Segmentation([*expected]), z, y, expected


@pytest.mark.parametrize("make", [classification, multi_label, regression, language, segmentation])
@pytest.mark.parametrize("size", [N, 100, 7])
def test_metrics_are_those_of_scikit_learn_however_they_are_split(
    make: Callable[[], tuple[Task, Tensor, Tensor, dict[str, float]]], size: int
) -> None:
    task, output, targets, expected = make()
    assert score(task, output, targets, size) == pytest.approx(expected, rel=1e-6)


def test_a_metric_of_torchmetrics_is_merged_exactly() -> None:
    z, y = logits(N, 4), labels(4, N)
    whole = torchmetrics.F1Score(task="multiclass", num_classes=4, average="macro")
    task = Classification([torchmetrics.F1Score(task="multiclass", num_classes=4, average="macro"), "accuracy"])
    (found, accuracy) = score(task, z, y, 10).values()
    assert found == pytest.approx(float(whole(z, y)), rel=1e-6)
    assert accuracy == sk.accuracy_score(y, z.argmax(1))


def test_a_metric_of_torchmetrics_that_is_no_sum_is_refused() -> None:
    with pytest.raises(UserError, match="metric PearsonCorrCoef cannot be merged exactly: its state 'mean_x'"):
        read_torchmetric(torchmetrics.PearsonCorrCoef())


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
    with pytest.raises(UserError, match=message):
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
