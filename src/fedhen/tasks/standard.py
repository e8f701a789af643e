"""Tasks with one prediction for each example: classification, multi-label, regression."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from fedhen.errors import unknown_name
from fedhen.tasks import metrics as m
from fedhen.tasks.metrics import Metric, make_mean_metric
from fedhen.tasks.predictions import Prediction, name_all, read_classes
from fedhen.tasks.r_squared import r2, r2_sums
from fedhen.tasks.task import Task


def make_loss_metric(loss: Callable[[Tensor, Tensor], Tensor], kept: Callable[[Tensor], Tensor]) -> Metric:
    """Makes the mean loss over the targets that count."""

    def sums(output: Tensor, targets: Tensor) -> Tensor:
        number = int(kept(targets).sum())
        total = loss(output.float(), targets).double() * number if number else output.new_zeros(()).double()
        return m.sum_and_count(total, number)

    return Metric("loss", sums, m.take_mean, higher_is_better=False)


def mean_of_softmax(outputs: Sequence[Tensor], dim: int) -> Tensor:
    """Returns the logarithm of the mean of the outputs' probabilities."""
    first, *others = (output.softmax(dim) for output in outputs)
    # In float64 the logarithm keeps the order of all numbers of float32.
    return (sum(others, first) / len(outputs)).double().log()


def is_right(output: Tensor, targets: Tensor) -> Tensor:
    return output.argmax(1) == targets


def is_in_top(output: Tensor, targets: Tensor, number: int) -> Tensor:
    best = output.topk(min(number, output.shape[1]), dim=1).indices
    return (best == targets[:, None]).any(1)


def is_whole(targets: Tensor) -> bool:
    return not (targets.is_floating_point() or targets.dtype == torch.bool)


