"""Makes data from a table with a row for each example: a DataFrame, a CSV or Parquet file, or columns by name."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedhen import seeds
from fedhen.data.dataset import Data, Index, arrays
from fedhen.data.inputs import Inputs
from fedhen.data.pixels import Array
from fedhen.errors import UserError, one_line, unknown_name

SUFFIXES = (".csv", ".parquet", ".pq")
SPLIT = "split"
"""The column that says of each row whether it is for training or for testing."""
PARTS = ("train", "test")
INSTALL = "pip install 'fedhen[tables]'"
Columns = dict[str, Array]


def from_table(
    table: object,
    target: str,
    *,
    by: str = "",
    test: object = None,
    inputs: Sequence[str] = (),
    test_share: float = 0.1,
    seed: int = 0,
) -> Data:
    """Makes data from a table, split over the devices that one of its columns names.

    Columns of numbers are the inputs, side by side. If a row of a column is itself an array, as token ids are, each
    column is an input of its own, by name. A target that is text is a class: 0 is the first in alphabetical order.

    Args:
        table: A pandas DataFrame, the path of a CSV or Parquet file, a `datasets.Dataset`, or a mapping of columns.
        target: The column to predict.
        by: The column that says which device a row belongs to. The devices are its values in sorted order. Without it
            the data is split over the devices by the settings, as `fedhen.arrays` is.
        test: Another table, to test on. By default rows with "test" in a column `split`; if there is no such column,
            a share of each device's rows.
        inputs: The columns that models are given. By default all others.
        test_share: The share of each device's rows that is held out, drawn at random.
        seed: The seed of this draw.

    Example:
        Two people, who are two devices::

            table = {"who": ["ann", "ann", "bob", "bob"], "age": [31, 32, 54, 55], "ill": ["no", "yes", "no", "no"]}
            data = fedhen.from_table(pandas.DataFrame(table), target="ill", by="who")
    """
    label = str(table) if isinstance(table, str | PathLike) else "the table"
    try:
        if not 0 <= test_share < 1:
            raise UserError(f"test_share is {test_share}: it must be at least 0 and below 1")
        return _make_data(_read_columns(table), target, by, test, list(inputs), test_share, seed)
    except UserError as error:
        raise UserError(f"{label}: {error}") from None


def _make_data(
    columns: Columns, target: str, by: str, test: object, inputs: list[str], test_share: float, seed: int
) -> Data:
    used = _choose_inputs(columns, target, by, inputs)
    owners = _find_owners(columns[by], by) if by else np.zeros(len(columns[target]), np.int64)
    if test is not None:
        tested, held = _read_columns(test), np.zeros(len(owners), bool)
    else:
        tested, held = columns, _find_held_rows(columns, owners, test_share, seed)
    rows, test_rows = np.flatnonzero(~held), np.flatnonzero(held) if test is None else slice(None)
    for name in (target, *used):
        if name not in tested:
            raise unknown_name("column in test", name, tested)
    classes, (y, y_test) = _read_targets(columns[target], tested[target], target)
    x, x_test = _read_inputs(columns, used, rows), _read_inputs(tested, used, test_rows)
    data = arrays(x, y[rows], x_test, y_test[test_rows], classes)
    return data if not by else data.split(_split_rows(columns[by], owners, rows))


def _split_rows(names: Array, owners: Index, rows: Index) -> list[Index]:
    shards = [np.flatnonzero(owners[rows] == device) for device in range(int(owners.max()) + 1)]
    for device, shard in enumerate(shards):
        if not len(shard):
            name = names[np.flatnonzero(owners == device)[0]]
            raise UserError(f"device {name} has no rows to train on: give it some, or remove it")
    return shards


def _choose_inputs(columns: Columns, target: str, by: str, inputs: list[str]) -> list[str]:
    """Returns the columns of the inputs, after a check that all columns that are named exist."""
    if not target:
        raise UserError(f"which column is the target? choose data.target from {', '.join(columns)}")
    for kind, name in (("target", target), *[("by", by)] * bool(by), *(("inputs", name) for name in inputs)):
        if name not in columns:
            raise unknown_name(f"column in {kind}", name, columns)
    for name in inputs:
        if name == target or inputs.count(name) > 1:
            raise UserError(f"inputs names {name!r} twice" if name != target else f"inputs names the target, {name!r}")
    used = inputs or [name for name in columns if name not in (target, by) and not _is_split(name, columns)]
    if not used:
        raise UserError(f"it has no columns for the inputs beside {target!r}: add some")
    return used


def _is_split(name: str, columns: Columns) -> bool:
    return name == SPLIT and set(columns[name].tolist()) <= {*PARTS}


def _find_held_rows(columns: Columns, owners: Index, share: float, seed: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Marks the rows for testing: those of the column `split`, or a share of each device's, and never all of them.

    Shares are rounded so that those of all devices together are right.
    """
    if SPLIT in columns and _is_split(SPLIT, columns):
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
    if empty := [row for row, value in enumerate(values, start=1) if _is_empty(value)]:
        raise UserError(f"column {by!r} is empty in row {empty[0]}: say which device it belongs to, or remove the row")
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


