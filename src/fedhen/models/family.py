"""Families of nested models: the contract of Assumption 1, "simple is a sub-network of complex", and its checks."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from fedhen import seeds
from fedhen.data.inputs import Inputs, call_module, describe, list_tensors
from fedhen.errors import ConfigError, unknown_name
from fedhen.params import Shapes, Weights, select, shapes_of

Build = Callable[[], nn.Module]


@dataclass(frozen=True)
class Family:
    """A family of nested models, one for each tier.

    A tier's module takes a batch of inputs and returns a list of logits of shape (batch, classes): first those of the
    tiers nested in it, in the order of the tiers, its own last. Tensors of the same name in `state_dict()` are the same
    weight in all tiers. A tier may hold the leading corner of a tensor that another tier holds whole. `check` tries
    all of this on a batch.

    Args:
        builds: Tier -> a function without arguments that returns a new module. Shallowest tier first.
        average_buffers: Allows layers that store statistics of the data, like BatchNorm, and averages these too.
        nested: Tier -> the tiers nested in it, itself last. By default each tier contains all tiers before it.
        supernet: A function that returns a module with the weights of all tiers. By default the last tier has them.
        outputs: Names of the weights whose rows are the classes; `server.rows_by_class` needs them.
        start: Weights to start from, by name. By default, and where it lacks a name, modules start as they are built.

    Example:
        A network with one early exit. The simple tier is its body and the early exit::

            class Net(nn.Module):
                def __init__(self, deep):
                    super().__init__()
                    self.body, self.exit = nn.Linear(20, 32), nn.Linear(32, 4)
                    self.top = nn.Linear(32, 4) if deep else None

                def forward(self, x):
                    h = self.body(x).relu()
                    return [self.exit(h)] if self.top is None else [self.exit(h), self.top(h)]


            family = Family({"simple": lambda: Net(deep=False), "complex": lambda: Net(deep=True)})
    """

    builds: Mapping[str, Build]
    average_buffers: bool = False
    nested: Mapping[str, tuple[str, ...]] | None = None
    supernet: Build | None = None
    outputs: frozenset[str] = frozenset()
    start: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for tier, build in self.builds.items():
            # A module can be called too: it would take part in every build.
            if isinstance(build, nn.Module):
                raise ConfigError(
                    f"tier {tier!r}: pass a function that builds the module, like lambda: model, not the module"
                )

    @property
    def tiers(self) -> tuple[str, ...]:
        """The names of the tiers, shallowest first."""
        return tuple(self.builds)

    def exits(self, tier: str) -> tuple[str, ...]:
        """Returns the exits of a tier's module, each named after its tier, in the order of the logits."""
        if tier not in self.builds:
            raise unknown_name("tier", tier, self.tiers)
        return self.tiers[: self.tiers.index(tier) + 1] if self.nested is None else self.nested[tier]

    def build(self, tier: str) -> nn.Module:
        """Builds a module of a tier."""
        if tier not in self.builds:
            raise unknown_name("tier", tier, self.tiers)
        return self.builds[tier]()

    def whole(self) -> nn.Module:
        """Builds a module that holds the weights of all tiers."""
        return self.build(self.tiers[-1]) if self.supernet is None else self.supernet()

    def initial(self, seed: seeds.Root) -> Weights:
        """Returns the initial weights, of which every tier and every method takes its part."""
        with seeds.randomness(seed, "initial weights"):
            built = weights_of(self.whole())
        return {name: self.start[name].to(w.dtype) if name in self.start else w for name, w in built.items()}

    def start_from(self, weights: Mapping[str, Tensor]) -> Family:
        """Returns the family with these weights to start from: all, or some. Warns of those that are missing."""
        with seeds.randomness(0, "initial weights"):
            whole = self.whole()
        expected = shapes_of(weights_of(whole))
        first = {parameter: name for name, parameter in whole.named_parameters()}
        # A tied weight is known by its first name, and files may have it under another.
        tied = {name: first[p] for name, p in whole.named_parameters(remove_duplicate=False)}
        weights = {**{tied.get(name, name): tensor for name, tensor in weights.items()}, **weights}
        for name, tensor in weights.items():
            if name not in expected:
                raise unknown_name("weight in initial", name, expected)
            if not isinstance(tensor, Tensor):
                raise ConfigError(f"initial: weight {name!r} is a {type(tensor).__name__}: pass tensors")
            if not bool(torch.isfinite(tensor).all()):
                raise ConfigError(f"initial: weight {name!r} holds NaN or infinity")
            if tuple(tensor.shape) != expected[name]:
                raise ConfigError(
                    f"initial: weight {name!r} has shape {tuple(tensor.shape)}, and the model's has {expected[name]}"
                )
        if missing := [name for name in expected if tied.get(name, name) not in weights]:
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            warnings.warn(f"not in initial, so they start as built: {', '.join(missing[:5])}{more}", stacklevel=2)
        return replace(self, start={name: tensor.detach().cpu() for name, tensor in weights.items()})

    def check(self, sample: Inputs, check_output: Callable[[Tensor], str]) -> None:
        """Checks Assumption 1 and the modules' contract on a batch of inputs. Raises a FedhenError if one is violated.

        `check_output` returns which shape an exit's output should have, or "" if it fits.
        """
        if not self.builds:
            raise ConfigError("a family needs at least one tier")
        with seeds.randomness(0, "check"):
            modules = {tier: self.build(tier) for tier in self.tiers}
            whole = weights_of(self.whole())
        for tier, module in modules.items():
            index = shapes_of(weights_of(module))
            _check_contained(tier, index, shapes_of(whole))
            if not self.average_buffers:
                _refuse_buffers(tier, module)
            load_weights(module, select(whole, index))
            _check_outputs(tier, _try_module(tier, module, sample), len(self.exits(tier)), check_output)
        self._check_exits({tier: list(call_module(module, sample)) for tier, module in modules.items()})

    def _check_exits(self, logits: Mapping[str, Sequence[Tensor]]) -> None:
        """Checks that with the same weights a tier computes what its exit computes in the tiers that contain it."""
        for tier in self.tiers:
            for place, name in enumerate(self.exits(tier)):
                if not torch.allclose(logits[tier][place], logits[name][-1], rtol=1e-3, atol=1e-4):
                    raise ConfigError(
                        f"Assumption 1 is broken: with the same weights, exit {place + 1} of tier {tier!r} and the "
                        f"last exit of tier {name!r} differ: return the shallowest exit first, and compute it alike"
                    )


