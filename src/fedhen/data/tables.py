"""Makes data from a table with a row for each example: a DataFrame, a CSV or Parquet file, or columns by name."""

from __future__ import annotations

import math
import warnings
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import replace
from numbers import Number
from os import PathLike
from typing import Any

import numpy as np
import torch

from fedhen import seeds
from fedhen.data.arrays import read_arrays
from fedhen.data.columns import Columns, read_columns
from fedhen.data.dataset import FederatedData, Index
from fedhen.data.digests import compute_digest
from fedhen.data.inputs import Inputs, list_tensors
from fedhen.data.pixels import Array
from fedhen.data.spec import DataSpec, InputSpec, Normalisation
from fedhen.errors import DataError, FedhenError, one_line, unknown_name

SPLIT = "split"
"""The column that says of each row whether it is for training or for testing."""
PARTS = ("train", "test")
LARGE = 30.0
"""Models with usual learning rates hardly learn from columns with larger numbers."""
LARGE_TARGET = 1000.0
"""The same of numbers that are predicted."""
SMALL = 1e-12
"""A smaller deviation, relative to the mean, is a rounding error."""


def read_table(
    table: object,
    target: str,
    *,
    by: str = "",
    test: object = None,
    inputs: Sequence[str] = (),
    test_share: float = 0.1,
    seed: int = 0,
    unit: str = "",
    standardise: bool = False,
) -> FederatedData:
    """See `FederatedData.from_table`."""
    label = str(table) if isinstance(table, str | PathLike) else "the table"
    try:
        if not 0 <= test_share < 1:
            raise DataError(f"test_share is {test_share}: it must be at least 0 and below 1")
        data = _make_data(read_columns(table), target, by, test, list(inputs), test_share, seed, unit)
        _warn_of_large_targets(data)
        return standardise_columns(data) if standardise else _warn_of_large_numbers(data)
    except FedhenError as error:
        raise DataError(f"{label}: {error}") from None


def _make_data(
    columns: Columns, target: str, by: str, test: object, inputs: list[str], test_share: float, seed: int, unit: str
) -> FederatedData:
    used = _choose_inputs(columns, target, by, inputs)
    owners = _find_owners(columns[by], by) if by else np.zeros(len(columns[target]), np.int64)
    if test is not None:
        tested, held = read_columns(test), np.zeros(len(owners), bool)
    else:
        tested, held = columns, _find_held_rows(columns, owners, test_share, seed)
    rows, test_rows = np.flatnonzero(~held), np.flatnonzero(held) if test is None else slice(None)
    for name in (target, *used):
        if name not in tested:
            raise unknown_name("column in test", name, tested)
    words, (y, y_test) = _read_targets(columns[target], tested[target], target)
    x, x_test = _read_inputs(columns, used, rows), _read_inputs(tested, used, test_rows)
    data = read_arrays(x, y[rows], x_test, y_test[test_rows], len(words) or None)
    if test is None and not _says_split(columns):
        # The seed draws the rows for testing: what all seeds have in common is the whole table.
        every = _read_inputs(columns, used, slice(None))
        data = replace(data, source=compute_digest([*list_tensors(every), torch.from_numpy(y)]))
    is_row = isinstance(x, torch.Tensor) and all(columns[name].ndim == 1 for name in used)
    about = DataSpec((InputSpec(columns=tuple(used) if is_row else ()),), tuple(map(str, words)), target, unit)
    data = replace(data, about=about)
    if not by:
        return data
    own = [np.flatnonzero(owners[held] == d) for d in range(int(owners.max()) + 1)] if test is None else []
    return data.split(_split_rows(columns[by], owners, rows), own)


def standardise_columns(data: FederatedData) -> FederatedData:
    """Returns the data with a normalisation by each column's mean and deviation over the training rows.

    A column without deviation is only shifted.
    """
    assert data.about is not None
    if not data.about.inputs[0].columns:
        raise DataError("standardise is for columns of numbers, and some have arrays in their rows: leave it out")
    x = data.x.double()
    mean, std = x.mean(0), x.std(0, unbiased=False)
    constant = std < SMALL * mean.abs().clamp(min=1.0)
    std[constant] = 1.0
    if names := [name for name, same in zip(data.about.inputs[0].columns, constant.tolist(), strict=True) if same]:
        warnings.warn(
            f"column {names[0]!r} has one number in all training rows, from which nothing is learned: leave it out",
            stacklevel=4,
        )
    return replace(data, normalisation=Normalisation(tuple(mean.tolist()), tuple(std.tolist())))


