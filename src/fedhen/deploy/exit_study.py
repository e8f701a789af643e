"""Studies early exits: what each exit scores, which threshold loses nothing, and what it saves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedhen import seeds
from fedhen.deploy.confidence import Confidence
from fedhen.deploy.manifest import NEVER, ExitStudy, ThresholdRow, read_threshold
from fedhen.errors import FedhenError
from fedhen.tasks import Task

TABLE = (0.0, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999, NEVER)
"""The thresholds that are shown."""
CANDIDATES = (*(k / 100 for k in range(100)), 0.995, 0.999, 0.9999, NEVER)
DEFAULT = 0.9
FEWEST = 200
"""With fewer examples a threshold cannot be chosen."""


def find_exits(confidences: Sequence[Tensor], threshold: float) -> Tensor:
    """Returns the place of the exit that each example takes, given the confidence of every exit but the last."""
    exits = torch.full_like(confidences[0], len(confidences), dtype=torch.int64)
    for place in reversed(range(len(confidences))):
        exits[confidences[place] >= threshold] = place
    return exits


def read_exits(outputs: Sequence[Tensor], exits: Tensor) -> Tensor:
    """Returns, for each example, the output of the exit that it takes."""
    found = outputs[0].clone()
    for place, output in enumerate(outputs):
        found[exits == place] = output[exits == place]
    return found


def score(task: Task, output: Tensor, targets: Tensor) -> float:
    """Returns the primary metric."""
    metric = task.scores[0]
    return metric.value(metric.sums(output, targets).double())


def score_exits(
    task: Task, outputs: Sequence[Tensor], targets: Tensor, names: Sequence[str]
) -> dict[str, float | None]:
    """Returns exit -> the primary metric; None if it is not finite."""
    return {name: _finite(score(task, output, targets)) for name, output in zip(names, outputs, strict=True)}


def study_exits(
    task: Task, outputs: Sequence[Tensor], targets: Tensor, operations: Mapping[str, int], confidence: Confidence
) -> ExitStudy:
    """Studies the outputs of a model's exits on a test set.

    `operations` names the exits, shallowest first, with the operations of an example that leaves there. The threshold
    is chosen on one half of the examples and scored on the other.
    """
    study = _Study(task, outputs, targets, list(operations.values()), confidence)
    every = torch.arange(len(targets))
    found = {
        "examples": len(targets),
        "score": score_exits(task, outputs, targets, list(operations)),
        "operations": dict(operations),
        "overthinking": _overthinking(task, outputs, targets),
        "table": [study.row(threshold, every) for threshold in TABLE],
    }
    if len(targets) < FEWEST:
        return ExitStudy(**found)  # type: ignore[arg-type]
    mixed = torch.from_numpy(seeds.stream(0, "threshold").permutation(len(targets)))
    half, other = mixed[: len(mixed) // 2], mixed[len(mixed) // 2 :]
    chosen = study.choose(half)
    last = score(task, outputs[-1][other], targets[other])
    return ExitStudy(**found, chosen=chosen, held_out=study.row(chosen, other), last_on_held_out=_finite(last))  # type: ignore[arg-type]


def choose_threshold(given: float | str | None, study: ExitStudy | None) -> tuple[float, str]:
    """Returns the threshold of a cascade and the rule that gave it."""
    if given is None:
        return DEFAULT, "default"
    if given != "auto":
        return read_threshold(given), "given"
    if study is None or study.held_out is None:
        number = study.examples if study else 0
        raise FedhenError(f"the threshold 'auto' needs {FEWEST} test examples, and there are {number}: give a number")
    return study.chosen, "auto"


class _Study:
    def __init__(
        self, task: Task, outputs: Sequence[Tensor], targets: Tensor, operations: list[int], confidence: Confidence
    ) -> None:
        self.task, self.outputs, self.targets = task, outputs, targets
        self.operations = torch.tensor(operations, dtype=torch.float64)
        self.confidences = [confidence(output) for output in outputs[:-1]]

    def row(self, threshold: float, index: Tensor) -> ThresholdRow:
        exits = find_exits([each[index] for each in self.confidences], threshold)
        spent = self.operations[exits].mean() / self.operations[-1] if self.operations[-1] else torch.tensor(1.0)
        return ThresholdRow(
            threshold=threshold,
            early=float((exits < len(self.outputs) - 1).double().mean()),
            score=_finite(self._score(exits, index)),
            operations=min(1.0, float(spent)),
        )

    def choose(self, index: Tensor) -> float:
        """Returns the smallest threshold that is not worse than the last exit."""
        last = score(self.task, self.outputs[-1][index], self.targets[index])
        higher = self.task.scores[0].higher_is_better
        for threshold in CANDIDATES:
            found = self._score(find_exits([each[index] for each in self.confidences], threshold), index)
            if found >= last if higher else found <= last:
                return threshold
        return NEVER

    def _score(self, exits: Tensor, index: Tensor) -> float:
        return score(self.task, read_exits([output[index] for output in self.outputs], exits), self.targets[index])


def _overthinking(task: Task, outputs: Sequence[Tensor], targets: Tensor) -> float | None:
    """Returns the share that the first exit has right and the last wrong, if examples are right or wrong."""
    if task.name != "classification":
        return None
    first, last = (output.argmax(1) == targets for output in (outputs[0], outputs[-1]))
    return float((first & ~last).double().mean())


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
