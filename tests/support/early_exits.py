"""Small modules with several exits, of kinds that no family of the package has, with inputs for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fedhen.models.gpt import GPTShape, gpt
from fedhen.models.preact_resnet import Shape, preact_resnet


class Recurrent(nn.Module):
    """Two LSTMs, with the examples on the second dimension inside."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.low, self.exit = nn.LSTM(8, 8), nn.Linear(8, 3)
        self.high, self.top = nn.LSTM(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> list[Tensor]:
        low, _ = self.low(self.words(x.t()))
        high, _ = self.high(low)
        return [self.exit(low[-1]), self.top(high[-1])]


class Attending(nn.Module):
    """Two of torch's transformer layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.low = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.high = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.exit, self.top = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> list[Tensor]:
        low = self.low(self.words(x))
        return [self.exit(low.mean(1)), self.top(self.high(low).mean(1))]


class Tied(nn.Module):
    """Both exits have the same weights, and the second reads the input again and the first one's logits."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.exit = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> list[Tensor]:
        low = self.body(x).relu()
        first = self.exit(low)
        return [first, self.exit(self.body(low).relu() + x) + first]


class FixedBatch(nn.Module):
    """Its forward writes down the number of examples."""

    def __init__(self) -> None:
        super().__init__()
        self.exit = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.exit(x.reshape(2, 6))]


class Branching(nn.Module):
    """Its forward depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.exit = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> list[Tensor]:
        z = self.exit(x)
        return [z if z.sum() > 0 else -z]


def four_exits() -> nn.Module:
    shape = Shape(1, 8, 10, (4, 4, 8, 8), (1, 1, 1, 1), (1, 2, 1, 1), {"a": 1, "b": 2, "c": 3, "d": 4}, exit_pool=2)
    return preact_resnet(shape).build("d")


def by_width() -> nn.Module:
    shape = Shape(
        1, 8, 10, (4, 8), (1, 1), (1, 2), exits={}, exit_pool=2, nesting="width", rates={"low": 0.5, "high": 1.0}
    )
    return preact_resnet(shape).build("high")


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    import fedhen

    config = BertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16)
    config.num_labels = 3
    nested = fedhen.nest(BertForSequenceClassification(config), {"low": "bert.encoder.layer.0", "high": None})
    return nested.build("high")


def make(name: str) -> tuple[nn.Module, Any]:
    """Returns a module by name, and nine examples for it."""
    words, images, numbers = torch.randint(0, 20, (9, 5)), torch.randn(9, 1, 8, 8), torch.randn(9, 6)
    mapping = {"input_ids": words, "attention_mask": (torch.rand(9, 5) > 0.2).long()}
    made: dict[str, tuple[Any, Any]] = {
        "four exits": (four_exits, images),
        "recurrent": (Recurrent, words),
        "attending": (Attending, words),
        "tied": (Tied, numbers),
        "width": (by_width, images),
        "gpt": (lambda: gpt(GPTShape(20, 5, 8, 2)).build("complex"), words),
        "bert": (bert, mapping),
    }
    build, inputs = made[name]
    return build().eval(), inputs
