"""Alg. 2 on several devices of a tier at once, each with weights, batches and corrections of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedhen.algorithm.local import Correction
from fedhen.algorithm.objectives import Objective, SumOfExits
from fedhen.config import TrainingConfig
from fedhen.data.batches import Visits
from fedhen.models.exits import masked
from fedhen.params import Weights
from fedhen.precision import Precision
from fedhen.runtimes.stacking import Stacked

Losses = Callable[[Sequence[Tensor], Tensor, Tensor], Tensor]
"""(logits, labels, classes present) of all devices -> the loss of each."""


def per_device(objective: Objective, is_masked: bool) -> Losses:
    """The objective on every device; where it is masked, of the logits of the classes that the device holds."""
    if isinstance(objective, SumOfExits) and not objective.distillation and not is_masked:
        return partial(_cross_entropies, objective)

    def loss(logits: Sequence[Tensor], labels: Tensor, present: Tensor) -> Tensor:
        return objective(masked(logits, present) if is_masked else logits, labels)

    found: Losses = torch.vmap(loss, in_dims=(1, 1, 0))
    return found


CLIP_GUARD = 1e-6
"""What `clip_grad_norm_` adds to the norm that it divides by."""


def _cross_entropies(objective: SumOfExits, logits: Sequence[Tensor], labels: Tensor, present: Tensor) -> Tensor:
    """The same in fewer operations, where it is a sum of cross-entropies."""
    read = [
        cross_entropy(logits[place].flatten(0, 1), labels.flatten(), reduction="none").view_as(labels).mean(0) * weight
        for place, weight in objective.places(len(logits))
    ]
    return torch.stack(read).sum(0)


@dataclass(frozen=True)
class StackTask:
    """What the devices of a stack minimise, and how."""

    stacked: Stacked
    losses: Losses
    learned: frozenset[str]
    """The weights that the losses reach."""
    training: TrainingConfig
    lr: float
    precision: Precision


class Stack:
    """Devices that train as one network: every tensor has the devices as its first dimension.

    All that is learned lies in one matrix with a row a device, so that a step is a few operations on it.
    """

    def __init__(self, task: StackTask, start: Weights, corrections: Sequence[Correction]) -> None:
        self.task, devices = task, len(corrections)
        kept = {n: task.stacked.kept(n, w.detach().expand(devices, *w.shape)) for n, w in start.items()}
        self.idle = {n: w for n, w in kept.items() if n not in task.learned}
        self.shapes = {n: w.shape[1:] for n, w in kept.items() if n in task.learned}
        self.flat = self._flat([kept[n] for n in self.shapes])
        self.leaves = self._parts(self.flat)
        # Kept: memory that is asked for anew in every step has to be mapped anew.
        self.gradient = torch.empty_like(self.flat)
        self.offset, self.pull = self._corrections(corrections)
        self.decay = self.flat.new_tensor([[task.training.weight_decay + c.decay] for c in corrections])
        self.velocity = torch.zeros_like(self.flat) if task.training.momentum else self.flat.new_empty(devices, 0)

    def step(self, rows: Sequence[int], batch: tuple[Tensor, Tensor], present: Tensor) -> Tensor:
        """One step of the devices in these rows; returns their losses."""
        inputs, labels = batch
        everyone = len(rows) == len(self.flat)
        held = self.flat if everyone else self.flat[list(rows)]
        leaves = self.leaves if everyone else self._parts(held)
        idle = {n: _rows(w, rows) for n, w in self.idle.items()}
        with self.task.precision.autocast():
            losses = self.task.losses(self.task.stacked.forward({**leaves, **idle}, inputs), labels, present)
        gradients = torch.autograd.grad(losses.sum(), list(leaves.values()))
        with torch.no_grad():
            self._descend(held, self._flat(gradients, self.gradient[: len(rows)]), rows)
            if not everyone:
                self.flat[list(rows)] = held
        return losses.detach()

    def weights_of(self, row: int) -> Weights:
        """What the device in that row has learned, and what it holds beside it."""
        named = {n: self.task.stacked.named(n, w.detach())[row] for n, w in {**self.leaves, **self.idle}.items()}
        return {n: w.clone(memory_format=torch.contiguous_format) for n, w in named.items()}

    def _descend(self, held: Tensor, gradient: Tensor, rows: Sequence[int]) -> None:
        """Correct, clip, decay and move, as `train_locally` and torch's SGD do for one device."""
        training = self.task.training
        if self.offset is not None:
            gradient.add_(_rows(self.offset, rows))
        if self.pull is not None:
            gradient.addcmul_(_rows(self.pull, rows), held)
        norms = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
        shrink = (training.clip / (norms + CLIP_GUARD)).clamp(max=1)
        if not bool((shrink == 1).all()):
            gradient.mul_(shrink)
        decay = _rows(self.decay, rows)
        if bool((decay == decay[0]).all()):
            gradient.add_(held, alpha=float(decay[0]))
        else:
            gradient.addcmul_(decay, held)
        if training.momentum:
            # From a velocity of zero, as in torch's SGD, the first step is the gradient.
            gradient.add_(_rows(self.velocity, rows), alpha=training.momentum)
            self.velocity[list(rows)] = gradient
        held.add_(gradient, alpha=-self.task.lr)

    def _flat(self, tensors: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
        return torch.cat([t.reshape(len(t), -1) for t in tensors], dim=1, out=out)

    def _parts(self, flat: Tensor) -> Weights:
        """The learned weights by name, as leaves that lie in that matrix."""
        parts = torch.split(flat, [shape.numel() for shape in self.shapes.values()], dim=1)
        named = zip(self.shapes.items(), parts, strict=True)
        return {n: part.view(len(flat), *shape).detach().requires_grad_() for (n, shape), part in named}

    def _corrections(self, corrections: Sequence[Correction]) -> tuple[Tensor | None, Tensor | None]:
        """The devices' offsets, and their pulls on the weights that have an offset; none where there is nothing."""
        if not any(c.offset for c in corrections):
            return None, None
        zeros = {n: torch.zeros_like(leaf[0]) for n, leaf in self.leaves.items()}
        offsets, pulls = [], []
        for name, zero in zeros.items():
            own = [c.offset.get(name) for c in corrections]
            named = [self.task.stacked.named(name, zero[None])[0] if t is None else t for t in own]
            offsets.append(self.task.stacked.kept(name, torch.stack(named)))
            pulled = [
                zero if t is None else torch.full_like(zero, c.pull) for t, c in zip(own, corrections, strict=True)
            ]
            pulls.append(torch.stack(pulled))
        return self._flat(offsets), self._flat(pulls) if any(c.pull for c in corrections) else None


def _rows(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """The rows of some devices; of all, the tensor itself."""
    return tensor if len(rows) == len(tensor) else tensor[list(rows)]


def ticks(plans: Sequence[Visits]) -> Iterator[tuple[list[int], Visits]]:
    """Which devices take their next steps together, and what they visit: those whose next batches are as large.

    The visits of a step are interleaved: the first of every device, then the second of every device, and so on.
    """
    parts = [list(plan.batches()) for plan in plans]
    for tick in range(max(map(len, parts))):
        groups: dict[int, list[int]] = {}
        for row, own in enumerate(parts):
            if tick < len(own):
                groups.setdefault(own[tick].stop - own[tick].start, []).append(row)
        for rows in groups.values():
            here = [(plans[row], parts[row][tick]) for row in rows]
            examples, corners, flips, crops = (
                _interleaved([getattr(plan, name)[part] for plan, part in here])
                for name in ("examples", "corners", "flips", "crops")
            )
            yield rows, Visits(examples, np.array([len(examples)]), corners, flips, crops)


def _interleaved(rows: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    together = np.stack(rows, axis=1)
    return together.reshape(-1, *together.shape[2:])
