"""The data of a run, loaded again to score, export or calibrate its models."""

from __future__ import annotations

import warnings
from contextlib import suppress
from dataclasses import replace
from os import PathLike
from pathlib import Path

from fedhen.config.settings import Config
from fedhen.data import sources
from fedhen.data.dataset import Data
from fedhen.data.digests import name_data_set
from fedhen.data.spec import DataSpec
from fedhen.data.storage import data_root
from fedhen.fileio import untrusted
from fedhen.runs.layout import ENVIRONMENT


def load_data_again(folder: Path, config: Config, data_dir: str | PathLike[str] | None = None) -> Data:
    """Loads the data of a run. Warns if it has changed since, as far as the run has recorded what it was."""
    data = sources.load_data(config.data, data_root(Path(data_dir) if data_dir else None), config.seed)
    recorded = None
    with suppress(OSError, *untrusted.PARSE_ERRORS):
        recorded = (untrusted.read_json(folder / ENVIRONMENT) or {}).get("data_digest")
    if recorded and recorded != name_data_set(data):
        warnings.warn(f"the data of {folder} has changed since: scores are those of other examples", stacklevel=3)
    return data


def restore_normalisation(data: Data, spec: DataSpec | None) -> Data:
    """Returns data with the normalisation that a model was trained with: that of the data may have changed since."""
    if data.normalisation is None or spec is None or not spec.inputs or spec.inputs[0].normalisation is None:
        return data
    return replace(data, normalisation=spec.inputs[0].normalisation)
