"""How sure an exit is of an example, and the threshold from which on that is enough."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from fedhen.errors import FedhenError

Confidence = Callable[[Tensor], Tensor]
"""An exit's output -> a number from 0 to 1 for each example."""


def _of_class(output: Tensor) -> Tensor:
    """Returns the largest probability; of an image of classes, its mean over the pixels."""
    largest = output.float().softmax(1).amax(1)
    return largest.flatten(1).mean(1) if largest.dim() > 1 else largest


def _of_token(output: Tensor) -> Tensor:
    """Returns the mean of the tokens' largest probabilities."""
    return output.float().softmax(-1).amax(-1).mean(1)


def _of_labels(output: Tensor) -> Tensor:
    """Returns the probability of the label that is least sure."""
    return (output.float().abs().flatten(1).amin(1)).sigmoid()


CONFIDENCES: Mapping[str, Confidence] = {
    "classification": _of_class,
    "segmentation": _of_class,
    "multi-label": _of_labels,
    "language-modelling": _of_token,
}
"""Task -> its confidence. Tasks that are not here, like regression, have none."""


def confidence_of(task: str) -> Confidence:
    """Returns the confidence of a task. Raises a FedhenError if it has none."""
    if task not in CONFIDENCES:
        raise FedhenError(f"a cascade needs a task with a confidence, and {task!r} has none")
    return CONFIDENCES[task]
