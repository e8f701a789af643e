"""Measures the workload of a run that did not record it: one from before that, or one that is not finished."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from fedhen.algorithm.methods import load_method
from fedhen.config import toml
from fedhen.config.data_settings import OWN
from fedhen.config.settings import Config
from fedhen.data import sources
from fedhen.data.dataset import Data
from fedhen.data.storage import data_root
from fedhen.devices.workload import measure_workload
from fedhen.errors import FedhenError
from fedhen.experiment.build import build_population
from fedhen.fileio.python_files import is_reference
from fedhen.profiles.workload import Workload
from fedhen.runs.folders import find_config

SHAPES = {"cifar10": (3, 32, 32, 10), "cifar100": (3, 32, 32, 100)}
"""Channels, height, width and classes of data sets that need not be there: blank images do as well for counting."""
EXAMPLES = 50000
"""Of each of them."""
EQUAL_SPLITS = ("iid", "dirichlet")
"""Splits that give all devices equally many examples, whatever the labels are."""


def recount_workload(folder: Path) -> Workload:
    """Builds the experiment of a run folder again, without playing it, and measures its workload."""
    config = toml.read_toml(find_config(folder))
    for name in (config.model.family, config.data.name, config.task.name, config.method_file):
        if name == OWN or is_reference(name):
            raise FedhenError("its models or data are your own: resume the run and let it end, which records this")
    # Without what changes nothing here, so that runs that differ only in it are measured once.
    seed = 0 if config.split.kind in EQUAL_SPLITS else config.seed
    return _measure(replace(config, seed=seed, rounds=1, targets={}, model=replace(config.model, initial="")))


def load_or_imitate(config: Config, root: Path) -> Data:
    """Loads the data of a configuration, or takes blank images in its place if only their number and shape matter."""
    if config.data.name not in SHAPES or config.split.kind not in EQUAL_SPLITS or config.evaluation.validation:
        return sources.load_data(config.data, root, config.seed)
    *shape, classes = SHAPES[config.data.name]
    x, y = torch.zeros(1, *shape).expand(EXAMPLES, *shape), torch.arange(EXAMPLES) % classes
    return sources.select_examples(Data(x, y, x[:classes], y[:classes], classes), config.data, config.seed)


def _measure(config: Config) -> Workload:
    return _measure_once(toml.to_toml(config))


@cache
def _measure_once(text: str) -> Workload:
    config = toml.parse_toml(text)
    return measure_workload(build_population(config, load_method(config.method), load_or_imitate(config, data_root())))