def _warn_of_large_numbers(data: FederatedData) -> FederatedData:
    assert data.about is not None
    names = data.about.inputs[0].columns
    if names and isinstance(data.x, torch.Tensor):
        most = data.x.abs().amax(0).tolist()
        large = [f"{name} (up to {value:.3g})" for name, value in zip(names, most, strict=True) if value > LARGE]
        if large:
            others = f" and {len(large) - 3} more" if len(large) > 3 else ""
            warnings.warn(
                f"models hardly learn from large numbers, here {', '.join(large[:3])}{others}: pass standardise=True "
                "(--set data.standardise=true)",
                stacklevel=4,
            )
    return data


def _warn_of_large_targets(data: FederatedData) -> None:
    assert data.about is not None
    most = float(data.y.double().abs().max()) if len(data.y) else 0.0
    if data.y.is_floating_point() and most > LARGE_TARGET:
        warnings.warn(
            f"models learn slowly to predict large numbers, here {data.about.target} (up to {most:.3g}): use a larger "
            "unit, or the distance from the mean",
            stacklevel=4,
        )


def _split_rows(names: Array, owners: Index, rows: Index) -> list[Index]:
    shards = [np.flatnonzero(owners[rows] == device) for device in range(int(owners.max()) + 1)]
    for device, shard in enumerate(shards):
        if not len(shard):
            name = names[np.flatnonzero(owners == device)[0]]
            raise DataError(f"device {name} has no rows to train on: give it some, or remove it")
    return shards


def _choose_inputs(columns: Columns, target: str, by: str, inputs: list[str]) -> list[str]:
    """Returns the columns of the inputs, after a check that all columns that are named exist."""
    if not target:
        raise DataError(f"which column is the target? choose data.target from {', '.join(columns)}")
    for kind, name in (("target", target), *[("by", by)] * bool(by), *(("inputs", name) for name in inputs)):
        if name not in columns:
            raise unknown_name(f"column in {kind}", name, columns)
    for name in inputs:
        if name == target or inputs.count(name) > 1:
            raise DataError(f"inputs names {name!r} twice" if name != target else f"inputs names the target, {name!r}")
    used = inputs or [name for name in columns if name not in (target, by) and not _is_split(name, columns)]
    if not used:
        raise DataError(f"it has no columns for the inputs beside {target!r}: add some")
    return used


def _is_split(name: str, columns: Columns) -> bool:
    return name == SPLIT and all(isinstance(cell, str) and cell in PARTS for cell in columns[name].tolist())


def _says_split(columns: Columns) -> bool:
    return SPLIT in columns and _is_split(SPLIT, columns)


