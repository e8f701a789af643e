"""What a fleet's owner brings: the data of each device, the server's test data, and models of their own if wanted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from fedhen.algorithm.methods import Method, load_method
from fedhen.config.settings import Config
from fedhen.data import sources
from fedhen.data.dataset import Data, Normalisation, arrays
from fedhen.data.partitions import deal
from fedhen.data.storage import data_root
from fedhen.errors import UserError
from fedhen.models.family import Family
from fedhen.models.registry import make_family

NodeConfig = Mapping[str, bool | float | int | str]
"""What a node was started with: --node-config 'tier="simple" data="/data"'."""


class Examples(NamedTuple):
    """Inputs and labels; where pixels are stored as bytes, with their normalisation."""

    x: object
    y: object
    normalisation: Normalisation | None = None


@dataclass(frozen=True)
class App:
    """The owner's part of a fleet; each function is called only where its data lies."""

    training_data: Callable[[NodeConfig, Config], Sequence[object]]
    """(a node's own configuration, the run's) -> x, y: what that device trains on."""
    test_data: Callable[[Config], Sequence[object] | None] = lambda config: None
    """(the run's configuration) -> x, y: what the server scores its models on; none where it has no such data."""
    inputs: tuple[int, ...] | None = None
    """The shape of one input; examples from the test data if there is some."""
    classes: int | None = None
    """How many classes there are; examples likewise."""
    family: Family | None = None
    """Models of its own, instead of those that the configuration names."""
    method: Method | None = None
    """A method of its own likewise."""

    def resolve_method(self, config: Config) -> Method:
        """The method, of which only the name travels."""
        if self.method is not None:
            return self.method
        if config.method_file:
            raise UserError("a fleet does not run a method's file: import it in the app, as App(..., method=...)")
        return load_method(config.method)

    def resolve_family(self, config: Config, data: Data) -> Family:
        """The models."""
        return self.family or make_family(config, data.shape, data.classes)

    def load_device_data(self, node: NodeConfig, config: Config, inputs: Sequence[int], classes: int) -> Data:
        """What a device trains on, all of it in one shard."""
        data = _check_data(self.training_data(node, config), classes)
        if data.shape != tuple(inputs):
            raise UserError(f"this device's inputs have shape {data.shape}, the fleet's {tuple(inputs)}")
        shard = np.arange(len(data.y), dtype=np.int64)
        return replace(data, x_test=data.x[:0], y_test=data.y[:0], shards=(shard,))

    def count_samples(self, node: NodeConfig, config: Config) -> int:
        """How many examples a device has."""
        return len(_check_data(self.training_data(node, config), None).y)

    def load_server_data(self, config: Config) -> Data:
        """The test data, with two blank inputs in place of the training data that the server never sees."""
        examples = self.test_data(config)
        if examples is not None:
            data = _check_data(examples, self.classes)
            return replace(data, x=data.x.new_zeros((2, *data.shape)), y=NO_LABELS)
        if self.inputs is None or self.classes is None:
            raise UserError("the server has no test data: say what the models take, as App(..., inputs=, classes=)")
        blank = torch.zeros((2, *self.inputs))
        return Data(blank, NO_LABELS, blank[:0], NO_LABELS[:0], self.classes)


NO_LABELS = torch.zeros(2, dtype=torch.int64)


def _check_data(examples: Sequence[object], classes: int | None) -> Data:
    """What the owner's function gave, checked; the examples are both, training and test data."""
    if not 2 <= len(examples) <= 3:
        raise UserError("training_data and test_data return x and y, and a normalisation if there is one")
    x, y, normalisation = Examples(*examples)  # type: ignore[arg-type]
    return replace(arrays(x, y, x, y, classes), normalisation=normalisation)


def recipe_app() -> App:
    """For a trial on one machine: every node deals the recipe's data as a simulation does, and takes its own shard."""

    def training_data(node: NodeConfig, config: Config) -> Examples:
        data = sources.load_data(config.data, data_root(None), config.seed)
        shard = deal(data, config.split, config.devices.number, config.seed)[int(node["device"])]
        return Examples(data.x[torch.from_numpy(shard)], data.y[torch.from_numpy(shard)], data.normalisation)

    def test_data(config: Config) -> Examples:
        data = sources.load_data(config.data, data_root(None), config.seed)
        return Examples(data.x_test, data.y_test, data.normalisation)

    return App(training_data, test_data)
