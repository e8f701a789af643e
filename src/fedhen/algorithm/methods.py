"""The methods: each is an objective and a choice of which tiers are averaged together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedhen.algorithm.merging import Pools, keep_tiers_apart, share_common_weights
from fedhen.algorithm.objectives import Objective, last_exit, sum_of_exits
from fedhen.config.settings import Config
from fedhen.errors import unknown_name
from fedhen.fileio.python_files import PythonFiles, is_reference

Settings = Callable[[Config], Mapping[str, Any]]
"""A recipe's configuration -> the settings that a method changes in it, nested as in a TOML file."""


def no_settings(config: Config) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True)
class Method:
    """A federated method: what a device minimises on a batch, and which tiers the server averages together.

    A method that gives the deepest exit twice the weight, and shares common weights as FedHeN does:

        def deepest_twice(logits, labels):
            return cross_entropy(logits[-1], labels) + sum(cross_entropy(z, labels) for z in logits)

        MINE = Method("twice", deepest_twice, share_common_weights)

    Use it with `fedhen run digits --method ./mymethod.py:MINE` or `fedhen.train(family, data, MINE)`.
    """

    name: str
    """What reports call the method."""
    objective: Objective
    """(logits of all exits, labels) -> loss."""
    pools: Pools
    """Tiers -> groups of tiers that are averaged together: `share_common_weights`, `keep_tiers_apart` or your own."""
    settings: Settings = no_settings
    """What the method changes in a recipe. The user's settings take precedence."""
    tiers: Callable[[Sequence[str]], Sequence[str]] = lambda tiers: tiers
    """A recipe's tiers, shallowest first -> those that the method's devices have."""

    def keep_tiers(self, config: Config) -> Config:
        """Returns the configuration with only the tiers that the method's devices have."""
        kept = list(self.tiers(list(config.tiers)))
        if kept == list(config.tiers):
            return config
        total = sum(config.tiers[tier] for tier in kept)
        return config.with_tiers({tier: config.tiers[tier] / total for tier in kept})


FEDHEN = Method("fedhen", sum_of_exits, share_common_weights)
"""Alg. 1: complex devices minimise their loss plus that of the sub-network; common weights are shared."""

NOSIDE = Method("noside", last_exit, share_common_weights)
"""Alg. 4: common weights are shared, without the side objective (HeteroFL's rule on this nesting)."""

DECOUPLE = Method("decouple", last_exit, keep_tiers_apart)
"""Alg. 3: FedAvg for each tier separately."""

SIDE_APART = Method("side-apart", sum_of_exits, keep_tiers_apart)
"""An ablation that the paper leaves out: the side objective without sharing."""


def heterofl_settings(config: Config) -> Mapping[str, Any]:
    """Returns HeteroFL's model family, with its scaler, masked loss and label rows."""
    return {
        "model": {"nesting": "width", "scaler": True},
        "training": {"masked_loss": True},
        "server": {"rows_by_class": True},
    }


HETEROFL = Method("heterofl", last_exit, share_common_weights, heterofl_settings)
"""HeteroFL (Diao et al. 2021): NoSide's rule on leading channels, with scaler, masked loss and label rows."""


FEDAVG = Method("fedavg", last_exit, keep_tiers_apart, tiers=lambda tiers: tiers[-1:])
"""FedAvg (McMahan et al. 2017): Decouple with one tier, which all devices have."""

METHODS = {m.name: m for m in (FEDHEN, NOSIDE, DECOUPLE, SIDE_APART, HETEROFL, FEDAVG)}


def load_method(name: str, files: PythonFiles | None = None) -> Method:
    """Returns the method of that name, or the one that a Python file defines: `path/to/file.py:NAME`."""
    if is_reference(name):
        return (files or PythonFiles()).load(name, "method", Method)
    if name not in METHODS:
        raise unknown_name("method", name, METHODS)
    return METHODS[name]
