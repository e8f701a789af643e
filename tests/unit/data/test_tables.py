"""Tables become data: numbers are inputs, a column names the device of each row, and what is wrong is named."""

from __future__ import annotations

import sys
import tracemalloc
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch

import fedhen
from fedhen.config.data_settings import DataConfig
from fedhen.data.columns import estimate_csv, estimate_parquet
from fedhen.data.sources import load_data, read_own_data
from fedhen.errors import FedhenError

ROWS: dict[str, list[Any]] = {
    "user": ["bob", "ann", "bob", "eve", "ann", "eve"],
    "age": [50, 30, 51, 40, 31, 41],
    "weight": [80.5, 60.0, 81.5, 70.0, 61.0, 71.0],
    "ill": ["no", "yes", "no", "maybe", "no", "no"],
}
INPUTS = [[50, 80.5], [30, 60.0], [51, 81.5], [40, 70.0], [31, 61.0], [41, 71.0]]
pytestmark = pytest.mark.filterwarnings("ignore:models hardly learn from large numbers")


class Columns:
    """Stands for `datasets.Dataset`: it has names of columns, and each column by its name."""

    column_names = tuple(ROWS)

    def __getitem__(self, name: str) -> list[Any]:
        return ROWS[name]


def write_csv(path: Path, rows: dict[str, list[Any]]) -> Path:
    lines = [",".join(rows), *(",".join(map(str, row)) for row in zip(*rows.values(), strict=True))]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def forms(folder: Path) -> dict[str, Any]:
    """The same table in every form."""
    frame = pandas.DataFrame(ROWS)
    frame.to_parquet(folder / "people.parquet")
    return {
        "csv": write_csv(folder / "people.csv", ROWS),
        "parquet": folder / "people.parquet",
        "frame": frame,
        "categories": frame.astype({"user": "category", "ill": "category"}),
        "datasets": Columns(),
        "mapping": ROWS,
    }


@pytest.mark.parametrize("form", ["csv", "parquet", "frame", "categories", "datasets", "mapping"])
def test_devices_are_the_values_of_a_column_in_order(tmp_path: Path, form: str) -> None:
    data = fedhen.from_table(forms(tmp_path)[form], "ill", by="user", test_share=0)
    assert data.x.tolist() == INPUTS and data.x.dtype == torch.float32
    assert [shard.tolist() for shard in data.shards] == [[1, 4], [0, 2], [3, 5]]
    assert data.y.tolist() == [1, 2, 1, 0, 1, 1] and data.classes == 3, "maybe, no, yes"
    assert not len(data.y_test)


def test_numbers_that_name_devices_are_in_order_of_size_and_keep_their_spelling(tmp_path: Path) -> None:
    rows: dict[str, list[Any]] = {"id": ["10", "9", "09", "100"], "x": [1, 2, 3, 4], "y": [0, 1, 0, 1]}
    for table in (rows, write_csv(tmp_path / "t.csv", rows)):
        data = fedhen.from_table(table, "y", by="id", test_share=0)
        assert [data.x[shard].flatten().tolist() for shard in data.shards] == [[3], [2], [1], [4]]
    data = fedhen.from_table({**rows, "id": [10, 9, 9, 100]}, "y", by="id", test_share=0)
    assert [shard.tolist() for shard in data.shards] == [[1, 2], [0], [3]]


def test_a_share_of_each_device_is_held_out_and_the_seed_draws_it() -> None:
    """Of 40, 20 and 4 rows a tenth is 4, 2 and 0.4. Over the ten small devices that is 4 rows in all."""
    owners = [0] * 40 + [1] * 20 + [device for device in range(2, 12) for _ in range(4)]
    table = {"id": owners, "x": range(100), "y": [0.5] * 100}
    data = fedhen.from_table(table, "y", by="id", seed=1)
    held = data.x_test.flatten().long()
    assert np.bincount(np.array(owners)[held])[:2].tolist() == [4, 2] and len(held) == 10
    assert sorted([*held.tolist(), *data.x.flatten().long().tolist()]) == list(range(100))
    assert [len(shard) for shard in data.shards[:2]] == [36, 18] and sum(map(len, data.shards)) == 90
    assert torch.equal(fedhen.from_table(table, "y", by="id", seed=1).x_test, data.x_test)
    assert not torch.equal(fedhen.from_table(table, "y", by="id", seed=2).x_test, data.x_test)