def name_of(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")


@dataclass(frozen=True, eq=False)
class Classification(Task):
    """One class for each example. Outputs are logits of shape (examples, classes), targets of shape (examples,).

    Args:
        metrics: accuracy (the default), macro_f1, top5 or loss, by name, or others; the first is the primary one.
        class_weights: The weight of each class in the loss, by default 1.
        label_smoothing: The share of each target that is spread over all classes.
    """

    metrics: Sequence[object] = ()
    class_weights: Sequence[float] = ()
    label_smoothing: float = 0.0
    name = "classification"

    def named_metrics(self) -> Mapping[str, Metric]:
        def classes(output: Tensor, targets: Tensor) -> Tensor:
            return m.count_per_class(output.argmax(1), targets, output.shape[1])

        return {
            "accuracy": make_mean_metric("accuracy", is_right, unit="%"),
            "macro_f1": Metric("macro_f1", classes, m.macro_f1, unit="%"),
            "top5": make_mean_metric("top5", partial(is_in_top, number=5), unit="%"),
            "loss": make_loss_metric(functional.cross_entropy, torch.ones_like),
        }

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Returns the cross-entropy."""
        if not self.class_weights and not self.label_smoothing:
            return functional.cross_entropy(output, targets)
        weight = output.new_tensor(self.class_weights) if self.class_weights else None
        return functional.cross_entropy(output, targets, weight, label_smoothing=self.label_smoothing)

    def check_targets(self, targets: Tensor, classes: int) -> str:
        if not is_whole(targets):
            return f"labels must be whole numbers, found {name_of(targets.dtype)}: choose a task, as task='regression'"
        if targets.dim() != 1:
            return (
                f"labels must be one for each example, found shape {tuple(targets.shape)}: choose a task, as task=..."
            )
        if self.class_weights and len(self.class_weights) != classes:
            return f"task.class_weights has {len(self.class_weights)} weights, and there are {classes} classes"
        if len(targets) and (int(targets.min()) < 0 or int(targets.max()) >= classes):
            wrong = int(targets.max()) if int(targets.max()) >= classes else int(targets.min())
            return f"label {wrong} is out of range, labels must be 0 to {classes - 1}"
        return ""

    def check_output(self, output: Tensor, targets: Tensor, classes: int) -> str:
        expected = (len(targets), classes)
        return "" if tuple(output.shape) == expected else str(expected)

    def log_probabilities(self, output: Tensor) -> Tensor:
        return functional.log_softmax(output, dim=1)

    def combine(self, outputs: Sequence[Tensor]) -> Tensor:
        return mean_of_softmax(outputs, dim=1)

    def interpret(self, output: Tensor, names: Sequence[str], lengths: Tensor | None = None) -> list[Prediction]:
        return read_classes(output, names)


@dataclass(frozen=True, eq=False)
class MultiLabel(Task):
    """Any number of labels for each example. Outputs are logits of the shape of the targets, which are 0 or 1.

    Args:
        metrics: micro_f1 (the default), macro_f1, label_accuracy, exact_match or loss, by name, or others.
    """

    metrics: Sequence[object] = ()
    name = "multi-label"

    def named_metrics(self) -> Mapping[str, Metric]:
        def labels(output: Tensor, targets: Tensor) -> Tensor:
            predicted, actual = (output > 0).flatten(1), targets.bool().flatten(1)
            return torch.cat([each.sum(0) for each in (predicted & actual, predicted, actual)]).double()

        return {
            "micro_f1": Metric("micro_f1", labels, m.micro_f1, unit="%"),
            "macro_f1": Metric("macro_f1", labels, _macro_f1_of_labels, unit="%"),
            "label_accuracy": make_mean_metric("label_accuracy", lambda z, y: (z > 0) == y.bool(), unit="%"),
            "exact_match": make_mean_metric(
                "exact_match", lambda z, y: ((z > 0) == y.bool()).flatten(1).all(1), unit="%"
            ),
            "loss": make_loss_metric(self.loss, lambda y: torch.ones(len(y))),
        }

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Returns the binary cross-entropy, averaged over labels and examples."""
        return functional.binary_cross_entropy_with_logits(output, targets.to(output.dtype))

    def check_targets(self, targets: Tensor, classes: int) -> str:
        if targets.dim() < 2:
            return f"multi-label targets must have a column for each label, found shape {tuple(targets.shape)}"
        if not bool(((targets == 0) | (targets == 1)).all()):
            return "multi-label targets must be 0 or 1"
        return ""

    def check_output(self, output: Tensor, targets: Tensor, classes: int) -> str:
        return "" if output.shape == targets.shape else str(tuple(targets.shape))

    def count_outputs(self, targets: Tensor, classes: int) -> int:
        return targets[0].numel()

    def log_probabilities(self, output: Tensor) -> Tensor:
        return torch.stack([functional.logsigmoid(output), functional.logsigmoid(-output)], -1).flatten(0, -2)

    def combine(self, outputs: Sequence[Tensor]) -> Tensor:
        return torch.stack([output.double().sigmoid() for output in outputs]).mean(0).logit()

    def interpret(self, output: Tensor, names: Sequence[str], lengths: Tensor | None = None) -> list[Prediction]:
        """Returns the names of the labels above 0.5. Its probability is that of the least certain label."""
        found, names = [], name_all(names, output[0].numel())
        for row in output.double().flatten(1).sigmoid().tolist():
            sure = min(max(share, 1 - share) for share in row)
            value = tuple(name for name, share in zip(names, row, strict=True) if share > 0.5)
            found.append(Prediction(value, sure, dict(zip(names, row, strict=True))))
        return found


def _macro_f1_of_labels(sums: Tensor) -> float:
    """Returns the mean F1 over all labels; a label that is neither predicted nor true has 0."""
    right, predicted, actual = sums.view(3, -1)
    return float((2 * right / (predicted + actual).clamp(min=1)).mean())


@dataclass(frozen=True, eq=False)
class Regression(Task):
    """Numbers. Outputs have the shape of the targets, or (examples, 1) for targets of shape (examples,).

    Args:
        metrics: rmse (the default), mae, mse, r2 or loss, by name, or others; the first is the primary one.
        error: "mse" for the squared error, "huber" for Huber's.
        huber_delta: The error from which on Huber's loss is linear.
    """

    metrics: Sequence[object] = ()
    error: str = "mse"
    huber_delta: float = 1.0
    name = "regression"

    def __post_init__(self) -> None:
        if self.error not in ("mse", "huber"):
            raise unknown_name("error of regression", self.error, ("mse", "huber"))

    def named_metrics(self) -> Mapping[str, Metric]:
        def error(output: Tensor, targets: Tensor) -> Tensor:
            return self.align(output, targets).double() - targets.double()

        square = make_mean_metric("mse", lambda z, y: error(z, y).square(), higher_is_better=False)
        root = Metric("rmse", square.sums, lambda sums: m.take_mean(sums) ** 0.5, higher_is_better=False)
        return {
            "rmse": root,
            "mae": make_mean_metric("mae", lambda z, y: error(z, y).abs(), higher_is_better=False),
            "mse": square,
            "r2": Metric("r2", r2_sums, r2),
            "loss": make_loss_metric(self.loss, lambda y: torch.ones(len(y))),
        }

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean squared error, or Huber's loss."""
        output = self.align(output, targets)
        if self.error == "huber":
            return functional.huber_loss(output, targets.to(output.dtype), delta=self.huber_delta)
        return functional.mse_loss(output, targets.to(output.dtype))

    def check_targets(self, targets: Tensor, classes: int) -> str:
        finite = not targets.is_floating_point() or bool(torch.isfinite(targets).all())
        return "" if finite else "targets must be finite numbers: remove examples with NaN or infinity"

    def check_output(self, output: Tensor, targets: Tensor, classes: int) -> str:
        fits = len(output) == len(targets) and output.numel() == targets.numel()
        return "" if fits else str(tuple(targets.shape))

    def count_outputs(self, targets: Tensor, classes: int) -> int:
        return targets[0].numel()

    def align(self, output: Tensor, targets: Tensor) -> Tensor:
        return output.reshape(targets.shape)

    def combine(self, outputs: Sequence[Tensor]) -> Tensor:
        return torch.stack([output.double() for output in outputs]).mean(0)

    def interpret(self, output: Tensor, names: Sequence[str], lengths: Tensor | None = None) -> list[Prediction]:
        """Returns the number, or the numbers as a list, in the unit of the targets."""
        return [Prediction(row.item() if row.numel() == 1 else row.tolist()) for row in output]
