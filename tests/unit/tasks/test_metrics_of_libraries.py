"""Metrics against scikit-learn and torchmetrics, whole and split over batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
import torchmetrics
from sklearn import metrics as sk
from torch import Tensor

from fedhen import FedhenError
from fedhen.tasks import Classification, LanguageModelling, MultiLabel, Regression, Segmentation, Task
from fedhen.tasks.metrics import read_torchmetric

# Importing the libraries takes seconds.
pytestmark = pytest.mark.slow

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


@pytest.mark.parametrize("offset", [0.0, 1e9, -1e12, 1e-9])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_r2_keeps_its_digits_far_from_zero_however_it_is_split(offset: float, kind: torch.dtype) -> None:
    """Also against fractions, since scikit-learn's own mean is rounded. float32 has steps of 64 at 1e9."""
    scale = max(1.0, abs(offset) * (1e-6 if kind == torch.float32 else 1e-12))
    y = (logits(N).double() * scale + offset).to(kind)
    z = (y.double() + logits(N).double() * scale / 2).to(kind)
    exact = [Fraction(each) for each in y.tolist()]
    spread = sum((each - sum(exact) / N) ** 2 for each in exact)
    expected = 1 - float((y.double() - z.double()).square().sum()) / float(spread)
    assert 0.5 < expected < 0.9 and sk.r2_score(y.double(), z.double()) == pytest.approx(expected, rel=1e-6)
    for size in (N, 100, 1):
        assert score(Regression(["r2"]), z, y, size)["r2"] == pytest.approx(expected, rel=1e-13)


def test_r2_needs_targets_that_differ() -> None:
    assert math.isnan(score(Regression(["r2"]), logits(N), torch.full((N,), 3.0), 10)["r2"])


def test_a_metric_of_torchmetrics_is_merged_exactly() -> None:
    z, y = logits(N, 4), labels(4, N)
    whole = torchmetrics.F1Score(task="multiclass", num_classes=4, average="macro")
    task = Classification([torchmetrics.F1Score(task="multiclass", num_classes=4, average="macro"), "accuracy"])
    (found, accuracy) = score(task, z, y, 10).values()
    assert found == pytest.approx(float(whole(z, y)), rel=1e-6)
    assert accuracy == sk.accuracy_score(y, z.argmax(1))


def test_a_metric_of_torchmetrics_takes_regressions_outputs_in_the_shape_of_the_targets() -> None:
    z, y = logits(N, 1), logits(N)
    (found,) = score(Regression([torchmetrics.MeanAbsoluteError()]), z, y, 50).values()
    assert found == pytest.approx(sk.mean_absolute_error(y, z[:, 0]), rel=1e-6)


def test_a_metric_of_torchmetrics_that_is_no_sum_is_refused() -> None:
    with pytest.raises(FedhenError, match="metric PearsonCorrCoef cannot be merged exactly: its state 'mean_x'"):
        read_torchmetric(torchmetrics.PearsonCorrCoef())