def test_a_column_split_says_which_rows_are_for_testing() -> None:
    split = ["train", "train", "test", "train", "train", "test"]
    data = fedhen.from_table({**ROWS, "split": split}, "ill", by="user")
    assert data.x.tolist() == [INPUTS[k] for k in (0, 1, 3, 4)] and data.x_test.tolist() == [INPUTS[2], INPUTS[5]]
    assert [shard.tolist() for shard in data.shards] == [[1, 3], [0], [2]]
    other = fedhen.from_table({**ROWS, "split": [1, 2, 3, 4, 5, 6]}, "ill", by="user", test_share=0)
    assert other.x[:, 2].tolist() == [1, 2, 3, 4, 5, 6], "a column of numbers is an input like any other"


def test_another_table_may_be_for_testing() -> None:
    data = fedhen.from_table(ROWS, "ill", by="user", test={"age": [1], "weight": [2.0], "ill": ["yes"]})
    assert len(data.y) == 6 and data.x_test.tolist() == [[1, 2]] and data.y_test.tolist() == [2]
    with pytest.raises(FedhenError, match="the table: class 'odd' of column 'ill' is only in the test table"):
        fedhen.from_table(ROWS, "ill", by="user", test={"age": [1], "weight": [2.0], "ill": ["odd"]})
    with pytest.raises(FedhenError, match="unknown column in test 'weight': choose from age, ill"):
        fedhen.from_table(ROWS, "ill", by="user", test={"age": [1], "ill": ["no"]})


def test_without_devices_the_data_is_split_by_the_settings() -> None:
    data = fedhen.from_table(ROWS, "weight", inputs=["age"], test_share=0)
    assert data.shards == () and data.x.tolist() == [[row[0]] for row in INPUTS]
    assert data.y.tolist() == ROWS["weight"] and data.y.dtype == torch.float32 and data.classes == 0


def test_columns_of_arrays_are_inputs_by_name() -> None:
    """As of `datasets.Dataset` with ids and an attention mask."""
    table = {"input_ids": [[1, 2], [3, 4]], "attention_mask": [[1, 0], [1, 1]], "label": [0, 1]}
    data = fedhen.from_table(table, "label", test_share=0)
    assert {name: tensor.tolist() for name, tensor in data.x.items()} == {n: table[n] for n in table if n != "label"}
    assert data.x["input_ids"].dtype == torch.int64
    cells = pandas.DataFrame({"x": [np.zeros((2, 3)), np.ones((2, 3))], "y": [0.0, 1.0]})
    assert fedhen.from_table(cells, "y", test_share=0).x.shape == (2, 2, 3)


