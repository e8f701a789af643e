"""The settings of the data, the task and the split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedhen.config.setting import setting

OWN = "python"
"""The name of a model family or of data that was passed from Python."""


@dataclass(frozen=True)
class DataConfig:
    """Which data."""

    name: str = setting(
        "digits",
        "data set: digits, cifar10, cifar100, shakespeare, or the path of a folder of images, an .npz, .csv or "
        ".parquet file; 'python' or file.py:NAME if it is made in Python",
    )
    by: str = setting(
        "", "tables: the column that says which device a row belongs to; .npz: the array, by default `device`"
    )
    target: str = setting("", "tables: the column to predict")
    inputs: tuple[str, ...] = setting((), "tables: the columns that models are given; by default all others")
    test_share: float = setting(
        0.1,
        "tables: share of each device's rows that is held out for testing; not used if a column `split` says which",
        least=0,
        most=0.9,
    )
    standardise: bool = setting(
        False, "tables: models are given (x - mean) / deviation of each column, over all training rows"
    )
    size: int = setting(0, "folders: resize images to this height and width; 0: as they are", least=0, most=4096)
    roles: int = setting(100, "shakespeare: the number of speaking roles, largest first; each is a device", least=1)
    context: int = setting(64, "shakespeare: the number of characters that models are given", least=1, most=4096)
    limit: int = setting(0, "use the first images only, this many for training and for testing; 0: all", least=0)
    fraction: float = setting(1.0, "train on this share of the training images, drawn at random", above=0, most=1)
    augmentation: Literal["none", "crop-flip", "half-crop-flip"] = setting(
        "none",
        "crop-flip: flip with p = 0.5 and crop from the image padded with 4 zeros after normalisation;"
        " half-crop-flip: crop with p = 0.5 too",
    )


@dataclass(frozen=True)
class TaskConfig:
    """What models predict."""

    name: str = setting(
        "classification",
        "classification, multi-label, regression, language-modelling or segmentation; "
        "'python' or file.py:NAME if it is your own",
    )
    metrics: tuple[str, ...] = setting(
        (),
        "metrics to record, the primary one first; by default accuracy, micro_f1, rmse, perplexity or mean_iou",
    )
    class_weights: tuple[float, ...] = setting((), "classification: weight of each class in the loss; by default 1")
    label_smoothing: float = setting(
        0.0, "classification: share of a target that is spread over all classes", least=0, most=1
    )
    error: Literal["mse", "huber"] = setting("mse", "regression: squared error, or Huber's loss")
    huber_delta: float = setting(1.0, "regression: error from which on Huber's loss is linear", above=0)
    padding: int = setting(-100, "language-modelling, segmentation: the target that is not counted")


@dataclass(frozen=True)
class SplitConfig:
    """How the data is split over the devices."""

    kind: Literal["iid", "dirichlet", "dirichlet-by-class", "natural"] = setting(
        "iid",
        "iid: at random; dirichlet: equal sizes, a class prior for each device; dirichlet-by-class: unequal sizes; "
        "natural: as the data says, which is set if the data comes split",
    )
    alpha: float = setting(0.3, "concentration of the Dirichlet splits; smaller is more unequal", above=0)
    minimum: int = setting(10, "dirichlet-by-class: the smallest number of images of a device", least=1)
