"""torch's Datasets become data: one of all devices, or one for each, with items of any form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import fedhen
from fedhen.errors import FedhenError

X, Y = torch.arange(12.0).view(6, 2), torch.tensor([0, 1, 2, 0, 1, 2])


class Items(Dataset[Any]):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, place: int) -> Any:
        return self.items[place]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(zip(X, Y, strict=True))


@pytest.mark.parametrize("train", [TensorDataset(X, Y), Stream(), list(zip(X, Y, strict=True))])
def test_one_dataset_is_split_by_the_settings(train: Any) -> None:
    data = fedhen.from_datasets(train, TensorDataset(X[:2], Y[:2]))
    assert torch.equal(data.x, X) and torch.equal(data.y, Y) and data.classes == 3 and data.shards == ()
    assert torch.equal(data.x_test, X[:2]) and torch.equal(data.y_test, Y[:2])
    assert not len(fedhen.from_datasets(train).y_test)


def test_a_list_has_one_dataset_for_each_device() -> None:
    devices = [TensorDataset(X[:4], Y[:4]), Items(list(zip(X[4:].numpy(), Y[4:].tolist(), strict=True)))]
    data = fedhen.from_datasets(devices)
    assert torch.equal(data.x, X) and torch.equal(data.y, Y)
    assert [shard.tolist() for shard in data.shards] == [[0, 1, 2, 3], [4, 5]]


def test_items_may_be_mappings_and_inputs_several() -> None:
    named = Items([{"ids": x.long(), "mask": x > 0, "labels": y} for x, y in zip(X, Y, strict=True)])
    data = fedhen.from_datasets(named)
    assert torch.equal(data.x["ids"], X.long()) and torch.equal(data.x["mask"], X > 0) and torch.equal(data.y, Y)
    one = fedhen.from_datasets(Items([{"image": x, "age": 0.5} for x in X]), target="age")
    assert torch.equal(one.x, X) and one.y.tolist() == [0.5] * 6 and one.y.dtype == torch.float32
    pairs = fedhen.from_datasets(Items([((x, x + 1), y) for x, y in zip(X, Y, strict=True)]))
    assert torch.equal(pairs.x[1], X + 1)
    numbers = fedhen.from_datasets(Items([(np.float32(k), k / 2) for k in range(4)]))
    assert numbers.x.tolist() == [0, 1, 2, 3] and numbers.y.tolist() == [0, 0.5, 1, 1.5]


@pytest.mark.parametrize(
    ("train", "says"),
    [
        (Items([(X[0], 0), (X[0, :1], 1)]), "training data: item 1 has inputs of shape (1,), item 0 of (2,)"),
        (Items([(X[0], X[0]), (X[0], X)]), "training data: item 1 has a target of shape (6, 2), item 0 of (2,)"),
        ([TensorDataset(X, Y), Items([])], "device 1 has no items: give it some, or remove it"),
        (
            [TensorDataset(X, Y), TensorDataset(X[:, :1], Y)],
            "device 1 has inputs of shape (1,), device 0 of shape (2,)",
        ),
        (Items([(X[0], 0), 3]), "training data, item 1 must be (x, y) or a mapping, found int"),
        (Items([(X[0], Y[0], 3)]), "training data, item 0 must be (x, y) or a mapping, found tuple"),
        (Items([("text", 0)]), "training data, item 0: the input is str: turn it into a tensor"),
        (Items([{"x": X[0], "kind": 0}]), "training data, item 0 has 'x', 'kind' and no target: name it with target="),
        (3, "training data is int: pass a Dataset, or a list with one for each device"),
        ([], "there are no devices"),
    ],
)
def test_datasets_that_do_not_fit_are_one_line(train: Any, says: str) -> None:
    with pytest.raises(FedhenError) as error:
        fedhen.from_datasets(train)
    assert str(error.value).startswith(says) and "\n" not in str(error.value)