@pytest.mark.parametrize(
    ("changes", "options", "says"),
    [
        ({}, {"target": "income"}, "unknown column in target 'income': choose from user, age, weight, ill"),
        ({}, {"by": "userid"}, "unknown column in by 'userid': did you mean 'user'?"),
        ({}, {"inputs": ["age", "size"]}, "unknown column in inputs 'size'"),
        ({}, {"inputs": ["age", "age"]}, "inputs names 'age' twice"),
        ({}, {"inputs": ["age", "ill"]}, "inputs names the target, 'ill'"),
        ({}, {"target": ""}, "which column is the target? choose data.target from user, age, weight, ill"),
        ({}, {"by": ""}, "column 'user' is text (like 'bob'): write it as numbers, or choose other columns"),
        ({"age": [1, 2, 3, 4, 5, ""]}, {}, "column 'age' has an empty cell"),
        ({"age": [1, 2, 3, 4, 5, "old"]}, {}, "column 'age' is text (like 'old')"),
        ({"weight": [1.0, 2, 3, 4, 5, np.nan]}, {}, "column 'weight' has empty cells or numbers that are not finite"),
        ({"user": ["a", "b", "", "d", "e", "f"]}, {}, "column 'user' is empty in row 3"),
        ({"ill": ["a", "b", "", "d", "e", "f"]}, {}, "column 'ill' has an empty cell"),
        ({"age": [1, 2, 3]}, {}, "its columns have unequal lengths: 'user' has 6, 'age' has 3"),
        ({"age": [[1], [2], [3], [4], [5], [6, 7]]}, {}, "column 'age' has rows of unequal lengths"),
        (
            {"split": ["test", "train", "test", "train", "train", "train"]},
            {},
            "device bob has no rows to train on: give it some, or remove it",
        ),
        ({name: [] for name in ROWS}, {}, "it has no rows"),
        ({"user": [[1]] * 6}, {}, "column 'user' has a cell of type list ([1]): write one number or text"),
        ({"user": [{}] * 6}, {}, "column 'user' has a cell of type dict ({}): write one number or text"),
        ({"ill": [["a"]] * 6}, {}, "column 'ill' has a cell of type list (['a']): write numbers, or text that names"),
        ({"ill": [{"a": 1}] * 6}, {}, "column 'ill' has a cell of type dict ({'a': 1}): write numbers, or text"),
        ({"ill": [object()] * 6}, {}, "column 'ill' has a cell of type object (<object object at 0x): write"),
        ({"age": [{1}] * 6}, {}, "column 'age' is text (like '{1}'): write it as numbers"),
        ({"split": [{}] * 6}, {}, "column 'split' is text (like '{}'): write it as numbers"),
        ({"age": 3}, {}, "column 'age' is a single value: pass an array"),
        ({"age": torch.eye(6).to_sparse()}, {}, "column 'age' is not an array: can't convert Sparse layout tensor"),
    ],
)
def test_a_table_that_does_not_fit_is_one_line(changes: dict[str, Any], options: dict[str, Any], says: str) -> None:
    with pytest.raises(FedhenError) as error:
        fedhen.from_table({**ROWS, **changes}, **{"target": "ill", "by": "user", **options})
    assert str(error.value).startswith(f"the table: {says}") and "\n" not in str(error.value)


def test_what_is_no_table_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(FedhenError, match="the table: it is int: pass a DataFrame, a path"):
        fedhen.from_table(3, "y")
    for content, says in (
        (b"a,b\n1,2\n3\n", "line 3 has 1 cells, and the first line names 2 columns"),
        (b"a,a\n1,2\n", "it has two columns 'a': rename one of them"),
        (b"\xff\xfe\x00", "it is not a CSV file in UTF-8"),
        (b"", "it has no rows"),
        (b"a,b\n", "it has no rows"),
    ):
        (tmp_path / "t.csv").write_bytes(content)
        with pytest.raises(FedhenError, match=says) as error:
            fedhen.from_table(tmp_path / "t.csv", "b")
        assert str(error.value).startswith(f"{tmp_path / 't.csv'}: ") and "\n" not in str(error.value)
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    with pytest.raises(FedhenError, match="it is not a Parquet file, or is damaged"):
        fedhen.from_table(str(tmp_path / "t.parquet"), "b")
    with pytest.raises(FedhenError, match="it cannot be read: No such file"):
        fedhen.from_table(tmp_path / "nowhere.csv", "b")


def test_cells_of_two_kinds_and_columns_of_one_name_are_one_line() -> None:
    with pytest.raises(FedhenError, match="column 'x' has numbers in some cells and lists in others"):
        fedhen.from_table(pandas.DataFrame({"x": [1, [2]], "y": [0, 1]}), "y")
    with pytest.raises(FedhenError, match="the table: it has two columns 'x': rename one of them"):
        fedhen.from_table(pandas.DataFrame([[1, 2, 0], [3, 4, 1]], columns=["x", "x", "y"]), "y")


def test_a_table_that_does_not_fit_half_of_the_free_memory_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """A file of four terabytes, of which all but the first rows is a hole on the disk."""
    path = write_csv(tmp_path / "people.csv", {name: cells * 40_000 for name, cells in ROWS.items()})
    with path.open("r+b") as file:
        file.truncate(1 << 42)
    with pytest.raises(
        FedhenError, match=r"people.csv: it needs about \d+\.\d GB, and [\d.]+ GB of memory are free: keep"
    ):
        fedhen.from_table(path, "ill", by="user")