def _find_held_rows(columns: Columns, owners: Index, share: float, seed: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Marks the rows for testing: those of the column `split`, or a share of each device's, and never all of them.

    Shares are rounded so that those of all devices together are right.
    """
    if _says_split(columns):
        return np.asarray(columns[SPLIT] == "test")
    held, rng, due = np.zeros(len(owners), bool), seeds.stream(seed, "held-out rows"), 0.0
    for device in range(int(owners.max()) + 1):
        rows = np.flatnonzero(owners == device)
        due += share * len(rows)
        number = min(round(due), len(rows) - 1)
        due -= number
        held[rng.permutation(rows)[:number]] = True
    return held


def _find_owners(column: Array, by: str) -> Index:
    """Returns the device of each row. Devices are the distinct values in order: numbers by size, text by letter."""
    values = column.tolist()
    if odd := [value for value in values if not isinstance(value, Hashable)]:
        raise DataError(
            f"column {by!r} has a cell of type {_describe(odd[0])}: write one number or text, which names the device"
        )
    if empty := [row for row, value in enumerate(values, start=1) if _is_empty(value)]:
        raise DataError(f"column {by!r} is empty in row {empty[0]}: say which device it belongs to, or remove the row")
    distinct = set(values)
    try:
        order = sorted(distinct, key=lambda value: (_finite(value), str(value)))
    except (TypeError, ValueError):
        order = sorted(distinct, key=str)
    places = {value: place for place, value in enumerate(order)}
    return np.array([places[value] for value in values], np.int64)


def _finite(value: Any) -> float:
    if not math.isfinite(number := float(value)):
        raise ValueError(f"{value} has no place in an order")
    return number


def _read_targets(train: Array, test: Array, name: str) -> tuple[list[Any], list[Array]]:
    """Returns the classes, if the targets are text, and both targets as numbers."""
    everything = np.concatenate([train, test])
    if not _is_text(everything) or _as_numbers(everything) is not None:
        numbers = read_numbers(everything, name)
        return [], [numbers[: len(train)], numbers[len(train) :]]
    if any(map(_is_empty, everything.tolist())):
        raise DataError(f"column {name!r} has an empty cell: fill it, or remove its row")
    if odd := [cell for cell in everything.tolist() if not isinstance(cell, str | Number | np.generic)]:
        raise DataError(
            f"column {name!r} has a cell of type {_describe(odd[0])}: write numbers, or text that names the class"
        )
    words = sorted(set(train.tolist()), key=str)
    places = {word: place for place, word in enumerate(words)}
    for word in test.tolist():
        if word not in places:
            raise DataError(f"class {word!r} of column {name!r} is only in the test table: add training rows of it")
    return words, [np.array([places[word] for word in each.tolist()], np.int64) for each in (train, test)]


def _read_inputs(columns: Columns, used: Sequence[str], rows: Any) -> Inputs:
    found = {name: read_numbers(columns[name][rows], name) for name in used}
    if all(column.ndim == 1 for column in found.values()):
        return torch.from_numpy(np.stack([column.astype(np.float32) for column in found.values()], 1))
    tensors = {name: torch.from_numpy(np.ascontiguousarray(column)) for name, column in found.items()}
    return tensors if len(tensors) > 1 else next(iter(tensors.values()))


def _is_empty(value: object) -> bool:
    """Returns whether a cell has no value: in CSV no text, in pandas NaN or one of its markers."""
    missing = value is None or type(value).__name__ in ("NAType", "NaTType")
    return missing or value == "" or (isinstance(value, float) and value != value)


def _describe(cell: object) -> str:
    return one_line(f"{type(cell).__name__} ({str(cell)[:20]})")


def _is_text(column: Array) -> bool:
    return column.dtype.kind in "OUS"


def _as_numbers(column: Array) -> Array | None:
    """Returns a column of text as whole numbers or floats, or None if it is not of numbers."""
    try:
        numbers = column.astype(np.float64)
    except (TypeError, ValueError, OverflowError):
        return None
    with suppress(TypeError, ValueError, OverflowError):
        # Of objects like decimals it would cut off what is behind the point.
        whole = column.astype(np.int64)
        if np.array_equal(whole.astype(np.float64), numbers):
            return whole
    return numbers


def read_numbers(column: Array, name: str) -> Array:
    """Returns a column as int64 or float32. Raises a DataError if it has a cell that is not a finite number."""
    numbers = _as_numbers(column) if _is_text(column) else column
    if numbers is None:
        odd = next((v for v in column.flat if _as_numbers(np.array([v], object)) is None), "")
        if any(isinstance(cell, list | tuple | np.ndarray) for cell in column.tolist()) and column.ndim == 1:
            raise DataError(f"column {name!r} has numbers in some cells and lists in others: use one of the two")
        if _is_empty(odd):
            raise DataError(f"column {name!r} has an empty cell: fill it, or remove its row")
        raise DataError(
            f"column {name!r} is text (like {one_line(str(odd))[:20]!r}): write it as numbers, "
            "or choose other columns with inputs (data.inputs)"
        )
    if numbers.dtype.kind not in "fiub":
        raise DataError(f"column {name!r} is not of numbers but {numbers.dtype}: write it as numbers")
    if numbers.dtype.kind != "f":
        return numbers.astype(np.int64)
    with np.errstate(over="ignore"):
        small = numbers.astype(np.float32)
    if not np.isfinite(small).all():
        raise DataError(f"column {name!r} has empty cells or numbers that are not finite: remove these rows")
    return small
