"""What the owner of a fleet provides: the data of devices and server and, optionally, models and a method."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from fedhen.algorithm.methods import Method, load_method
from fedhen.config.data_settings import OWN
from fedhen.config.settings import Config
from fedhen.config.validation import from_mapping
from fedhen.data import sources
from fedhen.data.arrays import read_arrays
from fedhen.data.dataset import Data
from fedhen.data.inputs import map_tensors, take
from fedhen.data.partitions import deal, deal_tests
from fedhen.data.spec import DataSpec, Normalisation
from fedhen.data.storage import data_root
from fedhen.errors import FleetError
from fedhen.models.family import Family
from fedhen.models.registry import make_family
from fedhen.tasks import Task
from fedhen.tasks.registry import describe_task, make_task

NodeConfig = Mapping[str, bool | float | int | str]
"""The settings that a node was started with: --node-config 'tier="simple" data="/data"'."""


class Examples(NamedTuple):
    """Inputs and labels, with a normalisation if pixels are stored as bytes, and with what else is known of them."""

    x: object
    y: object
    normalisation: Normalisation | None = None
    about: DataSpec = DataSpec()


@dataclass(frozen=True)
class App:
    """The owner's part of a fleet. Each function is called only on the machine that has its data.

    Example: `App(training_data, test_data, inputs=(1, 8, 8), classes=10)`, where `training_data(node, config)` and
    `test_data(config)` return `x, y`, or `x, y, normalisation`, as arrays or tensors.
    """

    training_data: Callable[[NodeConfig, Config], Sequence[object]]
    """(the node's settings, the run's configuration) -> x, y: the training data of that device."""
    test_data: Callable[[Config], Sequence[object] | None] = lambda config: None
    """(the run's configuration) -> x, y: the data on which the server scores its models, or None if it has none."""
    own_test_data: Callable[[NodeConfig, Config], Sequence[object] | None] = lambda node, config: None
    """(the node's settings, the run's configuration) -> x, y: the test data of that device, on which it scores models
    itself, or None if it has none."""
    inputs: tuple[int, ...] | None = None
    """The shape of one input. Required only if the server has no test data."""
    classes: int | None = None
    """The number of classes, or of outputs in another task. Required only if the server has no test data."""
    family: Family | None = None
    """Models to use instead of those that the configuration names."""
    method: Method | None = None
    """A method to use instead of the one that the configuration names."""
    task: Task | None = None
    """A task to use instead of the one that the configuration names."""
    about: DataSpec | None = None
    """Names of classes and what raw inputs are, for `predict` of the saved models. By default the test data says it."""

    def resolve_method(self, config: Config) -> Method:
        """Returns the method. Only its name is sent to the nodes."""
        if self.method is not None:
            return self.method
        if config.method_file:
            raise FleetError(
                "a fleet does not support method_file: import the method in the app, as App(..., method=...)"
            )
        return load_method(config.method)

    def resolve_family(self, config: Config, data: Data, outputs: int) -> Family:
        return self.family or make_family(config, data.shape, outputs)

    def resolve_task(self, config: Config) -> Task:
        return self.task or make_task(config.task)

    def name_parts(self, config: Config) -> Config:
        """Returns the configuration of a new run, which then names the owner's own models and task as such."""
        if self.family is not None:
            config = replace(config, model=replace(config.model, family=OWN))
        return config if self.task is None else from_mapping({"task": describe_task(self.task)}, config)

    def load_device_data(self, node: NodeConfig, config: Config, inputs: Sequence[int], classes: int) -> Data:
        """Returns a device's data as one shard. Raises `FleetError` if its inputs do not fit the models."""
        data = _check_data(self.training_data(node, config), classes)
        if data.shape != tuple(inputs):
            raise FleetError(f"this device's inputs have shape {data.shape}, but the fleet's have {tuple(inputs)}")
        shard = np.arange(len(data.y), dtype=np.int64)
        examples = self.own_test_data(node, config) if config.evaluation.own else None
        has_test = examples is not None and torch.as_tensor(examples[1]).numel() > 0
        test = _check_data(examples, classes) if examples is not None and has_test else None
        x_test, y_test = (take(data.x, slice(0)), data.y[:0]) if test is None else (test.x, test.y)
        test_shard = np.arange(len(y_test), dtype=np.int64)
        return replace(data, x_test=x_test, y_test=y_test, shards=(shard,), test_shards=(test_shard,))

    def count_samples(self, node: NodeConfig, config: Config) -> int:
        return len(_check_data(self.training_data(node, config), None).y)

    def load_server_data(self, config: Config) -> Data:
        """Returns the test data. The training data, which the server never sees, are two blank inputs."""
        examples = self.test_data(config)
        if examples is not None:
            data = _check_data(examples, self.classes)
            blank = map_tensors(data.x, lambda tensor: tensor.new_zeros((2, *tensor.shape[1:])))
            return replace(data, x=blank, y=data.y.new_zeros((2, *data.y.shape[1:])), about=self.about or data.about)
        if self.inputs is None or self.classes is None:
            raise FleetError(
                "the server has no test data: state the models' inputs, as App(..., inputs=..., classes=...)"
            )
        images = torch.zeros((2, *self.inputs))
        # Only the nodes know how they normalise their data.
        return Data(images, NO_LABELS, images[:0], NO_LABELS[:0], self.classes, about=self.about)


NO_LABELS = torch.zeros(2, dtype=torch.int64)


def _check_data(examples: Sequence[object], classes: int | None) -> Data:
    """Checks what a function of the owner returned. The result has the examples as training and as test data."""
    if not 2 <= len(examples) <= 4:
        raise FleetError("training_data and test_data must return x, y or x, y, normalisation")
    x, y, normalisation, about = Examples(*examples)  # type: ignore[arg-type]
    return replace(read_arrays(x, y, x, y, classes), normalisation=normalisation, about=about)


def recipe_app() -> App:
    """Builds the app of a local fleet: every node deals the recipe's data as a simulation does, and keeps its shard."""

    def training_data(node: NodeConfig, config: Config) -> Examples:
        config = with_seed(node, config)
        data = sources.load_data(config.data, data_root(None), config.seed)
        shard = deal(data, config.split, config.devices.number, config.seed)[int(node["device"])]
        index = torch.from_numpy(shard)
        return Examples(take(data.x, index), data.y[index], data.normalisation, data.about or DataSpec())

    def test_data(config: Config) -> Examples:
        data = sources.load_data(config.data, data_root(None), config.seed)
        return Examples(data.x_test, data.y_test, data.normalisation, data.about or DataSpec())

    def own_test_data(node: NodeConfig, config: Config) -> Examples:
        config = with_seed(node, config)
        data = sources.load_data(config.data, data_root(None), config.seed)
        dealt = data.split(deal(data, config.split, config.devices.number, config.seed))
        index = torch.from_numpy(deal_tests(dealt, config.seed)[int(node["device"])])
        return Examples(take(data.x_test, index), data.y_test[index], data.normalisation, data.about or DataSpec())

    return App(training_data, test_data, own_test_data)


def with_seed(node: NodeConfig, config: Config) -> Config:
    """Returns the configuration with the seed by which data is dealt. Nodes are started with it, and not sent it."""
    return replace(config, seed=int(node.get("seed", 0)))
