"""A tier that is cut from a larger model: it runs the model up to a block and returns the outputs of heads."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from torch import Tensor, nn

from fedhen.errors import ConfigError
from fedhen.models.heads import MeanHead, TiedHead

MASK = "attention_mask"


class _Stop(BaseException):
    """Leaves a model after the last block of a tier. No model catches it, as it may catch an Exception."""


class CutModel(nn.Module):
    """A model that ends after a block, with a head for each tier that is nested in it; weights keep their names.

    The model itself is no child of this module, because that would put a prefix before every name. Its children and
    weights are registered here instead. The tables of weights and buffers are shared, so that what replaces a weight
    here, as `.to()` does, replaces it there.

    Args:
        model: The model, which this module takes over.
        ends: Tier -> the block after which it ends, or None for the end of the model. Shallowest first.
        heads: Tier -> its head, or None if the model's own output is the tier's.
        embedding: The name of the module whose weight tied heads use.
    """

    def __init__(
        self,
        model: nn.Module,
        ends: Mapping[str, str | None],
        heads: Mapping[str, nn.Module | None],
        embedding: str | None = None,
    ) -> None:
        super().__init__()
        self._parameters, self._buffers = model._parameters, model._buffers
        self._non_persistent_buffers_set = model._non_persistent_buffers_set
        self._modules = dict(model._modules)
        # The names begin with an underscore and "cut", so that no child of the model has one of them.
        self._cut_heads = heads_name(model)
        self._modules[self._cut_heads] = nn.ModuleDict({t: head for t, head in heads.items() if head is not None})
        self._cut_model = (model,)
        self._cut_ends = dict(ends)
        self._cut_embedding = embedding
        self._cut_arguments = tuple(inspect.signature(model.forward).parameters)

    def train(self, mode: bool = True) -> CutModel:
        """Sets the mode of the model too, which is no child."""
        super().train(mode)
        self._cut_model[0].training = mode
        return self

    def forward(self, *inputs: Any, **named: Any) -> list[Tensor]:
        """Returns the outputs of the heads, shallowest first."""
        outputs: list[Tensor] = []
        model, mask = self._cut_model[0], {**dict(zip(self._cut_arguments, inputs, strict=False)), **named}.get(MASK)
        tiers, blocks = list(self._cut_ends), list(self._cut_ends.values())

        def hook(place: int, output: object) -> None:
            if len(outputs) != place:
                return  # the block runs again
            hidden, last = find_tensor(output), place == len(tiers) - 1
            # The next layer may change the hidden state in place, which the head may need for its gradient.
            outputs.append(self._read(tiers[place], hidden if last else hidden.clone(), mask))
            if last:
                raise _Stop

        # Hooks are set for one pass: one that stayed would still write to this module in a copy of it.
        with ExitStack() as hooks, suppress(_Stop):
            for place, block in enumerate(blocks):
                if block is not None:
                    hooks.callback(model.get_submodule(block).register_forward_hook(_at(place, hook)).remove)
            output = model(*inputs, **named)
            if blocks[-1] is None:
                hook(len(blocks) - 1, output)
        return outputs

    def _read(self, tier: str, hidden: Tensor, mask: Tensor | None) -> Tensor:
        heads = self._modules[self._cut_heads]
        assert isinstance(heads, nn.ModuleDict)
        if tier not in heads:
            return hidden
        head = heads[tier]
        if isinstance(head, TiedHead):
            assert self._cut_embedding is not None
            logits = head(hidden, self._cut_model[0].get_submodule(self._cut_embedding).weight)
        else:
            logits = head(hidden, mask) if isinstance(head, MeanHead) else head(hidden)
        assert isinstance(logits, Tensor)
        return logits


def heads_name(model: nn.Module) -> str:
    """Returns the name below which the heads' weights are found."""
    return "heads" if "heads" not in {*model._modules, *model._parameters, *model._buffers} else "tier_heads"


def find_tensor(output: object) -> Tensor:
    """Returns the logits of an output that has some, or its first tensor."""
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    if isinstance(output, Mapping):
        output = tuple(output.values())
    if isinstance(output, Sequence) and output:
        output = output[0]
    if not isinstance(output, Tensor):
        raise ConfigError(f"a tier cannot end where the model returns {type(output).__name__}: it must return a tensor")
    return output


def call_with(module: nn.Module, inputs: object) -> Any:
    """Calls a module with a tensor, with a mapping of named tensors, or with a tuple of tensors."""
    if isinstance(inputs, Mapping):
        return module(**inputs)
    return module(*inputs) if isinstance(inputs, tuple | list) else module(inputs)


def _at(place: int, hook: Callable[[int, object], None]) -> Callable[..., None]:
    return lambda _module, _inputs, output: hook(place, output)
