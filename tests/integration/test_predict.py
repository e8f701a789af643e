"""Saved models take raw inputs: `predict` scores as the run did, from each kind of data, and says what does not fit."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fedhen
from fedhen import FedhenError
from fedhen.config.recipes import load_recipe
from fedhen.data.digits import load_digits
from fedhen.data.spec import DataSpec, InputSpec
from fedhen.fileio.untrusted import PARSE_ERRORS
from fedhen.models.loaded_model import LoadedModel
from fedhen.models.model_card import read_card
from support.predictions import SMALL, Net, command, family, last_accuracy, share_right
from support.tiny import TINY_OPTIONS


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits") / "run"
    command("run", "digits", "--rounds", "3", "--out", str(folder), *TINY_OPTIONS, "--set", "data.limit=1400")
    return folder


def test_raw_pixels_of_the_digits_score_exactly_what_the_run_recorded(digits: Path) -> None:
    data = load_digits()
    names = [str(int(label)) for label in data.y_test]
    for kind, tiers in last_accuracy(digits).items():
        for tier, accuracy in tiers.items():
            assert share_right(fedhen.load(digits, tier, kind), data.x_test, names) == accuracy


def test_predictions_are_the_softmax_of_the_exit(digits: Path) -> None:
    """Computed here from the logits of pixels divided by 16."""
    model, pixels = fedhen.load(digits, "complex"), load_digits().x_test[:7]
    logits = dict(zip(("simple", "complex"), model(pixels.float() / 16), strict=True))
    for exit, expected in logits.items():
        found = model.predict(pixels, exit=exit, batch_size=3)
        shares = expected.double().softmax(1).tolist()
        for prediction, row in zip(found, shares, strict=True):
            assert list(prediction.probabilities) == list("0123456789") and prediction.exit == exit
            assert [*prediction.probabilities.values()] == pytest.approx(row, rel=1e-5)
            assert prediction.probability == max(prediction.probabilities.values())
            assert prediction.probabilities[prediction.value] == prediction.probability
    assert model.predict(pixels)[0].exit == "complex", "the last one by default"
    assert repr(model.predict(pixels[0])[0]).count("0.") == 1, "the repr is short"


def test_images_may_have_their_channels_first_last_or_nowhere(digits: Path) -> None:
    model, pixels = fedhen.load(digits, "simple"), load_digits().x_test[:3]
    expected = [each.value for each in model.predict(pixels)]
    forms = [pixels[:, 0], pixels.permute(0, 2, 3, 1), pixels.numpy(), pixels.tolist(), [*pixels], pixels.long()]
    images = [Image.fromarray(each.numpy()) for each in pixels[:, 0]]
    for raw in [*forms, images, pixels[:, 0].numpy().astype(np.uint16)]:
        assert [each.value for each in model.predict(raw)] == expected
    assert [model.predict(each)[0].value for each in (pixels[0], pixels[1, 0], images[2])] == expected


WRONG: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "normalised": (lambda x: x / 16, "float32: pass pixels as whole numbers from 0 to 16, not normalised"),
    "NaN": (lambda x: x * torch.nan, "is float32"),
    "bright": (lambda x: x * 16, "has pixels from 0 to 240: the model's are from 0 to 16"),
    "negative": (lambda x: x.long() - 1, "pixels from -1 to"),
    "true or false": (lambda x: x > 3, "is bool"),
    "large": (lambda x: torch.zeros(2, 1, 28, 28, dtype=torch.uint8), r"has shape \(2, 1, 28, 28\): an image has"),
    "coloured": (lambda x: x.expand(-1, 3, -1, -1), r"has shape \(2, 3, 8, 8\)"),
    "no images": (lambda x: x[:0], "there are no inputs"),
    "an empty list": (lambda x: [], "there are no inputs"),
    "nothing": (lambda x: None, "not an array of numbers"),
    "a mapping": (lambda x: {"x": x}, "not an array of numbers"),
    "ragged": (lambda x: [[1], [2, 3]], "cannot be read"),
    "words": (lambda x: np.array([["a"]]), "not an array of numbers of one shape"),
    "a large image": (lambda x: Image.new("L", (9, 8)), "the image has 9×8 pixels, and the model's images 8×8"),
    "a bright image": (lambda x: Image.new("L", (8, 8), 200), "pixels up to 200: the model's are from 0 to 16"),
    "a deep image": (lambda x: Image.new("I", (8, 8)), "more than 8 bits per pixel"),
    "no file": (lambda x: "missing.png", "missing.png cannot be read"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_inputs_are_one_line(digits: Path, name: str) -> None:
    change, says = WRONG[name]
    with pytest.raises(FedhenError, match=says) as error:
        fedhen.load(digits, "simple").predict(change(load_digits().x_test[:2]))
    assert "\n" not in str(error.value)


def test_wrong_arguments_are_one_line(digits: Path) -> None:
    model = fedhen.load(digits, "simple")
    with pytest.raises(FedhenError, match="unknown exit 'complex'"):
        model.predict(load_digits().x_test, exit="complex")
    with pytest.raises(FedhenError, match="batch_size is 0"):
        model.predict(load_digits().x_test, batch_size=0)


def test_a_loaded_model_is_the_module(tmp_path: Path) -> None:
    """Its weights, modes, types and copies are those of the module, which may have a method of the same name."""
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    data = fedhen.arrays(x, (x[:, 0] > 0).long(), class_names=["low", "high"])
    run = fedhen.train(family(3, 2), data, out=tmp_path / "run", **SMALL)
    model, plain = fedhen.load(tmp_path / "run", "complex", family=family(3, 2)), Net(3, 2, True)
    assert isinstance(model, nn.Module) and not model.training
    plain.load_state_dict(model.state_dict())
    assert list(model.state_dict()) == list(plain.state_dict()) == [name for name, _ in model.named_parameters()]
    assert torch.equal(model(x)[-1], plain(x)[-1]) and model.exit is model._loaded[0].exit
    expected = [each.value for each in model.predict(x)]
    assert expected == [("low", "high")[k] for k in plain(x)[-1].argmax(1)]
    assert [each.value for each in run.model("complex").predict(x)] == expected
    double = copy.deepcopy(model).double().train()
    assert next(model.parameters()).dtype == torch.float32 and double(x.double())[0].dtype == torch.float64
    assert [each.value for each in double.predict(x)] == expected and double.training, "its mode is as before"
    with torch.no_grad():
        model.top.bias.copy_(torch.tensor([100.0, 0.0]))
    assert {each.value for each in model.predict(x)} == {"low"}, "weights that change count"


def about_of(path: Path) -> dict[str, Any]:
    with safe_open(path, framework="pt") as file:
        found: dict[str, Any] = json.loads(file.metadata()["fedhen"])
    return found


@pytest.fixture
def own(digits: Path) -> Any:
    """The path of a model file that may be changed."""
    path = digits / "models" / "server-simple.safetensors"
    good = path.read_bytes()
    yield path
    path.write_bytes(good)


def test_files_of_earlier_versions_load_and_predict_says_what_is_missing(digits: Path, own: Path) -> None:
    old = {key: value for key, value in about_of(own).items() if key not in ("task", "data")}
    save_file(load_file(own), own, metadata={"fedhen": json.dumps(old)})
    model = fedhen.load(digits, "simple")
    assert model(torch.zeros(1, 1, 8, 8))[0].shape == (1, 10)
    with pytest.raises(FedhenError, match=r"does not say what its raw inputs are.*call it with inputs prepared"):
        model.predict(load_digits().x_test)


INPUT = ("data", "inputs", 0)
DAMAGES: dict[str, tuple[tuple[Any, ...], Any]] = {
    "data": (("data",), 3),
    "no inputs": (("data", "inputs"), []),
    "inputs of words": (("data", "inputs"), "abc"),
    "many inputs": (("data", "inputs"), [{}] * 1000),
    "another shape": ((*INPUT, "shape"), [1, 9, 9]),
    "a giant shape": ((*INPUT, "shape"), [1, 10**12, 8]),
    "a giant image": ((*INPUT, "shape"), [1, 10**9, 8]),
    "a deep shape": ((*INPUT, "shape"), [1] * 100),
    "a negative shape": ((*INPUT, "shape"), [-1, 8, 8]),
    "an unknown type": ((*INPUT, "dtype"), "complex64"),
    "a type of code": ((*INPUT, "dtype"), "__class__"),
    "no type": ((*INPUT, "dtype"), None),
    "a name": ((*INPUT, "name"), 3),
    "half a character": ((*INPUT, "name"), "\ud800"),
    "too many means": ((*INPUT, "mean"), [0.0, 1.0]),
    "a mean in words": ((*INPUT, "mean"), ["a"]),
    "a giant mean": ((*INPUT, "mean"), [1e300]),
    "no deviation": ((*INPUT, "std"), [0.0]),
    "a tiny deviation": ((*INPUT, "std"), [1e-300]),
    "a negative deviation": ((*INPUT, "std"), [-1.0]),
    "a deviation that is true": ((*INPUT, "std"), [True]),
    "a pixel of 256": ((*INPUT, "highest"), 256),
    "half a pixel": ((*INPUT, "highest"), 0.5),
    "resized in words": ((*INPUT, "resized"), "yes"),
    "columns of images": ((*INPUT, "columns"), ["a"]),
    "an alphabet of lists": ((*INPUT, "alphabet"), ["a"]),
    "a character twice": ((*INPUT, "alphabet"), "aa"),
    "padding": ((*INPUT, "padding"), -1),
    "names of numbers": (("data", "class_names"), [1]),
    "a name twice": (("data", "class_names"), ["a", "a"]),
    "names in words": (("data", "class_names"), "abc"),
    "a unit of numbers": (("data", "unit"), 3),
    "a target of lists": (("data", "target"), []),
    "the task": (("task",), "classification"),
    "an unknown task": (("task", "name"), "evil"),
    "a task from a file": (("task", "name"), "/tmp/evil.py:TASK"),
    "an unknown setting": (("task", "evil"), 1),
    "a setting in words": (("task", "label_smoothing"), "much"),
    "no exits": (("exits",), []),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_metadata_is_one_line(digits: Path, own: Path, name: str) -> None:
    about = about_of(own)
    (*way, last), value = DAMAGES[name]
    where: Any = about
    for key in way:
        where = where[key]
    where[last] = value
    save_file(load_file(own), own, metadata={"fedhen": json.dumps(about)})
    with pytest.raises(FedhenError, match="damaged") as error:
        fedhen.load(digits, "simple")
    assert "\n" not in str(error.value)


@pytest.mark.fuzz
def test_any_value_anywhere_in_the_metadata_is_read_or_refused(digits: Path) -> None:
    """Each place is replaced by each of some odd values: the model predicts, or an error says why not."""
    odd: list[Any] = [
        None,
        True,
        -1,
        0,
        10**30,
        0.5,
        "",
        "x",
        "\x00\n",
        [],
        [0],
        [[]],
        ["x"],
        {},
        {"x": 1},
        [1e308] * 3,
    ]
    path = digits / "models" / "server-simple.safetensors"
    good, module, pixels = about_of(path), fedhen.load(digits, "simple"), load_digits().x_test[:2]

    def places(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
        keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        for key in keys:
            yield (*way, key)
            yield from places(value[key], (*way, key))

    refused = 0
    for way in places(good):
        for value in odd:
            about = copy.deepcopy(good)
            where: Any = about
            for key in way[:-1]:
                where = where[key]
            where[way[-1]] = value
            try:
                card = read_card(about)
            except PARSE_ERRORS:
                refused += 1
                continue
            try:
                LoadedModel(module, card).predict(pixels)
            except FedhenError as error:
                assert "\n" not in str(error)
    assert refused > 200


def test_a_description_survives_what_is_done_to_data() -> None:
    data = load_digits()
    index = [np.arange(10), np.arange(10, 1437)]
    for changed in (data.split(index), data.to(torch.device("cpu")), data.in_type_of(nn.Linear(1, 1).double())):
        assert changed.describe() == data.describe()
    assert replace(data, about=None).describe() is None
    names = DataSpec((InputSpec("ids"), InputSpec("mask")), ("a", "b"))
    own = replace(fedhen.arrays({"p": torch.zeros(2, 3), "q": torch.zeros(2)}, torch.zeros(2).long()), about=names)
    described = own.describe()
    assert described is not None and [(i.name, i.shape) for i in described.inputs] == [("p", (3,)), ("q", ())]


def test_an_app_of_a_fleet_says_what_its_raw_inputs_are() -> None:
    """Without test data the server knows nothing of normalisation: only `about` says it."""
    from fedhen.fleet.app import App, recipe_app

    config = load_recipe("digits")
    there = recipe_app().load_server_data(config).describe()
    assert there is not None and there == load_digits().describe()
    blind = App(lambda node, config: (), inputs=(1, 8, 8), classes=10)
    assert blind.load_server_data(config).describe() is None
    assert replace(blind, about=there).load_server_data(config).describe() == there
    pixels = np.zeros((4, 1, 8, 8), np.uint8)
    seeing = App(lambda node, config: (), lambda config: (pixels, np.arange(4)), about=DataSpec(class_names=("a", "b")))
    described = seeing.load_server_data(config).describe()
    assert described is not None and described.class_names == ("a", "b") and described.inputs[0].dtype == "uint8"
