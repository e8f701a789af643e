"""Compares a file, loaded in its runtime, with the model that it was made from."""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedhen.deploy.capture import Flat
from fedhen.deploy.confidence import Confidence
from fedhen.deploy.exit_study import find_exits, read_exits, score_exits
from fedhen.deploy.manifest import Agreement, MethodRecord
from fedhen.deploy.runtime import Array, Arrays, Session
from fedhen.deploy.source import Source, TierModel, name_inputs, take_examples
from fedhen.errors import FedhenError
from fedhen.tasks.metrics import Metric

RELATIVE = 1e-5
"""The tolerated difference, of the largest output or of 1."""
NEAR = 1e-4
"""A confidence this near to the threshold may fall on either side of it."""
RULED_OUT = 1e9
"""An output from here on, as -1e30 for a class that cannot be, is not measured: the file's must be as far."""
FEW, MOST_AT_ONCE = 100, 500
"""Examples that are tried in small batches, and the largest batch."""


@dataclass(frozen=True)
class Reference:
    """What the model says of the examples."""

    model: TierModel
    source: Source
    inputs: Arrays
    outputs: list[Tensor]
    """Of each exit."""

    @property
    def examples(self) -> int:
        return len(self.outputs[0])

    @cached_property
    def tolerance(self) -> float:
        sizes = torch.cat([output.abs().flatten() for output in self.outputs])
        return RELATIVE * max(1.0, float(torch.where(sizes < RULED_OUT, sizes, 0.0).max()))

    @property
    def class_axis(self) -> int:
        return -1 if self.source.task.name == "language-modelling" else 1

    def score(self, outputs: Sequence[Tensor], examples: int, names: Sequence[str]) -> dict[str, float | None]:
        """Returns name -> the primary metric of the first examples, if there are test data."""
        if not self.source.has_test or self.source.targets is None:
            return {}
        return score_exits(self.source.task, [o[:examples] for o in outputs], self.source.targets[:examples], names)

    def leave_early(self, confidence: Confidence, threshold: float) -> list[Tensor]:
        """Returns what a cascade of the model itself answers."""
        confidences = [confidence(output) for output in self.outputs[:-1]]
        return [read_exits(self.outputs, find_exits(confidences, threshold))]


def make_reference(model: TierModel, source: Source) -> Reference:
    """Runs the model itself on the examples."""
    examples = source.examples
    flat, tensors = Flat(model.module, source.prepare, examples), take_examples(examples, slice(None))
    parts = []
    with torch.no_grad():
        for begin in range(0, len(tensors[0]), FEW):
            parts.append(flat(*(tensor[begin : begin + FEW] for tensor in tensors)))
    outputs = [torch.cat(column) for column in zip(*parts, strict=True)]
    names = name_inputs(examples)
    return Reference(model, source, {n: t.numpy() for n, t in zip(names, tensors, strict=True)}, outputs)


def run_in_batches(session: Session, inputs: Arrays, size: int, most: int, extra: Arrays) -> list[Tensor]:
    """Returns the outputs of the first `most` examples, `size` at a time."""
    number = min(most, len(next(iter(inputs.values()))))
    parts = []
    for begin in range(0, number, size):
        batch = {name: array[begin : min(begin + size, number)] for name, array in inputs.items()}
        parts.append(session({**batch, **extra}))
    return [torch.from_numpy(np.concatenate(column)) for column in zip(*parts, strict=True)]


def plan_batches(examples: int, fixed: int = 0) -> list[tuple[int, int]]:
    """Returns (batch size, examples) of the trials: 1, 7 and all; the last one has every example."""
    if fixed:
        return [(fixed, 2 * FEW)]
    return [(1, FEW), (7, FEW), (min(examples, MOST_AT_ONCE), examples)]


def check_model(
    session: Session, reference: Reference, name: str, exact: bool = True, fixed: int = 0
) -> tuple[Agreement, list[Tensor]]:
    """Compares a file with an output for each exit. Raises a FedhenError if `exact` and it differs."""
    worst, batches, found = 0.0, plan_batches(reference.examples, fixed), list[Tensor]()
    for size, most in batches:
        found = run_in_batches(session, reference.inputs, size, most, {})
        for output, expected in zip(found, reference.outputs, strict=True):
            worst = max(worst, _compare(output, expected[: len(output)], reference, name, exact))
    same = _share_of_same(found, reference)
    return _agreement(reference, len(found[0]), batches, worst, same), found


