"""What a device minimises on a batch: a loss over the logits of its model's exits, shallowest first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.nn.functional import cross_entropy

Objective = Callable[[Sequence[Tensor], Tensor], Tensor]
"""(logits of every exit, labels) -> loss. What it leaves out of the loss a device does not train."""


def sum_of_exits(logits: Sequence[Tensor], labels: Tensor) -> Tensor:
    """Alg. 2, line 12: f(w) + f([w]_M); on a simple device, whose only exit is its own, just f(w)."""
    loss = cross_entropy(logits[0], labels)
    for deeper in logits[1:]:
        loss = loss + cross_entropy(deeper, labels)
    return loss


def last_exit(logits: Sequence[Tensor], labels: Tensor) -> Tensor:
    """Alg. 2, line 4: f(w) alone."""
    return cross_entropy(logits[-1], labels)
