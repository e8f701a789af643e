"""What "simple is a sub-network of complex" means (Assumption 1), as code that is checked at the door."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedhen import seeds
from fedhen.errors import UserError, unknown_name
from fedhen.params import Shapes, Weights, select, shapes_of

Build = Callable[[], nn.Module]


@dataclass(frozen=True)
class Family:
    """Nested models, one a tier, shallowest first, each given as a function that builds it.

    A tier's module returns the logits of all its exits: its own last, and before it those of the tiers nested in it, in
    the order of the tiers. Weights with the same name are the same weight; a tier may hold the leading corner of one
    that another tier holds whole. The last tier holds the weights of all, unless a supernet does.
    """

    builds: Mapping[str, Build]
    average_buffers: bool = False
    nested: Mapping[str, tuple[str, ...]] | None = None
    """Tier -> the tiers nested in it, itself last; by default each tier contains all before it."""
    supernet: Build | None = None
    """Builds a module that holds all weights, where no tier does."""
    outputs: frozenset[str] = frozenset()
    """Weights whose rows are the classes."""

    @property
    def tiers(self) -> tuple[str, ...]:
        """The tiers' names, shallowest first."""
        return tuple(self.builds)

    def exits(self, tier: str) -> tuple[str, ...]:
        """The exits of a tier's module, each named after the tier it belongs to, its own last."""
        if tier not in self.builds:
            raise unknown_name("tier", tier, self.tiers)
        return self.tiers[: self.tiers.index(tier) + 1] if self.nested is None else self.nested[tier]

    def build(self, tier: str) -> nn.Module:
        """A new module of this tier."""
        if tier not in self.builds:
            raise unknown_name("tier", tier, self.tiers)
        return self.builds[tier]()

    def whole(self) -> nn.Module:
        """A new module that holds the weights of all tiers."""
        return self.build(self.tiers[-1]) if self.supernet is None else self.supernet()

    def initial(self, seed: int) -> Weights:
        """Initial weights: every tier's, and every method's, are cut from these."""
        with seeds.randomness(seed, "initial weights"):
            return weights_of(self.whole())

    def check(self, sample: Tensor, classes: int) -> None:
        """Assumption 1 and the contract of the modules, tried on a batch of inputs; a UserError says what breaks."""
        if not self.builds:
            raise UserError("a family needs at least one tier")
        with seeds.randomness(0, "check"):
            modules = {tier: self.build(tier) for tier in self.tiers}
            whole = weights_of(self.whole())
        for tier, module in modules.items():
            index = shapes_of(weights_of(module))
            _check_contained(tier, index, shapes_of(whole))
            if not self.average_buffers:
                _refuse_buffers(tier, module)
            load_weights(module, select(whole, index))
            _check_logits(tier, _tried(tier, module, sample), (len(self.exits(tier)), len(sample), classes))
        self._check_exits({tier: list(module(sample)) for tier, module in modules.items()})

    def _check_exits(self, logits: Mapping[str, Sequence[Tensor]]) -> None:
        """With the same weights a tier computes what its exit computes in the tiers that contain it."""
        for tier in self.tiers:
            for place, name in enumerate(self.exits(tier)):
                if not torch.allclose(logits[tier][place], logits[name][-1], rtol=1e-3, atol=1e-4):
                    raise UserError(
                        f"Assumption 1 is broken: with the same weights, exit {place + 1} of tier {tier!r} and the "
                        f"last exit of tier {name!r} differ: exits must come shallowest first, and compute the same"
                    )


def weights_of(module: nn.Module) -> Weights:
    """A copy of the module's weights, by name."""
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def find_reached_weights(module: nn.Module, outputs: Sequence[Tensor]) -> list[set[str]]:
    """For each output of the module, the names of the weights that it depends on."""
    parameters = {n: p for n, p in module.named_parameters(remove_duplicate=False) if p.requires_grad}
    names = []
    for output in outputs:
        gradients = torch.autograd.grad(output.sum(), list(parameters.values()), allow_unused=True, retain_graph=True)
        names.append({name for name, gradient in zip(parameters, gradients, strict=True) if gradient is not None})
    return names


def load_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy these weights into the module."""
    own = {**dict(module.named_buffers()), **module.state_dict()}
    with torch.no_grad():
        for name, tensor in weights.items():
            own[name].copy_(tensor)


def _check_contained(tier: str, index: Shapes, whole: Shapes) -> None:
    for name, shape in index.items():
        if name not in whole:
            raise UserError(f"Assumption 1 is broken: weight {name!r} of tier {tier!r} is not in the largest network")
        if len(shape) != len(whole[name]) or not all(map(operator.le, shape, whole[name])):
            raise UserError(
                f"Assumption 1 is broken: weight {name!r} has shape {shape} in tier {tier!r} "
                f"and only {whole[name]} in the largest network"
            )


def _refuse_buffers(tier: str, module: nn.Module) -> None:
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    for name in module.state_dict():
        if name not in parameters:
            path, _, buffer = name.rpartition(".")
            raise UserError(
                f"layer {path!r} ({type(module.get_submodule(path)).__name__}) of tier {tier!r} stores {buffer!r}, and "
                "stored data statistics leak: use GroupNorm, or register a constant with persistent=False, or allow "
                "averaging with average_buffers=True"
            )


def _tried(tier: str, module: nn.Module, sample: Tensor) -> object:
    try:
        return module.eval()(sample)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        inputs = f"two inputs of shape {tuple(sample.shape[1:])} and type {str(sample.dtype).removeprefix('torch.')}"
        raise UserError(f"the module of tier {tier!r} fails on {inputs}: {reason}") from error


def _check_logits(tier: str, logits: object, expected: tuple[int, int, int]) -> None:
    exits, batch, classes = expected
    found: object = type(logits).__name__
    if isinstance(logits, Sequence):
        found = [tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in logits]
    if found != [(batch, classes)] * exits:
        raise UserError(
            f"the module of tier {tier!r} must return a list of {exits} logits of shape {(batch, classes)}, "
            f"shallowest exit first; it returned {found}; the labels name {classes} classes, where the model has more "
            "say so with classes=..."
        )
