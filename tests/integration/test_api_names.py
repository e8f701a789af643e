"""Names of the API: what there is, old names, each function called twice, and errors in the words of Python."""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Callable
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import fedhen
from fedhen.config.keywords import TrainSettings
from fedhen.config.settings import Config
from support.points import SMALL, TINY, family, points

ROOT = Path(__file__).parents[2]


def test_dir_lists_all_names_but_the_old_ones() -> None:
    listed = dir(fedhen)
    assert {"train", "run", "compare", "rounds", "open_run", "FederatedData", "TrainingConfig", "Classification"} <= {
        *listed
    }
    assert all(getattr(fedhen, name) is not None for name in [*listed, *fedhen.__all__])
    assert {*fedhen.__all__} - {*listed} == {
        *("Data", "Trained", "UserError", "arrays", "from_datasets", "from_table", "per_device")
    }


def test_every_section_of_the_settings_is_importable_from_fedhen() -> None:
    for section in vars(Config()).values():
        if is_dataclass(section):
            assert getattr(fedhen, type(section).__name__) is type(section)
            assert type(section).__name__ in dir(fedhen)


def test_what_the_docs_use_is_importable_from_fedhen() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for block in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL):
            listed = ",".join(re.findall(r"^from fedhen import (.*)", block, flags=re.MULTILINE))
            for name in re.findall(r"\bfedhen\.(\w+)", block) + re.findall(r"\w+", listed):
                assert name in dir(fedhen), f"{page.name}: fedhen.{name}"


def test_no_public_function_shares_the_name_of_a_submodule() -> None:
    functions = [name for name in fedhen.__all__ if inspect.isroutine(getattr(fedhen, name))]
    assert {"train", "run", "resume", "rounds", "compare", "load", "evaluate", "report", "nest"} <= {*functions}
    assert [name for name in functions if importlib.util.find_spec(f"fedhen.{name}")] == []


@pytest.mark.slow
def test_each_public_function_can_be_called_twice(tmp_path: Path) -> None:
    """Also that none has become a module in the meantime."""
    data, x, y = points(), torch.randn(6, 6), torch.arange(6) % 3
    for place in (tmp_path / "a", tmp_path / "b"):
        run = fedhen.train(family(), data, run_dir=place / "run", **SMALL)
        assert run.accuracy == fedhen.resume(place / "run", family=family(), data=data, accelerator="cpu").accuracy
        assert run.accuracy == fedhen.open_run(place / "run").accuracy
        assert run.accuracy == fedhen.evaluate(place / "run", family=family(), data=data, accelerator="cpu")
        assert isinstance(fedhen.load(place / "run", "simple", family=family()), torch.nn.Module)
        assert "Rounds to target" in fedhen.report(place / "run", out=place / "report")
        assert len([*fedhen.rounds(family(), data, **SMALL)]) == 3
        assert fedhen.run("digits", **TINY).rounds[-1]["round"] == 2
        assert len(fedhen.compare("digits", ["fedhen"], **TINY).runs) == 1
        layers = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 3))
        assert fedhen.nest(layers, {"simple": "0", "complex": None}, sample=x, outputs=3).tiers == ("simple", "complex")
        assert fedhen.make_mean_metric("m", lambda output, y: y).name == "m"
        made = [fedhen.arrays(x, y), fedhen.per_device([(x, y)]), fedhen.from_datasets(TensorDataset(x, y))]
        made.append(fedhen.from_table({"x": x[:, 0].numpy(), "y": y.numpy()}, "y", test_share=0))
        assert [len(each.y) for each in made] == [6] * 4


