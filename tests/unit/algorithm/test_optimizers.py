"""The optimisers of a device: torch's to the bit, with state that is kept or not, and FedDyn's pull in the gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from fedhen.algorithm.optimizers import kept_state_like, make_optimizer
from fedhen.config.training_settings import TrainingConfig
from fedhen.params import Weights, pack, unpack

SHAPES = {"a": (7, 5), "b": (3,), "c": (4, 3, 3, 3), "never": (2, 2), "late": (5,)}
Torchs = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
CASES: dict[str, tuple[TrainingConfig, Torchs]] = {
    "sgd": (
        TrainingConfig(weight_decay=0.01),
        partial(torch.optim.SGD, lr=0.3, weight_decay=0.01),
    ),
    "momentum": (
        TrainingConfig(weight_decay=0.01, momentum=0.9),
        partial(torch.optim.SGD, lr=0.3, weight_decay=0.01, momentum=0.9),
    ),
    "adam": (
        TrainingConfig(optimizer="adam", weight_decay=0.0),
        partial(torch.optim.Adam, lr=0.3),
    ),
    "adam with decay": (
        TrainingConfig(optimizer="adam", weight_decay=0.1, beta1=0.8, beta2=0.95, epsilon=1e-3),
        partial(torch.optim.Adam, lr=0.3, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-3),
    ),
    "adamw": (
        TrainingConfig(optimizer="adamw", weight_decay=0.1, beta1=0.8),
        partial(torch.optim.AdamW, lr=0.3, weight_decay=0.1, betas=(0.8, 0.999)),
    ),
}
"""Name -> our settings, and torch's optimiser with the same."""


def random_weights(dtype: torch.dtype) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """The same weights twice, one of them as images lie with the channels last."""
    torch.manual_seed(0)
    values = {name: torch.randn(shape).to(dtype) for name, shape in SHAPES.items()}
    values["c"] = values["c"].contiguous(memory_format=torch.channels_last)
    ours, theirs = ({name: nn.Parameter(value.clone()) for name, value in values.items()} for _ in (0, 1))
    return ours, theirs


def give_gradients(step: int, *all_weights: dict[str, nn.Parameter]) -> None:
    """One weight never has a gradient, another has one from the third step on."""
    for name in SHAPES:
        has = name != "never" and (name != "late" or step > 1)
        gradient = torch.randn_like(all_weights[0][name]) if has else None
        for weights in all_weights:
            weights[name].grad = None if gradient is None else gradient.clone()


def equal(ours: dict[str, nn.Parameter], theirs: dict[str, nn.Parameter]) -> bool:
    return all(torch.equal(ours[name], theirs[name]) for name in SHAPES)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_are_those_of_torch_to_the_bit(case: str, dtype: torch.dtype) -> None:
    ours, theirs = random_weights(dtype)
    training, make = CASES[case]
    optimizer, expected = make_optimizer(training, 0.3), make([*theirs.values()])
    start = {name: weight.detach().clone() for name, weight in ours.items()}
    for step in range(6):
        give_gradients(step, ours, theirs)
        optimizer.step(ours)
        expected.step()
        assert equal(ours, theirs), f"step {step}"
    assert torch.equal(ours["never"], start["never"]), "without a gradient there is no decay either"


@pytest.mark.parametrize("case", ["momentum", "adam with decay", "adamw"])
def test_a_kept_state_goes_on_as_one_optimiser_of_torch(case: str) -> None:
    """Every two steps a new optimiser loads what the last one kept, packed and unpacked as a store does."""
    ours, theirs = random_weights(torch.float32)
    training, make = CASES[case]
    training = TrainingConfig(**{**vars(training), "optimizer_state": "device"})
    expected = make([*theirs.values()])
    like = kept_state_like(training, {name: weight.detach() for name, weight in ours.items()})
    kept: Weights = {}
    for step in range(8):
        if step % 2 == 0:
            optimizer = make_optimizer(training, 0.3)
            optimizer.load(ours, kept)
        give_gradients(step, ours, theirs)
        optimizer.step(ours)
        expected.step()
        assert equal(ours, theirs), f"step {step}"
        kept = unpack(pack(optimizer.keep(like)).clone(), like)
        assert pack(kept).dtype == torch.float32, "the count of steps must not double the room"


def test_a_kept_state_is_not_changed_by_the_steps_that_start_from_it() -> None:
    """A device that fails keeps its old state."""
    training = TrainingConfig(optimizer="adam", optimizer_state="device")
    ours, _ = random_weights(torch.float32)
    like = kept_state_like(training, dict(ours))
    kept = {key: torch.ones_like(tensor) for key, tensor in like.items()}
    optimizer = make_optimizer(training, 0.3)
    optimizer.load(ours, kept)
    give_gradients(5, ours)
    optimizer.step(ours)
    assert all((tensor == 1).all() for tensor in kept.values())
    assert optimizer.steps == {name: 2 if name != "never" else 1 for name in SHAPES}


def test_what_is_kept_by_name_shape_and_type() -> None:
    weights = {"w": torch.zeros(2, 3), "half": torch.zeros(4, dtype=torch.bfloat16)}
    adam = kept_state_like(TrainingConfig(optimizer="adam", optimizer_state="device"), weights)
    assert {key: (tuple(t.shape), t.dtype) for key, t in adam.items()} == {
        "mean/w": ((2, 3), torch.float32),
        "mean/half": ((4,), torch.bfloat16),
        "square/w": ((2, 3), torch.float32),
        "square/half": ((4,), torch.bfloat16),
        "steps/w": ((), torch.float32),
        "steps/half": ((), torch.float32),
    }
    assert [*kept_state_like(TrainingConfig(momentum=0.5, optimizer_state="device"), weights)] == [
        "momentum/w",
        "momentum/half",
    ]
    assert kept_state_like(TrainingConfig(optimizer="adam"), weights) == {}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"optimizer": "sgd"}, lambda g, w: w - 0.1 * (g + 0.3 * w)),
        ({"optimizer": "adam"}, lambda g, w: w - 0.1 * (g + 0.3 * w) / (abs(g + 0.3 * w) + 1e-8)),
        ({"optimizer": "adamw"}, lambda g, w: w * (1 - 0.1 * 0.1) - 0.1 * (g + 0.2 * w) / (abs(g + 0.2 * w) + 1e-8)),
    ],
    ids=["sgd", "adam", "adamw"],
)
def test_feddyns_pull_is_part_of_the_gradient(settings: dict[str, Any], expected: Any) -> None:
    """Weight decay 0.1, FedDyn's α_i = 0.2, lr = 0.1. Adam's first step is lr·g / (|g| + ε), whatever the betas are.

    AdamW decays w apart from the step, with the weight decay alone. w = 2 and g = −0.41 tell the rules apart: g + 0.3·w
    and g + 0.2·w are 0.19 and −0.01, of unlike signs.
    """
    w, g = 2.0, -0.41
    parameter = nn.Parameter(torch.tensor([w], dtype=torch.float64))
    parameter.grad = torch.tensor([g], dtype=torch.float64)
    make_optimizer(TrainingConfig(weight_decay=0.1, **settings), lr=0.1, pull=0.2).step({"w": parameter})
    assert parameter.item() == pytest.approx(expected(g, w), rel=1e-6)
    assert math.copysign(1, g + 0.3 * w) != math.copysign(1, g + 0.2 * w)
