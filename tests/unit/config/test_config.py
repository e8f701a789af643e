"""One configuration: TOML there and back, and one-line errors at the door."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedhen.config import toml
from fedhen.config.recipes import RECIPES, load_recipe, read_recipe_file
from fedhen.config.settings import Config
from fedhen.config.validation import RENAMED, flatten_config, from_mapping, list_settings
from fedhen.errors import FedhenError
from fedhen.experiment.resume import FREE, check_same_settings, flatten_settings
from fedhen.runs.reader import read_run


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("comments", [False, True])
def test_recipes_survive_toml(name: str, comments: bool) -> None:
    config = load_recipe(name)
    assert from_mapping(tomllib.loads(toml.to_toml(config, comments=comments))) == config


@given(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    st.floats(1e-300, 1e300),
    st.lists(st.integers(1, 9), max_size=3),
)
def test_any_value_survives_toml(text: str, number: float, numbers: list[int]) -> None:
    config = from_mapping({"data": {"name": text}, "training": {"lr": number}, "model": {"widths": numbers}})
    assert from_mapping(tomllib.loads(toml.to_toml(config))) == config


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("training.lrr=0.1", "unknown setting 'training.lrr': did you mean 'training.lr'?"),
        ("trainin.lr=0.1", "unknown setting 'trainin': did you mean 'training'?"),
        ("training.lr=fast", "training.lr must be a number, found a string 'fast'"),
        ("training.lr=0", "training.lr = 0.0 is too small: it must be above 0"),
        ("training.lr=nan", "training.lr must be a finite number"),
        ("training.epochs=2.5", "training.epochs must be a whole number"),
        ("training.epochs=true", "training.epochs must be a whole number"),
        ("rounds=0", "rounds = 0 is too small: it must be at least 1"),
        ("devices.active=500", "devices.active=500 is more than devices.number=100"),
        ("devices.number=1", "devices.active=10 is more than devices.number=1"),
        ("split.kind=iidd", "unknown value of split.kind 'iidd': did you mean 'iid'?"),
        ("model.widths=16", "model.widths must be a list, found a whole number"),
        ("model.exit_mix=half", "model.exit_mix must be a number or 'uniform', found 'half'"),
        ("model=3", "model must be a table, found a whole number"),
        ("tiers.simple=0.9", "the shares in tiers add up to 1.4"),
        ("tiers.simple=-1", "every tier a share above 0"),
        ("targets.simpel=[90]", "unknown tier in targets 'simpel': did you mean 'simple'?"),
        ("training.lr", "write section.key=value"),
        ("=3", "write section.key=value"),
        ("training.lr.x=3", "training.lr must be a number, found a table"),
        ("lr=0.1", "unknown setting 'lr': did you mean 'training.lr'?"),
        ("recipe=../evil", "'../evil' cannot be a name here"),
        ('tiers={"a/b"=1.0}', "'a/b' cannot be a name here"),
        ("targets.simple=[0.9, 120]", "targets.simple must be percents"),
        ("data.fraction=1.5", "data.fraction = 1.5 is too large: it must be at most 1"),
        ("training.beta1=1", "training.beta1 = 1.0 is too large: it must be below 1"),
        (
            "training.beta1=0.8",
            "training.beta1 has no effect with training.optimizer=sgd: "
            "set it to 0.9, or set training.optimizer to adam or adamw",
        ),
        ("training.optimizer=adagrad", "unknown value of training.optimizer 'adagrad'"),
        (
            "training.optimizer_state=device",
            "has nothing to keep: set training.momentum, or another training.optimizer",
        ),
        ("server.tau=0.1", "set it to 0.001, or set server.optimizer to adagrad or adam or yogi"),
        ("server.lr=0.5", "server.lr has no effect with server.optimizer=none: set it to 1.0"),
        ("server.lr=0", "server.lr = 0.0 is too small: it must be above 0"),
    ],
)
def test_wrong_settings_get_one_line_that_names_the_key(assignment: str, message: str) -> None:
    with pytest.raises(FedhenError) as error:
        toml.apply_settings(Config(), [assignment])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (
            ["training.optimizer=adam", "training.momentum=0.9"],
            "training.momentum has no effect with training.optimizer",
        ),
        (
            ["server.optimizer=momentum", "server.beta2=0.5"],
            "server.beta2 has no effect with server.optimizer=momentum",
        ),
        (["training.optimizer=adamw", "local.name=scaffold"], "set it to sgd, or use local.name=feddyn"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_settings_that_do_not_fit_together_get_one_line(assignments: list[str], message: str) -> None:
    with pytest.raises(FedhenError) as error:
        toml.apply_settings(Config(), assignments)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_settings_are_toml_values_and_bare_words() -> None:
    config = toml.apply_settings(
        Config(),
        ["training.lr=0.05", "split.kind=iid", 'data.name="my data"', "model.widths=[1, 2]", "model.final_norm=true"],
    )
    assert config.training.lr == 0.05
    assert config.data.name == "my data"
    assert config.model.widths == (1, 2)
    assert config.model.final_norm is True


def test_a_table_given_whole_replaces_and_a_key_of_it_changes() -> None:
    assert toml.apply_settings(Config(), ["tiers={only=1.0}"]).tiers == {"only": 1.0}
    changed = toml.apply_settings(Config(), ["tiers.simple=0.2", "tiers.complex=0.8", "model.exits.simple=1"])
    assert changed.tiers == {"simple": 0.2, "complex": 0.8}
    assert changed.model.exits == {"simple": 1, "complex": 4}


def test_numpys_numbers_are_numbers() -> None:
    values = {"lr": np.float64(0.05), "epochs": np.int64(2), "clip": np.float32(0.5)}
    config = from_mapping({"training": values})
    assert (config.training.lr, config.training.epochs, config.training.clip) == (0.05, 2, 0.5)
    assert from_mapping(tomllib.loads(toml.to_toml(config))) == config


def test_a_config_file_starts_from_the_recipe_that_it_names(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('recipe = "digits"\nmethod = "noside"\n[training]\nlr = 0.05\n')
    expected = dataclasses.replace(load_recipe("digits"), method="noside")
    expected = toml.apply_settings(expected, ["training.lr=0.05"])
    assert read_recipe_file(path) == expected


def test_tiers_are_dealt_to_the_devices_in_order() -> None:
    """Shares 0.2, 0.3, 0.5 of 10 devices are 2, 3 and 5 of them; of 7 devices the cuts 1.4 and 3.5 round to 1 and 4."""
    tiers = {"tiers": {"s": 0.2, "m": 0.3, "l": 0.5}}
    assert from_mapping({**tiers, "devices": {"number": 10}}).tier_sizes() == {"s": 2, "m": 3, "l": 5}
    assert from_mapping({**tiers, "devices": {"number": 7, "active": 1}}).tier_sizes() == {"s": 1, "m": 3, "l": 3}
    with pytest.raises(FedhenError, match="leaves a tier without a device"):
        from_mapping({**tiers, "devices": {"number": 2, "active": 1}})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rounds = ", "is not TOML"),
        ("rounds = 'ten'", "rounds must be a whole number, found a string 'ten'"),
        ("[trainig]\nlr = 1", "unknown setting 'trainig': did you mean 'training'?"),
        ("\x00", "is not TOML"),
    ],
)
def test_wrong_files_get_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(FedhenError) as error:
        toml.read_toml(path)
    assert message in str(error.value)
    with pytest.raises(FedhenError, match="cannot read"):
        toml.read_toml(tmp_path / "missing.toml")


def test_every_setting_says_what_it_means() -> None:
    assert all(item.metadata["doc"] for _, item in list_settings())


CHANGED: list[tuple[str, Any]] = [
    ("objective.weights", {"simple": 0.5}),
    ("server.untrained", "skip"),
    ("server.label_rows", True),
    ("runtime.rows", "disk"),
    ("runtime.rows_dir", "elsewhere"),
    ("fleet.deadline", 7.0),
    ("fleet.enough", 3),
    ("fleet.extra", 2),
    ("fleet.wait", 9.0),
]
"""Every renamed setting by its old name, with a value that is not its default."""


@pytest.mark.parametrize(("old", "value"), CHANGED)
def test_an_old_name_is_read_from_files_and_manifests(old: str, value: Any, tmp_path: Path) -> None:
    """The file says the same with the old name and with the new one: it is read, compared and resumed alike."""
    texts = [_text({name: value}) for name in (old, RENAMED[old])]
    path = tmp_path / "config.toml"
    for text in texts:
        path.write_text(text)
        config = toml.read_toml(path)
        section, name = RENAMED[old].split(".")
        assert getattr(getattr(config, section), name) == value
        assert toml.parse_toml(text) == config == toml.apply_settings(Config(), [f"{RENAMED[old]}={_value(value)}"])
        assert flatten_config(tomllib.loads(text)) == flatten_settings(config)
        path.write_text('recipe = "x"\nmethod = "fedhen"\nseed = 0\nrounds = 1\n' + text + "\n[tiers]\nonly = 1.0\n")
        assert read_run(tmp_path).config[section] == {name: value}
    before = flatten_settings(config)
    before[old] = before.pop(RENAMED[old])
    check_same_settings(config, before, "the checkpoint")
    if RENAMED[old] not in FREE:
        with pytest.raises(FedhenError, match=f"has another configuration: {RENAMED[old]} is .*, was "):
            check_same_settings(Config(), before, "the checkpoint")


@pytest.mark.parametrize(("old", "value"), CHANGED)
def test_an_old_name_on_the_command_line_or_in_python_names_the_new_one(old: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(FedhenError, match=rf"^{old} is now {RENAMED[old]}$"):
        toml.apply_settings(Config(), [f"{old}={_value(value)}"])
    section, name = old.split(".")
    with pytest.raises(FedhenError, match=rf"^{old} is now {RENAMED[old]}$"):
        from_mapping({section: {name: value}})
    # A file that has both says two things.
    path = tmp_path / "both.toml"
    path.write_text(_text({old: value, RENAMED[old]: value}))
    with pytest.raises(FedhenError, match=f"{old} is now {RENAMED[old]}$"):
        toml.read_toml(path)


def test_every_renamed_setting_is_tried() -> None:
    assert [old for old, _ in CHANGED] == list(RENAMED)
    assert set(RENAMED.values()) <= {key for key, _ in list_settings()}


def _text(settings: Mapping[str, Any]) -> str:
    return "".join(f"{key} = {_value(value)}\n" for key, value in settings.items())


def _value(value: Any) -> str:
    return "{simple = 0.5}" if isinstance(value, dict) else json.dumps(value)