def test_old_names_mean_the_new_ones(tmp_path: Path) -> None:
    assert fedhen.Data is fedhen.FederatedData and fedhen.Trained is fedhen.Run
    assert fedhen.UserError is fedhen.FedhenError
    x, y = np.zeros((4, 2)), np.arange(4) % 2
    old, new = fedhen.arrays(x, y), fedhen.FederatedData.from_arrays(x, y)
    assert torch.equal(old.x, new.x) and torch.equal(old.y, new.y)
    assert len(fedhen.FederatedData.from_devices([(x, y)] * 3).shards) == len(fedhen.per_device([(x, y)] * 3).shards)
    first = fedhen.train(family(), points(), out=tmp_path, **SMALL)
    second = fedhen.train(family(), points(), out=tmp_path, force=True, **{**SMALL, "rounds": 1})
    assert first.folder == second.folder == tmp_path and len(fedhen.open_run(tmp_path).rounds) == 1


def test_settings_for_editors_are_those_of_the_configuration() -> None:
    """Method and task are arguments, and a method's file follows from the method."""
    named = {*get_type_hints(TrainSettings)} - {"out", "force"}
    assert named == {*get_type_hints(Config)} - {"method", "method_file", "task"}


@pytest.mark.parametrize(
    ("kind", "act", "says"),
    [
        (fedhen.ConfigError, lambda: fedhen.train(None, points()), "family is None: pass a fedhen.Family"),  # type: ignore[arg-type]
        (fedhen.DataError, lambda: fedhen.train(family(), None), "data is None: pass fedhen.FederatedData"),  # type: ignore[arg-type]
        (fedhen.ConfigError, lambda: fedhen.run("digitz"), "did you mean 'digits'"),
        (fedhen.ConfigError, lambda: fedhen.run(None), "the recipe is None: pass a name"),  # type: ignore[arg-type]
        (fedhen.ConfigError, lambda: fedhen.run("digits", 3), "method is of type int"),  # type: ignore[arg-type]
        (fedhen.ConfigError, lambda: fedhen.run("digits", accelerator="cuda"), "choose cpu or auto as the accelerator"),
        (fedhen.DataError, lambda: fedhen.run("cifar10-iid", data_dir="nowhere"), "from Python with data_dir="),
        (fedhen.ConfigError, lambda: fedhen.compare("digits", ("fedhen", "fedhen")), "each method once"),
        (fedhen.ConfigError, lambda: fedhen.compare("digits", seeds=(0, 0)), "each seed once"),
        (fedhen.ConfigError, lambda: fedhen.train(family(), points(), training=3), "training must be a table"),  # type: ignore[arg-type]
        (fedhen.CheckpointError, lambda: fedhen.resume("nowhere"), "not a run folder"),
        (fedhen.CheckpointError, lambda: fedhen.open_run("nowhere"), "not a run folder"),
        (fedhen.CheckpointError, lambda: fedhen.report("nowhere"), "not a run folder"),
    ],
)
def test_errors_have_a_class_and_one_line(kind: type[Exception], act: Callable[[], Any], says: str) -> None:
    if "cuda" in says and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(kind, match=re.escape(says)) as error:
        act()
    assert type(error.value) is kind and isinstance(error.value, fedhen.FedhenError | ValueError)
    assert "\n" not in str(error.value) and "--force" not in str(error.value)


def test_errors_of_a_fleet_have_their_class(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    from fedhen.fleet.project import open_project

    with pytest.raises(fedhen.FleetError):
        open_project(tmp_path)


def test_a_run_is_replaced_only_if_asked(tmp_path: Path) -> None:
    """The message names Python's arguments."""
    fedhen.train(family(), points(), run_dir=tmp_path / "run", **SMALL)
    with pytest.raises(fedhen.ConfigError) as error:
        fedhen.train(family(), points(), run_dir=tmp_path / "run", **SMALL)
    assert str(error.value) == (
        f"{tmp_path / 'run'} is not empty: choose another run_dir, or overwrite=True to replace the runs in it"
    )
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "text").write_text("mine")
    with pytest.raises(fedhen.ConfigError, match="overwrite=True replaces runs only, choose another run_dir"):
        fedhen.train(family(), points(), run_dir=tmp_path / "thesis", overwrite=True, **SMALL)
    run = fedhen.train(family(), points(), run_dir=tmp_path / "run", overwrite=True, **{**SMALL, "rounds": 1})
    assert len(run.rounds) == 1
