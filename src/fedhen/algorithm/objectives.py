"""What a device minimises on a batch: a loss over the logits of its model's exits, shallowest first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax

from fedhen.config.settings import ObjectiveConfig
from fedhen.errors import UserError

Objective = Callable[[Sequence[Tensor], Tensor], Tensor]
"""(logits of every exit, labels) -> loss. What it does not read a device does not train."""


@dataclass(frozen=True)
class SumOfExits:
    """The cross-entropies of some exits, weighted and summed; each exit may also learn from the others."""

    chosen: slice
    """Which exits count."""
    exits: tuple[str, ...] = ()
    """The exits' names, shallowest first, where weights refer to them."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Nested exit -> weight, 1 where not named; one of weight 0 is left out. A model's own exit always counts 1."""
    distillation: float = 0.0
    temperature: float = 1.0

    def __call__(self, logits: Sequence[Tensor], labels: Tensor) -> Tensor:
        """The loss of a batch."""
        read = [(logits[index], weight) for index, weight in self.weighted_exits(len(logits))]
        losses = [cross_entropy(z, labels) * weight if weight != 1 else cross_entropy(z, labels) for z, weight in read]
        if self.distillation and len(read) > 1:
            losses.append(self.distillation * self._distillation_loss([z for z, _ in read]))
        total = losses[0]
        for loss in losses[1:]:
            total = total + loss
        return total

    def weighted_exits(self, number: int) -> list[tuple[int, float]]:
        """Which of that many exits are read, and the weight of each."""
        names = self.exits or ("",) * number
        own = number - 1
        weighted = [(k, 1.0 if k == own else self.weights.get(names[k], 1.0)) for k in range(number)[self.chosen]]
        return [(index, weight) for index, weight in weighted if weight]

    def _distillation_loss(self, logits: Sequence[Tensor]) -> Tensor:
        """DepthFL (Kim et al. 2023): every exit learns from each other's softened output, which is held fixed.

        Σ_k mean_{j≠k} KL(q_j ‖ q_k)·T², with q = softmax(logits / T).
        """
        soft = [log_softmax(z / self.temperature, dim=1) for z in logits]
        terms = [
            # Written out: torch has no rule for its own kl_div over several devices at once.
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
"""Alg. 2, line 12: f(w) + f([w]_M); on a simple device, whose only exit is its own, just f(w)."""

last_exit = SumOfExits(slice(-1, None))
"""Alg. 2, line 4: f(w) alone."""


def configure_objective(objective: Objective, exits: tuple[str, ...], config: ObjectiveConfig) -> Objective:
    """The objective for a tier with these exits, with the weights and the distillation that are configured."""
    if isinstance(objective, SumOfExits):
        if objective.chosen != slice(None) and config != ObjectiveConfig():
            raise UserError(
                "objective.exit_weights and objective.distillation need a method that reads several exits, like fedhen"
            )
        return replace(
            objective,
            exits=exits,
            weights=dict(config.exit_weights),
            distillation=config.distillation,
            temperature=config.temperature,
        )
    if config != ObjectiveConfig():
        raise UserError(
            "objective.exit_weights and objective.distillation need a sum of exits: this method has its own objective"
        )
    return objective
