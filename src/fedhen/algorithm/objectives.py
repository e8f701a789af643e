"""What a device minimises on a batch: a loss over the outputs of its model's exits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from fedhen.config.model_settings import ObjectiveConfig
from fedhen.errors import ConfigError
from fedhen.tasks import Classification, Task

CLASSIFICATION = Classification()

Objective = Callable[[Sequence[Tensor], Tensor], Tensor]
"""What a device minimises on a batch.

Args:
    logits: The output of each exit of the device's model, shallowest first; a simple device has one exit. In
        classification each has shape (examples, classes).
    labels: The targets; in classification of shape (examples,).

Returns:
    The loss, a tensor without dimensions.

Exits that an objective does not read are not trained by the device, and are sent to it only if another tier of its pool
has them. An objective that weighs the shallow exits by a half:

    def half_side(logits, labels):
        *side, own = [cross_entropy(z, labels) for z in logits]
        return own + 0.5 * sum(side)
"""


@dataclass(frozen=True)
class SumOfExits:
    """A weighted sum of the task's losses of some exits, with optional distillation between them."""

    chosen: slice
    """The exits that are read."""
    exits: tuple[str, ...] = ()
    """The names of the exits, shallowest first; needed only for weights."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Nested exit -> weight, by default 1. An exit of weight 0 is not read. A model's last exit always has weight 1."""
    distillation: float = 0.0
    temperature: float = 1.0
    task: Task = CLASSIFICATION
    """What the exits predict."""

    def __call__(self, logits: Sequence[Tensor], labels: Tensor) -> Tensor:
        read = [(logits[index], weight) for index, weight in self.weighted_exits(len(logits))]
        losses = [
            self.task.loss(z, labels) * weight if weight != 1 else self.task.loss(z, labels) for z, weight in read
        ]
        if self.distillation and len(read) > 1:
            losses.append(self.distillation * self._distillation_loss([z for z, _ in read]))
        total = losses[0]
        for loss in losses[1:]:
            total = total + loss
        return total

    def weighted_exits(self, number: int) -> list[tuple[int, float]]:
        """Returns the indices of the exits that are read, of `number` exits, and their weights."""
        names = self.exits or ("",) * number
        own = number - 1
        weighted = [(k, 1.0 if k == own else self.weights.get(names[k], 1.0)) for k in range(number)[self.chosen]]
        return [(index, weight) for index, weight in weighted if weight]

    def _distillation_loss(self, logits: Sequence[Tensor]) -> Tensor:
        """DepthFL (Kim et al. 2023): each exit learns from the softened outputs of the others, which are held fixed.

        Σ_k mean_{j≠k} KL(q_j ‖ q_k)·T², with q = softmax(logits / T).
        """
        soft = [self.task.log_probabilities(z / self.temperature) for z in logits]
        terms = [
            # Written out, since torch cannot vectorise its kl_div over several devices.
            (soft[j].detach().exp() * (soft[j].detach() - soft[k])).sum() / len(soft[k])
            for k in range(len(soft))
            for j in range(len(soft))
            if j != k
        ]
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        return total * self.temperature**2 / (len(soft) - 1)


sum_of_exits = SumOfExits(slice(None))
"""Alg. 2, line 12: f(w) + f([w]_M). On a simple device, which has one exit, it is f(w)."""

last_exit = SumOfExits(slice(-1, None))
"""Alg. 2, line 4: f(w) alone."""


def configure_objective(
    objective: Objective, exits: tuple[str, ...], config: ObjectiveConfig, task: Task = CLASSIFICATION
) -> Objective:
    """Returns the objective of a tier with these exits, with the task and the configured weights and distillation."""
    if isinstance(objective, SumOfExits):
        if objective.chosen != slice(None) and config != ObjectiveConfig():
            raise ConfigError(
                "objective.exit_weights and objective.distillation need a method that reads several exits, like fedhen"
            )
        return replace(
            objective,
            exits=exits,
            weights=dict(config.exit_weights),
            distillation=config.distillation,
            temperature=config.temperature,
            task=task,
        )
    if config != ObjectiveConfig():
        raise ConfigError(
            "objective.exit_weights and objective.distillation need a sum of exits: this method has another objective"
        )
    return objective
