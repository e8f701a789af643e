"""Early exits in torch: each example leaves at the first exit that is sure enough, and the rest is not computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from fedhen.data.inputs import Inputs, list_tensors, read_inputs
from fedhen.deploy.capture import Captured, capture
from fedhen.deploy.confidence import Confidence, confidence_of
from fedhen.deploy.manifest import read_threshold
from fedhen.deploy.split import Stage, shares_work, split
from fedhen.errors import FedhenError

NOTHING_SHARED = "nested by width: every exit is a pass of its own, so an early exit saves nothing: there is no cascade"
ONE_EXIT = "has one exit: there is no cascade"


class Cascade(nn.Module):
    """A trained module that answers each example at the first exit that is sure enough.

    The module is captured at the first call, for inputs of that form. Deeper stages run on the examples that are left.

    Args:
        module: A module that returns the outputs of its exits, shallowest first, as `fedhen.load` returns it.
        threshold: The confidence from which on an exit is sure enough, from 0 to 1, or "never".
        task: The name of the task, which says what confidence is; for classes the largest probability.

    Example:
        Digits, most of which leave early::

            cascade = fedhen.Cascade(fedhen.load("runs/digits", "complex"), threshold=0.9)
            logits, exits = cascade(images)
    """

    def __init__(self, module: nn.Module, threshold: float | str = 0.9, task: str = "classification") -> None:
        super().__init__()
        self.module = module.eval()
        self.threshold = read_threshold(threshold)
        self.confidence = confidence_of(task)
        self.stages: list[Stage] = []
        self.names: tuple[str, ...] = ()

    @torch.no_grad()
    def forward(self, inputs: object) -> tuple[Tensor, Tensor]:
        """Returns the output of the exit that each example took, and the place of that exit.

        `inputs` are what the module takes, as a tensor or an array; a mapping or a tuple if it takes several.
        """
        given = read_inputs(inputs)
        tensors = list_tensors(given)
        if not len(tensors[0]):
            raise FedhenError("the batch is empty: pass at least one example")
        if not self.stages:
            captured, self.stages = cut(self.module, given)
            self.names = captured.inputs
        values = dict(zip(self.names, tensors, strict=True))
        return run_stages(self.stages, values, self.threshold, self.confidence)


def cut(
    module: nn.Module, sample: Inputs, prepare: Callable[[Inputs], Inputs] | None = None
) -> tuple[Captured, list[Stage]]:
    """Captures a module and splits it into stages. Raises a FedhenError if no cascade can be made of it."""
    captured = capture(module, sample, prepare)
    stages = split(captured)
    if len(stages) < 2:
        raise FedhenError(f"the model {ONE_EXIT}")
    if not shares_work(captured, stages):
        raise FedhenError(f"the model is {NOTHING_SHARED}")
    return captured, stages


def run_stages(
    stages: Sequence[Stage], values: Mapping[str, Tensor], threshold: float, confidence: Confidence
) -> tuple[Tensor, Tensor]:
    """Returns the output of the exit that each example took, and the exit's place; deeper stages get what is left."""
    axes = {value.name: value.axis for stage in stages for value in (*stage.takes, *stage.gives)}
    examples = len(next(iter(values.values())))
    rows, exits = torch.arange(examples), torch.zeros(examples, dtype=torch.int64)
    outputs, given = stages[0](values)
    output, values = outputs, {**values, **given}
    for place, stage in enumerate(stages[1:], start=1):
        left = (~(confidence(output) >= threshold)).nonzero()[:, 0]
        if not len(left):
            break
        rows = rows[left]
        values = {name: tensor.index_select(axes[name], left) for name, tensor in values.items()}
        output, given = stage(values)
        values = {**values, **given}
        outputs, exits[rows] = outputs.index_copy(0, rows, output), place
    return outputs, exits
