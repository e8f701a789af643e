"""The contract of a task: what every engine, record and report knows of predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from torch import Tensor

from fedhen.errors import ConfigError, FedhenError, one_line, unknown_name
from fedhen.tasks.metrics import Metric, read_metrics
from fedhen.tasks.predictions import Prediction


class Task:
    """What models predict. A subclass has a name, a loss and metrics; the rest has defaults.

    Example:
        The 90 % quantile, for outputs of shape (examples, 1)::

            class Quantile(fedhen.Task):
                name = "quantile"
                metrics = [make_mean_metric("coverage", lambda output, y: y <= output[:, 0], unit="%")]

                def loss(self, output, targets):
                    error = targets - output[:, 0]
                    return torch.maximum(0.9 * error, -0.1 * error).mean()


            fedhen.train(family, data, task=Quantile())
    """

    name: str = ""
    """Its name in configurations and reports."""
    metrics: Sequence[object] = ()
    """The primary metric first: names, `Metric`s, or metrics of torchmetrics whose states are sums."""

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Returns the loss of one exit on a batch, a tensor without dimensions.

        Args:
            output: What the exit returned, with a row for each example.
            targets: The targets of the same examples.
        """
        raise NotImplementedError

    def check_targets(self, targets: Tensor, classes: int) -> str:
        """Returns what is wrong with targets, or "" if they fit the task."""
        return ""

    def counted(self, targets: Tensor) -> Tensor | None:
        """Returns which targets count in the loss, or None if all do. A batch without any is left out of training."""
        return None

    def check_output(self, output: Tensor, targets: Tensor, classes: int) -> str:
        """Returns which shape an exit's output should have, or "" if it fits."""
        return "" if len(output) == len(targets) else f"({len(targets)}, ...)"

    def count_outputs(self, targets: Tensor, classes: int) -> int:
        """Returns the number of outputs that a model for these targets needs."""
        return classes or targets[0].numel()

    def align(self, output: Tensor, targets: Tensor) -> Tensor:
        """Returns an exit's output in the shape in which metrics of torchmetrics take it."""
        return output

    def log_probabilities(self, output: Tensor) -> Tensor:
        """Returns the logarithms of the predicted probabilities, of shape (predictions, classes), for distillation."""
        raise ConfigError(f"objective.distillation needs a task with probabilities, and {self.name!r} has none")

    def combine(self, outputs: Sequence[Tensor]) -> Tensor:
        """Returns one output that stands for the mean prediction of several exits."""
        raise ConfigError(f"evaluation.ensemble needs a task that can combine outputs, and {self.name!r} cannot")

    def interpret(self, output: Tensor, names: Sequence[str], lengths: Tensor | None = None) -> list[Prediction]:
        """Returns what an output says of each example: a value, and how probable it is.

        Args:
            output: What an exit returned, on the CPU, with a row for each example.
            names: The names of classes, labels or tokens, as far as they are known.
            lengths: Of sequences, how many of each one's tokens are not padding.
        """
        return [Prediction(row) for row in output]

    def named_metrics(self) -> Mapping[str, Metric]:
        """Returns the metrics that can be chosen by name, the default first."""
        return {}

    def try_on(self, output: Tensor, targets: Tensor) -> None:
        """Computes loss and metrics of two examples. Raises a FedhenError of one line if that fails."""
        try:
            loss = self.loss(output, targets)
            if loss.dim():
                raise ValueError(f"the loss has shape {tuple(loss.shape)}: return its mean")
            for metric in self.scores:
                metric.sums(output, targets).double()
        except FedhenError:
            raise
        except Exception as error:  # A user's task may raise anything.
            reason = one_line(f"{type(error).__name__}: {error}")[:200]
            raise ConfigError(f"task {self.name!r} fails on two examples: {reason}") from error

    @cached_property
    def scores(self) -> tuple[Metric, ...]:
        """The metrics, the primary one first. Raises a FedhenError for a name that is not known."""
        known = self.named_metrics()
        for name in self.metrics:
            if isinstance(name, str) and name not in known:
                raise unknown_name(f"metric of {self.name}", name, known)
            if isinstance(name, Metric) and name.name in known:
                raise ConfigError(f"{self.name} has a metric {name.name!r}: give yours another name")
        found = read_metrics(
            [known[each] if isinstance(each, str) else each for each in self.metrics or list(known)[:1]], self.align
        )
        if not found:
            raise ConfigError(f"task {self.name or type(self).__name__!r} has no metrics: give it at least one")
        return found