def weights_of(module: nn.Module) -> Weights:
    """Returns a copy of the module's weights, by name."""
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def find_reached_weights(module: nn.Module, outputs: Sequence[Tensor]) -> list[set[str]]:
    """Returns, for each output of the module, the names of the weights that it depends on."""
    parameters = {n: p for n, p in module.named_parameters(remove_duplicate=False) if p.requires_grad}
    names: list[set[str]] = []
    for output in outputs:
        if not output.requires_grad:
            names.append(set())
            continue
        gradients = torch.autograd.grad(output.sum(), list(parameters.values()), allow_unused=True, retain_graph=True)
        names.append({name for name, gradient in zip(parameters, gradients, strict=True) if gradient is not None})
    return names


def load_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copies weights into the module."""
    own = {**dict(module.named_buffers()), **module.state_dict()}
    with torch.no_grad():
        for name, tensor in weights.items():
            own[name].copy_(tensor)


def _check_contained(tier: str, index: Shapes, whole: Shapes) -> None:
    for name, shape in index.items():
        if name not in whole:
            raise ConfigError(f"Assumption 1 is broken: weight {name!r} of tier {tier!r} is not in the largest network")
        if len(shape) != len(whole[name]) or not all(map(operator.le, shape, whole[name])):
            raise ConfigError(
                f"Assumption 1 is broken: weight {name!r} has shape {shape} in tier {tier!r} "
                f"and only {whole[name]} in the largest network"
            )


def _refuse_buffers(tier: str, module: nn.Module) -> None:
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    for name in module.state_dict():
        if name not in parameters:
            path, _, buffer = name.rpartition(".")
            raise ConfigError(
                f"layer {path!r} ({type(module.get_submodule(path)).__name__}) of tier {tier!r} stores {buffer!r}: "
                "statistics of the data leak it; use GroupNorm, or register a constant with persistent=False, or allow "
                "averaging with average_buffers=True"
            )


def _try_module(tier: str, module: nn.Module, sample: Inputs) -> object:
    try:
        return call_module(module.eval(), sample)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        pixels = any(tensor.dtype == torch.uint8 for tensor in list_tensors(sample))
        advice = (
            "; bytes are passed as they are: give the data a normalisation=(mean, std), or floats" if pixels else ""
        )
        raise ConfigError(
            f"the module of tier {tier!r} fails on two inputs of {describe(sample)}: {reason}{advice}"
        ) from error


def _check_outputs(tier: str, outputs: object, exits: int, check_output: Callable[[Tensor], str]) -> None:
    tensors = list(outputs) if isinstance(outputs, Sequence) else []
    wrong = "" if len(tensors) == exits else "any"
    for tensor in tensors:
        wrong = wrong or (check_output(tensor) if isinstance(tensor, Tensor) else "any")
    if wrong:
        found: object = type(outputs).__name__
        if tensors:
            found = [tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in tensors]
        shape = f" of shape {wrong}" if wrong != "any" else ""
        raise ConfigError(
            f"the module of tier {tier!r} must return a list of {exits} logits{shape}, shallowest exit first; "
            f"it returned {found}; labels count from 0: if the model has more classes, pass classes=...; to predict "
            "numbers, choose the task regression"
        )
