"""A data set as tensors in memory: the examples that devices train on and that models are scored on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedhen.data.inputs import (
    Inputs,
    count_examples,
    have_same_form,
    list_tensors,
    map_tensors,
    shape_of,
    shapes_of,
    take,
)
from fedhen.data.spec import DTYPES, DataSpec, Normalisation
from fedhen.errors import DataError

Index = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, repr=False)
class FederatedData:
    """Training and test examples. Make one with `from_arrays`, `from_devices`, `from_table` or `from_datasets`.

    `shards`, if given, are the training examples of each device.

    Inputs are a tensor, or a mapping or tuple of tensors; targets are a tensor with a row for each example. There may
    be no test examples: a device of a real fleet has none. Images may be stored as bytes, with a normalisation that is
    applied to each batch. Without a normalisation, inputs are passed to the models unchanged.
    """

    x: Inputs
    y: Tensor
    x_test: Inputs
    y_test: Tensor
    classes: int
    """The number of classes, if targets are the class of each example; else 0."""
    shards: tuple[Index, ...] = ()
    test_shards: tuple[Index, ...] = ()
    """The test examples of each device, if devices have test data; a device may have none."""
    normalisation: Normalisation | None = None
    dtype: torch.dtype = torch.float32
    """The type of normalised inputs."""
    source: str = ""
    """If a seed has drawn these examples from a data set: the checksum of that data set, which no seed changes."""
    about: DataSpec | None = DataSpec()
    """What the tensors do not say of inputs and targets, for models that are given raw inputs; None: not known."""

    def __post_init__(self) -> None:
        for name, x, y in (("training", self.x, self.y), ("test", self.x_test, self.y_test)):
            if count_examples(x) != len(y):
                raise DataError(
                    f"{name} data: {count_examples(x)} inputs need as many targets, "
                    f"found targets of shape {tuple(y.shape)}"
                )
        if not len(self.y):
            raise DataError("training data: it has no examples")
        if not have_same_form(self.x, self.x_test):
            raise DataError(
                f"training inputs have shape {shapes_of(self.x)}, test inputs {shapes_of(self.x_test)}: they must agree"
            )
        if self.y.shape[1:] != self.y_test.shape[1:]:
            raise DataError(
                f"training targets have shape {tuple(self.y.shape[1:])}, test targets {tuple(self.y_test.shape[1:])}: "
                "they must agree"
            )
        if self.test_shards and len(self.test_shards) != len(self.shards):
            raise DataError(f"test data of {len(self.test_shards)} devices, training data of {len(self.shards)}")
        for device, shard in enumerate(self.shards):
            if not len(shard):
                raise DataError(f"device {device} has no data: give it examples, or remove it")
        if self.normalisation is not None:
            for tensor in list_tensors(self.x):
                self.normalisation.check(tensor.shape[1:])

    def __repr__(self) -> str:
        parts = [f"{len(self.y)} examples of shape {self.shape}", f"{len(self.y_test)} for testing"]
        parts += [f"{self.classes} classes"] * bool(self.classes) + [f"{len(self.shards)} devices"] * bool(self.shards)
        return f"<FederatedData: {', '.join(parts)}>"

    def describe(self) -> DataSpec | None:
        """Returns what models for this data are given and predict. None if that is not known, or cannot be said."""
        kinds = {tensor.dtype for tensor in list_tensors(self.x)}
        return self.about.complete(self.x, self.normalisation) if self.about and kinds <= {*DTYPES.values()} else None

    @classmethod
    def from_arrays(
        cls,
        x: object,
        y: object,
        x_test: object = None,
        y_test: object = None,
        classes: int | None = None,
        *,
        class_names: Sequence[object] = (),
        normalisation: object = None,
    ) -> FederatedData:
        """Makes data from arrays or tensors, to be split over the devices.

        Args:
            x: The training inputs: an array, or a mapping or tuple of arrays, with a row for each example.
            y: The training targets, with a row for each example.
            x_test, y_test: The test data. Without them models are not scored.
            classes: The number of classes. By default it follows from the labels.
            class_names: The name of each class, for predictions. By default classes are called by their numbers.
            normalisation: (mean, std), each a number or one number a channel or column, by which inputs are normalised
                when models are given them. By default models are given the inputs as they are.
        """
        from fedhen.data.arrays import read_arrays

        return read_arrays(x, y, x_test, y_test, classes, class_names, normalisation)

    @classmethod
    def from_devices(
        cls,
        devices: Sequence[Sequence[object]],
        x_test: object = None,
        y_test: object = None,
        classes: int | None = None,
        *,
        class_names: Sequence[object] = (),
        normalisation: object = None,
    ) -> FederatedData:
        """Makes data that is already split: one (x, y) for each device, in order.

        A device may bring test data, as (x, y, x_test, y_test). If `x_test` and `y_test` are not given, models are
        scored on the test data of all devices together. The other arguments are those of `from_arrays`.
        """
        from fedhen.data.arrays import read_devices

        return read_devices(devices, x_test, y_test, classes, class_names, normalisation)

    @classmethod
    def from_table(
        cls,
        table: object,
        target: str,
        *,
        by: str = "",
        test: object = None,
        inputs: Sequence[str] = (),
        test_share: float = 0.1,
        seed: int = 0,
        unit: str = "",
        standardise: bool = False,
    ) -> FederatedData:
        """Makes data from a table, split over the devices that one of its columns names.

        Columns of numbers are the inputs, side by side. If a row of a column is itself an array, as token ids are, each
        column is an input of its own, by name. A target that is text is a class: 0 is the first in alphabetical order.

        Args:
            table: A pandas DataFrame, the path of a CSV or Parquet file, a `datasets.Dataset`, or a mapping of columns.
            target: The column to predict.
            by: The column that says which device a row belongs to. The devices are its values in sorted order. Without
                it the data is split over the devices by the settings, as that of `from_arrays` is.
            test: Another table, to test on. By default rows with "test" in a column `split`; if there is no such
                column, a share of each device's rows.
            inputs: The columns that models are given. By default all others.
            test_share: The share of each device's rows that is held out, drawn at random.
            seed: The seed of this draw.
            unit: The unit of the target, if it is a number.
            standardise: Give models (x − mean) / deviation of each column, over all training rows. Saved with the
                models, which then predict from raw rows.

        Example:
            Two people, who are two devices::

                table = {"who": ["ann", "ann", "bob", "bob"], "age": [31, 32, 54, 55], "ill": ["no", "yes", "no", "no"]}
                data = FederatedData.from_table(pandas.DataFrame(table), target="ill", by="who")
        """
        from fedhen.data.tables import read_table

        return read_table(
            table,
            target,
            by=by,
            test=test,
            inputs=inputs,
            test_share=test_share,
            seed=seed,
            unit=unit,
            standardise=standardise,
        )

    @classmethod
    def from_datasets(
        cls,
        train: Any,
        test: Any = None,
        *,
        target: str = "",
        classes: int | None = None,
        class_names: Sequence[object] = (),
        normalisation: object = None,
    ) -> FederatedData:
        """Makes data from torch's Datasets. All items are read into memory.

        Args:
            train: One Dataset, or a list with one for each device. Items are (x, y), or mappings by name, and all of
                one shape. x may be a tensor, an array, a number, or a mapping or tuple of them.
            test: The Dataset to test on. Without it models are not scored.
            target: The name of the target in items that are mappings: by default label, labels, target, targets or y.
            classes: The number of classes. By default it follows from the labels.
            class_names, normalisation: As in `from_arrays`.

        Example:
            Each device has a Dataset of its own::

                devices = [TensorDataset(torch.randn(20, 8), torch.randint(0, 3, (20,))) for _ in range(5)]
                data = FederatedData.from_datasets(devices)
        """
        from fedhen.data.torch_datasets import read_datasets

        return read_datasets(train, test, target, classes, class_names, normalisation)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input; of several tensors, that of the first."""
        return shape_of(self.x)

    @property
    def device(self) -> torch.device:
        """Where the data lies."""
        return self.y.device

    def to(self, accelerator: torch.device) -> FederatedData:
        """Returns the same data on an accelerator."""
        return self._map(lambda tensor: tensor.to(accelerator))

    def in_type_of(self, module: nn.Module) -> FederatedData:
        """Returns the same data, with what is floating-point in the type of a module's weights."""
        kind = next((p.dtype for p in module.parameters() if p.is_floating_point()), None)
        if kind is None:
            return self
        return replace(self._map(lambda t: t.to(kind) if t.is_floating_point() else t), dtype=kind)

    def _map(self, change: Callable[[Tensor], Tensor]) -> FederatedData:
        x, x_test = (map_tensors(inputs, change) for inputs in (self.x, self.x_test))
        return replace(self, x=x, y=change(self.y), x_test=x_test, y_test=change(self.y_test))

    def inputs(self, index: Tensor | slice) -> Inputs:
        """Returns training examples as the models' inputs."""
        return self._normalise(take(self.x, index))

    def test_inputs(self, index: Tensor | slice) -> Inputs:
        """Returns test examples as the models' inputs."""
        return self._normalise(take(self.x_test, index))

    def sample(self) -> tuple[Inputs, Tensor]:
        """Returns two training examples, for trials of models."""
        return self.inputs(slice(2)), self.y[:2]

    def _normalise(self, x: Inputs) -> Inputs:
        if self.normalisation is None:
            return x
        normalise = self.normalisation
        return map_tensors(x, lambda tensor: normalise(tensor).to(self.dtype))

    def present(self, device: int) -> Tensor:
        """Returns a mask of the classes that a device holds."""
        found = torch.zeros(self.classes, dtype=torch.bool, device=self.y.device)
        found[self.y[self.shards[device]]] = True
        return found

    def keep(self, index: Tensor) -> FederatedData:
        """Returns the data with only these training examples. Devices keep theirs of these."""
        places = np.full(len(self.y), -1, np.int64)
        places[index.cpu().numpy()] = np.arange(len(index))
        shards = [places[shard][places[shard] >= 0] for shard in self.shards]
        for device, shard in enumerate(shards):
            if not len(shard):
                raise DataError(f"none of device {device}'s examples is left: keep more (data.fraction, data.limit)")
        return replace(self, x=take(self.x, index), y=self.y[index], shards=tuple(shards))

    def split(self, shards: Sequence[Index], test_shards: Sequence[Index] = ()) -> FederatedData:
        """Returns the same data with these shards of the training data and, if devices have any, of the test data."""
        return replace(self, shards=tuple(shards), test_shards=tuple(test_shards))


# The old names.
Data = FederatedData
arrays = FederatedData.from_arrays
per_device = FederatedData.from_devices
from_table = FederatedData.from_table
from_datasets = FederatedData.from_datasets
