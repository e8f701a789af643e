"""Methods as expressions over an objective and a merge: the paper's three, and FedAvg."""

from __future__ import annotations

from dataclasses import dataclass

from fedhen.algorithm.merging import Pools, keep_tiers_apart, share_common_weights
from fedhen.algorithm.objectives import Objective, last_exit, sum_of_exits
from fedhen.errors import unknown


@dataclass(frozen=True)
class Method:
    """A federated method: what a device minimises on a batch, and which tiers the server averages together."""

    name: str
    objective: Objective
    pools: Pools


FEDHEN = Method("fedhen", sum_of_exits, share_common_weights)
"""Alg. 1: complex devices minimise their own loss plus the sub-network's; common weights are shared."""

NOSIDE = Method("noside", last_exit, share_common_weights)
"""Alg. 4: common weights are shared, without the side objective (HeteroFL's rule on this nesting)."""

DECOUPLE = Method("decouple", last_exit, keep_tiers_apart)
"""Alg. 3: FedAvg for each tier by itself."""

FEDAVG = Method("fedavg", last_exit, keep_tiers_apart)
"""McMahan et al. 2017, for devices that all have one tier; with several tiers it is Decouple."""

METHODS = {method.name: method for method in (FEDHEN, NOSIDE, DECOUPLE, FEDAVG)}


def method_named(name: str) -> Method:
    """The method of that name."""
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    return METHODS[name]
