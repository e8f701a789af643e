"""A trained model that is ready to use: the module of a tier, and predictions for raw inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from fedhen.data.inputs import call_module
from fedhen.data.raw import RawBatch, read_raw
from fedhen.data.spec import DataSpec
from fedhen.errors import CheckpointError, FedhenError, one_line, unknown_name
from fedhen.models.model_card import ModelCard
from fedhen.tasks import Prediction, Task


class LoadedModel(nn.Module):
    """A module with `predict`. Otherwise it is the module: its weights have the same names, and it is called alike.

    The module is no child of this one, because that would put a prefix before every name. Its tables of weights,
    buffers and children are shared instead.

    Args:
        module: The module, in evaluation mode, whose outputs are those of the card's exits.
        card: What it is given and predicts.
        task: The task, if it was passed from Python.
        round: The round that it is of; 0 if that is not known.
    """

    def __init__(self, module: nn.Module, card: ModelCard, task: Task | None = None, round: int = 0) -> None:
        super().__init__()
        self.model_card, self._own_task, self._loaded, self.round = card, task, (module,), round
        self.training = module.training
        self._parameters, self._buffers, self._modules = module._parameters, module._buffers, module._modules
        self._non_persistent_buffers_set = module._non_persistent_buffers_set

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Returns the outputs of the exits, shallowest first."""
        return self._loaded[0](*inputs, **named)

    def train(self, mode: bool = True) -> LoadedModel:
        """Sets the mode of the module."""
        self._loaded[0].train(mode)
        self.training = mode
        return self

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        return self._loaded[0].state_dict(*arguments, **options)

    def load_state_dict(self, *arguments: Any, **options: Any) -> Any:
        return self._loaded[0].load_state_dict(*arguments, **options)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LoadedModel:
        self._loaded[0]._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def __getattr__(self, name: str) -> Any:
        """Returns what only the module has, such as its own methods."""
        loaded = () if name.startswith("__") else self.__dict__.get("_loaded", ())
        return getattr(loaded[0], name) if loaded else super().__getattr__(name)

    def predict(self, raw: Any, *, batch_size: int = 100, exit: str | None = None) -> list[Prediction]:
        """Predicts from raw inputs: what the run's data was before anything was done to it. Returns one for each.

        Args:
            raw: One input or several. Images: arrays of whole numbers, images of Pillow, or paths of PNG and JPEG
                files. Rows of a table: a DataFrame, a mapping of columns, a list of rows, an array, or the path of a
                CSV file. Texts or token ids. Other numbers: an array.
            batch_size: How many are computed at once.
            exit: The exit that predicts. By default the last one.

        Example:
            The digits of the demo, from pixels between 0 and 16::

                model = fedhen.load("runs/digits", "complex")
                for prediction in model.predict(images):
                    print(prediction.value, prediction.probability)
        """
        place, spec = self._find_exit(exit), self._spec
        if batch_size < 1:
            raise FedhenError(f"batch_size is {batch_size}: it must be at least 1")
        batch, training = read_raw(spec, raw), self.training
        self.eval()
        try:
            parts = [
                self._predict(batch[begin : begin + batch_size], place, spec)
                for begin in range(0, len(batch), batch_size)
            ]
        finally:
            self.train(training)
        return [replace(each, exit=self.model_card.exits[place]) for part in parts for each in part]

    @torch.no_grad()
    def _predict(self, batch: RawBatch, place: int, spec: DataSpec) -> list[Prediction]:
        weight = next((p for p in self.parameters() if p.is_floating_point()), torch.empty(0))
        try:
            output = call_module(self, batch.feed(weight.device, weight.dtype))[place]
            return self._task.interpret(output.cpu(), spec.class_names, batch.lengths)
        except FedhenError:
            raise
        except Exception as error:  # The module and the task may be a user's.
            reason = one_line(f"{type(error).__name__}: {error}")[:200]
            raise FedhenError(f"the model fails on these inputs: {reason}") from error

    @property
    def _spec(self) -> DataSpec:
        if self.model_card.data is None:
            raise CheckpointError(
                "the model does not say what its raw inputs are, as files of earlier versions, or of a fleet whose app "
                "has no `about`: call it with inputs prepared as for training"
            )
        return self.model_card.data

    @cached_property
    def _task(self) -> Task:
        return self._own_task or self.model_card.make_task()

    def _find_exit(self, name: str | None) -> int:
        if name is not None and name not in self.model_card.exits:
            raise unknown_name("exit", name, self.model_card.exits)
        return len(self.model_card.exits) - 1 if name is None else self.model_card.exits.index(name)