def _read_targets(train: Array, test: Array, name: str) -> tuple[int | None, list[Array]]:
    """Returns the number of classes, if the targets are text, and both targets as numbers."""
    everything = np.concatenate([train, test])
    if not _is_text(everything) or _as_numbers(everything) is not None:
        numbers = _numbers(everything, name)
        return None, [numbers[: len(train)], numbers[len(train) :]]
    if any(map(_is_empty, everything.tolist())):
        raise UserError(f"column {name!r} has an empty cell: fill it, or remove its row")
    words = sorted(set(train.tolist()), key=str)
    places = {word: place for place, word in enumerate(words)}
    for word in test.tolist():
        if word not in places:
            raise UserError(f"class {word!r} of column {name!r} is only in the test table: add training rows of it")
    return len(words), [np.array([places[word] for word in each.tolist()], np.int64) for each in (train, test)]


def _read_inputs(columns: Columns, used: Sequence[str], rows: Any) -> Inputs:
    found = {name: _numbers(columns[name][rows], name) for name in used}
    if all(column.ndim == 1 for column in found.values()):
        return torch.from_numpy(np.stack([column.astype(np.float32) for column in found.values()], 1))
    tensors = {name: torch.from_numpy(np.ascontiguousarray(column)) for name, column in found.items()}
    return tensors if len(tensors) > 1 else next(iter(tensors.values()))


def _is_empty(value: object) -> bool:
    """Returns whether a cell has no value: in CSV no text, in pandas NaN or one of its markers."""
    missing = value is None or type(value).__name__ in ("NAType", "NaTType")
    return missing or value == "" or (isinstance(value, float) and value != value)


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


def _numbers(column: Array, name: str) -> Array:
    """Returns a column as int64 or float32."""
    numbers = _as_numbers(column) if _is_text(column) else column
    if numbers is None:
        odd = next((v for v in column.flat if _as_numbers(np.array([v], object)) is None), "")
        if _is_empty(odd):
            raise UserError(f"column {name!r} has an empty cell: fill it, or remove its row")
        raise UserError(
            f"column {name!r} is text (like {one_line(str(odd))[:20]!r}): write it as numbers, "
            "or choose other columns with inputs (data.inputs)"
        )
    if numbers.dtype.kind not in "fiub":
        raise UserError(f"column {name!r} is not of numbers but {numbers.dtype}: write it as numbers")
    if numbers.dtype.kind != "f":
        return numbers.astype(np.int64)
    with np.errstate(over="ignore"):
        small = numbers.astype(np.float32)
    if not np.isfinite(small).all():
        raise UserError(f"column {name!r} has empty cells or numbers that are not finite: remove these rows")
    return small


def _read_columns(table: object) -> Columns:
    """Returns the columns of any table by name, in order."""
    if isinstance(table, str | PathLike):
        found = _read_file(Path(table))
    elif hasattr(table, "columns") and hasattr(table, "iloc"):
        found = {str(name): table[name].to_numpy() for name in table.columns}  # type: ignore[index]
    elif hasattr(table, "column_names"):
        found = {str(name): table[name] for name in table.column_names}  # type: ignore[index]
    elif isinstance(table, Mapping):
        found = {str(name): column for name, column in table.items()}
    else:
        kinds = "a DataFrame, a path, a datasets.Dataset or a mapping of columns"
        raise UserError(f"it is {type(table).__name__}: pass {kinds}")
    columns = {name: _to_array(name, column) for name, column in found.items()}
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise UserError(f"its columns have unequal lengths: {', '.join(f'{n!r} has {k}' for n, k in lengths.items())}")
    if not columns or not next(iter(lengths.values())):
        raise UserError("it has no rows")
    return columns


def _to_array(name: str, column: Any) -> Array:
    if isinstance(column, torch.Tensor):
        column = column.numpy()
    try:
        found = np.asarray(column)
        if found.dtype.kind == "O" and len(found) and isinstance(found[0], list | tuple | np.ndarray):
            found = np.stack([np.asarray(each) for each in found])
    except ValueError:
        raise UserError(f"column {name!r} has rows of unequal lengths: pad them to one length") from None
    if not found.ndim:
        raise UserError(f"column {name!r} is a single value: pass an array")
    # numpy's text is as wide as its widest cell, and pandas has types of its own: Python's strings serve both.
    return found if found.dtype.kind in "fiub" else found.astype(object)


def _read_file(path: Path) -> Mapping[str, Any]:
    if path.suffix not in SUFFIXES:
        raise UserError(f"it is not a table: name a {', '.join(SUFFIXES)} file")
    try:
        return _read_csv(path) if path.suffix == ".csv" else _read_parquet(path)
    except OSError as error:
        raise UserError(f"it cannot be read: {error.strerror or one_line(str(error))}") from None


def _read_csv(path: Path) -> Mapping[str, Any]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            names = next(reader, [])
            rows = [(reader.line_num, row) for row in reader if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"it is not a CSV file in UTF-8: {one_line(str(error))}") from None
    if repeated := [name for k, name in enumerate(names) if name in names[:k]]:
        raise UserError(f"it has two columns {repeated[0]!r}: rename one of them")
    for line, row in rows:
        if len(row) != len(names):
            raise UserError(f"line {line} has {len(row)} cells, and the first line names {len(names)} columns")
    texts = (np.array([row[k] for _, row in rows], object) for k in range(len(names)))
    return dict(zip(names, texts, strict=True))


def _read_parquet(path: Path) -> Mapping[str, Any]:
    try:
        import pandas
        import pyarrow
    except ImportError:
        raise UserError(f"a Parquet file needs pandas and pyarrow: {INSTALL}") from None
    try:
        frame = pandas.read_parquet(path)
    except (pyarrow.ArrowException, ValueError) as error:
        raise UserError(f"it is not a Parquet file, or is damaged: {one_line(str(error))}") from None
    return {str(name): frame[name].to_numpy() for name in frame.columns}
