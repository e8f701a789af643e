"""The checksum of a data set tells data sets apart, and not seeds or splits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedhen
from fedhen.config.data_settings import DataConfig
from fedhen.data.dataset import Data
from fedhen.data.digests import name_data_set
from fedhen.data.sources import load_data

ROWS = {"age": list(range(20)), "user": [f"u{n % 4}" for n in range(20)], "ill": [n % 3 for n in range(20)]}


def of(config: DataConfig, seed: int = 0) -> str:
    return name_data_set(load_data(config, Path(), seed))


def test_every_part_of_the_data_counts_and_the_split_does_not() -> None:
    x, y = torch.arange(12.0).reshape(6, 2), torch.tensor([0, 1, 0, 1, 0, 1])
    data = fedhen.arrays(x[:4], y[:4], x[4:], y[4:])
    changed: list[Data] = [
        fedhen.arrays(x[:4] + 1, y[:4], x[4:], y[4:]),
        fedhen.arrays(x[:4], 1 - y[:4], x[4:], y[4:]),
        fedhen.arrays(x[:4], y[:4], x[4:] + 1, y[4:]),
        fedhen.arrays(x[:4], y[:4], x[4:], 1 - y[4:]),
        fedhen.arrays(x[:4], y[:4]),
        fedhen.arrays(x[:4].double(), y[:4], x[4:].double(), y[4:]),
    ]
    assert len({name_data_set(each) for each in (data, *changed)}) == 7
    assert name_data_set(data.split([np.array([0, 1]), np.array([2, 3])])) == name_data_set(data)
    assert len(name_data_set(data)) == 64


def test_what_the_seed_draws_from_the_same_data_has_its_checksum(tmp_path: Path) -> None:
    digits = DataConfig(name="digits")
    half, few = replace(digits, fraction=0.5), replace(digits, limit=100)
    assert len(load_data(half, tmp_path, seed=0).y) < len(load_data(digits, tmp_path).y)
    assert of(half, seed=0) == of(half, seed=1) == of(digits)
    assert of(few) == of(replace(few, fraction=0.5), seed=1) != of(digits)


@pytest.mark.parametrize("settings", [{}, {"by": "user"}, {"by": "user", "limit": 8}])
def test_rows_held_out_by_the_seed_have_the_checksum_of_their_table(tmp_path: Path, settings: dict[str, Any]) -> None:
    path = tmp_path / "people.csv"
    lines = [",".join(ROWS), *(",".join(map(str, row)) for row in zip(*ROWS.values(), strict=True))]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    config = DataConfig(name=str(path), target="ill", inputs=("age",), test_share=0.3, **settings)
    one, two = (load_data(config, tmp_path, seed) for seed in (0, 1))
    assert one.x_test.tolist() != two.x_test.tolist()
    assert name_data_set(one) == name_data_set(two)
    path.write_text("\n".join([*lines[:-1], "17,u0,1"]) + "\n", encoding="utf-8")
    assert of(config) != name_data_set(one)


def test_rows_that_the_table_itself_holds_out_are_test_data() -> None:
    def digest(split: list[str], seed: int = 0) -> str:
        return name_data_set(fedhen.from_table({**ROWS, "split": split}, "ill", by="user", seed=seed))

    first, other = ["test"] * 8 + ["train"] * 12, ["train"] * 12 + ["test"] * 8
    assert digest(first) == digest(first, seed=1) != digest(other)