def test_the_memory_of_a_table_is_estimated(tmp_path: Path) -> None:
    """Text in memory as Python counts it, Parquet's columns as pandas does."""
    names = [f"a person called {number}" for number in range(5000)]
    table: dict[str, list[Any]] = {
        "name": names,
        "size": [number / 7 for number in range(5000)],
        "age": [number % 90 for number in range(5000)],
    }
    csv_path, parquet = write_csv(tmp_path / "t.csv", table), tmp_path / "t.parquet"
    tracemalloc.start()
    fedhen.from_table(csv_path, "age", inputs=["size"])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.5 * peak < estimate_csv(csv_path) < 2 * peak
    frame = pandas.DataFrame(table)
    frame.to_parquet(parquet)
    assert frame.memory_usage(deep=True).sum() <= estimate_parquet(parquet) < 4 * frame.memory_usage(deep=True).sum()


def test_without_pandas_only_parquet_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = forms(tmp_path)
    for name in ("pandas", "pyarrow"):
        monkeypatch.setitem(sys.modules, name, None)
    assert len(fedhen.from_table(table["csv"], "ill", by="user").shards) == 3
    with pytest.raises(FedhenError, match=r"needs pandas and pyarrow: pip install 'fedhen\[tables\]'"):
        fedhen.from_table(table["parquet"], "ill", by="user")


def test_settings_read_a_table_as_python_does(tmp_path: Path) -> None:
    path = str(write_csv(tmp_path / "people.csv", ROWS))
    settings = DataConfig(name=path, by="user", target="ill", inputs=("age",), test_share=0.4)
    data = load_data(settings, tmp_path, seed=3)
    same = fedhen.from_table(path, "ill", by="user", inputs=["age"], test_share=0.4, seed=3)
    assert torch.equal(data.x, same.x) and torch.equal(data.x_test, same.x_test) and len(data.y_test) == 2
    some = load_data(DataConfig(name=path, by="user", target="ill", test_share=0, fraction=0.8), tmp_path, seed=3)
    with pytest.raises(FedhenError, match=r"none of device \d's examples is left: keep more \(data.fraction, "):
        load_data(DataConfig(name=path, by="user", target="ill", test_share=0, fraction=0.1), tmp_path, seed=3)
    assert len(some.y) == 5 and sorted(np.concatenate(some.shards).tolist()) == list(range(5))
    whole = fedhen.from_table(path, "ill", by="user", test_share=0)
    for kept, shard in zip(some.shards, whole.shards, strict=True):
        assert {*map(tuple, some.x[kept].tolist())} <= {*map(tuple, whole.x[shard].tolist())}
    with pytest.raises(FedhenError, match=r"which column is the target"):
        load_data(DataConfig(name=path), tmp_path)
    with pytest.raises(FedhenError, match=r"data\.size is for folders of images"):
        load_data(DataConfig(name=path, target="ill", size=3), tmp_path)
    with pytest.raises(FedhenError, match=r"data\.by is for tables and \.npz files, and the data is digits: remove it"):
        load_data(DataConfig(by="user"), tmp_path)


# Arrays with a device for each example


def npz(folder: Path, device: object, name: str = "device") -> Path:
    x, y = np.arange(12.0).reshape(6, 2), np.array([0, 1, 0, 1, 0, 1])
    np.savez(folder / "own.npz", x_train=x, y_train=y, x_test=x[:2], y_test=y[:2], **{name: np.array(device)})  # type: ignore[arg-type]
    return folder / "own.npz"


@pytest.mark.parametrize("device", [[7, 7, 3, 3, 3, 9], ["b", "b", "a", "a", "a", "c"]])
def test_an_npz_file_may_name_each_examples_device(tmp_path: Path, device: list[Any]) -> None:
    expected = [[2, 3, 4], [0, 1], [5]]
    assert [s.tolist() for s in read_own_data(npz(tmp_path, device)).shards] == expected
    named = DataConfig(name=str(npz(tmp_path, device, "who")), by="who")
    assert [s.tolist() for s in load_data(named, tmp_path).shards] == expected


