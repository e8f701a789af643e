"""Each device's test data: every example dealt once, in the class mix of the training data, or as it was brought."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedhen.config.data_settings import SplitConfig
from fedhen.data.dataset import FederatedData
from fedhen.data.partitions import deal, deal_tests


def make_data(train: list[int], test: list[int], classes: int) -> FederatedData:
    x, x_test = torch.arange(len(train)).float()[:, None], torch.arange(len(test)).float()[:, None]
    return FederatedData(x, torch.tensor(train), x_test, torch.tensor(test), classes)


@given(
    st.integers(0, 99),
    st.sampled_from(["iid", "dirichlet", "dirichlet-by-class"]),
    st.integers(1, 12),
    st.integers(0, 150),
    st.integers(1, 6),
)
@settings(deadline=None, max_examples=60)
def test_every_test_example_is_dealt_once_in_the_class_mix(
    seed: int, kind: str, devices: int, tests: int, classes: int
) -> None:
    """A device with a share s of the training examples of a class gets s·n of its n test examples, within 1."""
    rng = np.random.default_rng(seed)
    data = make_data(rng.integers(0, classes, 200).tolist(), rng.integers(0, classes, tests).tolist(), classes)
    split = SplitConfig(kind=kind, alpha=1.0, minimum=1)  # type: ignore[arg-type]
    data = data.split(deal(data, split, devices, seed))
    shards = deal_tests(data, seed)
    assert sorted(np.concatenate(shards).tolist()) == list(range(tests))
    train, test = data.y.numpy(), data.y_test.numpy()
    for c in range(classes):
        for trained, tested in zip(data.shards, shards, strict=True):
            if (train == c).any():
                due = (test == c).sum() * (train[trained] == c).sum() / (train == c).sum()
                assert abs((test[tested] == c).sum() - due) <= 1
                if not (train[trained] == c).any():
                    assert not (test[tested] == c).any(), "a class that the device does not train on"


def test_a_deal_worked_out_by_hand() -> None:
    """Device 0 has 3 of the 4 examples of class 0 and none of class 1: of 4 and 2 test examples it gets 3 and 0."""
    data = make_data([0, 0, 0, 0, 1, 1], [0, 1, 0, 1, 0, 0], 2).split([np.array([0, 1, 2]), np.array([3, 4, 5])])
    first, second = deal_tests(data, seed=0)
    assert data.y_test[first].tolist() == [0, 0, 0]
    assert sorted(data.y_test[second].tolist()) == [0, 1, 1]


def test_examples_without_classes_are_dealt_by_the_devices_sizes() -> None:
    x, y = torch.randn(12, 2), torch.randn(12)
    data = FederatedData(x, y, x[:8], y[:8], 0).split([np.arange(9), np.arange(9, 12)])
    assert [len(shard) for shard in deal_tests(data, 0)] == [6, 2]


def test_devices_bring_their_test_data() -> None:
    """The shards point at what each device brought, in the order of the devices; device 1 brings none."""
    brought = [
        (np.zeros((3, 1)), [0, 1, 0], [[10.0], [11.0]], [0, 1]),
        (np.zeros((2, 1)), [1, 1]),
        (np.zeros((2, 1)), [0, 1], [[12.0]], [1]),
    ]
    data = FederatedData.from_devices(brought)
    assert [data.x_test[shard].flatten().tolist() for shard in data.test_shards] == [[10.0, 11.0], [], [12.0]]


def test_rows_of_a_table_are_tested_on_their_own_device() -> None:
    """With a column `split`, each person's test rows are theirs; the input is 10 times the person's number."""
    who = [name for name in ("ann", "bob", "cleo") for _ in range(4)]
    numbers = {"ann": 0.0, "bob": 10.0, "cleo": 20.0}
    table = {
        "who": who,
        "x": [numbers[name] for name in who],
        "ill": [0, 1] * 6,
        "split": ["train", "train", "train", "test"] * 3,
    }
    data = FederatedData.from_table(table, "ill", by="who")
    assert [data.x_test[shard].flatten().tolist() for shard in data.test_shards] == [[0.0], [10.0], [20.0]]


def test_test_data_survive_what_is_done_to_training_data() -> None:
    """`keep` drops training examples only, and a single device that holds all the data has no shards of before."""
    data = FederatedData.from_devices([(np.zeros((4, 1)), [0, 1, 0, 1], [[1.0]], [0]) for _ in range(2)])
    kept = data.keep(torch.tensor([0, 5]))
    assert [shard.tolist() for shard in kept.test_shards] == [[0], [1]]
    assert data.split([np.arange(8)]).test_shards == ()
