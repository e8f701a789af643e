"""Tasks with a class for each position: language modelling, segmentation. Positions may be padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from fedhen.tasks import metrics as m
from fedhen.tasks.metrics import Metric, make_mean_metric
from fedhen.tasks.predictions import Prediction, name_all, read_classes
from fedhen.tasks.standard import is_whole, make_loss_metric, mean_of_softmax, name_of
from fedhen.tasks.task import Task

IGNORED = -100
"""A target of this value is not counted, in torch's losses and here."""


@dataclass(frozen=True, eq=False)
class LanguageModelling(Task):
    """The next token. Outputs are logits of shape (examples, positions, vocabulary), targets (examples, positions).

    Targets of `padding` are not counted.

    Args:
        metrics: perplexity (the default), loss or token_accuracy, by name, or others; the first is the primary one.
        padding: The target that is not counted.
    """

    metrics: Sequence[object] = ()
    padding: int = IGNORED
    name = "language-modelling"

    def named_metrics(self) -> Mapping[str, Metric]:
        loss = make_loss_metric(self.loss, self.counted)
        return {
            "perplexity": Metric("perplexity", loss.sums, _perplexity, higher_is_better=False),
            "loss": loss,
            "token_accuracy": make_mean_metric("token_accuracy", self._rights, unit="%"),
        }

    def counted(self, targets: Tensor) -> Tensor:
        return targets != self.padding

    def _rights(self, output: Tensor, targets: Tensor) -> Tensor:
        return (output.argmax(-1) == targets)[self.counted(targets)]

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean cross-entropy of the tokens that count."""
        return functional.cross_entropy(output.flatten(0, -2), targets.flatten(), ignore_index=self.padding)

    def check_targets(self, targets: Tensor, classes: int) -> str:
        if not is_whole(targets) or targets.dim() != 2:
            found = f"{name_of(targets.dtype)} of shape {tuple(targets.shape)}"
            return f"targets must be token ids of shape (examples, positions), found {found}"
        kept = targets[self.counted(targets)]
        return "" if not len(kept) or int(kept.min()) >= 0 else f"token {int(kept.min())} is below 0"

    def check_output(self, output: Tensor, targets: Tensor, classes: int) -> str:
        fits = output.dim() == 3 and output.shape[:2] == targets.shape and output.shape[2] >= classes
        return "" if fits else f"{(*targets.shape, 'vocabulary')}, with a vocabulary of at least {classes}"

    def count_outputs(self, targets: Tensor, classes: int) -> int:
        kept = targets[self.counted(targets)]
        return 1 + int(kept.max()) if len(kept) else 1

    def log_probabilities(self, output: Tensor) -> Tensor:
        return functional.log_softmax(output.flatten(0, -2), dim=1)

    def combine(self, outputs: Sequence[Tensor]) -> Tensor:
        return mean_of_softmax(outputs, dim=-1)

    def interpret(self, output: Tensor, names: Sequence[str], lengths: Tensor | None = None) -> list[Prediction]:
        """Returns the token that follows each sequence."""
        ends = torch.full((len(output),), output.shape[1]) if lengths is None else lengths
        return read_classes(output[torch.arange(len(output)), ends - 1], names)


def _perplexity(sums: Tensor) -> float:
    # torch's exponential overflows to infinity, where Python's raises.
    return float(torch.tensor(m.take_mean(sums), dtype=torch.float64).exp())


@dataclass(frozen=True, eq=False)
class Segmentation(Task):
    """A class for each pixel. Outputs are logits of shape (examples, classes, ...), targets (examples, ...).

    Args:
        metrics: mean_iou (the default), pixel_accuracy or loss, by name, or others; the first is the primary one.
        padding: The target of pixels that are not counted.
    """

    metrics: Sequence[object] = ()
    padding: int = IGNORED
    name = "segmentation"

    def named_metrics(self) -> Mapping[str, Metric]:
        def classes(output: Tensor, targets: Tensor) -> Tensor:
            kept = self.counted(targets)
            return m.count_per_class(output.argmax(1)[kept], targets[kept], output.shape[1])

        return {
            "mean_iou": Metric("mean_iou", classes, m.mean_iou, unit="%"),
            "pixel_accuracy": make_mean_metric(
                "pixel_accuracy", lambda z, y: (z.argmax(1) == y)[self.counted(y)], unit="%"
            ),
            "loss": make_loss_metric(self.loss, self.counted),
        }

    def counted(self, targets: Tensor) -> Tensor:
        return targets != self.padding

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean cross-entropy of the pixels that count."""
        return functional.cross_entropy(output, targets, ignore_index=self.padding)

    def check_targets(self, targets: Tensor, classes: int) -> str:
        if not is_whole(targets) or targets.dim() < 2:
            found = f"{name_of(targets.dtype)} of shape {tuple(targets.shape)}"
            return f"targets must be a class for each pixel, (examples, height, width), found {found}"
        kept = targets[self.counted(targets)]
        return "" if not len(kept) or int(kept.min()) >= 0 else f"class {int(kept.min())} is below 0"

    def check_output(self, output: Tensor, targets: Tensor, classes: int) -> str:
        fits = (len(output), *output.shape[2:]) == tuple(targets.shape) and output.shape[1] >= classes
        return "" if fits else f"{(len(targets), 'classes', *targets.shape[1:])}, with at least {classes} classes"

    def count_outputs(self, targets: Tensor, classes: int) -> int:
        kept = targets[self.counted(targets)]
        return 1 + int(kept.max()) if len(kept) else 1

    def log_probabilities(self, output: Tensor) -> Tensor:
        return functional.log_softmax(output.movedim(1, -1).flatten(0, -2), dim=1)

    def combine(self, outputs: Sequence[Tensor]) -> Tensor:
        return mean_of_softmax(outputs, dim=1)

    def interpret(self, output: Tensor, names: Sequence[str], lengths: Tensor | None = None) -> list[Prediction]:
        """Returns the class of each pixel. Probabilities are means over all pixels."""
        names, shares = name_all(names, output.shape[1]), output.double().softmax(1).flatten(2)
        means = zip(output.argmax(1), shares.amax(1).mean(1).tolist(), shares.mean(2).tolist(), strict=True)
        return [Prediction(pixels, sure, dict(zip(names, each, strict=True))) for pixels, sure, each in means]