@pytest.mark.parametrize(
    ("device", "says"),
    [
        ([1, 2, 3], "device must be whole numbers or text of shape (6,), like y_train, found int64 of shape (3,)"),
        ([0.5] * 6, "device must be whole numbers or text of shape (6,), like y_train, found float64"),
        ([[1, 2]] * 6, "found int64 of shape (6, 2)"),
    ],
)
def test_devices_of_an_npz_file_that_do_not_fit_are_one_line(tmp_path: Path, device: Any, says: str) -> None:
    path = npz(tmp_path, device)
    with pytest.raises(FedhenError) as error:
        read_own_data(path)
    assert says in str(error.value) and str(error.value).startswith(f"{path}: ") and "\n" not in str(error.value)
    with pytest.raises(FedhenError, match="lacks user: it needs x_train, y_train, x_test, y_test, user"):
        read_own_data(path, DataConfig(by="user"))


def test_decimals_keep_what_is_behind_the_point_and_owners_have_one_order() -> None:
    data = fedhen.from_table(
        {
            "x": np.array([Decimal("1.5"), Decimal("2.75")], object),
            "y": np.array([0, 1]),
            "who": np.array(["nan", "1"]),
        },
        "y",
        by="who",
        test_share=0.0,
    )
    assert data.x[:, 0].tolist() == [1.5, 2.75]
    assert [shard.tolist() for shard in data.shards] == [[1], [0]], "by letter, since nan has no place among numbers"
    with pytest.raises(FedhenError, match="test_share is 2: it must be at least 0 and below 1"):
        fedhen.from_table({"x": np.arange(4.0), "y": np.arange(4)}, "y", test_share=2)


def test_columns_are_standardised_over_the_training_rows() -> None:
    """By numpy, over the rows whose split is train; the column that never changes is only shifted."""
    rows: dict[str, list[Any]] = {
        **{"age": [20, 40, 60, 1000], "height": [1.5, 1.7, 2.1, 9.0], "always": [7, 7, 7, 8], "ill": [0, 1, 0, 1]},
        "split": ["train", "train", "train", "test"],
    }
    with pytest.warns(UserWarning, match="column 'always' has one number in all training rows"):
        data = fedhen.FederatedData.from_table(rows, target="ill", standardise=True)
    train = np.array([rows["age"][:3], rows["height"][:3]]).T
    assert data.normalisation is not None
    assert data.normalisation.mean == pytest.approx([*train.mean(0), 7])
    assert data.normalisation.std == pytest.approx([*train.std(0), 1])
    assert data.x.tolist()[0] == pytest.approx([20, 1.5, 7]), "the rows themselves stay raw"
    about = data.describe()
    assert about is not None
    (given,) = about.inputs
    fed = given.feed(data.x, torch.float32).numpy()
    assert fed[:, :2] == pytest.approx((train - train.mean(0)) / train.std(0), abs=1e-6) and not fed[:, 2].any()


@pytest.mark.filterwarnings("error")
def test_columns_of_large_numbers_are_named() -> None:
    with pytest.warns(UserWarning, match=r"large numbers, here age \(up to 51\), weight \(up to 81\.5\): pass stand"):
        fedhen.FederatedData.from_table(ROWS, target="ill", by="user", test_share=0.0)
    fedhen.FederatedData.from_table(ROWS, target="ill", by="user", standardise=True)
    priced = {"a": [0.1, 0.2, 0.3], "price": [200000.5, 210000.0, 190000.0]}
    with pytest.warns(
        UserWarning, match=r"slowly to predict large numbers, here price \(up to 2\.1e\+05\): use a larger"
    ):
        fedhen.FederatedData.from_table(priced, target="price")
    small = {**ROWS, "age": [0.5] * 6, "weight": [30.0] * 6}
    fedhen.FederatedData.from_table(small, target="ill", by="user")


def test_arrays_in_cells_are_not_standardised() -> None:
    rows = {"ids": [[1, 2], [3, 4], [5, 6]], "y": [0, 1, 0]}
    with pytest.raises(FedhenError, match="standardise is for columns of numbers, and some have arrays"):
        fedhen.FederatedData.from_table(rows, target="y", standardise=True)
