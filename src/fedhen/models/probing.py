"""Checks the names of a nesting, and tries the model on a sample: where its tiers end, and in which order."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from itertools import pairwise
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from fedhen.errors import ConfigError, FedhenError, one_line, unknown_name
from fedhen.models.cut_model import call_with, find_tensor
from fedhen.models.heads import Head

Inputs = Tensor | tuple[Tensor, ...] | Mapping[str, Tensor]
"""What a model is called with: a tensor, several in order, or several by name."""


def check_arguments(model: object, ends: object, heads: object, outputs: object) -> None:
    """Raises a ConfigError if an argument of `nest` has the wrong type."""
    example = 'like {"simple": "layer2", "complex": "layer4"}'
    if not isinstance(model, nn.Module):
        raise ConfigError(f"nest cuts a module, and model is {_describe(model)}: pass an object, like Net()")
    if not isinstance(ends, Mapping) or not all(isinstance(tier, str) and tier for tier in ends):
        raise ConfigError(f"ends must name the block of each tier, {example}, found {_describe(ends)}")
    for tier, block in ends.items():
        if block is not None and not isinstance(block, str):
            raise ConfigError(f"the block of tier {tier!r} must be a name, {example}, found {_describe(block)}")
    if not isinstance(heads, Mapping):
        raise ConfigError(f'heads must name tiers, like {{"simple": "pool"}}, found {_describe(heads)}')
    for tier, head in heads.items():
        if head is not None and not callable(head) and not isinstance(head, str):
            raise ConfigError(f"the head of tier {tier!r} must be a name, a module or a function, found {head!r}")
    if outputs is not None and (type(outputs) is not int or outputs < 1):
        raise ConfigError(f"outputs={outputs!r}: it must be a whole number, at least 1, as of classes or words")


def _describe(value: object) -> str:
    shown = value.__name__ if isinstance(value, type | FunctionType) else value
    return one_line(f"the {type(value).__name__} {shown}")[:60]


def check_tiers(ends: Mapping[str, str | None], heads: Mapping[str, Head | None]) -> None:
    """Raises a FedhenError if a tier cannot have its name, its end or its head."""
    if not ends:
        raise ConfigError('ends needs at least one tier, like ends={"simple": "layer2", "complex": "layer4"}')
    for tier in ends:
        if "." in tier or hasattr(nn.ModuleDict, tier):
            raise ConfigError(
                f"{tier!r} cannot be the name of a tier here, because its head has that name: choose another"
            )
    for tier in heads:
        if tier not in ends:
            raise unknown_name("tier in heads", tier, ends)
    for tier in list(ends)[:-1]:
        if ends[tier] is None:
            raise ConfigError(f"tier {tier!r}: only the last tier may end where the model ends: name a block")
        if heads.get(tier, "") is None:
            raise ConfigError(f"tier {tier!r}: only the last tier may have the model's own output: give it a head")


def check_blocks(model: nn.Module, ends: Mapping[str, str | None]) -> None:
    """Raises a FedhenError if the model lacks a block."""
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    for tier, block in ends.items():
        if block is not None and block not in names:
            # Large models have hundreds of names: those that are near, and the parts of the model.
            near = difflib.get_close_matches(str(block), names, n=3)
            parts = [name for name, _ in model.named_children() if name not in near]
            raise unknown_name(f"block of tier {tier!r}", block, [*near, *parts])


def find_sample(model: nn.Module, sample: Inputs | None) -> Inputs:
    """Returns the user's sample, or that of a model of transformers."""
    inputs = getattr(model, "dummy_inputs", None) if sample is None else sample
    if inputs is None:
        raise ConfigError("nest needs inputs to try the model on: pass sample=..., like torch.zeros(2, 3, 32, 32)")
    return inputs


def find_states(
    model: nn.Module, ends: Mapping[str, str | None], inputs: Inputs
) -> tuple[dict[str, Tensor], Tensor | None]:
    """Returns the hidden state at the end of each tier, and the model's own output if it is a tensor."""
    states: dict[str, Tensor] = {}
    with ExitStack() as hooks, torch.no_grad():
        for tier, block in ends.items():
            if block is not None:
                hooks.callback(model.get_submodule(block).register_forward_hook(_keep(states, tier)).remove)
        output = try_module("the model", model.eval(), inputs)
    _check_order({tier: block for tier, block in ends.items() if block is not None}, list(states))
    own = None
    with suppress(FedhenError):
        own = find_tensor(output)
    if len(states) < len(ends):
        states[list(ends)[-1]] = find_tensor(output)
    return states, own


def _keep(states: dict[str, Tensor], tier: str) -> Callable[..., None]:
    """Returns a hook that keeps the hidden state of a block that runs for the first time."""

    def hook(_module: nn.Module, _inputs: object, output: object) -> None:
        if tier not in states:
            states[tier] = find_tensor(output)

    return hook


def _check_order(blocks: Mapping[str, str], ran: list[str]) -> None:
    """Raises a FedhenError unless the blocks are different ones and ran in the order of the tiers."""
    for tier, block in blocks.items():
        if tier not in ran:
            raise ConfigError(f"tier {tier!r}: the block {block!r} does not run: name one that the model calls")
    tiers = list(blocks)
    for tier, deeper in pairwise(tiers):
        if blocks[tier] == blocks[deeper]:
            raise ConfigError(f"tiers {tier!r} and {deeper!r} end after the same block {blocks[tier]!r}")
        if ran.index(tier) > ran.index(deeper):
            raise ConfigError(
                f"ends must be in the order in which the model runs them: {blocks[deeper]!r} of tier {deeper!r} "
                f"ends before {blocks[tier]!r} of tier {tier!r}"
            )


def find_embedding(model: nn.Module) -> str:
    """Returns the name of the model's embedding of tokens, which tied heads use."""
    own = getattr(model, "get_input_embeddings", None)
    embedding = own() if own is not None else None
    for name, module in model.named_modules():
        if module is embedding or (embedding is None and isinstance(module, nn.Embedding)):
            return str(name)
    raise ConfigError("the head 'tied' needs an embedding, and the model has none: use 'linear'")


def try_module(what: str, module: nn.Module, inputs: Inputs) -> Any:
    """Calls a module. Raises a FedhenError if it fails."""
    try:
        return call_with(module, inputs)
    except FedhenError:
        raise
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"{what} fails on the sample: {one_line(reason)}") from error
