"""Small model families, and text data with words that a model does not know."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor, nn

from fedhen import Data, Family, per_device
from fedhen.algorithm.updates import Reply, Update


def came_back(replies: Iterable[Reply]) -> list[Update]:
    """Returns the updates of devices of which none failed."""
    replies = list(replies)
    updates = [reply for reply in replies if isinstance(reply, Update)]
    assert updates == replies
    return updates


def with_outputs(number: int) -> Callable[[Tensor], str]:
    """Returns a check that outputs have shape (2, number), for `Family.check`."""
    return lambda output: "" if output.shape == (2, number) else f"(2, {number})"


class TwoExits(nn.Module):
    """The network of `numpy_reference`: an exit after the first tanh layer, and another after the second."""

    def __init__(self, inputs: int, classes: int, deep: bool, hidden: tuple[int, int] = (5, 4)) -> None:
        super().__init__()
        self.body = nn.Linear(inputs, hidden[0])
        self.exit = nn.Linear(hidden[0], classes)
        self.deep = nn.Linear(hidden[0], hidden[1]) if deep else None
        self.top = nn.Linear(hidden[1], classes) if deep else None
        self.double()

    def forward(self, x: Tensor) -> list[Tensor]:
        h = torch.tanh(self.body(x))
        logits = [self.exit(h)]
        if self.deep is not None and self.top is not None:
            logits.append(self.top(torch.tanh(self.deep(h))))
        return logits


def two_exits(inputs: int = 6, classes: int = 3) -> Family:
    return Family(
        {"simple": lambda: TwoExits(inputs, classes, False), "complex": lambda: TwoExits(inputs, classes, True)}
    )


class Scalars(nn.Module):
    """Weights a (shared) and b (deep only), so that averages can be worked out by hand."""

    def __init__(self, deep: bool) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([1.0, 0.0]))
        self.b = nn.Parameter(torch.tensor([1.0, 0.0])) if deep else None

    def forward(self, x: Tensor) -> list[Tensor]:
        first = x * self.a
        return [first] if self.b is None else [first, x * self.a * self.b]


def scalars() -> Family:
    return Family({"simple": lambda: Scalars(False), "complex": lambda: Scalars(True)})


class Words(nn.Module):
    """A mean of word vectors with two exits. It raises at an unknown word, as a broken device would."""

    def __init__(self, deep: bool, padding: int | None) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4, padding)
        self.exit = nn.Linear(4, 3)
        self.top = nn.Linear(4, 3) if deep else None

    def forward(self, x: Tensor) -> list[Tensor]:
        h = self.words(x).mean(1)
        return [self.exit(h)] + ([self.top(torch.tanh(h))] if self.top is not None else [])


def words(padding: int | None = None) -> Family:
    return Family({"simple": lambda: Words(False, padding), "complex": lambda: Words(True, padding)})


def texts(unknown: Iterable[int] = ()) -> Data:
    """Returns eight devices with ten texts of three words each. The devices in `unknown` have an unknown word."""
    rng = np.random.default_rng(0)
    devices = [(rng.integers(0, 10, (10, 3)), rng.integers(0, 3, 10)) for _ in range(8)]
    for device in unknown:
        devices[device][0][4] = 11
    return per_device(devices, rng.integers(0, 10, (20, 3)), rng.integers(0, 3, 20), classes=3)