def check_cascade(
    session: Session,
    reference: Reference,
    confidence: Confidence,
    thresholds: Sequence[float],
    name: str,
    exact: bool = True,
) -> tuple[Agreement, list[Tensor]]:
    """Compares a cascade at several thresholds; returns the outputs at the first of them."""
    confidences = [confidence(output) for output in reference.outputs[:-1]]
    batches, kept, differences = plan_batches(reference.examples), list[Tensor](), [0.0]
    for threshold in thresholds:
        for size, most in batches:
            found, exits = run_in_batches(session, reference.inputs, size, most, _as_input(threshold))
            expected = read_exits([output[: len(exits)] for output in reference.outputs], exits)
            if exact:
                _check_exits(exits, confidences, threshold, name)
            differences.append(_compare(found, expected, reference, name, exact))
        kept = kept or [found, exits]
    same = _classes(kept[0], reference) == _classes(read_exits(reference.outputs, kept[1]), reference)
    share = float(same.double().mean())
    return _agreement(reference, reference.examples, batches, max(differences), share), kept[:1]


def check_stages(
    sessions: Mapping[str, Session], methods: Mapping[str, MethodRecord], reference: Reference, name: str
) -> None:
    """Runs the methods of an ExecuTorch file one after the other, as a device does, and compares every exit."""
    most = min(reference.examples, FEW)
    for place in range(most):
        values = {key: array[place : place + 1] for key, array in reference.inputs.items()}
        for exit, (method, session) in enumerate(sessions.items()):
            record = methods[method]
            found = session({key: values[key] for key in record.takes})
            values = {**values, **dict(zip(record.gives, found, strict=True))}
            _compare(torch.from_numpy(found[0]), reference.outputs[exit][place : place + 1], reference, name, True)


def check_loss(
    own: dict[str, float | None],
    model: dict[str, float | None],
    reference: Reference,
    same: float,
    tolerance: float,
    name: str,
) -> None:
    """Raises a FedhenError if a quantised file scores more than `tolerance` points below the model."""
    metric = reference.source.task.scores[0]
    losses = [100 * (1 - same)]
    if own:
        losses = [_loss(value, model[name], metric) for name, value in own.items()]
    if not max(losses) <= tolerance:
        what = "points" if metric.unit == "%" or not own else "%"
        raise FedhenError(
            f"{name} is {max(losses):.1f} {what} below the model, and the tolerance is {tolerance:g}: not written"
        )


def check_paths(content: bytes, name: str) -> None:
    """Raises a FedhenError if a file holds a path of this machine."""
    for path in {Path.cwd(), Path.home(), Path(sys.prefix), Path(__file__).parents[1], Path(tempfile.gettempdir())}:
        if len(str(path)) >= 6 and str(path).encode() in content:
            raise FedhenError(f"{name} would hold the path {path}: not written")


def _loss(own: float | None, model: float | None, metric: Metric) -> float:
    """Returns how much worse a file is: in points if the metric is a share, else in percent of the model's."""
    if own is None or model is None:
        return 0.0 if own == model else math.inf
    loss = model - own if metric.higher_is_better else own - model
    return 100 * loss / (1.0 if metric.unit == "%" else max(abs(model), 1e-12))


def _compare(found: Tensor, expected: Tensor, reference: Reference, name: str, exact: bool) -> float:
    if found.shape != expected.shape:
        raise FedhenError(
            f"{name} returns shape {tuple(found.shape)}, and the model {tuple(expected.shape)}: not written"
        )
    far = (expected.abs() >= RULED_OUT) & (found.abs() >= RULED_OUT) & (found.sign() == expected.sign())
    difference = torch.where(far, 0.0, (found - expected).abs()).flatten(1).amax(1)
    worst, place = difference.max(0)
    if exact and not float(worst) <= reference.tolerance:
        raise FedhenError(
            f"{name} differs from the model by {float(worst):.2g} on example {int(place)}, more than "
            f"{reference.tolerance:.2g}: not written"
        )
    return float(worst)


def _check_exits(exits: Tensor, confidences: Sequence[Tensor], threshold: float, name: str) -> None:
    before = [each[: len(exits)] for each in confidences]
    clear = torch.stack([(each - threshold).abs() > NEAR for each in before]).all(0)
    wrong = (find_exits(before, threshold) != exits) & clear
    if bool(wrong.any()):
        raise FedhenError(
            f"{name} takes another exit than the model on example {int(wrong.nonzero()[0, 0])}: not written"
        )


def _share_of_same(found: Sequence[Tensor], reference: Reference) -> float:
    pairs = zip(found, reference.outputs, strict=True)
    return min(float((_classes(a, reference) == _classes(b[: len(a)], reference)).double().mean()) for a, b in pairs)


def _classes(output: Tensor, reference: Reference) -> Tensor:
    return output.argmax(reference.class_axis) if output.dim() > 1 else output


def _as_input(value: float) -> dict[str, Array]:
    return {"threshold": np.array(value, np.float32)}


def _agreement(
    reference: Reference, examples: int, batches: list[tuple[int, int]], worst: float, same: float
) -> Agreement:
    return Agreement(
        examples=examples,
        batches=sorted({size for size, _ in batches}),
        difference=float(f"{worst:.3g}"),
        tolerance=float(f"{reference.tolerance:.3g}"),
        same=same,
    )
