"""The numbers that the paper prints: its two tables and the accuracies in its text.

D. A. E. Acar and V. Saligrama, FedHeN: Federated Learning in Heterogeneous Networks, 2022. It has one number per cell,
without seeds or deviations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

CITATION = "D. A. E. Acar and V. Saligrama, FedHeN: Federated Learning in Heterogeneous Networks, 2022"
METHODS: Mapping[str, str] = {"fedhen": "FedHeN", "decouple": "Decouple", "noside": "NoSide"}
"""The paper's methods -> their names there, in the order of its columns."""
DATA_SETS: Mapping[str, str] = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
TIERS = ("simple", "complex")
"""Shallowest first, the order of the tables and of the figures' panels."""


@dataclass(frozen=True)
class Split:
    """A split of the data: the number of its table in the paper, and the recipe of each data set."""

    table: int
    name: str
    recipes: Mapping[str, str]

    @property
    def heading(self) -> str:
        return f"{self.name[0].upper()}{self.name[1:]} split"


IID = Split(1, "IID", {"cifar10": "cifar10-iid", "cifar100": "cifar100-iid"})
NON_IID = Split(2, "non-IID", {"cifar10": "cifar10-noniid", "cifar100": "cifar100-noniid"})
SPLITS = (IID, NON_IID)


@dataclass(frozen=True)
class Row:
    """A row of Table 1 or 2: the target, each method's rounds to it, and FedHeN's gain."""

    percent: float
    rounds: Mapping[str, int]
    gain: float


def _make_row(percent: float, fedhen: int, decouple: int, noside: int, gain: float) -> Row:
    return Row(percent, {"fedhen": fedhen, "decouple": decouple, "noside": noside}, gain)


ROUNDS_TO_TARGET: Mapping[str, Mapping[str, tuple[Row, ...]]] = {
    "cifar10-iid": {  # Table 1
        "simple": (_make_row(84.4, 289, 943, 805, 2.8), _make_row(83.4, 249, 731, 669, 2.7)),
        "complex": (_make_row(88.5, 649, 991, 941, 1.4), _make_row(87.5, 456, 739, 669, 1.5)),
    },
    "cifar100-iid": {
        "simple": (_make_row(46.4, 296, 864, 984, 2.9), _make_row(45.4, 250, 588, 807, 2.4)),
        "complex": (_make_row(46.8, 468, 963, 614, 1.3), _make_row(45.8, 376, 752, 472, 1.3)),
    },
    "cifar10-noniid": {  # Table 2
        "simple": (_make_row(79.4, 295, 986, 810, 2.7), _make_row(78.4, 256, 816, 676, 2.6)),
        "complex": (_make_row(84.2, 596, 1000, 857, 1.4), _make_row(83.2, 519, 887, 751, 1.4)),
    },
    "cifar100-noniid": {
        "simple": (_make_row(43.8, 278, 978, 914, 3.3), _make_row(42.8, 239, 813, 762, 3.2)),
        "complex": (_make_row(44.8, 450, 997, 498, 1.1), _make_row(43.8, 372, 754, 456, 1.2)),
    },
}
"""Recipe -> tier -> rows, the upper target first."""

BEST_PERCENT: Mapping[tuple[str, str], float] = {("cifar10-iid", "simple"): 88.6, ("cifar10-iid", "complex"): 89.6}
"""(recipe, tier) -> FedHeN's accuracy within 1000 rounds, if the text names it."""
LEAD: Mapping[tuple[str, str], str] = {("cifar10-iid", "complex"): "> 1"}
"""(recipe, tier) -> FedHeN's lead over the other methods in points, if the text names it."""

Reference = tuple[str, str, float]
"""A data set, a tier, and the share of the training images that is centralised."""

CENTRALISED_PERCENT: Mapping[Reference, float] = {  # Section "Experiments", paragraph "Models"
    ("cifar10", "complex", 1.0): 93.0,
    ("cifar10", "complex", 0.5): 90.5,
    ("cifar10", "simple", 1.0): 86.0,
    ("cifar10", "simple", 0.5): 84.5,
    ("cifar100", "complex", 1.0): 73.5,
    ("cifar100", "complex", 0.5): 62.6,
    ("cifar100", "simple", 1.0): 63.2,
    ("cifar100", "simple", 0.5): 55.7,
}
"""Test accuracy in percent if one machine holds all images, or half of them as 50 devices do."""
