"""Loads the data set that a configuration names."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from fedhen import seeds
from fedhen.config.data_settings import OWN, DataConfig
from fedhen.data import cifar, tables
from fedhen.data.columns import SUFFIXES
from fedhen.data.dataset import Data
from fedhen.data.digests import digest_text, name_data_set
from fedhen.data.digits import load_digits
from fedhen.data.image_folder import read_image_folder
from fedhen.data.inputs import take
from fedhen.data.npz import read_npz
from fedhen.data.published import PUBLISHED, SHAKESPEARE
from fedhen.data.shakespeare import load_shakespeare
from fedhen.errors import DataError, unknown_name
from fedhen.fileio.python_files import refuse_reference

DIGITS = "digits"
OPTIONS = {
    "by": "tables and .npz files",
    "target": "tables",
    "inputs": "tables",
    "test_share": "tables",
    "standardise": "tables",
    "size": "folders of images",
    "roles": "shakespeare",
    "context": "shakespeare",
}
"""Settings that only some kinds of data read."""


def load_data(config: DataConfig, root: Path, seed: int = 0) -> Data:
    """Returns the data set that a configuration names; downloaded data sets are read from `root`."""
    name = config.name
    if name == OWN:
        raise DataError(
            "the data of this run was passed from Python: pass it again as data=..., or with --data FILE.py:NAME"
        )
    refuse_reference(name, "data")
    if name == DIGITS:
        data = load_digits()
    elif name in cifar.NAMES:
        data = cifar.read(PUBLISHED[name], root)
    elif "/" in name or os.sep in name or name.endswith((".npz", *SUFFIXES)):
        return select_examples(read_own_data(Path(name), config, seed), config, seed)
    elif name == SHAKESPEARE.name:
        _refuse_unread(config, "roles", "context")
        return select_examples(load_shakespeare(root, config.roles, config.context), config, seed)
    else:
        named = unknown_name("data set", name, (DIGITS, *PUBLISHED))
        raise DataError(f"{named}, or give the path of a folder, an .npz file or a table")
    _refuse_unread(config)
    return select_examples(data, config, seed)


def read_own_data(path: Path, config: DataConfig | None = None, seed: int = 0) -> Data:
    """Reads a user's own data: a folder with train/CLASS/*.png and test/CLASS/*.png (or .jpg), an .npz file, a table.

    The settings say how, and the seed decides which rows of a table are held out.
    """
    config = config or DataConfig()
    try:
        if path.is_dir():
            _refuse_unread(config, "size")
            return read_image_folder(path, config.size)
        if not path.exists():
            kinds = "a folder with train/CLASS and test/CLASS, an .npz, .csv or .parquet file"
            raise DataError(f"{path} does not exist: name {kinds}")
        if path.suffix in SUFFIXES:
            _refuse_unread(config, "by", "target", "inputs", "test_share", "standardise")
            return tables.read_table(
                path,
                config.target,
                by=config.by,
                inputs=config.inputs,
                test_share=config.test_share,
                seed=seed,
                standardise=config.standardise,
            )
        if path.suffix != ".npz":
            raise DataError(f"{path} is neither a folder of images nor an .npz, .csv or .parquet file")
        _refuse_unread(config, "by")
        return read_npz(path, config.by)
    except OSError as error:
        raise DataError(f"{error.filename or path} cannot be read: {error.strerror}") from None


def is_drawn(config: DataConfig) -> bool:
    """Returns whether the seed decides which examples there are: a share of them, or a table's rows for testing."""
    return config.fraction < 1 or config.name.endswith(SUFFIXES)


def _refuse_unread(config: DataConfig, *read: str) -> None:
    """Raises a DataError for a setting that would have no effect on this kind of data."""
    for name, kind in OPTIONS.items():
        if name not in read and getattr(config, name) != getattr(DataConfig(), name):
            raise DataError(f"data.{name} is for {kind}, and the data is {config.name}: remove it")


def select_examples(data: Data, config: DataConfig, seed: int) -> Data:
    """Returns the examples that `data.limit` and `data.fraction` keep."""
    if config.limit:
        first = slice(config.limit)
        data = replace(data, source=data.source and digest_text(f"first {config.limit} of {data.source}"))
        data = data.keep(torch.arange(len(data.y))[first])
        tests = tuple(shard[shard < config.limit] for shard in data.test_shards)
        data = replace(data, x_test=take(data.x_test, first), y_test=data.y_test[first], test_shards=tests)
    if config.fraction < 1:
        data = replace(data, source=name_data_set(data))
        kept = max(1, round(config.fraction * len(data.y)))
        # The same draw as the IID split's: half of the examples are those of the first half of its devices.
        index = torch.from_numpy(np.sort(seeds.stream(seed, "split").permutation(len(data.y))[:kept]))
        data = data.keep(index)
    return data
