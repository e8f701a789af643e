"""Prototypes: classes are told apart by the distance of features to the mean of each class (Snell et al. 2017)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedhen.algorithm.gradients import Batch, LossOf
from fedhen.data.inputs import Inputs
from fedhen.errors import ConfigError
from fedhen.models.last_layers import find_last_layers

FAR = 1e30
"""The distance to a class without examples."""


def read_features(module: nn.Module, inputs: Inputs) -> list[Tensor]:
    """Returns the features that the last layer of each exit reads, shallowest first."""
    layers = find_last_layers(module, inputs)
    # Distances need more than half precision.
    found = [
        layer.features.flatten(1).to(torch.promote_types(layer.features.dtype, torch.float32))
        for layer in layers
        if layer is not None
    ]
    if len(found) < len(layers):
        raise ConfigError("personal.name=proto needs exits that end in a layer of their own, such as nn.Linear")
    return found


def compute_prototypes(features: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Returns the sum of the features of each class, and the number of its examples."""
    sums = features.new_zeros(classes, features.shape[1]).index_add(0, labels, features)
    return sums, torch.bincount(labels, minlength=classes).to(features.dtype)


def measure_closeness(features: Tensor, sums: Tensor, counts: Tensor) -> Tensor:
    """Returns the negative squared distance of each example to the mean of each class."""
    means = sums / counts.clamp(min=1)[:, None]
    distances = (features[:, None, :] - means[None, :, :]).square().sum(2)
    return torch.where(counts > 0, -distances, torch.full_like(distances, -FAR))


@dataclass(frozen=True)
class PrototypeLoss:
    """The gradient of the objective, with closeness to the class means of batch 1 as logits of batch 2 (Acar 2021).

    Examples of batch 2 whose class batch 1 does not have are left out.
    """

    classes: int
    batches: int = 2

    def compute(self, loss_of: LossOf, batches: Sequence[Batch]) -> Tensor:
        (inputs, labels), (others, targets) = batches
        with loss_of.autocast:
            support, queries = read_features(loss_of.module, inputs), read_features(loss_of.module, others)
        known = torch.bincount(labels, minlength=self.classes)[targets] > 0
        if known.any():
            logits = [
                measure_closeness(query[known], *compute_prototypes(one, labels, self.classes))
                for one, query in zip(support, queries, strict=True)
            ]
            loss = loss_of.objective(logits, targets[known])
        else:
            loss = torch.stack([query.sum() * 0 for query in queries]).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


class NearestPrototype(nn.Module):
    """A module whose exits say how close an example is to each class of a device's training data."""

    def __init__(self, module: nn.Module, batches: Iterable[Batch], classes: int) -> None:
        super().__init__()
        self.module = module.eval()
        self.prototypes: list[tuple[Tensor, Tensor]] = []
        with torch.no_grad():
            for inputs, labels in batches:
                found = [compute_prototypes(f, labels, classes) for f in read_features(module, inputs)]
                before = self.prototypes or [(torch.zeros_like(s), torch.zeros_like(n)) for s, n in found]
                self.prototypes = [(a + s, b + n) for (a, b), (s, n) in zip(before, found, strict=True)]

    def forward(self, *inputs: Tensor, **named: Tensor) -> list[Tensor]:
        features = read_features(self.module, named or (inputs[0] if len(inputs) == 1 else inputs))
        return [measure_closeness(f, *sums) for f, sums in zip(features, self.prototypes, strict=True)]
